"""Any pictures in folders: ``train``, ``val`` and ``test``, one folder per class (as CIFAR-FS)."""

from __future__ import annotations

from pathlib import Path

from innerloop.data._archive import Source, opened
from innerloop.data._cache import Content, cached
from innerloop.data._decode import decode, is_picture, same_size
from innerloop.data._locate import data_root
from innerloop.data._refusal import refused
from innerloop.data._splits import PARTS, packed, unpacked
from innerloop.data.images import Images, Splits
from innerloop.errors import InnerLoopError, four_part

EXPECTED = "train/class/picture, val/class/picture and test/class/picture, PNG or JPEG"


def folder(
    root: Path | str | None = None, *, seed: int = 0, size: int | None = None, channels: int = 3
) -> Splits:
    """Read your own pictures: ``root/{train,val,test}/class/*.png`` (or ``.jpg``), or a zip of it.

    With ``size``, pictures of another size are resized to ``size x size`` (Lanczos); without, all
    must have one size. ``channels`` is 3 for RGB, 1 for grey. The folders are the split, so
    ``seed`` changes nothing.

    Returns pictures ``[n, channels, height, width]``.
    """
    if channels not in (1, 3) or (size is not None and size < 1):
        raise InnerLoopError(
            four_part(
                f"You asked for pictures with channels={channels} and size={size}.",
                "3 channels (RGB) or 1 (grey), and a positive size or none.",
                "these are the pictures that PNG and JPEG files hold.",
                "folder(root, size=32, channels=3).",
            )
        )
    path = data_root(root)
    settings = f"size={size},channels={channels}"
    if not path.exists():
        raise refused(path, "there is no such folder", EXPECTED, "the folder that holds train/")
    return unpacked(cached("folder", [path], settings, lambda: _decoded(path, size, channels)))


def _decoded(path: Path, size: int | None, channels: int) -> Content:
    with opened(path, EXPECTED) as source:
        listing = _listing(source)
        names = [n for by_class in listing.values() for files in by_class.values() for n in files]
        pictures = {name: decode(source, name, channels, size) for name in names}
        same_size(source, names, list(pictures.values()))
        return packed(
            {
                part: Images.stack({c: [pictures[n] for n in files] for c, files in found.items()})
                for part, found in listing.items()
            }
        )


def _listing(source: Source) -> dict[str, dict[str, list[str]]]:
    """The pictures of each class of each split. One folder around all of them is allowed."""
    found: dict[str, dict[str, list[str]]] = {part: {} for part in PARTS}
    for name in filter(is_picture, source.names()):
        parts = name.split("/")
        if len(parts) >= 3 and parts[-3] in found:
            found[parts[-3]].setdefault(parts[-2], []).append(name)
    for part, by_class in found.items():
        if not by_class:
            raise refused(
                source.path,
                f"it has no pictures in {part}/class/",
                EXPECTED,
                "root=... with the folder that holds train/, val/ and test/",
            )
    return found
