"""Pictures of the learning-rate experiment: the paper's figure, and what became of the rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from matplotlib import colormaps
from matplotlib.figure import Figure

Records = list[dict[str, Any]]


def draw(records: Records, folder: Path) -> None:
    """All of them, into the folder of the run. Runs that diverged are left out."""
    lost = {(r["arm"], r["seed"]) for r in records if "diverged" in r}
    records = [r for r in records if (r["arm"], r["seed"]) not in lost]
    if not records:
        return
    _save(test_error(records), folder / "test-error.png")
    learning = [r for r in records if "learned" in r]
    for name in learning[0]["learned"] if learning else ():
        _save(learned(name, learning), folder / f"learned-{name}.png")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130, bbox_inches="tight")
    figure.savefig(path.with_suffix(".svg"), bbox_inches="tight")


def _cells(records: Records, arm: str) -> list[Records]:
    """The records of one arm, by seed."""
    seeds = sorted({r["seed"] for r in records})
    found = [[r for r in records if (r["arm"], r["seed"]) == (arm, seed)] for seed in seeds]
    return [cell for cell in found if cell]


def test_error(records: Records) -> Figure:
    """Test error after each epoch: a line for each arm, and its spread over seeds."""
    figure = Figure(figsize=(6.4, 4))
    axes = figure.subplots()
    for colour, arm in enumerate(dict.fromkeys(r["arm"] for r in records)):
        cells = _cells(records, arm)
        x = [r["epoch"] for r in cells[0]]
        y = 100 * numpy.array([[r["test_error"] for r in cell] for cell in cells])
        axes.plot(x, y.mean(0), color=f"C{colour}", label=arm)
        # The lowest and the highest seed: three make no distribution.
        axes.fill_between(x, y.min(0), y.max(0), color=f"C{colour}", alpha=0.2, linewidth=0)
    axes.set(xlabel="epoch", ylabel="test error in %")
    axes.set_title("mean over seeds, lowest to highest shaded", fontsize=9)
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def learned(name: str, records: Records) -> Figure:
    """A learned setting after each meta-update, a panel for each run, coloured by depth.

    A setting of several numbers, as betas, has a row of panels for each: they are of other sizes.
    """
    runs = list(dict.fromkeys((r["arm"], r["seed"]) for r in records))
    first = numpy.array(records[0]["learned"][name])  # [groups, (components)]
    components = first.shape[1] if first.ndim > 1 else 1
    size = max(3.2 * len(runs), 5), 1 + 2.4 * components
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(components, len(runs), sharex=True, sharey="row", squeeze=False)
    for column, (arm, seed) in enumerate(runs):
        mine = [r for r in records if (r["arm"], r["seed"]) == (arm, seed)]
        # [epochs, groups, components]
        values = numpy.array([r["learned"][name] for r in mine])
        values = values.reshape(*values.shape[:2], components)
        for row, axes in enumerate(panels[:, column]):
            _lines(axes, [r["epoch"] for r in mine], values[:, :, row])
            axes.grid(alpha=0.3)
        panels[0, column].set(title=f"{arm}, seed {seed}")
        panels[-1, column].set(xlabel="epoch")
    if components > 1:
        for row, axes in enumerate(panels[:, 0]):
            axes.set(ylabel=f"{name}[{row}]")
    figure.suptitle(f"learned {name}, from the first layer (dark) to the last (bright)")
    return figure


def _lines(axes: Any, x: list[int], values: Any) -> None:
    """A line for each group. values: [epochs, groups]"""
    groups = values.shape[1]
    for g in range(groups):
        colour = colormaps["viridis"](g / max(groups - 1, 1))
        axes.plot(x, values[:, g], color=colour, linewidth=0.8)
