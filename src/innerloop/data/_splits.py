"""Three splits as plain tensors and names, as the cache keeps them."""

from __future__ import annotations

from collections.abc import Iterable

from innerloop.data._cache import Content
from innerloop.data.images import Images, Splits

PARTS = ("train", "val", "test")


def packed(parts: dict[str, Images]) -> Content:
    """Return what can be saved and loaded without running code."""
    return {
        name: {"pixels": part.pixels, "offsets": part.offsets, "names": list(part.names)}
        for name, part in parts.items()
    }


def unpacked(content: Content) -> Splits:
    """Return the splits that were packed."""
    parts = (content[name] for name in PARTS)
    return Splits(*(Images(p["pixels"], p["offsets"], tuple(p["names"])) for p in parts))


def repeated(places: Iterable[tuple[str, str]]) -> str | None:
    """Say what is in two places, of ``(what, place)``: splits share no class and no picture."""
    first: dict[str, str] = {}
    for what, place in places:
        if what in first:
            return f"{what} is in {first[what]} and again in {place}"
        first[what] = place
    return None
