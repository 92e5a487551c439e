"""What `memory.py` measured: tables for people, the targets, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timing
from fresh import Point
from timing import Spread

SIDES = ("higher", "Tape", "Remat", "Binomial(8)")


class Ratio(NamedTuple):
    """Time of one side divided by that of another, in rounds in which each ran once."""

    problem: str
    side: str
    reference: str
    steps: int
    where: str  # in one process, or each in its own
    ratio: Spread
    seconds: Spread
    reference_seconds: Spread

    @classmethod
    def of(cls, timed: Any, where: str, ours: list[float], theirs: list[float]) -> Ratio:
        spreads = (timing.ratio(ours, theirs), timing.spread(ours), timing.spread(theirs))
        return cls(timed.problem, timed.side, timed.reference, timed.steps, where, *spreads)


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
    if point.extra is not None:
        return "-"
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
        f"{row.problem}, J = {row.steps}, {row.where}: {row.side} {row.seconds.median:.2f} s, "
        f"{row.reference} {row.reference_seconds.median:.2f} s, ratio {row.ratio.median:.3f} "
        f"(quartiles {row.ratio.low:.3f}-{row.ratio.high:.3f})"
    )


# --- targets ----------------------------------------------------------------------------------

Key = tuple[str, int]  # side and number of steps


def _quotient(
    text: str,
    points: Sequence[Point],
    top: Key,
    bottom: Key,
    limit: float,
    at_most: bool = True,
    states: bool = True,
) -> Target:
    """Memory of one point over that of another; without `states`, less J x parameters each."""
    found = {(p.side, p.steps): p for p in points if not p.note}
    if top not in found or bottom not in found:
        return Target(text, None, limit, at_most)
    kept = [0 if states else key[1] * found[key].parameters for key in (top, bottom)]
    sizes = {
        field: (getattr(found[top], field), getattr(found[bottom], field))
        for field in ("extra", "extra_defaults")
    }
    ratios = [
        None if None in pair else (pair[0] - kept[0]) / (pair[1] - kept[1])
        for pair in sizes.values()
    ]
    detail = "" if ratios[1] is None else f"with glibc's defaults {ratios[1]:.3f}"
    return Target(text, ratios[0], limit, at_most, detail)


def memory_targets(problem: str, points: Sequence[Point]) -> list[Target]:
    flat = f"{problem}: Remat, memory less J x parameters, J = 200 / J = 2"
    fixed = f"{problem}: Binomial(8), memory, J = 200 / J = 8"
    less = f"{problem}: memory at J = 50, higher / Remat"
    targets = [
        _quotient(flat, points, ("Remat", 200), ("Remat", 2), 1.2, states=False),
        _quotient(fixed, points, ("Binomial(8)", 200), ("Binomial(8)", 8), 1.5),
    ]
    if problem.endswith("gpt"):
        targets.append(_quotient(less, points, ("higher", 50), ("Remat", 50), 10.0, at_most=False))
    return targets


def ratio_target(row: Ratio, limit: float) -> Target:
    text = f"{row.problem}: time at J = {row.steps}, {row.side} / {row.reference}"
    detail = f"{row.where}, quartiles {row.ratio.low:.3f}-{row.ratio.high:.3f}"
    return Target(text, row.ratio.median, limit, detail=detail)


def auto_target(point: Point) -> Target:
    text = f"{point.problem}: {point.side} at J = {point.steps}, memory / budget"
    if point.auto is None or point.extra is None:
        return Target(text, None, 1.0, detail=point.note)
    budget, forecast = point.auto["budget"], point.auto["forecast"]
    detail = (
        f"{point.auto['strategy']}, forecast {forecast / 1e6:.0f} MB, "
        f"measured {point.extra / 1e6:.0f} MB"
    )
    if point.extra_defaults is not None:
        detail += f"; with glibc's defaults {point.extra_defaults / budget:.3f}"
    return Target(text, point.extra / budget, 1.0, detail=detail)


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
