"""A figure of an unrolled inner loop: losses, gradient norms, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from innerloop.diagnose import Report, diagnose
from innerloop.errors import InnerLoopError, refusal
from innerloop.inner_loop import InnerLoop

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from innerloop.tasks import Way


def plot_unroll(
    what: Report | InnerLoop,
    train: Any = None,
    val: Any = None,
    *,
    tasks: bool | Way | None = None,
) -> Figure:
    """Draw the training loss, the norm of B_j, and the memory of each strategy.

    ``what`` is a report of :func:`innerloop.diagnose`, or an inner loop together with ``train`` and
    ``val``, which is then diagnosed. Returns a matplotlib figure, which belongs to no window.

    Left: the training loss before each step, and L_val after the last. Middle: the norms of
    B_j, the gradient of L_val by the weights before step j, and of the inner gradient G_j; a line
    that falls to the left shows a vanishing gradient, one that rises an exploding one. Right: the
    forecast peak memory of each strategy.
    """
    figure = _figure()
    report = _report(what, train, val, tasks)
    loss, norms, memory = figure.subplots(1, 3)
    _draw_losses(loss, report)
    _draw_norms(norms, report)
    _draw_memory(memory, report)
    figure.suptitle(f"{report.steps} steps with {report.backward}")
    return figure


def _figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError(
            "innerloop.plot_unroll needs the package 'matplotlib', which is not installed. Install "
            "it with: pip install '.[plot]' in a clone"
        ) from missing
    return Figure(figsize=(13, 4), layout="constrained")


def _report(what: Any, train: Any, val: Any, tasks: bool | Way | None) -> Report:
    if isinstance(what, Report):
        return what
    if isinstance(what, InnerLoop) and train is not None:
        return diagnose(what, train, val, tasks=tasks)
    raise _not_plottable(what)


def _not_plottable(what: Any) -> InnerLoopError:
    return refusal(
        f"You gave a {type(what).__name__} to plot_unroll"
        + (" without batches." if isinstance(what, InnerLoop) else "."),
        "a report of diagnose, or an InnerLoop with its training and validation batches.",
        "the figure shows its measurements.",
        "plot_unroll(inner, train, val) or plot_unroll(diagnose(inner, train, val)).",
    )


_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))


def _draw_losses(ax: Axes, report: Report) -> None:
    steps = list(range(len(report.losses)))
    if steps:
        ax.plot(steps, report.losses, marker="o", markersize=3, label="training loss")
    if report.val_loss is not None:
        ax.plot(
            [report.steps],
            [report.val_loss],
            linestyle="none",
            marker="D",
            color="tab:red",
            label="L_val",
        )
    _count_steps(ax)
    _finish(ax, "Loss before each step", "step", bool(steps) or report.val_loss is not None)


def _draw_norms(ax: Axes, report: Report) -> None:
    drawn = False
    for norms, label in ((report.b_norms, "|B_j|"), (report.grad_norms, "|G_j|")):
        points = [(j, norm) for j, norm in enumerate(norms) if norm > 0]
        if points:
            ax.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
            drawn = True
    if drawn:
        ax.set_yscale("log")
    _count_steps(ax)
    _finish(ax, "Gradients by step", "step", drawn)


def _count_steps(ax: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_memory(ax: Axes, report: Report) -> None:
    rows = () if report.memory is None else report.memory.rows
    largest = max((row.peak_bytes for row in rows), default=0)
    unit, size = next((u, s) for u, s in _UNITS if largest >= s or s == 1)
    if rows:
        names = [str(row.strategy) for row in rows]
        ax.barh(names, [row.peak_bytes / size for row in rows], color="tab:gray")
        ax.invert_yaxis()
    _finish(ax, "Peak memory by strategy", f"{unit}, forecast", bool(rows), legend=False)


def _finish(ax: Axes, title: str, label: str, drawn: bool, legend: bool = True) -> None:
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(label)
    ax.grid(alpha=0.25)
    if not drawn:
        ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", va="center")
    elif legend:
        ax.legend(frameon=False)
