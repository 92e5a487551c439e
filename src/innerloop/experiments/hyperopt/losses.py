"""Training losses with hyperparameters in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    affine_grid,
    binary_cross_entropy_with_logits,
    cross_entropy,
    grid_sample,
    log_softmax,
)

CLASSES = 10


class Batch(NamedTuple):
    """Some training points."""

    x: Tensor
    y: Tensor
    which: Tensor
    """Their places among the training points. [n]"""
    draws: Tensor
    """Random numbers of the augmentations. [n, AUGMENTATIONS]"""


def class_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The plain loss, also of the validation: cross-entropy of the classes."""
    return cross_entropy(model(batch[0])[:, :CLASSES], batch[1])


class _Loss(nn.Module):
    """A loss whose hyperparameters are the exponentials of one tensor, ``raw``."""

    names: Sequence[str] = ()
    """Names of the hyperparameters; none if they belong to training points."""

    def __init__(self, count: int, start: float) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.full((count,), math.log(start), dtype=torch.float32))

    @property
    def numbers(self) -> Tensor:
        return self.raw.exp()


class Smoothed(_Loss):
    """Label smoothing: the share of the target that all classes get, for each class."""

    names = tuple(map(str, range(CLASSES)))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        logs = log_softmax(model(batch.x)[:, :CLASSES], -1)
        right = logs.gather(1, batch.y[:, None]).squeeze(1)
        share = self.numbers[batch.y]
        return -((1 - share) * right + share * logs.mean(-1)).mean()


class Weighted(_Loss):
    """A weight for each training point. Only their ratios count."""

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        each = cross_entropy(model(batch.x)[:, :CLASSES], batch.y, reduction="none")
        # The mean over all points, not those of the batch: a batch of bad points counts little.
        return (each * self.numbers[batch.which]).mean() / self.numbers.mean()


AUGMENTATIONS = ("shift x", "shift y", "rotate", "scale", "stretch", "shear", "contrast", "bright")
# What a draw of one standard deviation does at strength 1.
_FULL = (0.5, 0.5, math.pi / 4, 0.5, 0.5, 0.5, 0.5, 0.5)


class Augmented(_Loss):
    """Strengths of random augmentations, for each kind of change."""

    names = AUGMENTATIONS

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        amounts = self.numbers * batch.draws * batch.draws.new_tensor(_FULL)
        return class_loss(model, (transform(batch.x, amounts), batch.y))


def transform(x: Tensor, amounts: Tensor) -> Tensor:
    """Moves, turns, scales, shears and brightens images by these amounts."""
    right, down, angle, scale, stretch, shear, contrast, bright = amounts.unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    wide, high = (scale + stretch).exp(), (scale - stretch).exp()
    first = torch.stack([wide * cos, wide * (shear * cos - sin), right], -1)
    second = torch.stack([high * sin, high * (shear * sin + cos), down], -1)
    grid = affine_grid(torch.stack([first, second], 1), list(x.shape), align_corners=False)
    moved = grid_sample(x, grid, padding_mode="border", align_corners=False)
    return moved * contrast.exp()[:, None, None, None] + bright[:, None, None, None]


TASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "odd": lambda y: y % 2,
    "above 4": lambda y: y // 5,
    "has a hole": lambda y: torch.isin(y, torch.tensor([0, 6, 8, 9])),
    "divisible by 3": lambda y: y % 3 == 0,
}
_SENSELESS = 4  # tasks whose labels are drawn at random


class ManyTasks(_Loss):
    """Weights of auxiliary yes-or-no tasks beside the classes, which few points have.

    All points have labels of all auxiliary tasks; of these some say something about the class, and
    others are noise. The model's outputs after the classes are theirs.
    """

    names = (*TASKS, *(f"senseless {k + 1}" for k in range(_SENSELESS)))

    def __init__(self, start: float, labels: Tensor, labelled: int, generator: torch.Generator):
        super().__init__(len(self.names), start)
        known = [task(labels).float() for task in TASKS.values()]
        noise = torch.rand(_SENSELESS, len(labels), generator=generator, dtype=torch.float32)
        self.register_buffer("labels", torch.stack([*known, *noise.round()], 1))
        self.labelled = labelled

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch.x)
        each = cross_entropy(logits[:, :CLASSES], batch.y, reduction="none")
        known = (batch.which < self.labelled).float()
        main = (each * known).sum() / known.sum().clamp(min=1)
        answers = self.get_buffer("labels")[batch.which]
        others = binary_cross_entropy_with_logits(logits[:, CLASSES:], answers, reduction="none")
        return main + (self.numbers * others.mean(0)).sum()
