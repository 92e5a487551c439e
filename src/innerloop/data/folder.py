"""Images in folders: ``train``, ``val`` and ``test``, one folder per class (as CIFAR-FS)."""

from __future__ import annotations

import re
from pathlib import Path

from innerloop.data.archive import Source, open_source
from innerloop.data.arguments import check_integer, data_root
from innerloop.data.decode import is_image
from innerloop.data.images import Images, Splits
from innerloop.data.refusals import refusal, unusable_file
from innerloop.data.splits import PARTS, Listing, decode_splits, find_overlap, load_splits

EXPECTED = (
    "train/class/image, val/class/image and test/class/image, PNG or JPEG, each class in one of "
    "the three, and nothing else in these"
)
UNREAD = (".bmp", ".gif", ".tif", ".tiff", ".webp")
LARGEST = 1024  # pixels; images of a few-shot task are far smaller

_SPLIT = re.compile(rf"((?:[^/]+/)*?)(?:{'|'.join(PARTS)})/")


def folder(
    root: Path | str | None = None, *, seed: int = 0, size: int | None = None, channels: int = 3
) -> Splits:
    """Read your own images: ``root/{train,val,test}/class/*.png`` (or ``.jpg``).

    ``root`` may also be a .zip, .tar.gz, .tgz or .tar of such a folder. A class is in one split
    only, and an image lies directly in the folder of its class. The three folders may lie in other
    folders; folders beside them are not read. With ``size``, at most 1024, images of another size
    are resized to ``size x size`` (Lanczos); without, all must have one size. ``channels`` is 3 for
    RGB, 1 for gray; transparent pixels become white. The folders are the split, so ``seed`` changes
    nothing.

    Returns images ``[n, channels, height, width]``.
    """
    size = None if size is None else check_integer("size", size, most=LARGEST)
    if check_integer("channels", channels) not in (1, 3):
        raise refusal(
            f"You asked for images with channels={channels}.",
            "3 channels (RGB) or 1 (gray).",
            "these are the images that PNG and JPEG files hold.",
            "folder(root, size=32, channels=3).",
        )
    path = data_root(root)
    if not path.exists():
        write = "the folder that holds train/"
        raise unusable_file(path, "there is no such folder", EXPECTED, write)
    settings = f"size={size},channels={channels},on=white"
    return load_splits("folder", path, settings, lambda: _decode(path, size, channels))


def _decode(path: Path, size: int | None, channels: int) -> dict[str, Images]:
    with open_source(path, EXPECTED) as source:
        return decode_splits(source, _list_files(source), channels, size)


def _list_files(source: Source) -> Listing:
    """List the images by split and class. Nothing outside the three folders is read."""
    prefix = _find_prefix(source)
    listing: Listing = {part: {} for part in PARTS}
    for name in [*source.folders, *source.names]:
        part, _, inside = name.removeprefix(prefix).partition("/")
        if not name.startswith(prefix) or part not in listing:
            continue
        label, in_class, file = inside.partition("/")
        if is_image(name) and (not in_class or "/" in file):
            raise source.unusable(f"the image {name!r} is not at {prefix}{part}/class/image")
        if name.lower().endswith(UNREAD):
            raise source.unusable(f"the image {name!r} is neither PNG nor JPEG")
        if in_class:
            files = listing[part].setdefault(label, [])
            if is_image(name):
                files.append(name)
    _check_classes(source, prefix, listing)
    return listing


def _check_classes(source: Source, prefix: str, listing: Listing) -> None:
    places = []
    for part, by_class in listing.items():
        if not by_class:
            raise source.unusable(f"it has no images in {prefix}{part}/class/")
        for label, files in by_class.items():
            if not files:
                raise source.unusable(f"it has no images in {prefix}{part}/{label}/")
            places.append((f"class {label!r}", f"{part}/"))
    if overlap := find_overlap(places):
        raise source.unusable(overlap)


def _find_prefix(source: Source) -> str:
    """Return the folder that holds train/, val/ and test/: empty, or a name with a slash."""
    matches = map(_SPLIT.match, filter(is_image, source.names))
    prefixes = sorted({match[1] for match in matches if match})
    if len(prefixes) > 1:
        places = " and in ".join(f"./{prefix}" for prefix in prefixes)
        raise source.unusable(f"it has train/, val/ or test/ in {places}")
    return prefixes[0] if prefixes else ""
