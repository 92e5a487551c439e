"""The figure: time relative to innerloop's best for each case, and how time grows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from peer_cases import AXES, GROWTH, SYSTEMS

Points = Mapping[tuple[str, str], float]  # (case, system) -> seconds

_COLOURS = dict(
    zip(SYSTEMS, ("#1b6ca8", "#7f7f7f", "#d95f02", "#1b9e5a", "#7b4fa3", "#222222"), strict=True)
)


def _plain(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _ratios(axes: Axes, points: Points, cases: list[str]) -> None:
    for system, colour in _COLOURS.items():
        known = [
            (points[case, system] / points[case, "innerloop"], row)
            for row, case in enumerate(cases)
            if (case, system) in points and (case, "innerloop") in points
        ]
        if known:
            axes.plot(*zip(*known, strict=True), "o", color=colour, label=system)
    axes.set(xscale="log", xlabel="time / innerloop's best", title="one meta-step")
    axes.set_yticks(range(len(cases)), [f"({case})" for case in cases])
    axes.invert_yaxis()
    _plain(axes)


def _curves(axes: Axes, points: Points, axis: str) -> None:
    start = f"{GROWTH} {axis} "
    values = sorted({int(case.removeprefix(start)) for case, _ in points if case.startswith(start)})
    for system, colour in _COLOURS.items():
        known = [
            (v, points[f"{start}{v}", system]) for v in values if (f"{start}{v}", system) in points
        ]
        if known:
            axes.plot(*zip(*known, strict=True), "o-", ms=4, color=colour, label=system)
    axes.set(xscale="log", yscale="log", xlabel=AXES[axis], ylabel="one meta-step, s")
    axes.set_xticks(values, map(str, values))
    axes.set_xticks([], minor=True)
    axes.set_title("(i) sine MAML")
    _plain(axes)


def draw(path: Path, points: Points) -> list[Path]:
    """A PNG and an SVG beside each other; nothing if nothing was measured."""
    ours = [case for case, system in points if system == "innerloop"]
    cases = [case for case in ours if not case.startswith(GROWTH)]
    swept = [
        axis for axis in AXES if any(case.startswith(f"{GROWTH} {axis} ") for case, _ in points)
    ]
    count = bool(cases) + len(swept)
    if not count:
        return []
    size = (5 * count, 4.5)
    figure, grid = plt.subplots(1, count, figsize=size, squeeze=False, layout="constrained")
    columns = iter(grid[0])
    if cases:
        _ratios(next(columns), points, cases)
    for axis in swept:
        _curves(next(columns), points, axis)
    grid[0, 0].legend(frameon=False)
    paths = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for one in paths:
        figure.savefig(one, dpi=150)
    plt.close(figure)
    return paths
