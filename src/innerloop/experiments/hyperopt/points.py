"""Points to train on, to choose hyperparameters by, and to test with; digits or CIFAR-10."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop import data
from innerloop.data.images import checksum
from innerloop.errors import InnerLoopError, four_part

DATASETS = ("digits", "cifar10")
CLASSES = 10


class Points(NamedTuple):
    """Images and their classes."""

    x: Tensor
    """[n, channel, size, size], float32."""
    y: Tensor
    """[n], int64."""


class Split(NamedTuple):
    """Three parts without a common point. Only the labels in ``train`` may be wrong."""

    train: Points
    clean: Tensor
    """The right labels of ``train``. [n]"""
    val: Points
    test: Points


def load(dataset: str, root: Path | None) -> tuple[Points, Points | None]:
    """All points, and the test set if the dataset has one of its own."""
    if dataset == "digits":
        return _digits(), None
    found = data.cifar10(root)
    return _scale(found.train), _scale(found.test)


def digest(*parts: Points) -> str:
    """A short checksum of images and their labels."""
    shapes = [list(part.x.shape) for part in parts]
    return checksum(shapes, *(tensor for part in parts for tensor in part))


def _digits() -> Points:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images = torch.as_tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return Points(images - images.mean(), torch.as_tensor(y, dtype=torch.int64))


def _scale(part: data.Labelled) -> Points:
    return Points(part.images.float() / 127.5 - 1, part.labels)


def split(
    points: Points, test: Points | None, *, train: int, val: int, noise: float, seed: int
) -> Split:
    """Draws the parts. ``noise`` is the share of training labels that are set to another class.

    The parts depend on the seed and the sizes alone: with and without noise they are the same.

    >>> points = Points(torch.zeros(30, 1, 2, 2), torch.arange(30) % 10)
    >>> found = split(points, None, train=10, val=10, noise=0.4, seed=0)
    >>> (found.train.y != found.clean).sum().item(), len(found.test.y)
    (4, 10)
    """
    rest = len(points.y) - train - val
    if rest < 0 or (test is None and rest < CLASSES):
        raise InnerLoopError(_too_many(train, val, len(points.y), test is None))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(points.y), generator=generator)
    parts = [Points(points.x[i], points.y[i]) for i in order.split([train, val, rest])]
    first, second, third = parts
    noisy = _with_noise(first.y, noise, generator)
    return Split(Points(first.x, noisy), first.y, second, third if test is None else test)


def _with_noise(labels: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    wrong = torch.randperm(len(labels), generator=generator)[: round(noise * len(labels))]
    others = torch.randint(1, CLASSES, (len(wrong),), generator=generator)
    labels = labels.clone()
    labels[wrong] = (labels[wrong] + others) % CLASSES
    return labels


def _too_many(train: int, val: int, available: int, tested: bool) -> str:
    return four_part(
        f"You asked for {train} training and {val} validation points of {available}.",
        f"at least {CLASSES} points beside them to test with." if tested else "fewer.",
        "the three parts have no point in common.",
        "smaller numbers with --train and --val.",
    )
