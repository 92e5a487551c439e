"""The curves: extra memory and time over the number of inner steps, a column for each network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from fresh import Point

_COLOURS = {"higher": "#7f7f7f", "Tape": "#d95f02", "Remat": "#1b6ca8", "Binomial(8)": "#1b9e5a"}


def _curve(axes: Axes, side: str, points: Sequence[Point], field: str, scale: float) -> None:
    known = [(p.steps, scale * getattr(p, field)) for p in points if not p.note]
    axes.plot(*zip(*known, strict=True), "o-", ms=4, color=_COLOURS[side], label=side)


def _predictions(axes: Axes, side: str, points: Sequence[Point]) -> None:
    """Open circles, joined to the last measured point by dots."""
    last = [(p.steps, 1e-6 * (p.extra or 0.0)) for p in points if not p.note][-1:]
    ahead = [(p.steps, 1e-6 * p.predicted) for p in points if p.predicted is not None]
    if ahead:
        colour = _COLOURS[side]
        axes.plot(*zip(*ahead, strict=True), "o", ms=4, mfc="white", color=colour)
        axes.plot(*zip(*last, *ahead, strict=True), ":", lw=1, color=colour, zorder=0)


def _column(memory: Axes, time: Axes, title: str, points: Sequence[Point]) -> None:
    for side in dict.fromkeys(p.side for p in points if not p.note):
        mine = [p for p in points if p.side == side]
        _curve(memory, side, mine, "extra", 1e-6)
        _predictions(memory, side, mine)
        _curve(time, side, mine, "seconds", 1.0)
    steps = sorted({p.steps for p in points})
    for axes in (memory, time):
        axes.set(xscale="log", yscale="log", xlabel="inner steps J")
        axes.set_xticks(steps, map(str, steps))
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    memory.set(title=title, ylabel="extra peak memory, MB")
    time.set(ylabel="one meta-step, s")


def draw(path: Path, points: Sequence[Point]) -> list[Path]:
    """A PNG and an SVG beside each other; nothing if no curve was measured."""
    points = [p for p in points if p.side in _COLOURS]
    problems = list(dict.fromkeys(p.problem for p in points))
    if not problems:
        return []
    size = (5 * len(problems), 7)
    figure, grid = plt.subplots(2, len(problems), figsize=size, squeeze=False, layout="constrained")
    for column, problem in enumerate(problems):
        mine = [p for p in points if p.problem == problem]
        _column(grid[0, column], grid[1, column], problem, mine)
    grid[0, 0].legend(frameon=False)
    if any(p.predicted is not None for p in points):
        figure.supxlabel("open circles: predicted from smaller J, not run", fontsize=8)
    paths = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for one in paths:
        figure.savefig(one, dpi=150)
    plt.close(figure)
    return paths
