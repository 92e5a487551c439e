"""Figures of learned losses: errors over steps, and the shape of a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from matplotlib.figure import Figure
from torch import Tensor

from innerloop.experiments.framework.figures import plot_band, row, save
from innerloop.experiments.learned_loss.cell import Cell
from innerloop.experiments.learned_loss.problem import PROBLEMS
from innerloop.learned import LearnedLoss

_LINE = torch.linspace(-5, 5, 81, dtype=torch.float32)  # predictions and targets that are drawn
_INPUTS = (-4.0, 0.0, 4.0)


def draw(experiment: Any, folder: Path) -> None:
    """Saves all of them, and the learned losses themselves, into the folder of the run."""
    config = experiment.config
    save(draw_errors(experiment.records, config), folder / "curves.png")
    for (name, seed), weights in zip(config.cells, experiment.outcomes, strict=True):
        torch.save(weights, folder / f"loss-{name}-{seed}.pt")
        if seed == config.seed:
            cell = Cell(config, name, seed)
            cell.criterion.load_state_dict(weights)
            save(draw_loss(cell), folder / f"shape-{name}.png")


def draw_errors(records: list[dict[str, Any]], config: Any) -> Figure:
    """The error on held-out tasks over steps, mean and spread over seeds."""
    figure, panels = row(len(config.names), 5.5, 4)
    for axes, name in zip(panels, config.names, strict=True):
        own = [r for r in records if r["problem"] == name]
        for key, label, color in (
            ("task", "task's loss, best rate and clip", "C1"),
            ("learned", "learned loss", "C0"),
        ):
            # [seeds, steps + 1]; NaN, which is not drawn, from where a seed diverged.
            values = numpy.array([r[key] for r in own], dtype=float)
            mean, spread = values.mean(0), values.std(0, ddof=min(len(values) - 1, 1))
            plot_band(axes, range(len(mean)), mean, spread, color=color, label=label)
        end = numpy.mean([r["task"][-1] for r in own])
        axes.axhline(end, color="C1", linestyle=":", label=f"that after {config.horizon} steps")
        axes.axvline(config.steps, color="grey", linestyle="--", label="learned for so many steps")
        axes.set(xlabel="steps", ylabel=PROBLEMS[name].measured, title=name)
        # The learned loss may go far astray after the steps it was learned for.
        axes.set_ylim(0, 1.25 * max(max(r["task"]) for r in own))
        axes.legend(fontsize=8)
    return figure


def draw_loss(cell: Cell) -> Figure:
    """The shape of a learned loss, and what each step has of its own."""
    criterion = cell.criterion
    panels: list[Callable[[Any, Cell], None]] = [_draw_classes]
    if cell.problem.targets == "values":
        inputs = _INPUTS if criterion.extras else (0.0,)
        panels = [functools.partial(_draw_height, at=at) for at in inputs] + [_draw_slopes]
        if criterion.moments is not None:
            panels.append(_draw_pairs)
    if criterion.steps:
        panels.append(_draw_steps)
    figure, found = row(len(panels), 4.2, 3.8)
    for axes, panel in zip(found, panels, strict=True):
        panel(axes, cell)
    return figure


def _extras(cell: Cell, at: Tensor, step: int = 0) -> list[Any]:
    """The further inputs of the loss at these x, in the order of the experiment."""
    known = () if cell.read is None else cell.read(at)
    return [*known, step] if cell.criterion.steps else [*known]


@torch.no_grad()
def _draw_height(axes: Any, cell: Cell, at: float) -> None:
    """The loss over prediction and target, in the first step."""
    target, prediction = torch.meshgrid(_LINE, _LINE, indexing="ij")
    extras = _extras(cell, torch.full_like(target, at))
    drawn = axes.contourf(_LINE, _LINE, cell.criterion.each(prediction, target, *extras), levels=20)
    axes.plot(_LINE, _LINE, color="white", linestyle=":")
    where = f", x = {at:g}" if cell.criterion.extras else ""
    axes.set(xlabel="prediction", ylabel="target", title=f"learned loss{where}")
    axes.figure.colorbar(drawn, ax=axes)


def _draw_slopes(axes: Any, cell: Cell) -> None:
    """The derivative by the prediction, for some targets; a line for the squared error."""
    for target in (-3.0, 0.0, 3.0):
        moving = _LINE.clone().requires_grad_()
        extras = _extras(cell, torch.zeros_like(_LINE))
        each = cell.criterion.each(moving, torch.full_like(moving, target), *extras)
        (slope,) = torch.autograd.grad(each.sum(), moving)
        (line,) = axes.plot(_LINE, slope, label=f"target {target:g}")
        axes.axvline(target, color=line.get_color(), linestyle=":", linewidth=1)
    axes.axhline(0, color="grey", linewidth=1)
    axes.set(xlabel="prediction", ylabel="derivative of the loss", title="slope of the loss")
    axes.legend(fontsize=8)


@torch.no_grad()
def _draw_pairs(axes: Any, cell: Cell) -> None:
    """Contribution of pairs of errors to the loss, beside their own."""
    weights = cell.criterion.together(_LINE, *_extras(cell, _LINE))
    pairs = weights @ weights.T
    most = pairs.abs().max().item()
    drawn = axes.contourf(_LINE, _LINE, pairs, levels=20, cmap="RdBu", vmin=-most, vmax=most)
    axes.set(xlabel="x of an error", ylabel="x of another", title="errors that count together")
    axes.figure.colorbar(drawn, ax=axes)


@torch.no_grad()
def _draw_classes(axes: Any, cell: Cell) -> None:
    """For two classes, over the probability of the right one, beside the cross-entropy."""
    # As many examples of either kind, so the mean of their logits is the same for both classes.
    right = torch.linspace(0.01, 0.99, 99, dtype=torch.float32)
    logits = torch.stack([right, 1 - right], -1).log()
    labels = torch.zeros(len(right), dtype=torch.long)
    last = max(cell.criterion.steps - 1, 0)
    for step in sorted({0, last // 2, last}):
        each = cell.criterion.each(logits, labels, *_extras(cell, right, step)).sum(-1)
        which = f", step {step + 1}" if cell.criterion.steps else ""
        axes.plot(right, each - each.min(), label=f"learned{which}")
    axes.plot(right, -right.log(), color="grey", linestyle=":", label="cross-entropy")
    axes.set(xlabel="probability of the right class, of two", ylabel="loss above its least value")
    axes.legend(fontsize=8)


def _draw_steps(axes: Any, cell: Cell) -> None:
    """Learned values of each step: a factor of the loss, and the part of the mean left out."""
    criterion: LearnedLoss = cell.criterion
    steps = range(1, criterion.steps + 1)
    assert criterion.factors is not None
    axes.plot(steps, criterion.factors.detach().exp(), marker=".", label="factor of the loss")
    if criterion.center is not None:
        axes.plot(steps, criterion.center.detach(), marker=".", label="part of the mean left out")
    axes.set(xlabel="step", title="what each step has of its own")
    axes.legend(fontsize=8)
