"""Sine waves as tasks, and the net that fits them (Finn et al. 2017)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

SHOTS = 10
LOW, HIGH = -5.0, 5.0


class Sines(NamedTuple):
    """Support and query points of tasks, as (x, y). [tasks, points, 1] each."""

    support: tuple[Tensor, Tensor]
    query: tuple[Tensor, Tensor]

    def tasks(self, chosen: slice | Tensor) -> Sines:
        """A part of the tasks."""
        return Sines(*((x[chosen], y[chosen]) for x, y in self))


def draw_sines(
    generator: torch.Generator, tasks: int, *, shots: int = SHOTS, query: Tensor | None = None
) -> Sines:
    """Draws sine waves and their support points; the query points too, unless they are given."""

    def uniform(points: int) -> Tensor:
        return torch.rand(tasks, points, 1, generator=generator, dtype=torch.float32)

    amplitude, phase = 0.1 + 4.9 * uniform(1), math.pi * uniform(1)

    def curve(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, amplitude * torch.sin(x - phase)

    support = LOW + (HIGH - LOW) * uniform(shots)
    if query is None:
        return Sines(curve(support), curve(LOW + (HIGH - LOW) * uniform(shots)))
    return Sines(curve(support), curve(query.expand(tasks, *query.shape)))


def build_net(seed: int) -> nn.Module:
    """Builds the regression net 1-40-40-1 of the MAML paper, with the weights of this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(1, 40, dtype=torch.float32),
            nn.ReLU(),
            nn.Linear(40, 40, dtype=torch.float32),
            nn.ReLU(),
            nn.Linear(40, 1, dtype=torch.float32),
        )


def squared_error(net: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The loss, in training and in testing. The batch begins with (x, y)."""
    return mse_loss(net(batch[0]), batch[1])
