"""The figure of a comparison of optimizers: losses over steps."""

from __future__ import annotations

from typing import Any

import numpy
from matplotlib.figure import Figure

from innerloop.experiments.framework.figures import single

_COLORS = {"sgd": "C2", "adam": "C1", "rmsprop": "C3"}
NAMES = {"sgd": "SGD", "adam": "Adam", "rmsprop": "RMSprop", "lstm": "learned LSTM"}
NAMES |= {"mlp": "learned MLP", "meta-sgd": "Meta-SGD", "lslr": "LSLR"}
_LOSSES = {"quadratics": "loss", "digits": "cross-entropy of a minibatch"}


def draw_curves(config: Any, problem: str, result: dict[str, Any]) -> Figure:
    """The loss on unseen problems over the steps, mean and spread over seeds."""
    figure, axes = single(6.4, 4)
    cells = [c for c in result["cells"] if c["problem"] == problem]
    for kind in cells[0]["curves"]:
        # [seeds, steps]
        found = numpy.array([c["curves"][kind] for c in cells])
        with numpy.errstate(invalid="ignore"):  # runs that diverged have infinite losses
            mean, spread, steps = found.mean(0), found.std(0), range(found.shape[1])
        color, width, label = "C0", 2.2, NAMES[kind]
        if kind in _COLORS:
            rate = result["rates"][problem][kind][str(config.horizon)]["mean"]
            color, width, label = _COLORS[kind], 1.4, f"{label}, rate {rate:.2g}"
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
