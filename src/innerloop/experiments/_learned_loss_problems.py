"""What a learned loss is learned on: sines and handwritten digits, from random weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from innerloop.experiments._sines import HIGH, LOW, build_net, draw_sines

_SINE_SHOTS = 100
_DIGITS_SHOWN, _DIGITS_JUDGED = 50, (50, 200)  # the latter where held out
_WIDTH = 32


class Tasks(NamedTuple):
    """Examples to train on, and to be judged by, as (x, y). [tasks, examples, ...] each.

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
    """What is reported."""
    measured: str
    rate: float
    """Of the learned loss."""
    rates: tuple[float, ...]
    """The task's loss is trained with the best of these."""
    clip: float
    """The longest inner gradient, with either loss."""
    meta_rate: float
    """Of the outer Adam at the start."""


def _sines(generator: torch.Generator, tasks: int, held_out: bool) -> Tasks:
    points = torch.linspace(LOW, HIGH, 100 if held_out else 25, dtype=torch.float32)
    return Tasks(*draw_sines(generator, tasks, shots=_SINE_SHOTS, query=points.unsqueeze(1)))


@functools.cache
def _digit_images() -> tuple[Tensor, Tensor]:
    """8 × 8 images in an order of chance, [images, 64], and what they show."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    order = torch.randperm(len(found.data), generator=torch.Generator().manual_seed(0))
    pixels = torch.from_numpy(found.data).to(torch.float32) / 16
    return pixels[order], torch.from_numpy(found.target).long()[order]


def _digits(generator: torch.Generator, tasks: int, held_out: bool) -> Tasks:
    """Some images for each task; held-out tasks have images that are in no other."""
    x, y = _digit_images()
    half = len(x) // 2
    count = _DIGITS_SHOWN + _DIGITS_JUDGED[held_out]
    chosen = [torch.randperm(half, generator=generator)[:count] for _ in range(tasks)]
    rows = torch.stack(chosen) + (half if held_out else 0)
    shown, judged = rows[:, :_DIGITS_SHOWN], rows[:, _DIGITS_SHOWN:]
    return Tasks((x[shown], y[shown]), (x[judged], y[judged]))


def _digits_net(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(64, _WIDTH, dtype=torch.float32),
            nn.ReLU(),
            nn.Linear(_WIDTH, 10, dtype=torch.float32),
        )


def _squared_error(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return mse_loss(net(batch[0]), batch[1])


def _cross_entropy(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(net(batch[0]), batch[1])


def _wrong(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    said = net(batch[0])
    return (said.argmax(-1) != batch[1]).to(said.dtype).mean()


PROBLEMS = {
    "sines": Problem(
        "values",
        _sines,
        build_net,
        _squared_error,
        _squared_error,
        "mean squared error",
        0.05,
        (0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15),
        3.0,
        0.02,
    ),
    "digits": Problem(
        "classes",
        _digits,
        _digits_net,
        _cross_entropy,
        _wrong,
        "share of wrong answers",
        0.5,
        (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5),
        3.0,
        0.006,
    ),
}
