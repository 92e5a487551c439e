"""Figures of metrics without a gradient: metrics over meta-updates, learned weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from matplotlib.figure import Figure

from innerloop.experiments.framework.figures import plot_band, row, save, single

Records = list[dict[str, Any]]
_SHOWN = {"f1": "test F1 (higher is better)", "cross_entropy": "test cross-entropy (the proxy)"}


def draw(records: Records, folder: Path) -> None:
    """Saves all of them into the folder of the run."""
    arms: dict[str, dict[int, Records]] = {}
    """The records of all seeds, by method and meta-update."""
    for record in records:
        arms.setdefault(record["arm"], {}).setdefault(record["update"], []).append(record)
    save(draw_metrics(arms), folder / "metrics.png")
    save(draw_weights(arms), folder / "weights.png")


def draw_metrics(arms: dict[str, dict[int, Records]]) -> Figure:
    """The metric that matters and its proxy, over meta-updates: mean and deviation over seeds."""
    figure, panels = row(2, 4.5, 3.6)
    for axes, (metric, title) in zip(panels, _SHOWN.items(), strict=True):
        for arm, updates in arms.items():
            # [updates, seeds]
            values = numpy.array([[r[metric] for r in found] for found in updates.values()])
            plot_band(axes, [*updates], values.mean(1), values.std(1), marker=".", label=arm)
        axes.set(xlabel="meta-updates", title=title)
        axes.legend()
    return figure


def draw_weights(arms: dict[str, dict[int, Records]]) -> Figure:
    """The learned weights of the characters; the first one is the rare one."""
    figure, axes = single(7, 3.4)
    for k, (arm, updates) in enumerate(arms.items()):
        # Only ratios matter to the model's predictions; the rate is learned too.
        found = numpy.array([r["learned"]["weights"] for r in updates[max(updates)]])
        found = found / found[:, 1:].mean(1, keepdims=True)
        at = numpy.arange(found.shape[1]) + 0.8 * (k - (len(arms) - 1) / 2) / len(arms)
        axes.bar(at, found.mean(0), width=0.8 / len(arms), yerr=found.std(0), label=arm)
    axes.set(xlabel="character (0: the rare one)", ylabel="weight / mean weight of the others")
    axes.legend()
    return figure
