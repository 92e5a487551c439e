"""Tasks of learned losses: sines and handwritten digits, from random weights."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from innerloop.experiments.sine.problem import HIGH, LOW, build_net, draw_sines, squared_error

_SINE_SHOTS = 100
_SUPPORT, _QUERY = 50, (50, 200)  # digits; 200 where held out
_WIDTH = 32
_WAVES = 4


class Tasks(NamedTuple):
    """Support and query examples, as (x, y). [tasks, examples, ...] each.

    The x are whatever the net takes: the inputs, or these with initial weights.
    """

    support: tuple[Any, Tensor]
    query: tuple[Any, Tensor]


Measure = Callable[[nn.Module, tuple[Any, Tensor]], Tensor]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Tasks, a net that starts from random weights for each, the task's loss and error."""

    targets: str
    """As :class:`innerloop.learned.LearnedLoss` has it."""
    draw: Callable[[torch.Generator, int, bool], Tasks]
    """(generator, tasks, held out)"""
    build: Callable[[int], nn.Module]
    """By the seed of its weights."""
    task_loss: Measure
    error: Measure
    """The reported measure."""
    measured: str
    read: Callable[[Tensor], tuple[Tensor, ...]] | None
    """Inputs of a learned loss: numbers of the shape of the prediction."""
    rate: float
    """Of the learned loss."""
    clip: float
    """The longest inner gradient with the learned loss."""
    rates: tuple[float, ...]
    clips: tuple[float, ...]
    """The task's loss is trained with the best of these, in all pairs."""
    meta_rate: float
    """Of the outer Adam at the start."""
    meta_clip: float
    """The longest meta-gradient."""
    iterations: int
    """Meta-updates of a short run."""

    @property
    def settings(self) -> list[tuple[float, float]]:
        """Rates and clips of the task's loss."""
        return [*itertools.product(self.rates, self.clips)]


def _sines(generator: torch.Generator, tasks: int, held_out: bool) -> Tasks:
    points = torch.linspace(LOW, HIGH, 100 if held_out else 25, dtype=torch.float32)
    return Tasks(*draw_sines(generator, tasks, shots=_SINE_SHOTS, query=points.unsqueeze(1)))


@functools.cache
def digit_images() -> tuple[Tensor, Tensor]:
    """8 × 8 images in random order, [images, 64], and their labels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def _digits(generator: torch.Generator, tasks: int, held_out: bool) -> Tasks:
    """Some images for each task; held-out tasks have images that are in no other."""
    x, y = digit_images()
    half = len(x) // 2
    count = _SUPPORT + _QUERY[held_out]
    chosen = [torch.randperm(half, generator=generator)[:count] for _ in range(tasks)]
    rows = torch.stack(chosen) + (half if held_out else 0)
    support, query = rows[:, :_SUPPORT], rows[:, _SUPPORT:]
    return Tasks((x[support], y[support]), (x[query], y[query]))


def _digits_net(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(64, _WIDTH, dtype=torch.float32),
            nn.ReLU(),
            nn.Linear(_WIDTH, 10, dtype=torch.float32),
        )


def _cross_entropy(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(net(batch[0]), batch[1])


def _error_rate(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = net(batch[0])
    return (logits.argmax(-1) != batch[1]).to(logits.dtype).mean()


def _waves(x: Tensor) -> tuple[Tensor, ...]:
    """The input, and waves of several lengths at it: features at several scales."""
    turns = [k * math.pi * x / (HIGH - LOW) for k in range(1, _WAVES + 1)]
    return x / HIGH, *(turn.sin() for turn in turns), *(turn.cos() for turn in turns)


PROBLEMS = {
    "sines": Problem(
        targets="values",
        draw=_sines,
        build=build_net,
        task_loss=squared_error,
        error=squared_error,
        measured="mean squared error",
        read=_waves,
        rate=0.1,
        clip=3.0,
        rates=(0.03, 0.05, 0.07, 0.1, 0.15),
        clips=(1.0, 3.0),
        meta_rate=0.02,
        meta_clip=1.0,
        iterations=400,
    ),
    "digits": Problem(
        targets="classes",
        draw=_digits,
        build=_digits_net,
        task_loss=_cross_entropy,
        error=_error_rate,
        measured="share of wrong answers",
        read=None,
        rate=1.5,
        clip=1.0,
        rates=(0.8, 1.0, 1.5, 2.0, 3.0),
        clips=(0.3, 1.0),
        meta_rate=0.01,
        meta_clip=0.1,
        iterations=400,
    ),
}
