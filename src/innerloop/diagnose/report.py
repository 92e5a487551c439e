"""The report of a diagnosis: its data, and its text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from innerloop.backward.auto import Forecast


class Difference(NamedTuple):
    """Comparison of a gradient with a finite difference of L_val along one direction."""

    verdict: str
    """``"agrees"``, ``"differs"`` or ``"not judged"``."""
    error: float | None = None
    """The distance between the two, relative to the larger one; ``None`` if both are zero."""
    width: float | None = None
    """The distance by which the parameter was moved to either side, relative to its own size."""
    influence: bool = False
    """True if moving the parameter changed L_val beyond rounding."""
    why: str = ""
    """The reason for ``"not judged"``, or the number of parameters moved together."""


class Row(NamedTuple):
    """One meta-parameter."""

    name: str
    """As in ``inner.named_parameters()``."""
    shape: tuple[int, ...]
    part: str
    """``"init"``, ``"setting"``, ``"loss"``, ``"optimizer"`` or ``"other"``."""
    reached: bool
    """True if it gets a gradient that is finite and not zero."""
    requirement: str
    """The paper's requirement by which the gradient comes, or the one that does not hold."""
    norm: float | None
    """The norm of the gradient; ``None`` if there is none."""
    per_step: tuple[float, ...]
    """For an initial weight, the norm of its part of B_j, the gradient by the weights before
    step j. For any other, the norm of the contribution of step j to the gradient."""
    direct: float
    """The norm of the contribution of L_val itself, without any step."""
    difference: Difference
    problem: str = ""
    write: str = ""
    """Advice: the code to write instead."""


class Finding(NamedTuple):
    """One problem or note, and the meta-parameters that it concerns."""

    kind: str
    """``"broken"``: no gradient, or a wrong one. ``"no influence"``: the gradient is rightly zero.
    ``"by choice"``: an approximation that was asked for. ``"note"``: nothing is wrong."""
    problem: str
    where: tuple[str, ...] = ()
    """Lines and modules of the user's code."""
    write: str = ""
    rows: tuple[str, ...] = ()
    message: str = ""
    """The error that was raised, in full."""
    requirement: str = ""
    """The requirement of the paper that does not hold, if it is not that of the rows."""


@dataclass(frozen=True, repr=False)
class Report:
    """The result of :func:`innerloop.diagnose`; printed, a table."""

    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    backward: str
    """The strategy that computed the gradient."""
    steps: int
    val_loss: float | None
    losses: tuple[float, ...]
    """The training loss before each step."""
    grad_norms: tuple[float, ...]
    """The norm of the inner gradient G_j at each step."""
    b_norms: tuple[float, ...]
    """The norm of B_j = ∇L_val by the weights before step j, and after the last step."""
    memory: Forecast | None = None
    """A forecast of the peak memory of every strategy; ``None`` if a step fails."""

    @property
    def healthy(self) -> bool:
        """True if every meta-parameter gets a gradient, and no finite difference contradicts."""
        broken = any(finding.kind == "broken" for finding in self.findings)
        return all(row.reached for row in self.rows) and not broken

    def __getitem__(self, name: str) -> Row:
        """The row of a meta-parameter."""
        return {row.name: row for row in self.rows}[name]

    def __str__(self) -> str:
        parts = [_title(self), _table(self), *_findings(self), *_steps(self)]
        if self.memory is not None:
            parts.append(f"Memory\n{textwrap.indent(str(self.memory), '  ')}")
        return "\n".join(line.rstrip() for line in "\n\n".join(parts).splitlines())

    __repr__ = __str__


# The text. --------------------------------------------------------------------------------------

_COLUMNS = (
    *("meta-parameter", "shape", "reached", "by", "|gradient|", "per step"),
    *("finite difference", ""),
)


def _title(report: Report) -> str:
    reached = sum(row.reached for row in report.rows)
    value = "could not be computed" if report.val_loss is None else f"= {report.val_loss:.4g}"
    steps = "1 step" if report.steps == 1 else f"{report.steps} steps"
    return (
        f"{reached} of {len(report.rows)} meta-parameters get a gradient. "
        f"{steps} with {report.backward}, L_val {value}."
    )


def _table(report: Report) -> str:
    cells = [_COLUMNS, *(_cells(row, report) for row in report.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
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
        _comparison(row),
        "".join(numbers),
    )


def _series(values: Sequence[float]) -> str:
    if len(values) > 3:
        return f"{_number(values[0])} … {_number(values[-1])}"
    return " ".join(map(_number, values)) or "-"


def _comparison(row: Row) -> str:
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
    unjudged = [row.difference for row in report.rows if row.difference.verdict == "not judged"]
    reasons = dict.fromkeys(difference.why for difference in unjudged if difference.why)
    return blocks + [_wrap(f"Not judged by finite differences: {why}.", 0) for why in reasons]


def _finding(number: int, finding: Finding) -> str:
    names = list(finding.rows)
    if len(names) > 4:
        names[4:] = [f"and {len(names) - 4} more"]
    about = f" {', '.join(names)}:" if names else ""
    lines = [_wrap(f"[{number}] {finding.kind}:{about} {finding.problem}", 4)]
    lines += [f"    where  {place}" for place in finding.where]
    if finding.write:
        lines.append(_wrap(f"    write  {finding.write}", 11))
    if finding.message:
        lines.append(_wrap(f"    error  {finding.message}", 11))
    return "\n".join(lines)


def _wrap(text: str, indent: int) -> str:
    return textwrap.fill(
        text, 100, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def _steps(report: Report) -> list[str]:
    """Loss, |G_j| and |B_j| by step; at most eight of the steps."""
    count = len(report.losses)
    if not count or not report.b_norms:
        return []
    shown = range(count) if count <= 8 else [round(i * (count - 1) / 7) for i in range(8)]
    lines = ["step    loss        |G_j|       |B_j|"]
    for j in shown:
        loss, grad, b = report.losses[j], report.grad_norms[j], report.b_norms[j]
        lines.append(f"{j:<6}  {_number(loss):<10}  {_number(grad):<10}  {_number(b)}")
    end = "-" if report.val_loss is None else _number(report.val_loss)
    lines.append(f"L_val   {end:<10}  {'':<10}  {_number(report.b_norms[-1])}")
    return ["\n".join(lines)]
