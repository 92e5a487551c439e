"""A report as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from innerloop.diagnose.report import Finding, Report, Row

_WIDTH = 100
_HEAD = (
    "meta-parameter",
    "shape",
    "reached",
    "by",
    "|gradient|",
    "per step",
    "finite difference",
    "",
)


def printed(report: Report) -> str:
    """The whole report: the table, findings, steps, layers, memory."""
    parts = [_title(report), _table(report), *_findings(report), *_steps(report)]
    if report.layers:
        lines = [f"  {layer.path} ({layer.kind}): {layer.instead}" for layer in report.layers]
        parts.append("\n".join(["Layers that run in another way", *lines]))
    if report.memory is not None:
        parts.append(f"Memory\n{textwrap.indent(str(report.memory), '  ')}")
    return "\n".join(line.rstrip() for line in "\n\n".join(parts).splitlines())


def _title(report: Report) -> str:
    reached = sum(row.reached for row in report.rows)
    value = "could not be computed" if report.val_loss is None else f"= {report.val_loss:.4g}"
    steps = report.steps
    return (
        f"{reached} of {len(report.rows)} meta-parameters get a gradient. "
        f"{steps} step{'' if steps == 1 else 's'} with {report.backward}, L_val {value}."
    )


def _table(report: Report) -> str:
    cells = [_HEAD, *(_cells(row, report) for row in report.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _cells(row: Row, report: Report) -> tuple[str, ...]:
    numbers = [f"[{i}]" for i, found in enumerate(report.findings, 1) if row.name in found.rows]
    return (
        row.name,
        "x".join(map(str, row.shape)) or "scalar",
        "yes" if row.reached else "NO",
        row.requirement or "-",
        "none" if row.norm is None else _number(row.norm),
        _series(row.per_step),
        _compared(row),
        "".join(numbers),
    )


def _series(values: Sequence[float]) -> str:
    if not values:
        return "-"
    ends = values if len(values) <= 3 else [values[0], None, values[-1]]
    return " ".join("…" if v is None else _number(v) for v in ends)


def _compared(row: Row) -> str:
    difference = row.difference
    if difference.verdict == "not judged":
        return "not judged"
    if not row.norm:
        return "L_val changes" if difference.influence else "no change"
    if difference.error is None:
        return difference.verdict
    return f"{difference.verdict} ({difference.error:.0e})"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"


def _findings(report: Report) -> list[str]:
    blocks = [_finding(i, finding) for i, finding in enumerate(report.findings, 1)]
    reasons = dict.fromkeys(
        row.difference.why
        for row in report.rows
        if row.difference.verdict == "not judged" and row.difference.why
    )
    blocks += [_wrapped(f"Not judged by finite differences: {why}.", "") for why in reasons]
    return blocks


def _finding(number: int, finding: Finding) -> str:
    rows = ", ".join(finding.rows[:4]) + (
        f" and {len(finding.rows) - 4} more" if len(finding.rows) > 4 else ""
    )
    about = f" {rows}:" if rows else ""
    lines = [_wrapped(f"[{number}] {finding.kind}:{about} {finding.problem}", "    ")]
    lines += [f"    where  {place}" for place in finding.where]
    if finding.write:
        lines.append(_wrapped(f"    write  {finding.write}", "           "))
    if finding.message:
        lines.append(_wrapped(f"    error  {finding.message}", "           "))
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=True,
    )


def _steps(report: Report) -> list[str]:
    """Loss, |G_j| and |B_j| by step; of many steps, some."""
    count = len(report.losses)
    if not count or not report.b_norms:
        return []
    shown = range(count) if count <= 8 else sorted({round(i * (count - 1) / 7) for i in range(8)})
    lines = ["step    loss        |G_j|       |B_j|"]
    for j in shown:
        loss, grad, b = report.losses[j], report.grad_norms[j], report.b_norms[j]
        lines.append(f"{j:<6}  {_number(loss):<10}  {_number(grad):<10}  {_number(b)}")
    end = "-" if report.val_loss is None else _number(report.val_loss)
    lines.append(f"L_val   {end:<10}  {'':<10}  {_number(report.b_norms[-1])}")
    return ["\n".join(lines)]
