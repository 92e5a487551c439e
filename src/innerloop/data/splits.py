"""Three splits of a dataset: cached, and checked for overlaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from innerloop.data.cache import Content, load_or_decode
from innerloop.data.images import Images, Splits

PARTS = ("train", "val", "test")


def load_splits(
    name: str, path: Path, settings: str, decode: Callable[[], dict[str, Images]]
) -> Splits:
    """Return the splits that ``decode`` reads from ``path``, from the cache if they are there."""
    content = load_or_decode(name, [path], settings, lambda: _to_content(decode()))
    return Splits(*(Images(**content[part]) for part in PARTS))


def _to_content(splits: dict[str, Images]) -> Content:
    return {
        name: {"pixels": images.pixels, "offsets": images.offsets, "names": images.names}
        for name, images in splits.items()
    }


def find_overlap(places: Iterable[tuple[str, str]]) -> str | None:
    """Describe the first item that is in two places, given as ``(item, place)``."""
    first: dict[str, str] = {}
    for item, place in places:
        if item in first:
            return f"{item} is in {first[item]} and again in {place}"
        first[item] = place
    return None
