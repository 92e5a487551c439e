"""What `memory.py` measured: tables for people, the targets, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fresh import Point
from timing import Spread

SIDES = ("higher", "Tape", "Remat", "Binomial(8)")


class Ratio(NamedTuple):
    """Time of one side divided by that of another, interleaved in one process."""

    problem: str
    side: str
    reference: str
    steps: int
    ratio: Spread
    seconds: Spread
    reference_seconds: Spread


class Target(NamedTuple):
    """A number that was promised. `value` is None where nothing was measured."""

    text: str
    value: float | None
    limit: float
    at_most: bool = True
    detail: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "PASS" if (self.value <= self.limit) == self.at_most else "MISS"


# --- tables -----------------------------------------------------------------------------------

_QUANTITIES = (
    ("extra peak memory, MB", "extra", 1e-6, ".0f"),
    ("the same with glibc's defaults, MB", "extra_defaults", 1e-6, ".0f"),
    ("one meta-step, s", "seconds", 1.0, ".2f"),
)


def _cell(point: Point, field: str, scale: float, form: str) -> str:
    value = getattr(point, field)
    if value is not None:
        return format(scale * value, form)
    if point.predicted is None:
        return "failed"
    return point.note if field == "extra" else "skipped"


def _table(points: Sequence[Point], field: str, scale: float, form: str) -> str:
    sides = list(dict.fromkeys(p.side for p in points))
    cells = {(p.side, p.steps): _cell(p, field, scale, form) for p in points}
    rows = [["J", *sides]]
    for steps in sorted({p.steps for p in points}):
        rows.append([str(steps), *(cells[side, steps] for side in sides)])
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    return "\n".join("".join(map(str.rjust, row, widths)) for row in rows)


def tables(title: str, points: Sequence[Point]) -> str:
    """One table for each quantity, and the reason of every failure."""
    size = max(p.parameters for p in points)
    parts = [f"## {title}; {size / 1e6:.2f} MB of parameters"]
    parts += [f"{name}\n{_table(points, *how)}" for name, *how in _QUANTITIES]
    failed = [p for p in points if p.note and p.predicted is None]
    parts += [f"{p.side} at J = {p.steps}: {p.note}" for p in failed]
    return "\n\n".join(parts)


def ratio_line(row: Ratio) -> str:
    return (
        f"{row.problem}, J = {row.steps}: {row.side} {row.seconds.median:.2f} s, "
        f"{row.reference} {row.reference_seconds.median:.2f} s, ratio {row.ratio.median:.3f} "
        f"(quartiles {row.ratio.low:.3f}-{row.ratio.high:.3f})"
    )


# --- targets ----------------------------------------------------------------------------------

_FLAT, _BINOMIAL, _LESS = 1.2, 1.5, 10.0


def _quotient(
    points: Sequence[Point],
    top: tuple[str, str, int],
    bottom: tuple[str, str, int],
    without_states: bool = False,
) -> float | None:
    """Extra memory of one point over that of another; `without_states`: less J x parameters."""
    found = {(p.problem, p.side, p.steps): p for p in points}
    values = []
    for key in (top, bottom):
        if key not in found or found[key].extra is None:
            return None
        states = found[key].steps * found[key].parameters if without_states else 0
        values.append((found[key].extra or 0.0) - states)
    return values[0] / values[1]


def memory_targets(problem: str, points: Sequence[Point]) -> list[Target]:
    remat, binomial = (problem, "Remat"), (problem, "Binomial(8)")
    flat = _quotient(points, (*remat, 200), (*remat, 2), without_states=True)
    fixed = _quotient(points, (*binomial, 200), (*binomial, 8))
    targets = [
        Target(f"{problem}: Remat, memory less J x parameters, J = 200 / J = 2", flat, _FLAT),
        Target(f"{problem}: Binomial(8), memory, J = 200 / J = 8", fixed, _BINOMIAL),
    ]
    if problem.endswith("gpt"):
        less = _quotient(points, (problem, "higher", 50), (*remat, 50))
        text = f"{problem}: memory at J = 50, higher / Remat"
        targets.append(Target(text, less, _LESS, at_most=False))
    return targets


def ratio_target(row: Ratio, limit: float) -> Target:
    text = f"{row.problem}: time at J = {row.steps}, {row.side} / {row.reference}"
    detail = f"quartiles {row.ratio.low:.3f}-{row.ratio.high:.3f}"
    return Target(text, row.ratio.median, limit, detail=detail)


def auto_target(point: Point) -> Target:
    text = f"{point.problem}: {point.side} at J = {point.steps}, memory / budget"
    if point.auto is None or point.extra is None:
        return Target(text, None, 1.0, detail=point.note)
    chosen = f"{point.auto['strategy']}, forecast {point.auto['forecast'] / 1e6:.0f} MB"
    detail = f"{chosen}, measured {point.extra / 1e6:.0f}"
    if point.extra_defaults is not None:
        detail += f", with glibc's defaults {point.extra_defaults / 1e6:.0f}"
    return Target(text, point.extra / point.auto["budget"], 1.0, detail=detail)


def target_line(target: Target) -> str:
    value = "" if target.value is None else f"{target.value:.3f}"
    sign = "<=" if target.at_most else ">="
    detail = f"  ({target.detail})" if target.detail else ""
    return (
        f"{target.text:66}{value:>8} {sign} {target.limit:<5.2f} {target.verdict}{detail}".rstrip()
    )


# --- JSON -------------------------------------------------------------------------------------


def write(
    path: Path,
    about: dict[str, object],
    points: Sequence[Point],
    ratios: Sequence[Ratio],
    targets: Sequence[Target],
) -> None:
    """One JSON object: where and how it was measured, then everything that was."""
    spreads = ("ratio", "seconds", "reference_seconds")
    content = about | {
        "points": [p._asdict() for p in points],
        "ratios": [r._asdict() | {k: getattr(r, k)._asdict() for k in spreads} for r in ratios],
        "targets": [t._asdict() | {"verdict": t.verdict} for t in targets],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
