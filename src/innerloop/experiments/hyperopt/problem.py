"""A training run whose validation loss is a function of its hyperparameters, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import innerloop as il
from innerloop import data
from innerloop.errors import InnerLoopError, four_part
from innerloop.experiments.hyperopt.losses import (
    AUGMENTATIONS,
    CLASSES,
    Augmented,
    Batch,
    ManyTasks,
    Smoothed,
    Weighted,
    class_loss,
)
from innerloop.experiments.hyperopt.settings import RANGES, STRATEGIES, Config, Range
from innerloop.experiments.meta_lr.problem import draw_rows

_CHUNK = 2000  # points that are measured at a time

# --- data: digits or CIFAR-10 ---------------------------------------------------------------------


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
    if dataset == "cifar10":
        found = data.cifar10(root)
        return _scale(found.train), _scale(found.test)
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images = torch.as_tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return Points(images - images.mean(), torch.as_tensor(y, dtype=torch.int64)), None


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
    if rest < (CLASSES if test is None else 0):
        raise InnerLoopError(
            four_part(
                f"You asked for {train} training and {val} validation points of {len(points.y)}.",
                f"at least {CLASSES} points beside them to test with." if not test else "fewer.",
                "the three parts have no point in common.",
                "smaller numbers with --train and --val.",
            )
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(points.y), generator=generator)
    first, second, third = (
        Points(points.x[rows], points.y[rows]) for rows in order.split([train, val, rest])
    )
    labels = first.y.clone()
    wrong = torch.randperm(train, generator=generator)[: round(noise * train)]
    others = torch.randint(1, CLASSES, (len(wrong),), generator=generator)
    labels[wrong] = (labels[wrong] + others) % CLASSES
    return Split(Points(first.x, labels), first.y, second, test or third)


# --- the problem ----------------------------------------------------------------------------------


class Problem(NamedTuple):
    """One seed's data and net, as a function of the hyperparameters."""

    inner: il.InnerLoop
    raw: nn.Parameter
    """Logarithms of the hyperparameters: all that ``inner`` learns."""
    names: Sequence[str]
    """Names of the hyperparameters; none if they belong to training points."""
    batches: list[Batch]
    split: Split
    range: Range

    def set(self, raw: Tensor) -> None:
        with torch.no_grad():
            self.raw.copy_(raw)

    @property
    def start(self) -> Tensor:
        return torch.full_like(self.raw, math.log(self.range.middle)).detach()

    def clamp(self) -> None:
        with torch.no_grad():
            self.raw.clamp_(math.log(self.range.low), math.log(self.range.high))

    @torch.no_grad()
    def value(self, raw: Tensor) -> float:
        """The validation loss after a training with these hyperparameters."""
        self.set(raw)
        return self.inner(self.batches, self.split.val).item()

    def draw(self, generator: torch.Generator, shared: bool = False) -> Tensor:
        """Log-uniform hyperparameters; one for all if ``shared``."""
        count = 1 if shared else self.raw.numel()
        share = torch.rand(count, generator=generator, dtype=torch.float32)
        low, high = math.log(self.range.low), math.log(self.range.high)
        return (low + (high - low) * share).expand(self.raw.numel()).clone()

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Losses and accuracies after a training with the present hyperparameters."""
        model = self.inner.adapt(self.batches)
        found = {}
        for name, points in (("val", self.split.val), ("test", self.split.test)):
            predicted = torch.cat([model(x)[:, :CLASSES] for x in points.x.split(_CHUNK)])
            found[f"{name}_loss"] = cross_entropy(predicted, points.y).item()
            found[f"{name}_accuracy"] = (predicted.argmax(-1) == points.y).double().mean().item()
        return found


def build(config: Config, split: Split, seed: int) -> Problem:
    """Builds the net, its data in the order of training, and the inner loop over both."""
    what, searched = config.what, RANGES[config.what]
    outputs = CLASSES + (len(ManyTasks.names) if what == "task-weights" else 0)
    model = net(split.train.x.shape[1:], config.width, outputs, seed)
    generator = torch.Generator().manual_seed(seed)
    decay = searched.middle if what == "weight-decay" else 0.0
    sgd = torch.optim.SGD(
        model.parameters(), lr=config.inner_lr, momentum=config.momentum, weight_decay=decay
    )
    learn: Any = ()
    loss: Any = class_loss
    if what == "weight-decay":
        learn = {"weight_decay": il.Learn(per="parameter", transform="log")}
        names = [name for name, _ in model.named_parameters()]
    else:
        loss = _build_loss(config, split, generator)
        names = loss.names
    strategy = STRATEGIES[config.backward]
    inner = il.InnerLoop(model, sgd, loss, learn=learn, val_loss=class_loss, backward=strategy)
    (raw,) = inner.parameters()
    batches = make_batches(split.train, config.steps, config.batch, generator)
    return Problem(inner, raw, names, batches, split, searched)


def _build_loss(config: Config, split: Split, generator: torch.Generator) -> nn.Module:
    start = RANGES[config.what].middle
    if config.what == "label-smoothing":
        return Smoothed(CLASSES, start)
    if config.what == "augmentation":
        return Augmented(len(AUGMENTATIONS), start)
    if config.what == "example-weights":
        return Weighted(len(split.train.y), start)
    return ManyTasks(start, split.clean, config.labelled, generator)


def measure_references(config: Config, problem: Problem, seed: int) -> dict[str, Any]:
    """Losses and accuracies of trainings without a search."""

    def at(number: float, of: Problem = problem) -> dict[str, float]:
        of.set(torch.full_like(of.raw, math.log(number)))
        return of.measure()

    split, searched = problem.split, problem.range
    if config.what == "example-weights":
        clean = split._replace(train=Points(split.train.x, split.clean))
        alone = split._replace(train=split.val, clean=split.val.y)
        return {
            "noisy labels": at(1.0),
            "clean labels": at(1.0, build(config, clean, seed)),
            "validation points alone": at(1.0, build(config, alone, seed)),
            "wrong": (split.train.y != split.clean).tolist(),
        }
    found: dict[str, Any] = {"lowest": at(searched.low), "middle": at(searched.middle)}
    return found | {"equal tasks": at(1.0)} if config.what == "task-weights" else found


def net(shape: torch.Size, width: int, outputs: int, seed: int) -> nn.Module:
    """Three hidden layers for small images, three convolutions for larger ones."""
    channels, size = shape[0], shape[-1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = _linear(channels * size**2, width, outputs)
        if size >= 16:
            made = _convolutions(channels, size, width, outputs)
        for weight in (p for p in made.parameters() if p.dim() > 1):
            nn.init.kaiming_normal_(weight, nonlinearity="relu")
    return made


def _linear(inputs: int, width: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for entering in (inputs, width, width):
        layers += [nn.Linear(entering, width, dtype=torch.float32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs, dtype=torch.float32))


def _convolutions(channels: int, size: int, width: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for entering in (channels, width, width):
        made = nn.Conv2d(entering, width, 3, padding=1, dtype=torch.float32)
        layers += [made, nn.ReLU(), nn.MaxPool2d(2)]
    last = nn.Linear(width * (size // 8) ** 2, outputs, dtype=torch.float32)
    return nn.Sequential(*layers, nn.Flatten(), last)


def make_batches(points: Points, steps: int, batch: int, generator: torch.Generator) -> list[Batch]:
    """Batches for all steps: each point once before any comes again."""
    size = min(batch, len(points.y))
    found = []
    for rows in draw_rows(len(points.y), size, steps, generator):
        draws = torch.randn(size, len(AUGMENTATIONS), generator=generator, dtype=torch.float32)
        found.append(Batch(points.x[rows], points.y[rows], rows, draws))
    return found
