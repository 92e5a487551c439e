"""Figures of the learning-rate experiment: the paper's figure, and the learned settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from matplotlib.figure import Figure

from innerloop.experiments.framework.figures import plot_by_depth, save, single

Records = list[dict[str, Any]]


def draw(records: Records, folder: Path) -> None:
    """All of them, into the folder of the run. Runs that diverged are left out."""
    lost = {(r["arm"], r["seed"]) for r in records if "diverged" in r}
    records = [r for r in records if (r["arm"], r["seed"]) not in lost]
    if not records:
        return
    save(test_error(records), folder / "test-error.png")
    learning = [r for r in records if "learned" in r]
    for name in learning[0]["learned"] if learning else ():
        save(learned(name, learning), folder / f"learned-{name}.png")


def _cells(records: Records, arm: str) -> list[Records]:
    """The records of one arm, by seed."""
    seeds = sorted({r["seed"] for r in records})
    found = [[r for r in records if (r["arm"], r["seed"]) == (arm, seed)] for seed in seeds]
    return [cell for cell in found if cell]


def test_error(records: Records) -> Figure:
    """Test error after each epoch: a line for each arm, and its spread over seeds."""
    figure, axes = single(6.4, 4)
    for color, arm in enumerate(dict.fromkeys(r["arm"] for r in records)):
        cells = _cells(records, arm)
        x = [r["epoch"] for r in cells[0]]
        y = 100 * numpy.array([[r["test_error"] for r in cell] for cell in cells])
        axes.plot(x, y.mean(0), color=f"C{color}", label=arm)
        # The lowest and the highest seed: three make no distribution.
        axes.fill_between(x, y.min(0), y.max(0), color=f"C{color}", alpha=0.2, linewidth=0)
    axes.set(xlabel="epoch", ylabel="test error in %")
    axes.set_title("mean over seeds, lowest to highest shaded", fontsize=9)
    axes.legend()
    return figure


def learned(name: str, records: Records) -> Figure:
    """A learned setting after each meta-update, a panel for each run, colored by depth.

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
            plot_by_depth(axes, [r["epoch"] for r in mine], values[:, :, row], width=0.8)
            axes.grid(alpha=0.3)
        panels[0, column].set(title=f"{arm}, seed {seed}")
        panels[-1, column].set(xlabel="epoch")
    if components > 1:
        for row, axes in enumerate(panels[:, 0]):
            axes.set(ylabel=f"{name}[{row}]")
    figure.suptitle(f"learned {name}, from the first layer (dark) to the last (bright)")
    return figure
