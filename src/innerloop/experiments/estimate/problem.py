"""A search for a rare character, and its metric."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, binary_cross_entropy_with_logits

from innerloop import data

_POOLED = 4


class Images(NamedTuple):
    """Images as features, True for the rare character, and the number of each one's character."""

    features: Tensor
    target: Tensor
    character: Tensor

    def draw_batches(self, steps: int, size: int, generator: torch.Generator) -> list[Images]:
        rows = torch.randint(len(self.target), (steps, size), generator=generator)
        return [Images(*(t[row] for t in self)) for row in rows]


class Search(NamedTuple):
    """Images to train on, to choose the loss by, and to test with."""

    train: Images
    val: Images
    test: Images


@functools.lru_cache(maxsize=1)  # all methods have the problem of their seed
def draw_search(seed: int, characters: int, common: int, rare: int, noise: float) -> Search:
    """Images of several characters, ``common`` of each, but ``rare`` of the first one.

    They are small and noisy: a linear model takes many for another character.
    """
    drawn = data.glyphs(train=characters, val=1, test=1, drawings=3 * common, seed=seed).train
    small = avg_pool2d(drawn.pixels.float() / 255, _POOLED).flatten(1)
    generator = torch.Generator().manual_seed(seed)
    small = small + noise * torch.randn(small.shape, generator=generator, dtype=torch.float32)
    small = (small - small.mean(0)) / small.std(0)
    images = small.view(characters, 3, common, -1)
    counts = [rare] + [common] * (characters - 1)
    character = torch.arange(characters).repeat_interleave(torch.tensor(counts))

    def part(k: int) -> Images:
        features = [own[:count] for own, count in zip(images[:, k], counts, strict=True)]
        return Images(torch.cat(features), character == 0, character)

    return Search(*map(part, range(3)))


class WeightedLoss(nn.Module):
    """Cross-entropy with a learned weight for each character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.log_weights = nn.Parameter(torch.zeros(characters, dtype=torch.float32))

    def forward(self, model: nn.Module, batch: Images) -> Tensor:
        each = binary_cross_entropy_with_logits(
            logits(model, batch), batch.target.float(), reduction="none"
        )
        return (self.log_weights.exp()[batch.character] * each).mean()


def logits(model: Any, part: Images) -> Tensor:
    return model(part.features).squeeze(-1)


def cross_entropy(model: nn.Module, part: Images) -> Tensor:
    """The proxy of F1."""
    return binary_cross_entropy_with_logits(logits(model, part), part.target.float())


def f1(predicted: Tensor, target: Tensor) -> Tensor:
    """Twice the number of hits over predicted and true positives; it has no gradient.

    >>> round(f1(torch.tensor([True, True, False]), torch.tensor([True, False, False])).item(), 3)
    0.667
    """
    predicted, target = predicted.float(), target.float()
    return 2 * (predicted * target).sum() / (predicted.sum() + target.sum()).clamp(min=1)


def f1_loss(model: nn.Module, part: Images) -> Tensor:
    """1 - F1 of the model's predictions."""
    return 1 - f1(logits(model, part) > 0, part.target)
