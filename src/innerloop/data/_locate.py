"""Where the datasets are."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from innerloop.errors import InnerLoopError, four_part


def data_root(root: Path | str | None) -> Path:
    """Return the folder (or file) that the user named, or ``$INNERLOOP_DATA``."""
    named = root if root is not None else os.environ.get("INNERLOOP_DATA")
    if not named:
        raise InnerLoopError(
            four_part(
                "You named no folder with data.",
                "the folder that holds the dataset's archives, or their unpacked folders.",
                "only 'glyphs' comes with the package.",
                "root=..., or --data, or set INNERLOOP_DATA.",
            )
        )
    return Path(named).expanduser()


def first_of(candidates: Iterable[Path], root: Path, wanted: str, write: str) -> Path:
    """Return the first path that exists."""
    tried = list(candidates)
    for path in tried:
        if path.exists():
            return path
    raise InnerLoopError(
        four_part(
            f"{root} has none of {', '.join(_within(path, root) for path in tried)}.",
            f"{wanted}.",
            "these are the names and places of the dataset's own files.",
            f"{write}.",
        )
    )


def _within(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path != root and path.is_relative_to(root) else str(path)
