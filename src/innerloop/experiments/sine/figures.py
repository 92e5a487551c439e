"""The figure of the sine experiment: nets that adapt."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import mse_loss

from innerloop.experiments.sine.problem import HIGH, LOW, SHOTS, Sines

DRAWN_STEPS = (0, 1, 10)

# The predictions at the query points of some sines after a number of steps.
Predicts = Callable[[Sines, int], Tensor]


def small_middle_large(sines: Sines) -> Sines:
    """Picks sines to draw by their height alone (its quartiles), whatever the nets predict."""
    count = len(sines.query[1])
    by_height = sines.query[1].abs().amax(dim=(1, 2)).argsort()
    chosen = by_height[[count * quarter // 4 for quarter in (1, 2, 3)]]
    (support_x, support_y), (query_x, query_y) = sines
    return Sines((support_x[chosen], support_y[chosen]), (query_x[chosen], query_y[chosen]))


def draw_fits(adapters: dict[str, Predicts], sines: Sines) -> Figure:
    """Draws each net (row) adapting to each sine (column)."""
    styles = {
        0: {"color": "0.6", "linestyle": ":", "label": "before adaptation"},
        1: {"color": "tab:orange", "linestyle": "--", "label": "after 1 step"},
        10: {"color": "tab:blue", "linestyle": "-", "label": "after 10 steps"},
    }
    (support_x, support_y), (query_x, query_y) = sines
    figure = Figure(figsize=(4 * len(query_x), 6.4), layout="constrained")
    axes = figure.subplots(len(adapters), len(query_x), sharex=True, sharey="col", squeeze=False)
    for row, (name, adapter) in zip(axes, adapters.items(), strict=True):
        fits = {steps: adapter(sines, steps) for steps in DRAWN_STEPS}
        for task, ax in enumerate(row):
            x = query_x[task].flatten().tolist()
            ax.plot(x, query_y[task].flatten().tolist(), color="0.1", lw=1.2, label="true sine")
            for steps, fit in fits.items():
                ax.plot(x, fit[task].flatten().tolist(), lw=2, **styles[steps])
            ax.plot(
                support_x[task].flatten().tolist(),
                support_y[task].flatten().tolist(),
                linestyle="none",
                marker="o",
                color="tab:red",
                markersize=6,
                zorder=3,
                label=f"{SHOTS} support points",
            )
            error = mse_loss(fits[max(DRAWN_STEPS)][task], query_y[task]).item()
            title = f"{name}: squared error {error:.2f} after {max(DRAWN_STEPS)} steps"
            ax.set_title(title, fontsize=10)
            ax.grid(alpha=0.25)
            ax.set_xlim(LOW, HIGH)
        row[0].set_ylabel("y")
    for ax in axes[-1]:
        ax.set_xlabel("x")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle("Adapting to a small, a middling and a large sine never seen in training")
    return figure
