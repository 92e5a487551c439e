"""Decodes image files to uint8 tensors."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch import Tensor

from innerloop.data.archive import Source
from innerloop.data.refusals import reading, unusable_file

ENDINGS = (".png", ".jpg", ".jpeg")


def is_image(name: str) -> bool:
    """Recognize PNG and JPEG files by their names."""
    return name.lower().endswith(ENDINGS)


def decode(source: Source, name: str, channels: int, size: int | None) -> Tensor:
    """Read one image as ``[channels, height, width]``, gray or RGB, on a white background.

    With ``size``, an image of another size is resized to ``size x size`` with Pillow's Lanczos
    filter, which averages over the pixels that shrink into one.
    """
    pillow = _pillow()
    expected = "a complete PNG or JPEG image"
    with reading(source.locate(name), expected), warnings.catch_warnings():
        # A small file that claims to be a huge image: refuse it, do not fill the memory.
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        with pillow.open(io.BytesIO(source.read(name)), formats=("PNG", "JPEG")) as image:
            if image.mode.startswith("I"):  # 16 bits, which Pillow would clip at 255
                image = image.convert("I").point(lambda value: value / 256)
            if image.has_transparency_data:  # the color of transparent pixels is arbitrary
                background = pillow.new("RGBA", image.size, "white")
                image = pillow.alpha_composite(background, image.convert("RGBA"))
            # Before resizing: Pillow resizes black-and-white images without a filter.
            image = image.convert("L" if channels == 1 else "RGB")
            if size is not None and image.size != (size, size):
                image = image.resize((size, size), pillow.Resampling.LANCZOS)
            width, height = image.size
            flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            return flat.view(height, width, channels).permute(2, 0, 1).contiguous()


def check_same_size(source: Source, images: dict[str, Tensor]) -> None:
    """Refuse images that differ in size: they cannot be one tensor."""
    height, width = next(iter(images.values())).shape[1:]
    for name, image in images.items():
        if image.shape[1:] != (height, width):
            other = f"{image.shape[2]} x {image.shape[1]}"
            raise unusable_file(
                source.locate(name),
                f"it has {other} pixels, the first image has {width} x {height}",
                "images of one size, or a size to which all are resized",
                "size=32 (or another size) as an argument, or --size 32 on the command line",
            )


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as missing:
        raise ImportError(
            "innerloop.data needs the package 'pillow', which is not installed, to read images. "
            "Install it with: pip install '.[experiments]' in a clone"
        ) from missing
    return Image
