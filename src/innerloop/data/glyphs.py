"""Glyphs: handwriting-like characters, drawn from random numbers. Nothing to download.

A class is two to four smooth strokes (cubic Bézier curves) in a square. A drawing of it moves every
control point a little, then turns, scales, shears and shifts the whole, with its own pen width: so
two drawings of one class share their shape, and few of their pixels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from innerloop.data.arguments import check_integer
from innerloop.data.images import Images, Splits

SIZE = 28
MOST_STROKES = 4
POINTS = 20  # along each stroke: less than a pixel apart, so that the dots join to a line
AT_ONCE = 2000  # drawings rendered together: some tens of megabytes


def glyphs(
    train: int = 1000, val: int = 100, test: int = 200, drawings: int = 20, seed: int = 0
) -> Splits:
    """Draw three splits with the given numbers of classes, and ``drawings`` images per class.

    The same seed gives the same drawings; the size of one split does not change another.

    Example:
        >>> from innerloop.data import glyphs
        >>> splits = glyphs(train=8, val=4, test=4, drawings=6)
        >>> list(splits.train.pixels.shape), len(splits.test)
        ([48, 1, 28, 28], 4)
    """
    drawings = check_integer("drawings", drawings)
    seed = check_integer("seed", seed, -(2**61), 2**62)  # three times as much must fit a generator
    splits = []
    for number, (name, classes) in enumerate({"train": train, "val": val, "test": test}.items()):
        generator = torch.Generator().manual_seed(3 * seed + number)
        splits.append(_split(name, check_integer(name, classes), drawings, generator))
    return Splits(*splits)


def _split(name: str, classes: int, drawings: int, generator: torch.Generator) -> Images:
    strokes, used = _characters(classes, generator)
    points = _handwriting(strokes, drawings, generator)
    widths = _uniform((len(points), 1), 0.55, 0.95, generator)
    used = used.repeat_interleave(drawings, dim=0)
    chunks = zip(points.split(AT_ONCE), used.split(AT_ONCE), widths.split(AT_ONCE), strict=True)
    pixels = torch.cat([_render(*chunk) for chunk in chunks])
    offsets = torch.arange(classes + 1) * drawings
    return Images(pixels, offsets, tuple(f"{name}-{number:05d}" for number in range(classes)))


def _characters(classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw control points ``[classes, stroke, 4, 2]`` in [-1, 1], and a mask of used strokes."""
    shape = (classes, MOST_STROKES)
    start = _uniform((*shape, 1, 2), -0.9, 0.9, generator)
    # A pen that keeps its direction, more or less: smooth strokes, not scribbles.
    direction = _uniform((*shape, 1, 1), -math.pi, math.pi, generator)
    turns = _uniform((*shape, 3, 1), -1.3, 1.3, generator).cumsum(-2)
    lengths = _uniform((*shape, 3, 1), 0.35, 0.75, generator)
    angle = direction + turns
    steps = lengths * torch.cat([angle.cos(), angle.sin()], dim=-1)
    strokes = torch.cat([start, start + steps.cumsum(-2)], dim=-2)
    number = torch.randint(2, MOST_STROKES + 1, (classes, 1), generator=generator)
    used = torch.arange(MOST_STROKES) < number
    # Center on the used strokes, and fit them in the square, as people fill the box they write in.
    inside = used[..., None, None]
    low = strokes.masked_fill(~inside, 9).amin((1, 2), keepdim=True)
    high = strokes.masked_fill(~inside, -9).amax((1, 2), keepdim=True)
    half = ((high - low) / 2).amax(-1, keepdim=True)
    return (strokes - (low + high) / 2) / half, used


def _handwriting(strokes: Tensor, drawings: int, generator: torch.Generator) -> Tensor:
    """Return the points of all drawings, in pixels: ``[classes * drawings, stroke * point, 2]``."""
    control = strokes.repeat_interleave(drawings, dim=0)
    count = len(control)
    control = control + 0.07 * _normal(control.shape, generator)
    control = control + 0.06 * _normal((count, MOST_STROKES, 1, 2), generator)
    time = torch.linspace(0, 1, POINTS, dtype=torch.float32).unsqueeze(-1)
    cubic = torch.cat(
        [(1 - time) ** 3, 3 * time * (1 - time) ** 2, 3 * time**2 * (1 - time), time**3], dim=-1
    )
    points = torch.einsum("pk,nskd->nspd", cubic, control).flatten(1, 2)
    angle = _uniform((count,), -0.35, 0.35, generator)
    scale = _uniform((count, 2), 0.7, 1.0, generator)
    shear = _uniform((count,), -0.25, 0.25, generator)
    cos, sin = angle.cos(), angle.sin()
    turn = torch.stack([cos, -sin + shear, sin, cos], dim=-1).view(-1, 2, 2)
    points = (points * scale.unsqueeze(1)) @ turn.mT
    shift = _uniform((count, 1, 2), -2.5, 2.5, generator)
    return points * (0.42 * SIZE) + SIZE / 2 + shift


def _render(points: Tensor, used: Tensor, widths: Tensor) -> Tensor:
    """Put dots of ink along the strokes: uint8 ``[drawings, 1, 28, 28]``.

    A round dot is the product of a bump in x and a bump in y, so the ink of all dots is one matrix
    product per drawing. Ink saturates: where dots are dense or strokes cross it is not brighter.
    """
    centers = torch.arange(SIZE, dtype=torch.float32) + 0.5
    across, down = (
        torch.exp(-0.5 * ((points[..., axis : axis + 1] - centers) / widths.unsqueeze(-1)) ** 2)
        for axis in (0, 1)
    )
    inked = used.repeat_interleave(POINTS, dim=1).unsqueeze(-1)
    ink = (down * inked).mT @ across
    return (255 * (1 - torch.exp(-2 * ink))).round().to(torch.uint8).unsqueeze(1)


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, dtype=torch.float32, generator=generator)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, generator=generator)
