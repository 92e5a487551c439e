"""Labelled images for ordinary training: split, normalized, flipped and shifted; all seeded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop import data
from innerloop.data import Labelled
from innerloop.data.images import checksum
from innerloop.errors import InnerLoopError, four_part
from innerloop.experiments.meta_lr.shapes import coloured_shapes

SHIFT = 4  # pixels
_CHUNK = 10_000  # images
SYNTHETIC = "coloured shapes (synthetic)"


class Split(NamedTuple):
    """Three parts of a dataset, and the mean and deviation of the colours of the first."""

    train: Labelled
    val: Labelled
    test: Labelled
    mean: Tensor
    deviation: Tensor


def stream(*key: object) -> torch.Generator:
    """Random numbers of one purpose, the same whatever else was drawn, and whenever.

    So nothing has to be kept to go on with a run, and what one part of it draws cannot change
    another.

    >>> torch.equal(torch.rand(3, generator=stream(0, "order", 7)),
    ...             torch.rand(3, generator=stream(0, "order", 7)))
    True
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def load(root: Path | None, shapes: int, device: str) -> tuple[Labelled, Labelled, str]:
    """Training and test images: CIFAR-10 where a folder is named, else synthetic shapes."""
    if root is not None:
        found = data.cifar10(root, device=device)
        count = len(found.train.labels)
        return found.train, found.test, f"CIFAR-10, {count} training pictures"
    drawn = (
        coloured_shapes(n, stream("shapes", n_th)) for n_th, n in enumerate((shapes, shapes // 5))
    )
    train, test = (Labelled(*(t.to(device) for t in part)) for part in drawn)
    return train, test, f"{SYNTHETIC}, {shapes} training pictures"


def digest(*parts: tuple[Tensor, Tensor]) -> str:
    """A short checksum of images and their labels."""
    shapes = [list(images.shape) for images, _ in parts]
    return checksum(shapes, *(tensor for part in parts for tensor in part))


def split(train: Labelled, test: Labelled, part: float, seed: int) -> Split:
    """Holds a part of the training images out, others for every seed."""
    order = torch.randperm(len(train.labels), generator=stream(seed, "split"))
    held = round(part * len(order))
    if not 0 < held < len(order):
        raise InnerLoopError(
            four_part(
                f"You hold out {part:g} of {len(order)} images for validation.",
                "at least one image in each part.",
                "the meta-loss is measured on images that are not trained on.",
                "a larger --val-part, or more images.",
            )
        )
    order = order.to(train.labels.device)
    kept, out = (Labelled(*(t[rows] for t in train)) for rows in (order[held:], order[:held]))
    return Split(kept, out, test, *_statistics(kept.images))


def _statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel: of whole numbers, so exact, whatever the threads."""
    values = torch.arange(256, dtype=torch.float64, device=images.device) / 255
    found = []
    for channel in images.unbind(1):
        chunks = channel.split(_CHUNK)
        counts = sum(torch.bincount(chunk.flatten(), minlength=256) for chunk in chunks)
        share = counts / torch.tensor(channel.numel(), dtype=torch.float64)
        mean = (share * values).sum()
        unbiased = channel.numel() / max(channel.numel() - 1, 1)
        found.append((mean, ((share * (values - mean).square()).sum() * unbiased).sqrt()))
    mean, deviation = (torch.stack(v).float().view(-1, 1, 1) for v in zip(*found, strict=True))
    return mean, deviation


def normalize(images: Tensor, parts: Split) -> Tensor:
    """[batch, 3, 32, 32], uint8 to float32 of mean 0 and deviation 1 in each channel."""
    return (images.float() / 255 - parts.mean) / parts.deviation


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirrors every other image, by chance, and shifts each by up to 4 pixels over zeros.

    >>> augment(torch.ones(2, 3, 32, 32), stream(0)).shape
    torch.Size([2, 3, 32, 32])
    """
    count, _, height, width = images.shape
    device = images.device
    mirrored = torch.rand(count, generator=generator, dtype=torch.float32).to(device) < 0.5
    shift = torch.randint(0, 2 * SHIFT + 1, (2, count, 1), generator=generator).to(device)
    padded = torch.nn.functional.pad(images, [SHIFT] * 4)
    down = shift[0] + torch.arange(height, device=device)
    across = torch.arange(width, device=device)
    across = torch.where(mirrored.unsqueeze(1), across.flip(0), across) + shift[1]
    rows = torch.arange(count, device=device).view(-1, 1, 1)
    # Indices with a slice between them put the channel last.
    moved = padded[rows, :, down.unsqueeze(2), across.unsqueeze(1)]
    return moved.permute(0, 3, 1, 2).contiguous()


def batch(
    part: Labelled, rows: Tensor, parts: Split, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """These images, ready for the model; augmented if there are random numbers for it."""
    rows = rows.to(part.labels.device)
    images = normalize(part.images[rows], parts)
    return images if generator is None else augment(images, generator), part.labels[rows]


def draw_rows(count: int, size: int, batches: int, generator: torch.Generator) -> list[Tensor]:
    """Rows of some batches: all are used before one comes again.

    >>> [len(rows) for rows in draw_rows(10, 4, 3, stream(0))]
    [4, 4, 4]
    """
    rounds = -(-size * batches // count)
    rows = torch.cat([torch.randperm(count, generator=generator) for _ in range(rounds)])
    return list(rows[: size * batches].split(size))
