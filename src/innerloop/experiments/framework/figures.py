"""Drawing that the figures of all commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Saves a PNG, and an SVG beside it."""
    figure.savefig(path, dpi=130, bbox_inches="tight")
    figure.savefig(path.with_suffix(".svg"), bbox_inches="tight")


def single(width: float, height: float) -> tuple[Figure, Any]:
    """A figure with one pair of axes and a grid."""
    figure = Figure(figsize=(width, height))
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes


def row(panels: int, width: float, height: float, sharey: bool = False) -> tuple[Figure, list[Any]]:
    """A figure with panels of this size side by side, each with a grid."""
    figure = Figure(figsize=(panels * width, height), layout="constrained")
    found = [*figure.subplots(1, panels, sharey=sharey, squeeze=False)[0]]
    for axes in found:
        axes.grid(alpha=0.3)
    return figure, found


def plot_band(axes: Any, x: Any, mean: Any, spread: Any, **line: Any) -> None:
    """A line with a shaded band of ``spread`` on both sides."""
    (drawn,) = axes.plot(x, mean, **line)
    color = drawn.get_color()
    axes.fill_between(x, mean - spread, mean + spread, color=color, alpha=0.2, linewidth=0)


def plot_by_depth(axes: Any, x: Sequence[Any], values: Any, width: float = 1.0) -> None:
    """A line for each layer, from the first (dark) to the last (bright). values: [x, layers]"""
    count = values.shape[1]
    for layer in range(count):
        color = colormaps["viridis"](layer / max(count - 1, 1))
        axes.plot(x, values[:, layer], color=color, linewidth=width)
