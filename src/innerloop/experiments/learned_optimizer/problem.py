"""Families of problems. An optimizer is trained on some members and tested on others.

A problem is a start of the model's weights and a batch for each step. Several problems are drawn at
once: they share the start, and their batches have a leading task axis.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from innerloop.experiments.learned_loss.problem import digit_images

DIMENSIONS = 10
_HIDDEN, _BATCH = 16, 32


class Family(abc.ABC):
    """Problems of one kind."""

    model: nn.Module
    starts: int
    """The number of starts among the problems of a comparison."""

    @abc.abstractmethod
    def begin(self, generator: torch.Generator) -> None:
        """Gives the model the weights of a new start."""

    @abc.abstractmethod
    def draw(self, generator: torch.Generator, tasks: int, steps: int, unseen: bool) -> list[Any]:
        """A batch for each step. [tasks, ...] each

        With ``unseen``, of data that is never drawn otherwise, if problems have data.
        """

    @staticmethod
    @abc.abstractmethod
    def loss(model: nn.Module, batch: Any) -> Tensor: ...


class _Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(DIMENSIONS, dtype=torch.float32))


class Quadratics(Family):
    """``|Wθ - y|²`` with normal W and y, from θ = 0 (Andrychowicz et al. 2016, section 3.1)."""

    starts = 1

    def __init__(self) -> None:
        self.model = _Point()

    def begin(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            self.model.at.zero_()  # type: ignore[operator]

    def draw(self, generator: torch.Generator, tasks: int, steps: int, unseen: bool) -> list[Any]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(tasks, *shape, generator=generator, dtype=torch.float32)

        return [(normal(DIMENSIONS, DIMENSIONS), normal(DIMENSIONS))] * steps

    @staticmethod
    def loss(model: nn.Module, batch: Any) -> Tensor:
        matrix, target = batch
        return (matrix @ model.at - target).square().sum()  # type: ignore[operator]


class Digits(Family):
    """A network that learns digits in minibatches, from new weights.

    Half of the images are kept for the comparison.
    """

    starts = 4

    def __init__(self) -> None:
        pixels, labels = (part.chunk(2) for part in digit_images())
        self.halves = [*zip(pixels, labels, strict=True)]
        self.model = nn.Sequential(
            nn.Linear(64, _HIDDEN, dtype=torch.float32),
            nn.Sigmoid(),
            nn.Linear(_HIDDEN, 10, dtype=torch.float32),
        )

    def begin(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            for layer in (self.model[0], self.model[2]):  # type: ignore[index]
                bound = layer.in_features**-0.5
                for p in layer.parameters():
                    drawn = torch.rand(p.shape, generator=generator, dtype=torch.float32)
                    p.copy_((2 * drawn - 1) * bound)

    def draw(self, generator: torch.Generator, tasks: int, steps: int, unseen: bool) -> list[Any]:
        pixels, labels = self.halves[int(unseen)]
        shape = steps, tasks, _BATCH
        chosen = torch.randint(len(labels), shape, generator=generator)
        return [(pixels[index], labels[index]) for index in chosen]

    @staticmethod
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return cross_entropy(model(x), y)


FAMILIES: dict[str, type[Family]] = {"quadratics": Quadratics, "digits": Digits}


def draw_problems(
    family: Family, held_out: int, steps: int, seed: int, unseen: bool
) -> Iterator[list[Any]]:
    """Batches of as many problems as a comparison has, some for each start of the model."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(family.starts):
        family.begin(generator)
        yield family.draw(generator, held_out // family.starts, steps, unseen)
