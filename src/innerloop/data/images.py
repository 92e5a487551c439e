"""One split of a dataset: all images in one uint8 tensor, ordered by class."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.data.refusals import refusal


@dataclass(frozen=True, eq=False)
class Images:
    """The images of a split, ordered by class.

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
    """``[images, channel, height, width]``, uint8, on any device."""
    offsets: Tensor
    """``[classes + 1]``, int64 on the CPU: class ``c`` is ``pixels[offsets[c]:offsets[c + 1]]``."""
    names: tuple[str, ...]
    """The name of each class."""

    def __post_init__(self) -> None:
        """Refuse parts that do not fit together."""
        pixels, offsets = self.pixels, self.offsets
        fits = (
            _has(pixels, torch.uint8, 4)
            and _has(offsets, torch.int64, 1)
            and len(offsets) == len(self.names) + 1
            and offsets[0] == 0
            and offsets[-1] == len(pixels)
            and bool((self.counts > 0).all())
        )
        if not fits:
            raise refusal(
                f"You gave Images pixels {_describe(pixels)}, offsets {_describe(offsets)} and "
                f"{len(self.names)} names.",
                "uint8 pixels [images, channel, height, width], an int64 tensor of offsets that "
                "rise from 0 to the number of images, one name per class.",
                "a class is a range of rows of one tensor, and no class is empty.",
                "Images.stack(images_by_class), which computes the offsets.",
            )

    @classmethod
    def stack(cls, by_class: Mapping[str, Sequence[Tensor]]) -> Images:
        """Build a split from the images of each class, uint8 ``[channel, height, width]`` each."""
        images = list(chain.from_iterable(by_class.values()))
        kinds = sorted({_describe(image) for image in images})
        if len(kinds) != 1 or not isinstance(images[0], Tensor):
            raise refusal(
                f"You gave {len(images)} images: {', '.join(kinds) or 'no classes'}.",
                "uint8 tensors [channel, height, width] of one shape, at least one per class.",
                "all images of a split are one tensor.",
                "Images.stack({'a': [image, ...], 'b': [...]}), resized to one size.",
            )
        counts = torch.tensor([len(of_class) for of_class in by_class.values()])
        return cls(torch.stack(images), _offsets(counts), tuple(by_class))

    def __len__(self) -> int:
        """Return the number of classes."""
        return len(self.names)

    @property
    def counts(self) -> Tensor:
        """``[classes]``: the number of images of each class."""
        return self.offsets.diff()

    @property
    def labels(self) -> Tensor:
        """``[images]``: the class of each image, for ordinary training."""
        return torch.repeat_interleave(self.counts).to(self.pixels.device)

    @cached_property
    def digest(self) -> str:
        """A short checksum of the names, the offsets and about a million of the pixels."""
        description = [list(self.names), self.offsets.tolist(), list(self.pixels.shape)]
        return checksum(description, self.pixels)

    def to(self, device: torch.device | str) -> Images:
        """Return the same images on another device."""
        return Images(self.pixels.to(device), self.offsets, self.names)

    def select(self, classes: Sequence[int] | Tensor) -> Images:
        """Return the classes with these numbers, in this order."""
        numbers = torch.as_tensor(classes)
        chosen = numbers.flatten().tolist()
        is_whole = not numbers.is_floating_point() and numbers.dtype != torch.bool
        fits = is_whole and numbers.ndim == 1 and {*chosen} <= {*range(len(self))}
        if not chosen or not fits or len({*chosen}) < len(chosen):
            raise refusal(
                f"You selected the classes {classes!r}.",
                f"whole numbers from 0 to {len(self) - 1}, at least one, and none twice.",
                "a class is chosen by its number, and is in a split once.",
                "images.select([0, 2]), or images.select(mask.nonzero().flatten()) for a mask.",
            )
        starts = self.offsets.tolist()
        rows = torch.cat([torch.arange(starts[c], starts[c + 1]) for c in chosen])
        names = tuple(self.names[c] for c in chosen)
        pixels = self.pixels[rows.to(self.pixels.device)]
        return Images(pixels, _offsets(self.counts[chosen]), names)

    def rotated(self) -> Images:
        """Add every class turned by 90, 180 and 270 degrees (anticlockwise) as a further class."""
        height, width = self.pixels.shape[-2:]
        if height != width:
            raise refusal(
                f"You asked to rotate images of {height} x {width}.",
                "square images.",
                "turned by 90 degrees they must still fit in one tensor.",
                "load the images at a square size.",
            )
        pixels = torch.cat([torch.rot90(self.pixels, turns, (-2, -1)) for turns in range(4)])
        names = list(self.names)
        for degrees in (90, 180, 270):
            names += [f"{name}@{degrees}" for name in self.names]
        return Images(pixels, _offsets(self.counts.repeat(4)), tuple(names))


class Splits(NamedTuple):
    """Classes for meta-training, for model selection and for the reported result."""

    train: Images
    val: Images
    test: Images

    def to(self, device: torch.device | str) -> Splits:
        """Return the same splits on another device."""
        return Splits(*(images.to(device) for images in self))


def checksum(description: object, *tensors: Tensor) -> str:
    """Return a short checksum of a description, and of about a million values of each tensor."""
    digest = hashlib.sha256(repr(description).encode())
    for tensor in tensors:
        values = tensor.flatten()
        # An odd step, so that it does not hit the same places of every image.
        some = values[:: max(1, len(values) // 2**20) | 1].contiguous()
        digest.update(bytes(some.view(torch.uint8).tolist()))
    return digest.hexdigest()[:16]


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


def _has(value: object, dtype: torch.dtype, dimensions: int) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype and value.ndim == dimensions


def _describe(value: object) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"{value.dtype} {list(value.shape)}" if is_tensor else type(value).__name__
