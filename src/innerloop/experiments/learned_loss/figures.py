"""Figures of learned losses: errors over steps, and the shape of a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch
from matplotlib.figure import Figure
from torch import Tensor

from innerloop.experiments.framework.figures import plot_band, save
from innerloop.experiments.learned_loss.cell import Cell
from innerloop.experiments.learned_loss.problem import PROBLEMS
from innerloop.learned import LearnedLoss

_REACH = 5.0  # of predictions and targets that are drawn
_INPUTS = (-4.0, 0.0, 4.0)


def draw(experiment: Any, folder: Path, result: dict[str, Any]) -> None:
    """All of them, and the learned losses themselves, into the folder of the run."""
    config = experiment.config
    save(curves(experiment.records, config), folder / "curves.png")
    seen = set()
    for (name, seed), weights in zip(config.cells, experiment.outcomes, strict=True):
        torch.save(weights, folder / f"loss-{name}-{seed}.pt")
        if name not in seen:
            criterion = restore(name, weights, config)
            shape = surface if PROBLEMS[name].targets == "values" else class_curves
            save(shape(criterion, name), folder / f"shape-{name}.png")
        seen.add(name)


def restore(name: str, weights: dict[str, Tensor], config: Any) -> LearnedLoss:
    criterion = Cell(config, name, 0).criterion
    criterion.load_state_dict(weights)
    return criterion


def curves(records: list[dict[str, Any]], config: Any) -> Figure:
    """The error on held-out tasks over steps, mean and spread over seeds."""
    names = list(dict.fromkeys(r["problem"] for r in records))
    figure = Figure(figsize=(5.5 * len(names), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
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
        axes.grid(alpha=0.3)
    return figure


def _extras(criterion: LearnedLoss, name: str, step: int, at: Tensor) -> list[Any]:
    """Its further inputs, in the order of the experiment, at these x."""
    read = PROBLEMS[name].read
    known = read(at) if criterion.extras and read is not None else ()
    return [*known, step] if criterion.steps else [*known]


def _steps(criterion: LearnedLoss) -> list[int]:
    """The first, the middle and the last that it tells apart."""
    last = max(criterion.steps - 1, 0)
    return sorted({0, last // 2, last})


def surface(criterion: LearnedLoss, name: str) -> Figure:
    """Over prediction and target, at the first step, for some inputs if it reads the input."""
    inputs = _INPUTS if criterion.extras else _INPUTS[1:2]
    panels = len(inputs) + 1 + (criterion.moments is not None) + bool(criterion.steps)
    figure = Figure(figsize=(4.2 * panels, 3.8), layout="constrained")
    row = [*figure.subplots(1, panels, squeeze=False)[0]]
    axis = torch.linspace(-_REACH, _REACH, 81, dtype=torch.float32)
    target, prediction = torch.meshgrid(axis, axis, indexing="ij")
    for at in inputs:
        axes, place = row.pop(0), torch.full_like(target, at)
        with torch.no_grad():
            height = criterion.each(prediction, target, *_extras(criterion, name, 0, place))
        drawn = axes.contourf(axis, axis, height, levels=20)
        axes.plot(axis, axis, color="white", linestyle=":")
        where = f", x = {at:g}" if criterion.extras else ""
        axes.set(xlabel="prediction", ylabel="target", title=f"learned loss{where}")
        figure.colorbar(drawn, ax=axes)
    _slopes(row.pop(0), criterion, name, axis)
    if criterion.moments is not None:
        _together(figure, row.pop(0), criterion, name, axis)
    if criterion.steps:
        _over_steps(row.pop(0), criterion)
    return figure


def _together(figure: Figure, axes: Any, criterion: LearnedLoss, name: str, x: Tensor) -> None:
    """Contribution of pairs of errors to the loss, beside their own."""
    with torch.no_grad():
        weights = criterion.together(x, *_extras(criterion, name, 0, x))
    most = (weights @ weights.T).abs().max().item()
    drawn = axes.contourf(x, x, weights @ weights.T, levels=20, cmap="RdBu", vmin=-most, vmax=most)
    axes.set(xlabel="x of an error", ylabel="x of another", title="errors that count together")
    figure.colorbar(drawn, ax=axes)


def _slopes(axes: Any, criterion: LearnedLoss, name: str, prediction: Tensor) -> None:
    """Its derivative by the prediction, for some targets; that of the squared error is a line."""
    for target in (-3.0, 0.0, 3.0):
        moving = prediction.clone().requires_grad_()
        extras = _extras(criterion, name, 0, torch.zeros_like(prediction))
        each = criterion.each(moving, torch.full_like(moving, target), *extras)
        (slope,) = torch.autograd.grad(each.sum(), moving)
        (line,) = axes.plot(prediction, slope, label=f"target {target:g}")
        axes.axvline(target, color=line.get_color(), linestyle=":", linewidth=1)
    axes.axhline(0, color="grey", linewidth=1)
    axes.set(xlabel="prediction", ylabel="derivative of the loss", title="what it does to a net")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _over_steps(axes: Any, criterion: LearnedLoss) -> None:
    """Learned values of each step: a factor of the loss, and the part of the mean left out."""
    steps = range(1, criterion.steps + 1)
    assert criterion.factors is not None
    axes.plot(steps, criterion.factors.detach().exp(), marker=".", label="factor of the loss")
    if criterion.center is not None:
        axes.plot(steps, criterion.center.detach(), marker=".", label="part of the mean left out")
    axes.set(xlabel="step", title="what each step has of its own")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def class_curves(criterion: LearnedLoss, name: str) -> Figure:
    """For two classes, over the probability of the right one, beside the cross-entropy."""
    panels = 1 + bool(criterion.steps)
    figure = Figure(figsize=(5.5 * panels, 3.8), layout="constrained")
    row = figure.subplots(1, panels, squeeze=False)[0]
    # As many examples of either kind, so the mean of their logits is the same for both classes.
    right = torch.linspace(0.01, 0.99, 99, dtype=torch.float32)
    logits = torch.stack([right, 1 - right], -1).log()
    labels = torch.zeros(len(right), dtype=torch.long)
    for step in _steps(criterion):
        extras = _extras(criterion, name, step, right)
        with torch.no_grad():
            each = criterion.each(logits, labels, *extras).sum(-1)
        which = f", step {step + 1}" if criterion.steps else ""
        row[0].plot(right, each - each.min(), label=f"learned{which}")
    row[0].plot(right, -right.log(), color="grey", linestyle=":", label="cross-entropy")
    row[0].set(xlabel="probability of the right class, of two", ylabel="loss above its least value")
    row[0].legend(fontsize=8)
    row[0].grid(alpha=0.3)
    if criterion.steps:
        _over_steps(row[1], criterion)
    return figure
