"""What the systems that stand on torch share: the model with its weights, the loss, the tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
from systems.problem import BETAS, EPS, Gradients, Problem

Batch = tuple[Tensor, Tensor]

# Without running statistics, as in MAML, so that every system has the same work to do.
BATCH_NORM = partial(nn.BatchNorm2d, track_running_stats=False)


def network(problem: Problem, norm: models.Norm = BATCH_NORM) -> nn.Module:
    """The case's model with the case's weights."""
    case = problem.case
    sizes = dict(case.sizes, norm=norm) if case.composed else dict(case.sizes)
    model: nn.Module = getattr(models, case.network)(**sizes).to(problem.rate.dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(problem.weights[name])
    return model


def loss(problem: Problem, out: Tensor, wanted: Tensor) -> Tensor:
    if problem.classes:
        return F.cross_entropy(out.flatten(0, -2), wanted.flatten())
    return F.mse_loss(out, wanted)


def tasks(problem: Problem) -> list[tuple[list[Batch], Batch]]:
    """What each task trains on and is measured on."""
    if problem.case.tasks is None:
        return [(problem.train, problem.val)]
    repeats = problem.case.steps // problem.case.batches
    distinct = problem.train[: problem.case.batches]
    return [
        ([(x[t], y[t]) for x, y in distinct] * repeats, (problem.val[0][t], problem.val[1][t]))
        for t in range(problem.case.tasks)
    ]


def averaged(problem: Problem, learned: dict[str, list[Tensor]], losses: Iterable[Tensor]):
    """The gradient of the mean of the losses, each freed before the next is computed."""
    leaves = [leaf for name in learned for leaf in learned[name]]
    total = [torch.zeros_like(leaf) for leaf in leaves]
    for value in losses:
        torch._foreach_add_(total, torch.autograd.grad(value, leaves))
    torch._foreach_div_(total, float(problem.case.tasks or 1))
    return _by_name(learned, iter(total))


def _by_name(learned: dict[str, list[Tensor]], found: Iterator[Tensor]) -> Gradients:
    grads = {name: [next(found) for _ in leaves] for name, leaves in learned.items()}
    return {name: values if name == "init" else values[0] for name, values in grads.items()}


def optimizer(problem: Problem, model: nn.Module) -> torch.optim.Optimizer:
    """The ordinary one, with the case's groups."""
    grouped: dict[int, list[nn.Parameter]] = {}
    for group, weight in zip(problem.groups, model.parameters(), strict=True):
        grouped.setdefault(group, []).append(weight)
    groups = [{"params": grouped[group]} for group in sorted(grouped)]
    if problem.case.rule == "adam":
        return torch.optim.Adam(groups, lr=problem.case.rate, betas=BETAS, eps=EPS)
    return torch.optim.SGD(groups, lr=problem.case.rate)
