"""Labelled images for ordinary training: split, normalized, flipped and shifted; all seeded."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from innerloop import data
from innerloop.data import Labelled
from innerloop.data.images import checksum
from innerloop.errors import InnerLoopError, four_part

SHIFT = 4  # pixels
CLASSES, SIZE = 10, 32  # of the coloured shapes
_PATTERNS = 5


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
    drawn = (coloured_shapes(n, stream("shapes", k)) for k, n in enumerate((shapes, shapes // 5)))
    train, test = (Labelled(*(t.to(device) for t in part)) for part in drawn)
    return train, test, f"coloured shapes (synthetic), {shapes} training pictures"


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
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = (share * values).sum()
        unbiased = channel.numel() / (channel.numel() - 1)
        found.append(((share * (values - mean).square()).sum() * unbiased).sqrt())
        found.append(mean)
    deviation, mean = torch.stack(found).float().view(-1, 2, 1, 1).unbind(1)
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


# --- coloured shapes ------------------------------------------------------------------------------


def coloured_shapes(count: int, generator: torch.Generator) -> Labelled:
    """Images of coloured shapes, classes in turn. Nothing to download.

    A class is one of five patterns (plain, wide stripes, narrow stripes, checks, rings) inside one
    of two outlines (two lobes or five). Place, size, turn and all colours are random, the
    background varies smoothly, a patch of another colour hides some of it, and there is noise:
    neither a colour nor a pixel tells the class.

    >>> shapes = coloured_shapes(20, torch.Generator().manual_seed(0))
    >>> shapes.images.shape, shapes.images.dtype, shapes.labels[:12].tolist()
    (torch.Size([20, 3, 32, 32]), torch.uint8, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1])
    """
    labels = torch.arange(count) % CLASSES
    outline, pattern = _shape(labels, generator)
    image = _background(count, generator)
    image = _paint(image, outline, generator)
    image = _paint(image, outline * pattern, generator)
    image = _paint(image, _patch(count, generator), generator)
    image = image + 0.04 * torch.randn(image.shape, generator=generator, dtype=torch.float32)
    return Labelled((255 * image.clamp(0, 1)).round().to(torch.uint8), labels)


def _uniform(shape: tuple[int, ...], low: float, high: float, g: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=g, dtype=torch.float32)


def _background(count: int, g: torch.Generator) -> Tensor:
    """Backgrounds that vary from corner to corner. [count, 3, 32, 32]"""
    coarse = _uniform((count, 3, 3, 3), 0, 1, g)
    return interpolate(coarse, size=(SIZE, SIZE), mode="bilinear", align_corners=True)


def _paint(image: Tensor, mask: Tensor, g: torch.Generator) -> Tensor:
    """The image with a colour of its own where the mask is 1."""
    colour = _uniform((len(image), 3, 1, 1), 0, 1, g)
    return image + mask.unsqueeze(1) * (colour - image)


def _shape(labels: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Masks of the shape of each class, and of the second colour of its pattern. [count, 32, 32]"""
    count = len(labels)
    line = torch.linspace(-1, 1, SIZE, dtype=torch.float32)
    centre = _uniform((2, count, 1, 1), -0.2, 0.2, g)
    x, y = line.view(1, 1, -1) - centre[0], line.view(1, -1, 1) - centre[1]
    radius, turn = (x.square() + y.square()).sqrt(), _uniform((count, 1, 1), -math.pi, math.pi, g)
    lobes = torch.where(labels < _PATTERNS, 2, 5).view(-1, 1, 1)
    edge = 1 + 0.35 * torch.cos(lobes * (torch.atan2(y, x) + turn))
    edge = _uniform((count, 1, 1), 0.55, 0.8, g) * edge
    return torch.sigmoid(25 * (edge - radius)), _pattern(labels % _PATTERNS, x, y, radius, turn)


def _pattern(kind: Tensor, x: Tensor, y: Tensor, radius: Tensor, turn: Tensor) -> Tensor:
    """Plain, wide stripes, narrow stripes, checks, rings. [count, 32, 32]"""
    along, across = (x * turn.cos() + y * turn.sin(), y * turn.cos() - x * turn.sin())
    wide, narrow = torch.sin(8 * along), torch.sin(20 * along)
    checks = 2 * torch.sin(12 * along) * torch.sin(12 * across)
    waves = torch.stack([torch.full_like(wide, -1), wide, narrow, checks, torch.sin(16 * radius)])
    return torch.sigmoid(10 * waves[kind, torch.arange(len(kind))])


def _patch(count: int, g: torch.Generator) -> Tensor:
    """A rectangle anywhere. [count, 32, 32]"""
    pixels = torch.arange(SIZE, dtype=torch.float32)
    start = _uniform((2, count, 1), 0, SIZE - 4, g)
    end = start + _uniform((2, count, 1), 3, 10, g)
    down, across = ((pixels >= start) & (pixels < end)).float()
    return down.unsqueeze(2) * across.unsqueeze(1)
