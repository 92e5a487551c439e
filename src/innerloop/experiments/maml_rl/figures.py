"""Figures of a run of maml-rl: returns by steps, training, episodes before and after."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.figure import Figure

from innerloop.experiments.framework.figures import single

MEASURED = 3
"""Steps of adaptation that are measured."""

_SHOWN = 4  # tasks
_STEPS = {0: ("0.6", "before"), 1: ("C1", "after 1 step"), MEASURED: ("C0", f"after {MEASURED}")}
_PATHS = 5  # episodes of each
_DRAWN_SEED = 3_000_017


def draw_returns(result: dict[str, Any]) -> Figure:
    """The return against the number of steps: each seed, and the mean."""
    figure, axes = single(5, 3.6)
    x = range(len(result["mean"]))
    for one in result["seeds"]:
        axes.errorbar(x, one["returns"], one["intervals"], color="C0", alpha=0.35, capsize=2)
    axes.plot(x, result["mean"], color="C0", linewidth=2.5, marker="o", label="mean of the seeds")
    axes.set(xlabel="steps of adaptation", ylabel="return on held-out tasks", xticks=list(x))
    axes.set_title(result["world"])
    axes.legend(loc="lower right")
    return figure


def draw_curves(found: list[list[float]], first: int) -> Figure:
    """The return after adaptation, while meta-training."""
    figure, axes = single(5, 3.6)
    for k, curve in enumerate(found):
        axes.plot(range(1, len(curve) + 1), curve, linewidth=1, label=f"seed {first + k}")
    axes.set(xlabel="meta-updates", ylabel="discounted return after adaptation")
    axes.legend(fontsize=8)
    return figure


def draw_episodes(learner: Any) -> Figure:
    """Some held-out tasks of the last seed: episodes before and after adaptation."""
    made = torch.Generator().manual_seed(learner.seed + _DRAWN_SEED)
    tasks = learner.world.tasks(_SHOWN, made)
    train = learner.batches(tasks, MEASURED, made)
    (val,) = learner.batches(tasks, 1, made, _PATHS)
    draw = _plane if learner.config.world == "navigation" else _angles
    figure = Figure(figsize=(3.2 * _SHOWN, 3.4), layout="constrained")
    panels = figure.subplots(1, _SHOWN, sharex=True, sharey=True)
    for steps, (color, label) in _STEPS.items():
        found = learner.sample(learner.policies(train[:steps], _SHOWN), val)
        for axes, episodes, task in zip(panels, found, tasks, strict=True):
            draw(axes, episodes, task, color, label)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"held-out tasks, seed {learner.seed}")
    return figure


def _plane(axes: Any, found: Any, goal: Any, color: str, label: str) -> None:
    for k, path in enumerate(found.observations):
        x, y = path.unbind(-1)
        axes.plot(x, y, color=color, linewidth=1, alpha=0.8, label=None if k else label)
    star = None if color != "C0" else "goal"
    axes.plot(*goal.tolist(), marker="*", color="C3", markersize=12, linestyle="", label=star)
    axes.set_aspect("equal")
    axes.grid(alpha=0.3)


def _angles(axes: Any, found: Any, physics: Any, color: str, label: str) -> None:
    for k, (path, alive) in enumerate(zip(found.observations, found.alive, strict=True)):
        angle = path[alive][:, 2]
        axes.plot(angle, color=color, linewidth=1, alpha=0.8, label=None if k else label)
    force, length, gravity = physics.tolist()
    axes.set_title(f"force {force:.1f}, length {2 * length:.1f}, gravity {gravity:.1f}", fontsize=8)
    axes.set(xlabel="time", ylabel="angle of the pole")
    axes.grid(alpha=0.3)
