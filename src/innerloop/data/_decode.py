"""Picture files to uint8 tensors."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch import Tensor

from innerloop.data._archive import Source
from innerloop.data._refusal import reading, refused

EXPECTED = "a whole PNG or JPEG picture"
ENDINGS = (".png", ".jpg", ".jpeg")


def decode(source: Source, name: str, channels: int, size: int | None) -> Tensor:
    """Read one picture as ``[channels, height, width]``, grey or RGB; what is transparent is white.

    With ``size``, a picture of another size is resized to ``size x size`` with Pillow's Lanczos
    filter, which averages over the pixels that shrink into one.
    """
    image_module = _pillow()
    with reading(source.where(name), EXPECTED), warnings.catch_warnings():
        # A small file that claims to be a huge picture: refuse it, do not fill the memory.
        warnings.simplefilter("error", image_module.DecompressionBombWarning)
        with image_module.open(io.BytesIO(source.read(name)), formats=("PNG", "JPEG")) as picture:
            if picture.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
                picture = picture.convert("I").point(lambda value: value / 256)
            if picture.has_transparency_data:  # the colour of what cannot be seen is arbitrary
                paper = image_module.new("RGBA", picture.size, "white")
                picture = image_module.alpha_composite(paper, picture.convert("RGBA"))
            # First to grey or RGB: Pillow resizes black-and-white pictures without a filter.
            picture = picture.convert("L" if channels == 1 else "RGB")
            if size is not None and picture.size != (size, size):
                picture = picture.resize((size, size), image_module.Resampling.LANCZOS)
            width, height = picture.size
            flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
            return flat.view(height, width, channels).permute(2, 0, 1).contiguous()


def same_size(source: Source, names: list[str], pictures: list[Tensor]) -> None:
    """Refuse pictures that differ in size: they cannot be one tensor."""
    for name, picture in zip(names, pictures, strict=True):
        if picture.shape != pictures[0].shape:
            height, width = picture.shape[1:]
            raise refused(
                source.where(name),
                f"it has {width} x {height} pixels, the first picture has "
                f"{pictures[0].shape[2]} x {pictures[0].shape[1]}",
                "pictures of one size, or a size to which all are resized",
                "size=32 (or another size) as an argument, or --size 32 on the command line",
            )


def is_picture(name: str) -> bool:
    """Whether a file's name ends as that of a picture."""
    return name.lower().endswith(ENDINGS)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as missing:
        raise ImportError(
            "innerloop.data needs the package 'pillow', which is not installed, to read pictures. "
            "Install it with: pip install '.[experiments]' in a clone"
        ) from missing
    return Image
