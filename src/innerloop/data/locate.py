"""Finds the files of a dataset."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from innerloop.data.refusals import refusal
from innerloop.errors import InnerLoopError


def data_root(root: Path | str | None) -> Path:
    """Return the given folder or file, or ``$INNERLOOP_DATA``."""
    named = root if root is not None else os.environ.get("INNERLOOP_DATA")
    if not named:
        raise _no_root()
    return Path(named).expanduser()


def find_file(
    root: Path, folders: Iterable[str], names: Iterable[str], expected: str, write: str
) -> Path:
    """Return the first path ``root/folder/name`` that exists."""
    candidates = [Path(folder, name) for folder in folders for name in names]
    for path in candidates:
        if (root / path).exists():
            return root / path
    raise _none_found(root, candidates, expected, write)


def _no_root() -> InnerLoopError:
    return refusal(
        "You named no folder with data.",
        "the folder that holds the dataset's archives, or their unpacked folders.",
        "only 'glyphs' comes with the package.",
        "root=..., or --data, or set INNERLOOP_DATA.",
    )


def _none_found(root: Path, candidates: list[Path], expected: str, write: str) -> InnerLoopError:
    return refusal(
        f"{root} has none of {', '.join(map(str, candidates))}.",
        f"{expected}.",
        "these are the names and places of the dataset's own files.",
        f"{write}.",
    )
