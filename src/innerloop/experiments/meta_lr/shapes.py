"""Coloured shapes: pictures of ten classes, drawn from random numbers. Nothing to download.

A class is one of five patterns (plain, wide stripes, narrow stripes, checks, rings) inside one of
two outlines (two lobes or five). Place, size, turn and all colours are random, the background
varies smoothly, a patch of another colour hides some of it, and there is noise: neither a colour
nor a pixel tells the class.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from innerloop.data import Labelled

CLASSES, SIZE = 10, 32
PATTERNS = 5


def coloured_shapes(count: int, generator: torch.Generator) -> Labelled:
    """So many pictures, classes in turn.

    >>> shapes = coloured_shapes(20, torch.Generator().manual_seed(0))
    >>> shapes.images.shape, shapes.images.dtype, shapes.labels[:12].tolist()
    (torch.Size([20, 3, 32, 32]), torch.uint8, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1])
    """
    labels = torch.arange(count) % CLASSES
    outline, pattern = _shape(labels, generator)
    image = _smooth(count, generator)
    image = _paint(image, outline, generator)
    image = _paint(image, outline * pattern, generator)
    image = _paint(image, _patch(count, generator), generator)
    image = image + 0.04 * torch.randn(image.shape, generator=generator, dtype=torch.float32)
    return Labelled((255 * image.clamp(0, 1)).round().to(torch.uint8), labels)


def _uniform(shape: tuple[int, ...], low: float, high: float, g: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=g, dtype=torch.float32)


def _smooth(count: int, g: torch.Generator) -> Tensor:
    """Backgrounds that vary from corner to corner. [count, 3, 32, 32]"""
    coarse = _uniform((count, 3, 3, 3), 0, 1, g)
    return interpolate(coarse, size=(SIZE, SIZE), mode="bilinear", align_corners=True)


def _paint(image: Tensor, mask: Tensor, g: torch.Generator) -> Tensor:
    """The picture with a colour of its own where the mask is 1."""
    colour = _uniform((len(image), 3, 1, 1), 0, 1, g)
    return image + mask.unsqueeze(1) * (colour - image)


def _shape(labels: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Where the shape of each class is, and the second colour of its pattern. [count, 32, 32]"""
    count = len(labels)
    line = torch.linspace(-1, 1, SIZE, dtype=torch.float32)
    centre = _uniform((2, count, 1, 1), -0.2, 0.2, g)
    x, y = line.view(1, 1, -1) - centre[0], line.view(1, -1, 1) - centre[1]
    radius, turn = (x.square() + y.square()).sqrt(), _uniform((count, 1, 1), -math.pi, math.pi, g)
    lobes = torch.where(labels < PATTERNS, 2, 5).view(-1, 1, 1)
    edge = 1 + 0.35 * torch.cos(lobes * (torch.atan2(y, x) + turn))
    edge = _uniform((count, 1, 1), 0.55, 0.8, g) * edge
    return torch.sigmoid(25 * (edge - radius)), _pattern(labels % PATTERNS, x, y, radius, turn)


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
