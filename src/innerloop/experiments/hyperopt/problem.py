"""A training run whose validation loss is a function of its hyperparameters, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import innerloop as il
from innerloop.errors import DivergedError
from innerloop.experiments.hyperopt.losses import (
    AUGMENTATIONS,
    SENSELESS,
    TASKS,
    Augmented,
    Batch,
    ManyTasks,
    Smoothed,
    Weighted,
    classified,
)
from innerloop.experiments.hyperopt.points import CLASSES, Points, Split


class Range(NamedTuple):
    """Where hyperparameters are searched, on a logarithmic scale."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)


_MEASURED = 2000  # points at a time
RANGES = {
    "weight-decay": Range(1e-5, 1.0),
    "label-smoothing": Range(1e-3, 0.8),
    "augmentation": Range(1e-2, 1.0),
    "example-weights": Range(1e-3, 1.0),
    "task-weights": Range(1e-3, 10.0),
}


class Problem(NamedTuple):
    """One seed's data and net, as a function of the hyperparameters."""

    inner: il.InnerLoop
    raw: nn.Parameter
    """Logarithms of the hyperparameters: all that ``inner`` learns."""
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

    def value(self, raw: Tensor) -> float:
        """The validation loss after a training with these hyperparameters; NaN if it diverges."""
        self.set(raw)
        try:
            with torch.no_grad():
                return self.inner(self.batches, self.split.val).item()
        except DivergedError:  # to a search it is only a bad trial
            return math.nan

    def draw(self, generator: torch.Generator, shared: bool = False) -> Tensor:
        """Log-uniform hyperparameters; one for all if ``shared``."""
        count = 1 if shared else self.raw.numel()
        share = torch.rand(count, generator=generator, dtype=torch.float32)
        low, high = math.log(self.range.low), math.log(self.range.high)
        return (low + (high - low) * share).expand(self.raw.numel()).clone()


def build(
    what: str,
    split: Split,
    *,
    seed: int,
    width: int,
    steps: int,
    batch: int,
    lr: float,
    momentum: float,
    labelled: int,
    backward: Any,
) -> Problem:
    """The net, its data in the order of training, and the inner loop over both."""
    extra = len(TASKS) + SENSELESS if what == "task-weights" else 0
    model = net(split.train.x.shape[1:], width, CLASSES + extra, seed)
    generator = torch.Generator().manual_seed(seed)
    searched = RANGES[what]
    decay = searched.middle if what == "weight-decay" else 0.0
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
    learn: Any = ()
    loss: Any = classified
    if what == "weight-decay":
        learn = {"weight_decay": il.Learn(per="parameter", transform="log")}
    else:
        loss = _losses(split, labelled, generator)[what](searched.middle)
    inner = il.InnerLoop(model, sgd, loss, learn=learn, val_loss=classified, backward=backward)
    (raw,) = inner.parameters()
    batches = make_batches(split.train, steps, batch, generator)
    return Problem(inner, raw, batches, split, searched)


def _losses(
    split: Split, labelled: int, generator: torch.Generator
) -> dict[str, Callable[[float], nn.Module]]:
    return {
        "label-smoothing": lambda start: Smoothed(CLASSES, start),
        "augmentation": lambda start: Augmented(len(AUGMENTATIONS), start),
        "example-weights": lambda start: Weighted(len(split.train.y), start),
        "task-weights": lambda start: ManyTasks(start, split.clean, labelled, generator),
    }


def names(what: str, inner: il.InnerLoop) -> list[str]:
    """Names of the hyperparameters; none if they belong to training points."""
    return {
        "weight-decay": [name for name, _ in inner.model.named_parameters()],
        "label-smoothing": [str(k) for k in range(CLASSES)],
        "augmentation": list(AUGMENTATIONS),
        "example-weights": [],
        "task-weights": [*TASKS, *(f"senseless {k + 1}" for k in range(SENSELESS))],
    }[what]


def measure(problem: Problem) -> dict[str, float]:
    """Losses and accuracies after a training with the present hyperparameters."""
    with torch.no_grad():
        model = problem.inner.adapt(problem.batches)
        found = {}
        for name, points in (("val", problem.split.val), ("test", problem.split.test)):
            predicted = torch.cat([model(x)[:, :CLASSES] for x in points.x.split(_MEASURED)])
            found[f"{name}_loss"] = cross_entropy(predicted, points.y).item()
            found[f"{name}_accuracy"] = (predicted.argmax(-1) == points.y).double().mean().item()
    return found


def references(what: str, problem: Problem, rebuilt: Callable[[Split], Problem]) -> dict[str, Any]:
    """Losses and accuracies of trainings without a search."""

    def at(number: float, of: Problem = problem) -> dict[str, float]:
        of.set(torch.full_like(of.raw, math.log(number)))
        return measure(of)

    split, low = problem.split, problem.range.low
    if what == "example-weights":
        clean = split._replace(train=Points(split.train.x, split.clean))
        alone = split._replace(train=split.val, clean=split.val.y)
        return {
            "noisy labels": at(1.0),
            "clean labels": at(1.0, rebuilt(clean)),
            "validation points alone": at(1.0, rebuilt(alone)),
            "wrong": (split.train.y != split.clean).tolist(),
        }
    found: dict[str, Any] = {"lowest": at(low), "middle": at(problem.range.middle)}
    return found | {"equal tasks": at(1.0)} if what == "task-weights" else found


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
    count = len(points.y)
    size = min(batch, count)
    passes = -(-steps * size // count)
    order = torch.cat([torch.randperm(count, generator=generator) for _ in range(passes)])
    found = []
    for k in range(steps):
        index = order[k * size : (k + 1) * size]
        draws = torch.randn(size, len(AUGMENTATIONS), generator=generator, dtype=torch.float32)
        found.append(Batch(points.x[index], points.y[index], index, draws))
    return found
