"""The figure of the sine experiment: nets that adapt."""

from __future__ import annotations

from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import mse_loss

from innerloop.experiments.sine.problem import HIGH, LOW, SHOTS, Sines

STYLES = {
    0: {"color": "0.6", "linestyle": ":", "label": "before adaptation"},
    1: {"color": "tab:orange", "linestyle": "--", "label": "after 1 step"},
    10: {"color": "tab:blue", "linestyle": "-", "label": "after 10 steps"},
}
"""Numbers of steps after which predictions are drawn."""


def small_middle_large(sines: Sines) -> Sines:
    """Picks sines to draw by their height alone (its quartiles), whatever the nets predict."""
    count = len(sines.query[1])
    by_height = sines.query[1].abs().amax(dim=(1, 2)).argsort()
    return sines.tasks(by_height[[count * quarter // 4 for quarter in (1, 2, 3)]])


def draw_fits(fits: dict[str, dict[int, Tensor]], sines: Sines) -> Figure:
    """Draws each net (row) adapting to each sine (column).

    ``fits``: the predictions at the query points, by net and number of steps.
    """
    (support_x, support_y), (query_x, query_y) = sines
    figure = Figure(figsize=(4 * len(query_x), 6.4), layout="constrained")
    axes = figure.subplots(len(fits), len(query_x), sharex=True, sharey="col", squeeze=False)
    for row, (name, predictions) in zip(axes, fits.items(), strict=True):
        for task, ax in enumerate(row):
            ax.plot(query_x[task], query_y[task], color="0.1", lw=1.2, label="true sine")
            for steps, style in STYLES.items():
                ax.plot(query_x[task], predictions[steps][task], lw=2, **style)
            points = f"{SHOTS} support points"
            ax.plot(support_x[task], support_y[task], "o", color="tab:red", zorder=3, label=points)
            error = mse_loss(predictions[10][task], query_y[task]).item()
            ax.set_title(f"{name}: squared error {error:.2f} after 10 steps", fontsize=10)
            ax.grid(alpha=0.25)
            ax.set_xlim(LOW, HIGH)
        row[0].set_ylabel("y")
    for ax in axes[-1]:
        ax.set_xlabel("x")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle("Adapting to a small, a middling and a large sine never seen in training")
    return figure
