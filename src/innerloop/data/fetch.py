"""Downloads datasets from their official places."""

from __future__ import annotations

import http.client
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from innerloop.data.archive import file_digest
from innerloop.data.arguments import data_root
from innerloop.data.refusals import refusal
from innerloop.errors import InnerLoopError

CHUNK = 1 << 16
TIMEOUT = 30  # seconds without a byte

Progress = Callable[[str, int, int | None], object]


class File(NamedTuple):
    """A file to download."""

    url: str
    path: str
    """Destination, relative to the root."""
    md5: str
    """Checksum of the official file, as its other readers record it."""


_OMNIGLOT = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"
SOURCES: dict[str, tuple[File, ...]] = {
    "omniglot": (
        File(
            f"{_OMNIGLOT}/images_background.zip",
            "omniglot/images_background.zip",
            "68d2efa1b9178cc56df9314c21c6e718",
        ),
        File(
            f"{_OMNIGLOT}/images_evaluation.zip",
            "omniglot/images_evaluation.zip",
            "6b91aef0f799c5bb55b94e3f2daec811",
        ),
    ),
    "cifar10": (
        File(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "cifar10/cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
        ),
    ),
}


def fetch(
    name: str, root: Path | str | None = None, *, progress: Progress | None = None
) -> list[Path]:
    """Download a dataset (``omniglot`` or ``cifar10``) to ``root`` (``$INNERLOOP_DATA``).

    A file gets its name only when it is complete and its checksum is right; an interrupted download
    leaves nothing behind. A file that is there already and right is not downloaded again.
    ``progress(file, done, total)`` is called as bytes arrive.

    Returns the paths of the files.
    """
    if name not in SOURCES:
        raise _no_download(name)
    return fetch_files(SOURCES[name], data_root(root), progress)


def fetch_files(files: Sequence[File], root: Path, progress: Progress | None = None) -> list[Path]:
    """Download the files that are missing; return the paths of all."""
    return [_fetch_file(file, root / file.path, progress) for file in files]


def _fetch_file(file: File, path: Path, progress: Progress | None) -> Path:
    if path.exists():
        if (found := file_digest(path, "md5")) != file.md5:
            raise _other_file(file, path, found)
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as aside:
            received = Path(aside, path.name)
            _receive(file, received, progress)
            if (found := file_digest(received, "md5")) != file.md5:
                raise _wrong_checksum(file, found)
            received.replace(path)
    except (OSError, http.client.HTTPException) as error:
        raise _download_failed(file, path, error) from error
    return path


def _receive(file: File, path: Path, progress: Progress | None) -> None:
    request = urllib.request.Request(file.url, headers={"User-Agent": "innerloop"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply, path.open("wb") as out:
        length = reply.headers.get("Content-Length", "")
        total = int(length) if length.isdigit() else None
        done = 0
        while True:
            if progress is not None:
                progress(file.path, done, total)
            chunk = reply.read(CHUNK)
            if not chunk:
                break
            done += out.write(chunk)
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done} of {total} bytes")


def _no_download(name: str) -> InnerLoopError:
    return refusal(
        f"You asked to download {name!r}.",
        f"one of {', '.join(SOURCES)}.",
        "these have an official place from which anybody may download; glyphs needs no "
        "download, and mini-ImageNet's images come under ImageNet's terms, by hand.",
        f"fetch({next(iter(SOURCES))!r}, root).",
    )


def _wrong_checksum(file: File, found: str) -> InnerLoopError:
    return refusal(
        f"The file that {file.url} sent has the MD5 checksum {found}.",
        f"{file.md5}.",
        "the file is damaged, or not the official one; it was deleted.",
        "the same command again; if it fails again, put the file there by hand.",
    )


def _other_file(file: File, path: Path, found: str) -> InnerLoopError:
    return refusal(
        f"{path} is there already, with the MD5 checksum {found}.",
        f"no such file, or the official one, {file.md5}.",
        "it is damaged or repacked, and might be yours: it is not overwritten.",
        "another root, or delete the file first. A repacked one can be used as it is.",
    )


def _download_failed(file: File, path: Path, error: Exception) -> InnerLoopError:
    return refusal(
        f"{file.url} could not be downloaded ({error}).",
        f"a connection to it, and room for it in {path.parent}.",
        "only a complete file is kept.",
        "the same command again: it downloads the file from the start.",
    )
