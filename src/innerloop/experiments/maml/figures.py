"""Figures of a few-shot run: accuracy, learned settings, some test tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from matplotlib.figure import Figure

from innerloop.experiments.framework.figures import plot_by_depth, row, save, single

_SHOWN = 3  # tasks
_QUERIES = 5  # of each


def draw(training: Any, folder: Path, result: dict[str, Any]) -> None:
    """Saves all of them into the folder of the run."""
    records = training.records
    save(draw_accuracy(records, result, training.config.way), folder / "accuracy.png")
    for name in records[-1]["learned"]:
        save(draw_learned(name, records), folder / f"learned-{name}.png")
    save(draw_episodes(training), folder / "episodes.png")


def draw_accuracy(records: list[dict[str, Any]], result: dict[str, Any], way: int) -> Figure:
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


def draw_learned(name: str, records: list[dict[str, Any]]) -> Figure:
    """A learned setting over time, a line for each group, colored by depth.

    Each step has a panel, or each of the betas.
    """
    # [epochs, (steps or betas), groups]
    values = numpy.array([r["learned"][name] for r in records])
    betas = name == "betas"
    if betas and values.shape[1] != 2:
        values = values.transpose(0, 2, 1)
    several = values.ndim == 3
    panels = values if several else values[:, None]
    # The second beta moves in thousandths, so it has a scale of its own.
    width = 3.2 if several else 5
    figure, row_of_axes = row(panels.shape[1], width, 3.4, sharey=not betas)
    for k, axes in enumerate(row_of_axes):
        plot_by_depth(axes, [r["iteration"] for r in records], panels[:, k])
        title = f"{'beta' if betas else 'step'} {k + 1}" if several else ""
        axes.set(xlabel="meta-updates", title=title)
    figure.suptitle(f"learned {name}, from the first layer (dark) to the last (bright)")
    return figure


def draw_episodes(training: Any) -> Figure:
    """Support sets of some test tasks, and queries with the predictions of the adapted model."""
    way = training.config.way
    episode = training.build_sampler(training.splits.test, _SHOWN, training.config.seed).sample()
    predicted = training.learner.probabilities(episode).argmax(-1)
    columns = way + _QUERIES
    figure = Figure(figsize=(0.9 * columns, 1.15 * _SHOWN))
    for task, panels in enumerate(figure.subplots(_SHOWN, columns, squeeze=False)):
        (x, y), (query_x, query_y) = ((v[task] for v in part) for part in episode)
        for axes in panels:
            axes.axis("off")
        for k, axes in enumerate(panels[:way]):
            _show(axes, x[y == k][0], f"class {k + 1}", "black")
        step = max(len(query_x) // _QUERIES, 1)
        for axes, i in zip(panels[way:], range(0, len(query_x), step), strict=False):
            color = "green" if predicted[task, i] == query_y[i] else "red"
            _show(axes, query_x[i], f"predicted {int(predicted[task, i]) + 1}", color)
    figure.suptitle("support (left) and queries (right; green: right, red: wrong)", fontsize=9)
    return figure


def _show(axes: Any, image: Any, title: str, color: str) -> None:
    pixels = image.permute(1, 2, 0).cpu().numpy()
    low, high = pixels.min(), pixels.max()
    axes.imshow((pixels - low) / max(high - low, 1e-6), cmap="gray")
    axes.set_title(title, fontsize=7, color=color)
