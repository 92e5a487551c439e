"""Any pictures in folders: ``train``, ``val`` and ``test``, one folder per class (as CIFAR-FS)."""

from __future__ import annotations

import re
from pathlib import Path

from innerloop.data._archive import Source, opened
from innerloop.data._cache import Content, cached
from innerloop.data._decode import decode, is_picture, same_size
from innerloop.data._locate import data_root
from innerloop.data._numbers import whole
from innerloop.data._refusal import refused
from innerloop.data._splits import PARTS, packed, repeated, unpacked
from innerloop.data.images import Images, Splits
from innerloop.errors import InnerLoopError, four_part

EXPECTED = "train/class/picture, val/class/picture and test/class/picture, PNG or JPEG"
UNREAD = (".bmp", ".gif", ".tif", ".tiff", ".webp")
LARGEST = 1024  # pixels; pictures of a few-shot task are far smaller

_SPLIT = re.compile(rf"((?:[^/]+/)*?)(?:{'|'.join(PARTS)})/")


def folder(
    root: Path | str | None = None, *, seed: int = 0, size: int | None = None, channels: int = 3
) -> Splits:
    """Read your own pictures: ``root/{train,val,test}/class/*.png`` (or ``.jpg``), packed or not.

    ``root`` may be a .zip, .tar.gz, .tgz or .tar of it. A class is in one split only, and a picture
    directly in its class. Other folders may lie around the three, or beside them, where they are
    not read. With ``size``, at most 1024, pictures of another size are resized to ``size x size``
    (Lanczos); without, all must have one size.
    ``channels`` is 3 for RGB, 1 for grey; what is transparent becomes white. The folders are the
    split, so ``seed`` changes nothing.

    Returns pictures ``[n, channels, height, width]``.
    """
    size = None if size is None else whole("size", size, most=LARGEST)
    channels = whole("channels", channels)
    if channels not in (1, 3):
        raise InnerLoopError(
            four_part(
                f"You asked for pictures with channels={channels}.",
                "3 channels (RGB) or 1 (grey).",
                "these are the pictures that PNG and JPEG files hold.",
                "folder(root, size=32, channels=3).",
            )
        )
    path = data_root(root)
    settings = f"size={size},channels={channels},on=white"
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
    """The pictures of each class of each split. What lies beside the three folders is not read."""
    prefix = _prefix(source)
    found: dict[str, dict[str, list[str]]] = {part: {} for part in PARTS}
    for name in [*(f"{name}/" for name in source.folders()), *source.names()]:
        part, _, inside = name.removeprefix(prefix).partition("/")
        if not name.startswith(prefix) or part not in found:
            continue
        label, in_class, file = inside.partition("/")
        if is_picture(name) and (not in_class or "/" in file):
            raise _wrong(source, f"the picture {name!r} is not at {prefix}{part}/class/picture")
        if name.lower().endswith(UNREAD):
            raise _wrong(source, f"the picture {name!r} is neither PNG nor JPEG")
        if in_class:
            found[part].setdefault(label, []).extend([name] if is_picture(name) else [])
    for part, by_class in found.items():
        for label, files in (by_class or {"class": []}).items():
            if not files:
                raise _wrong(source, f"it has no pictures in {prefix}{part}/{label}/")
    places = ((f"class {c!r}", f"{part}/") for part, by_class in found.items() for c in by_class)
    if problem := repeated(places):
        raise _wrong(source, problem)
    return found


def _prefix(source: Source) -> str:
    """The folder that holds train/, val/ and test/: empty, or a name that ends with a slash."""
    matches = map(_SPLIT.match, filter(is_picture, source.names()))
    prefixes = sorted({match[1] for match in matches if match})
    if len(prefixes) > 1:
        held = " and in ".join(f"./{prefix}" for prefix in prefixes)
        raise _wrong(source, f"it has train/, val/ or test/ in {held}")
    return prefixes[0] if prefixes else ""


def _wrong(source: Source, problem: str) -> InnerLoopError:
    return refused(
        source.path,
        problem,
        f"{EXPECTED}, each class in one of the three",
        "root=... with the folder that holds train/, val/ and test/, and nothing else in these",
    )
