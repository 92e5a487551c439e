"""Cache of decoded datasets.

The folder is ``$INNERLOOP_CACHE``, or ``~/.cache/innerloop``. A file's name holds a checksum of the
source and of the settings, so a changed archive or another image size is another file.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from innerloop.data.archive import checksum
from innerloop.data.refusals import reading

FORMAT = 3  # raise it when decoding changes: older files are then ignored

Content = dict[str, Any]


def load_or_decode(
    name: str, sources: list[Path], settings: str, decode: Callable[[], Content]
) -> Content:
    """Return the cached content, or what ``decode`` returns if it is missing or damaged."""
    parts = [str(FORMAT), settings]
    for source in sources:
        with reading(source, "a file or folder that can be read"):
            parts.append(checksum(source))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    path = cache_folder() / f"{name}-{key}.pt"
    content = _load(path)
    if content is None:
        content = decode()
        _save(content, path)
    return content


def cache_folder() -> Path:
    """Return the folder of the cache."""
    named = os.environ.get("INNERLOOP_CACHE")
    return Path(named) if named else Path("~/.cache/innerloop").expanduser()


def _load(path: Path) -> Content | None:
    try:
        with zipfile.ZipFile(path) as archive:  # the format of torch.save; torch ignores its CRCs
            if archive.testzip() is not None:
                return None
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # missing or damaged in whatever way: decode again
        return None


def _save(content: Content, path: Path) -> None:
    """Write the file elsewhere first, so that other processes see all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".save-") as aside:
            complete = Path(aside, path.name)
            torch.save(content, complete)
            complete.replace(path)
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"{path.parent} cannot be written ({error}), so the images will be decoded again "
            "next time. Set INNERLOOP_CACHE to a writable folder.",
            stacklevel=2,
        )
