"""Figures of a search: validation loss against compute, and the hyperparameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
from matplotlib.figure import Figure

from innerloop.experiments.framework.figures import plot_band, save, single

ABOUT = {
    "gradient": "gradient of the validation loss",
    "random": "random search",
    "shared": "random search, one number for all",
}


def draw(config: Any, records: list[dict[str, Any]], result: dict[str, Any], folder: Path) -> None:
    """Saves all of them into the folder of the run."""
    save(search(config, records), folder / "search.png")
    if config.what == "example-weights":
        save(weights(records), folder / "found.png")
    else:
        save(found(config, records, result["names"]), folder / "found.png")


def _of(records: list[dict[str, Any]], arm: str) -> list[dict[str, Any]]:
    return [record for record in records if record["arm"] == arm]


def search(config: Any, records: list[dict[str, Any]]) -> Figure:
    """The best validation loss so far, mean and standard deviation over seeds."""
    figure, axes = single(6, 3.8)
    for k, arm in enumerate(arm for arm in ABOUT if _of(records, arm)):
        traces = numpy.array([r["least"] for r in _of(records, arm)], dtype=float)
        x = numpy.cumsum(config.costs if arm == "gradient" else [1] * traces.shape[1])
        plot_band(axes, x, traces.mean(0), traces.std(0), color=f"C{k}", label=ABOUT[arm])
    axes.set(xlabel="compute, in trainings", ylabel="best validation loss")
    axes.set_title(f"{config.what} on {config.dataset}, {config.seeds} seeds", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def found(config: Any, records: list[dict[str, Any]], labels: list[str]) -> Figure:
    """The hyperparameters of each seed, by gradient and at random."""
    figure, axes = single(max(5, 0.7 * len(labels)), 3.8)
    for k, arm in enumerate(("gradient", "random")):
        for number, record in enumerate(_of(records, arm)):
            place = numpy.arange(len(labels)) + 0.25 * k - 0.125
            label = ABOUT[arm] if number == 0 else None
            axes.plot(place, record["numbers"], "o", color=f"C{k}", alpha=0.6, label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
    axes.set_ylabel(config.what)
    axes.legend(fontsize=8)
    return figure


def weights(records: list[dict[str, Any]]) -> Figure:
    """Histogram of the weights of right and wrong labels, over all seeds."""
    figure, axes = single(6, 3.8)
    by_kind: dict[bool, list[float]] = {False: [], True: []}
    pairs = zip(_of(records, "gradient"), _of(records, "references"), strict=True)
    for learned, plain in pairs:
        for number, wrong in zip(learned["numbers"], plain["wrong"], strict=True):
            by_kind[wrong].append(math.log10(number))
    both = list(by_kind.values())
    axes.hist(both, bins=30, label=["right label", "wrong label"], color=["C0", "C3"])
    axes.set(xlabel="learned weight, logarithm to base 10", ylabel="training points")
    axes.legend()
    return figure
