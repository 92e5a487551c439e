"""Ordinary optimizers with the rate that suits them best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from innerloop.experiments.learned_optimizer.problem import Family

OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
}
# Four in each factor of ten: neighbours differ by 1.8.
RATES = tuple(10 ** (k / 4) for k in range(-14, 5))
METRICS = ("mean", "final")


def curves(
    kind: str, rates: Sequence[float], family: Family, batches: Sequence[Any], tasks: int
) -> Tensor:
    """The loss before each step, of every rate and problem. [rates, tasks, steps]

    All of them run at once: a group of the optimizer for each rate, in whose tensors each problem
    has weights of its own. These optimizers move every number by itself, so that changes nothing.
    """
    names, start = zip(*family.model.named_parameters(), strict=True)
    stacks = [
        [p.detach().expand(tasks, *p.shape).clone().requires_grad_() for p in start] for _ in rates
    ]
    groups = [{"params": own, "lr": rate} for own, rate in zip(stacks, rates, strict=True)]
    optimizer = OPTIMIZERS[kind](groups)

    loss = _Loss(family)

    def one(weights: list[Tensor], batch: Any) -> Tensor:
        own = {f"model.{name}": w for name, w in zip(names, weights, strict=True)}
        return functional_call(loss, own, batch)

    losses = []
    for batch in batches:
        optimizer.zero_grad()
        stacks = zip(*(group["params"] for group in groups), strict=True)
        every = [torch.stack(stack) for stack in stacks]
        found = vmap(vmap(one), in_dims=(0, None))(every, batch)
        found.sum().backward()
        optimizer.step()
        losses.append(found.detach())
    return torch.stack(losses, -1)


class _Loss(torch.nn.Module):
    """The loss as a forward, which is what ``functional_call`` calls."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.model, self.of = family.model, family.loss

    def forward(self, *batch: Any) -> Tensor:
        return self.of(self.model, batch)


def measure(curve: Tensor, horizon: int, metric: str) -> Tensor:
    """The mean loss over the steps of the horizon, or the loss after them. [..., steps] -> [...]"""
    return curve[..., :horizon].mean(-1) if metric == "mean" else curve[..., horizon]


def best_rates(found: Tensor, horizons: Sequence[int]) -> dict[str, dict[str, float]]:
    """The rate that is best at each horizon by each metric. ``found``: [rates, tasks, steps]"""
    return {
        str(horizon): {metric: _best(found, horizon, metric) for metric in METRICS}
        for horizon in horizons
    }


def _best(found: Tensor, horizon: int, metric: str) -> float:
    values = measure(found, horizon, metric).mean(-1)
    # A rate that diverged, in any problem, is no choice.
    sound = found[..., : horizon + 1].isfinite().all(-1).all(-1)
    values = torch.where(sound, values, math.inf)
    return RATES[int(values.argmin())]
