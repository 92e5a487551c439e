"""A comparison of optimizers as curves and as a table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
from matplotlib.figure import Figure

from innerloop.experiments.framework.figures import save, single

_COLORS = {"sgd": "C2", "adam": "C1", "rmsprop": "C3"}
_NAMES = {"sgd": "SGD", "adam": "Adam", "rmsprop": "RMSprop", "lstm": "learned LSTM"}
_NAMES |= {"mlp": "learned MLP", "meta-sgd": "Meta-SGD", "lslr": "LSLR"}
_LOSSES = {"quadratics": "loss", "digits": "cross-entropy of a minibatch"}


def draw(config: Any, folder: Path, result: dict[str, Any]) -> None:
    """Saves a figure for each problem."""
    for problem in config.problems:
        save(curves(config, problem, result), folder / f"{problem}.png")


def curves(config: Any, problem: str, result: dict[str, Any]) -> Figure:
    """The loss on unseen problems over the steps, mean and spread over seeds."""
    figure, axes = single(6.4, 4)
    cells = [c for c in result["cells"] if c["problem"] == problem]
    for kind in cells[0]["curves"]:
        # [seeds, steps]
        found = numpy.array([c["curves"][kind] for c in cells])
        with numpy.errstate(invalid="ignore"):  # runs that diverged have infinite losses
            mean, spread, steps = found.mean(0), found.std(0), range(found.shape[1])
        color, width = _COLORS.get(kind, "C0"), 1.4 if kind in _COLORS else 2.2
        label = _NAMES[kind]
        if kind in _COLORS:
            rate = result["rates"][problem][kind][str(config.horizon)]["mean"]
            label += f", rate {rate:.2g}"
        axes.plot(steps, mean, color=color, linewidth=width, label=label)
        low = numpy.maximum(mean - spread, mean / 10)  # what a logarithmic axis can show
        axes.fill_between(steps, low, mean + spread, color=color, alpha=0.2, linewidth=0)
    axes.axvline(config.horizon, color="grey", linestyle=":")
    where: Any = ("data", "axes fraction")
    text, at = "end of the training horizon", (config.horizon, 0.98)
    axes.annotate(text, at, xycoords=where, rotation=90, va="top", ha="right", fontsize=7)
    axes.set(xlabel="steps", ylabel=_LOSSES[problem], yscale="log", title=f"unseen {problem}")
    axes.legend()
    return figure


def table(config: Any, result: dict[str, Any]) -> str:
    """Mean and standard deviation over seeds."""
    lines = []
    for problem, summary in result["summary"].items():
        heads = [f"{what} {h} steps" for h in config.horizons for what in ("mean over", "after")]
        lines += ["", f"{problem}, unseen: loss, mean and deviation over {config.seeds} seeds"]
        lines.append("  ".join([f"{'':12}", *(f"{head:>20}" for head in heads)]))
        for kind, by in summary.items():
            cells = [by[str(h)][m] for h in config.horizons for m in ("mean", "final")]
            shown = [_shown(c["mean"], c["deviation"]) for c in cells]
            lines.append("  ".join([f"{_NAMES[kind]:12}", *(f"{text:>20}" for text in shown)]))
        lines.append(_verdict(config, summary))
    return "\n".join([*lines[1:], "", f"{result['seconds']:.0f} s."])


def _shown(mean: float, deviation: float) -> str:
    """A mean over seeds; if any diverged to infinity there is none."""
    return f"{mean:.4g} ± {deviation:.2g}" if math.isfinite(mean) else "diverged"


def _verdict(config: Any, summary: dict[str, Any]) -> str:
    cell = summary[config.optimizer][str(config.horizon)]["mean"]
    return (
        f"{_NAMES[config.optimizer]} is below tuned Adam, in the mean over the training horizon, "
        f"in {cell['seeds_below_adam']} of {config.seeds} seeds."
    )
