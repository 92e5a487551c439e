"""Figures of metrics without a gradient: metrics over meta-updates, learned weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from matplotlib.figure import Figure

from innerloop.experiments.framework.figures import plot_band, save

Records = list[dict[str, Any]]


def draw(records: Records, folder: Path) -> None:
    """All of them, into the folder of the run."""
    save(metrics(records), folder / "metrics.png")
    save(weights(records), folder / "weights.png")


def _arms(records: Records) -> list[str]:
    return list(dict.fromkeys(r["arm"] for r in records))


def metrics(records: Records) -> Figure:
    """The metric that matters and its proxy, over meta-updates: mean and deviation over seeds."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    shown = {"f1": "test F1 (higher is better)", "cross_entropy": "test cross-entropy (the proxy)"}
    for axes, (name, title) in zip(figure.subplots(1, 2), shown.items(), strict=True):
        for arm in _arms(records):
            plot_band(axes, *_curve(records, arm, name), marker=".", label=arm)
        axes.set(xlabel="meta-updates", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _curve(records: Records, arm: str, name: str) -> tuple[list[int], Any, Any]:
    own = [r for r in records if r["arm"] == arm]
    x = sorted({r["update"] for r in own})
    # [points, seeds]
    values = numpy.array([[r[name] for r in own if r["update"] == update] for update in x])
    return x, values.mean(1), values.std(1)


def weights(records: Records) -> Figure:
    """The learned weights of the characters; the first one is that which is searched for."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    last = max(r["update"] for r in records)
    arms = _arms(records)
    for k, arm in enumerate(arms):
        ends = [r for r in records if r["arm"] == arm and r["update"] == last]
        # Only ratios matter to what the model says; the rate is learned too.
        found = numpy.array([r["learned"]["weights"] for r in ends])
        found = found / found[:, 1:].mean(1, keepdims=True)
        at = numpy.arange(found.shape[1]) + 0.8 * (k - (len(arms) - 1) / 2) / len(arms)
        axes.bar(at, found.mean(0), width=0.8 / len(arms), yerr=found.std(0), label=arm)
    axes.set(xlabel="character (0: searched for)", ylabel="weight / mean weight of the others")
    axes.legend()
    axes.grid(alpha=0.3, axis="y")
    return figure
