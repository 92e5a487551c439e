"""One split of a dataset: all its pictures in one uint8 tensor, ordered by class."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.data._numbers import as_index
from innerloop.errors import InnerLoopError, four_part


@dataclass(frozen=True, eq=False)
class Images:
    """The pictures of a split, ordered by class.

    Example:
        >>> import torch
        >>> from innerloop.data import Images
        >>> pixels = torch.zeros(5, 1, 28, 28, dtype=torch.uint8)
        >>> images = Images(pixels, offsets=torch.tensor([0, 2, 5]), names=("a", "b"))
        >>> len(images), images.counts.tolist()
        (2, [2, 3])
        >>> images.rotated().names
        ('a', 'b', 'a@90', 'b@90', 'a@180', 'b@180', 'a@270', 'b@270')
    """

    pixels: Tensor
    """``[pictures, channel, height, width]``, uint8, on any device."""
    offsets: Tensor
    """``[classes + 1]``, int64 on the CPU: class ``c`` is ``pixels[offsets[c]:offsets[c + 1]]``."""
    names: tuple[str, ...]
    """The name of each class."""

    def __post_init__(self) -> None:
        """Refuse parts that do not fit together."""
        sound = (
            isinstance(self.pixels, Tensor)
            and self.pixels.dtype == torch.uint8
            and self.pixels.ndim == 4
            and isinstance(self.offsets, Tensor)
            and self.offsets.dtype == torch.int64
            and self.offsets.ndim == 1
            and self.offsets.tolist()[:1] == [0]
            and self.offsets[-1].item() == len(self.pixels)
            and bool((self.counts > 0).all())
            and isinstance(self.names, tuple | list)
            and len(self.names) == len(self.offsets) - 1
        )
        if not sound:
            raise InnerLoopError(
                four_part(
                    f"You gave Images pixels {_said(self.pixels)}, offsets {_said(self.offsets)} "
                    f"and names {_said(self.names)}.",
                    "uint8 pixels [pictures, channel, height, width], an int64 tensor of offsets "
                    "that rise from 0 to the number of pictures, one name per class.",
                    "a class is a range of rows of one tensor, and no class is empty.",
                    "Images.stack(pictures_by_class), which works the offsets out.",
                )
            )

    @classmethod
    def stack(cls, by_class: dict[str, Sequence[Tensor]]) -> Images:
        """Make a split from the pictures of each class, ``[channel, height, width]`` uint8 each."""
        counts = torch.tensor([0, *(len(pictures) for pictures in by_class.values())])
        pictures = [p for pictures in by_class.values() for p in pictures]
        if len({_said(p) for p in pictures}) != 1 or not isinstance(pictures[0], Tensor):
            raise InnerLoopError(
                four_part(
                    f"You gave {len(pictures)} pictures: "
                    f"{', '.join(sorted({_said(p) for p in pictures})) or 'no classes'}.",
                    "uint8 tensors [channel, height, width] of one shape, at least one per class.",
                    "all pictures of a split are one tensor.",
                    "Images.stack({'a': [picture, ...], 'b': [...]}), resized to one size.",
                )
            )
        return cls(torch.stack(pictures), counts.cumsum(0), tuple(by_class))

    def __len__(self) -> int:
        """How many classes there are."""
        return len(self.names)

    @property
    def counts(self) -> Tensor:
        """``[classes]``: how many pictures each class has."""
        return self.offsets.diff()

    @property
    def labels(self) -> Tensor:
        """``[pictures]``: the class of each picture, for ordinary training."""
        return torch.repeat_interleave(self.counts).to(self.pixels.device)

    @cached_property
    def digest(self) -> str:
        """A short checksum of the names, the offsets and about a million of the pixels."""
        told = [list(self.names), self.offsets.tolist(), list(self.pixels.shape)]
        return checksum(told, self.pixels)

    def to(self, device: torch.device | str) -> Images:
        """Return the same pictures on another device."""
        return Images(self.pixels.to(device), self.offsets, self.names)

    def select(self, classes: Sequence[int] | Tensor) -> Images:
        """Return the classes with these numbers, in this order."""
        listed = classes.tolist() if isinstance(classes, Tensor) else classes
        numbers = [as_index(c) for c in listed] if isinstance(listed, Iterable) else []
        chosen = [c for c in numbers if c is not None and 0 <= c < len(self)]
        if not chosen or len({*chosen}) < len(numbers):
            raise InnerLoopError(
                four_part(
                    f"You selected the classes {classes!r}.",
                    f"whole numbers from 0 to {len(self) - 1}, at least one, and none twice.",
                    "a class is chosen by its number, and is in a split once.",
                    "images.select([0, 2]), or images.select(mask.nonzero().flatten()) for a mask.",
                )
            )
        starts = self.offsets.tolist()
        rows = torch.cat([torch.arange(starts[c], starts[c + 1]) for c in chosen])
        counts = torch.cat([torch.zeros(1, dtype=torch.int64), self.counts[chosen]])
        names = tuple(self.names[c] for c in chosen)
        return Images(self.pixels[rows.to(self.pixels.device)], counts.cumsum(0), names)

    def rotated(self) -> Images:
        """Add every class turned by 90, 180 and 270 degrees (anticlockwise) as a further class."""
        height, width = self.pixels.shape[-2:]
        if height != width:
            raise InnerLoopError(
                four_part(
                    f"You asked to rotate pictures of {height} x {width}.",
                    "square pictures.",
                    "turned by 90 degrees they must still fit in one tensor.",
                    "load the pictures at a square size.",
                )
            )
        turned = [torch.rot90(self.pixels, turns, (-2, -1)) for turns in range(4)]
        counts = torch.cat([torch.zeros(1, dtype=torch.int64), self.counts.repeat(4)])
        names = [*self.names, *(f"{n}@{90 * turns}" for turns in (1, 2, 3) for n in self.names)]
        return Images(torch.cat(turned), counts.cumsum(0), tuple(names))


class Splits(NamedTuple):
    """Classes to meta-train on, to choose the best epoch with, and to report."""

    train: Images
    val: Images
    test: Images

    def to(self, device: torch.device | str) -> Splits:
        """Return the same splits on another device."""
        return Splits(*(images.to(device) for images in self))


def checksum(told: object, *tensors: Tensor) -> str:
    """A short checksum of what is told about tensors, and of about a million values of each."""
    found = hashlib.sha256(repr(told).encode())
    for tensor in tensors:
        values = tensor.flatten()
        # An odd step, so that it does not hit the same places of every picture.
        some = values[:: max(1, len(values) // 2**20) | 1].contiguous()
        found.update(bytes(some.view(torch.uint8).tolist()))
    return found.hexdigest()[:16]


def _said(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    many = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{type(value).__name__}{many}"
