"""Decoded datasets, kept between runs, each beside a checksum.

The folder is ``$INNERLOOP_CACHE``, or ``~/.cache/innerloop``. A name holds a checksum of the source
and of the settings, so a changed archive or another size is another file.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from innerloop.data._archive import checksum
from innerloop.data._refusal import reading

FORMAT = 2  # raise it when decoding changes: older files are then not used any more

Content = dict[str, Any]


def cached(name: str, sources: list[Path], settings: str, make: Callable[[], Content]) -> Content:
    """Return what ``make`` returns, from the cache if it is there and undamaged."""
    parts = [str(FORMAT), settings, *(_sum_of(path) for path in sources)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    path = cache_folder() / f"{name}-{key}.pt"
    content = _load(path)
    if content is None:
        content = make()
        _save(content, path)
    return content


def _sum_of(source: Path) -> str:
    with reading(source, "a file or folder that can be read"):
        return checksum(source)


def cache_folder() -> Path:
    """Where decoded datasets are kept."""
    named = os.environ.get("INNERLOOP_CACHE")
    return Path(named) if named else Path("~/.cache/innerloop").expanduser()


def _load(path: Path) -> Content | None:
    """Return the kept content, or None if there is none or it is not as it was written."""
    try:
        if checksum(path) != _beside(path).read_text().strip():
            return None
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # missing or damaged in whatever way: it is made again
        return None


def _save(content: Content, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, lambda file: torch.save(content, file))
        # Written last: after a crash in between, the sum does not fit and the file is made again.
        _replace(_beside(path), lambda file: file.write(f"{checksum(path)}\n".encode()))
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"{path.parent} cannot be written ({error}), so the pictures will be decoded again "
            "next time. Set INNERLOOP_CACHE to a folder that can.",
            stacklevel=2,
        )


def _replace(path: Path, write: Callable[[Any], object]) -> None:
    """Write a file so that others see all of it or nothing."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _beside(path: Path) -> Path:
    return path.with_suffix(".sha256")
