"""Downloads datasets from their official places."""

from __future__ import annotations

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from innerloop.data.locate import data_root
from innerloop.data.refusals import refusal
from innerloop.errors import InnerLoopError

CHUNK = 1 << 16
TIMEOUT = 30  # seconds without a byte
TRIES = 3
PAUSE = 1.0  # seconds before another try

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

    An interrupted download is kept as ``….part`` and resumed, at once or at the next call; the file
    gets its name only when its checksum is right. A file that is there already and right is not
    downloaded again. ``progress(file, done, total)`` is called as bytes arrive.

    Returns the paths of the files.
    """
    if name not in SOURCES:
        raise _no_download(name)
    return fetch_files(SOURCES[name], data_root(root), progress)


def fetch_files(files: Sequence[File], root: Path, progress: Progress | None = None) -> list[Path]:
    """Download the files that are missing; return the paths of all."""
    return [_fetch_file(file, root / file.path, progress or _ignore) for file in files]


def _fetch_file(file: File, path: Path, progress: Progress) -> Path:
    if path.exists():
        if (found := _md5(path)) != file.md5:
            raise _other_file(file, path, found)
        return path
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(file, part, progress)
        if (found := _md5(part)) != file.md5:
            part.unlink()
            raise _wrong_checksum(file, found)
        part.replace(path)
    except (OSError, http.client.HTTPException) as error:
        raise _download_failed(file, part, error) from error
    return path


def _download(file: File, part: Path, progress: Progress) -> None:
    """Receive the file in up to ``TRIES`` connections, each resuming the one before."""
    if part.exists() and _md5(part) == file.md5:
        return
    for attempt in range(1, TRIES + 1):
        try:
            return _receive(file, part, progress)
        except (OSError, http.client.HTTPException) as error:
            if not _worth_another_try(error) or attempt == TRIES:
                raise
            if getattr(error, "code", None) == 416:  # the part is longer than the file
                part.unlink(missing_ok=True)
        time.sleep(PAUSE)


def _worth_another_try(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return error.code == 416 or error.code >= 500
    return True


def _receive(file: File, part: Path, progress: Progress) -> None:
    """Append what is missing to ``part``, or write all of it if the server cannot resume."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(file.url, headers={"User-Agent": "innerloop"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
        if reply.status != 206:
            done = 0
        length = reply.headers.get("Content-Length", "")
        total = done + int(length) if length.isdigit() else None
        with part.open("ab" if done else "wb") as out:
            progress(file.path, done, total)
            while chunk := reply.read(CHUNK):
                out.write(chunk)
                done += len(chunk)
                progress(file.path, done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done} of {total} bytes")


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _ignore(name: str, done: int, total: int | None) -> None:
    pass


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


def _download_failed(file: File, part: Path, error: Exception) -> InnerLoopError:
    kept = part.stat().st_size if part.exists() else 0
    return refusal(
        f"{file.url} could not be downloaded ({error}).",
        f"a connection to it, and room for it in {part.parent}.",
        f"{kept} bytes have arrived and are kept in {part}.",
        "the same command again: it resumes the download.",
    )
