"""A search for a rare character, and its metric."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, binary_cross_entropy_with_logits

from innerloop import data

_POOLED = 4


class Found(NamedTuple):
    """Images as features, whether each shows the character searched for, and which it shows."""

    features: Tensor
    target: Tensor
    character: Tensor


class Search(NamedTuple):
    """Drawings to train on, to choose the loss by, and to test with."""

    train: Found
    val: Found
    test: Found


def search(seed: int, characters: int, common: int, rare: int, noise: float) -> Search:
    """Drawings of several characters, ``common`` of each, but ``rare`` of the first one.

    They are small and noisy: a linear model takes many for what they are not.
    """
    images = data.glyphs(train=characters, val=1, test=1, drawings=3 * common, seed=seed).train
    small = avg_pool2d(images.pixels.float() / 255, _POOLED).flatten(1)
    generator = torch.Generator().manual_seed(seed)
    small = small + noise * torch.randn(small.shape, generator=generator, dtype=torch.float32)
    small = (small - small.mean(0)) / small.std(0)
    drawings = small.view(characters, 3, common, -1)
    counts = [rare] + [common] * (characters - 1)
    return Search(*(_part(drawings[:, k], counts) for k in range(3)))


def _part(drawings: Tensor, counts: list[int]) -> Found:
    features = torch.cat([own[:count] for own, count in zip(drawings, counts, strict=True)])
    character = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return Found(features, character == 0, character)


def batches(part: Found, steps: int, size: int, generator: torch.Generator) -> list[Found]:
    rows = torch.randint(len(part.target), (steps, size), generator=generator)
    return [Found(*(t[row] for t in part)) for row in rows]


class WeightedLoss(nn.Module):
    """Cross-entropy with a learned weight for each character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.log_weights = nn.Parameter(torch.zeros(characters, dtype=torch.float32))

    def forward(self, model: nn.Module, batch: Found) -> Tensor:
        each = binary_cross_entropy_with_logits(
            logits(model, batch), batch.target.float(), reduction="none"
        )
        return (self.log_weights.exp()[batch.character] * each).mean()


def logits(model: Any, part: Found) -> Tensor:
    return model(part.features).squeeze(-1)


def cross_entropy(model: nn.Module, part: Found) -> Tensor:
    """The proxy."""
    return binary_cross_entropy_with_logits(logits(model, part), part.target.float())


def f1(predicted: Tensor, target: Tensor) -> Tensor:
    """Twice the number of hits over predicted and true positives; it has no gradient.

    >>> round(f1(torch.tensor([True, True, False]), torch.tensor([True, False, False])).item(), 3)
    0.667
    """
    predicted, target = predicted.float(), target.float()
    return 2 * (predicted * target).sum() / (predicted.sum() + target.sum()).clamp(min=1)


def missed(model: nn.Module, part: Found) -> Tensor:
    """1 - F1 of the model's predictions."""
    return 1 - f1(logits(model, part) > 0, part.target)
