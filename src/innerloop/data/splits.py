"""Three splits of a dataset: decoded, cached, and checked for overlaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from innerloop.data.archive import Source
from innerloop.data.cache import load_or_decode
from innerloop.data.decode import check_same_size, decode
from innerloop.data.images import Images, Splits

PARTS = ("train", "val", "test")

Listing = dict[str, dict[str, list[str]]]
"""The files of each class of each split."""


def load_splits(
    name: str, path: Path, settings: str, decode: Callable[[], dict[str, Images]]
) -> Splits:
    """Return the splits that ``decode`` reads from ``path``, from the cache if they are there."""
    content = load_or_decode(
        name, [path], settings, lambda: {part: vars(images) for part, images in decode().items()}
    )
    return Splits(*(Images(**content[part]) for part in PARTS))


def decode_splits(
    source: Source, listing: Listing, channels: int, size: int | None
) -> dict[str, Images]:
    """Read the listed files; ``channels`` and ``size`` are those of :func:`decode`."""
    names = [name for part in listing.values() for files in part.values() for name in files]
    images = {name: decode(source, name, channels, size) for name in names}
    check_same_size(source, images)
    return {
        part: Images.stack({label: [images[n] for n in by_class[label]] for label in by_class})
        for part, by_class in listing.items()
    }


def find_overlap(places: Iterable[tuple[str, str]]) -> str | None:
    """Describe the first item that is in two places, given as ``(item, place)``."""
    first: dict[str, str] = {}
    for item, place in places:
        if item in first:
            return f"{item} is in {first[item]} and again in {place}"
        first[item] = place
    return None
