"""Figures of a few-shot run: accuracy, learned settings, some test tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from matplotlib.figure import Figure

from innerloop.data import Sampler
from innerloop.experiments.framework.figures import plot_by_depth, save, single

_SHOWN = 3  # tasks
_QUERIES = 5  # of each


def draw(training: Any, folder: Path, result: dict[str, Any]) -> None:
    """Saves all of them into the folder of the run."""
    records = training.records
    save(accuracy(records, result, training.config.way), folder / "accuracy.png")
    for name in records[-1]["learned"]:
        save(learned(name, records), folder / f"learned-{name}.png")
    save(episodes(training), folder / "episodes.png")


def accuracy(records: list[dict[str, Any]], result: dict[str, Any], way: int) -> Figure:
    """Validation accuracy after each epoch, and the test accuracy."""
    figure, axes = single(6, 3.6)
    x = [r["iteration"] for r in records]
    axes.plot(x, [100 * r["val_accuracy"] for r in records], marker=".", label="validation")
    test, interval = 100 * result["accuracy"], 100 * result["interval"]
    axes.axhline(test, color="C1", label=f"test: {test:.2f} ± {interval:.2f} %")
    axes.axhspan(test - interval, test + interval, color="C1", alpha=0.2)
    axes.axhline(100 / way, color="grey", linestyle=":", label="chance")
    axes.set(xlabel="meta-updates", ylabel="accuracy in %")
    axes.legend(loc="lower right")
    return figure


def learned(name: str, records: list[dict[str, Any]]) -> Figure:
    """A learned setting over time, a line for each group, colored by depth."""
    x = [r["iteration"] for r in records]
    # [epochs, (steps or coefficients), groups]
    values = numpy.array([r["learned"][name] for r in records])
    panels = values[:, None] if values.ndim == 2 else values
    if name == "betas" and panels.shape[1] != 2:
        panels = panels.transpose(0, 2, 1)
    count = panels.shape[1]
    titles = _titles(name, count, values.ndim)
    figure = Figure(figsize=(max(3.2 * count, 5), 3.4), layout="constrained")
    alike = name != "betas"  # The second beta moves in thousandths.
    for k, axes in enumerate(figure.subplots(1, count, sharey=alike, squeeze=False)[0]):
        plot_by_depth(axes, x, panels[:, k])
        axes.set(xlabel="meta-updates", title=titles[k])
        axes.grid(alpha=0.3)
    figure.suptitle(f"learned {name}, from the first layer (dark) to the last (bright)")
    return figure


def _titles(name: str, count: int, dims: int) -> list[str]:
    if name == "betas":
        return [f"beta {k + 1}" for k in range(count)]
    return [f"step {k + 1}" for k in range(count)] if dims == 3 else [""]


def episodes(training: Any) -> Figure:
    """Support sets of some test tasks, and queries with the predictions of the adapted model."""
    c = training.config
    sampler = Sampler(
        training.splits.test, way=c.way, shot=c.shot, query=c.query, tasks=_SHOWN, seed=c.seed
    )
    episode = sampler.sample()
    predicted = training.learner.probabilities(episode).argmax(-1)
    columns = c.way + _QUERIES
    figure = Figure(figsize=(0.9 * columns, 1.15 * _SHOWN))
    grid = figure.subplots(_SHOWN, columns, squeeze=False)
    for task, row in enumerate(grid):
        (x, y), (qx, qy) = ((v[task] for v in part) for part in episode)
        firsts = [int((y == k).nonzero()[0]) for k in range(c.way)]
        step = max(len(qx) // _QUERIES, 1)
        for axes in row:
            axes.axis("off")
        for k, axes in enumerate(row[: c.way]):
            _show(axes, x[firsts[k]], f"class {k + 1}", "black")
        for axes, i in zip(row[c.way :], range(0, len(qx), step), strict=False):
            right = bool(predicted[task, i] == qy[i])
            _show(
                axes, qx[i], f"predicted {int(predicted[task, i]) + 1}", "green" if right else "red"
            )
    figure.suptitle("support (left) and queries (right; green: right, red: wrong)", fontsize=9)
    return figure


def _show(axes: Any, image: Any, title: str, color: str) -> None:
    picture = image.permute(1, 2, 0).cpu().numpy()
    low, high = picture.min(), picture.max()
    axes.imshow((picture - low) / max(high - low, 1e-6), cmap="gray")
    axes.set_title(title, fontsize=7, color=color)
