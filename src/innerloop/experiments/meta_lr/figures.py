"""Figures of the learning-rate experiment: the paper's figure, and the learned settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from matplotlib.figure import Figure

from innerloop.experiments.framework.figures import plot_by_depth, save, single

Runs = dict[tuple[str, int], list[dict[str, Any]]]
"""The records of each method and seed."""


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """Saves all of them into the folder of the run. Runs that diverged are left out."""
    runs: Runs = {}
    for record in records:
        runs.setdefault((record["arm"], record["seed"]), []).append(record)
    runs = {key: own for key, own in runs.items() if "diverged" not in own[-1]}
    if not runs:
        return
    save(draw_test_error(runs), folder / "test-error.png")
    learning = {key: own for key, own in runs.items() if "learned" in own[0]}
    if learning:
        for name in next(iter(learning.values()))[0]["learned"]:
            save(draw_learned(name, learning), folder / f"learned-{name}.png")


def draw_test_error(runs: Runs) -> Figure:
    """Test error after each epoch: a line for each method, and its range over seeds."""
    figure, axes = single(6.4, 4)
    for color, arm in enumerate(dict.fromkeys(arm for arm, _ in runs)):
        own = [records for (name, _), records in runs.items() if name == arm]
        x = [r["epoch"] for r in own[0]]
        y = 100 * numpy.array([[r["test_error"] for r in records] for records in own])
        axes.plot(x, y.mean(0), color=f"C{color}", label=arm)
        # The lowest and the highest seed: three make no distribution.
        axes.fill_between(x, y.min(0), y.max(0), color=f"C{color}", alpha=0.2, linewidth=0)
    axes.set(xlabel="epoch", ylabel="test error in %")
    axes.set_title("mean over seeds, lowest to highest shaded", fontsize=9)
    axes.legend()
    return figure


def draw_learned(name: str, runs: Runs) -> Figure:
    """A learned setting after each meta-update, a panel for each run, colored by depth.

    A setting of several numbers, as betas, has a row of panels for each: they are of other sizes.
    """
    # [runs, epochs, groups, components]
    values = numpy.array([[r["learned"][name] for r in own] for own in runs.values()])
    values = values.reshape(*values.shape[:3], -1)
    components = values.shape[-1]
    size = max(3.2 * len(runs), 5), 1 + 2.4 * components
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(components, len(runs), sharex=True, sharey="row", squeeze=False)
    for column, ((arm, seed), own) in enumerate(runs.items()):
        for row, axes in enumerate(panels[:, column]):
            epochs = [r["epoch"] for r in own]
            plot_by_depth(axes, epochs, values[column, :, :, row], width=0.8)
            axes.grid(alpha=0.3)
        panels[0, column].set(title=f"{arm}, seed {seed}")
        panels[-1, column].set(xlabel="epoch")
    if components > 1:
        for row, axes in enumerate(panels[:, 0]):
            axes.set(ylabel=f"{name}[{row}]")
    figure.suptitle(f"learned {name}, from the first layer (dark) to the last (bright)")
    return figure
