"""Download datasets from their official places."""

from __future__ import annotations

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from innerloop.data._locate import data_root
from innerloop.errors import InnerLoopError, four_part

CHUNK = 1 << 16
TIMEOUT = 30  # seconds without a byte
TRIES = 3
PAUSE = 1.0  # seconds before another try

Progress = Callable[[str, int, int | None], object]


class File(NamedTuple):
    """A file to download."""

    url: str
    path: str
    """Where it goes, within the root."""
    md5: str
    """Of the official file, as its other readers record it."""


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

    A broken download is kept as ``….part`` and goes on where it stopped, at once or when you call
    again; the file gets its name only when its checksum is right. A file that is there already and
    right is not downloaded again. ``progress(file, done, total)`` is called as bytes arrive.

    Returns the paths of the files.
    """
    if name not in SOURCES:
        raise InnerLoopError(
            four_part(
                f"You asked to download {name!r}.",
                f"one of {', '.join(SOURCES)}.",
                "these have an official place from which anybody may download; glyphs needs no "
                "download, and mini-ImageNet's pictures come under ImageNet's terms, by hand.",
                f"fetch({next(iter(SOURCES))!r}, root).",
            )
        )
    return fetch_files(SOURCES[name], data_root(root), progress)


def fetch_files(files: Sequence[File], root: Path, progress: Progress | None = None) -> list[Path]:
    """Download files that are not there yet; return their paths."""
    return [_fetch_file(file, root / file.path, progress or _silent) for file in files]


def _fetch_file(file: File, path: Path, progress: Progress) -> Path:
    if path.exists():
        _check_present(file, path)
        return path
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(file, part, progress)
        _check_download(file, part)
        part.replace(path)
    except (OSError, http.client.HTTPException) as error:
        raise _failed(file, part, error) from error
    return path


def _download(file: File, part: Path, progress: Progress) -> None:
    """Try a few times; each try goes on where the one before stopped."""
    for left in reversed(range(TRIES)):
        try:
            return _receive(file, part, progress)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and part.exists():  # nothing after what we have
                if _md5(part) == file.md5:
                    return None
                part.unlink()
            elif not left or error.code < 500:
                raise
        except (OSError, http.client.HTTPException):
            if not left:
                raise
        time.sleep(PAUSE)
    raise ConnectionError("the server offers less than was received before")


def _receive(file: File, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(file.url, headers={"User-Agent": "innerloop"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
        # A server that knows no ranges, or sends another one, sends what must not be appended.
        goes_on = reply.status == 206 and reply.headers.get("Content-Range", "").startswith(
            f"bytes {have}-"
        )
        if reply.status == 206 and not goes_on:
            part.unlink(missing_ok=True)
            raise ConnectionError("the server sent another range than asked for")
        done = have if goes_on else 0
        length = reply.headers.get("Content-Length")
        total = done + int(length) if length and length.isdigit() else None
        with part.open("ab" if goes_on else "wb") as out:
            progress(file.path, done, total)
            while chunk := reply.read(CHUNK):
                out.write(chunk)
                done += len(chunk)
                progress(file.path, done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done} of {total} bytes")


def _check_download(file: File, part: Path) -> None:
    found = _md5(part)
    if found != file.md5:
        part.unlink()
        raise InnerLoopError(
            four_part(
                f"What {file.url} sent has the MD5 checksum {found}.",
                f"{file.md5}.",
                "the file is damaged, or not the official one; it was deleted.",
                "the same command again; if it fails again, put the file there by hand.",
            )
        )


def _check_present(file: File, path: Path) -> None:
    found = _md5(path)
    if found != file.md5:
        raise InnerLoopError(
            four_part(
                f"{path} is there already, with the MD5 checksum {found}.",
                f"no such file, or the official one, {file.md5}.",
                "it is damaged or repacked, and might be yours: it is not overwritten.",
                "another root, or delete the file first. A repacked one can be used as it is.",
            )
        )


def _failed(file: File, part: Path, error: Exception) -> InnerLoopError:
    kept = part.stat().st_size if part.exists() else 0
    return InnerLoopError(
        four_part(
            f"{file.url} could not be downloaded ({error}).",
            f"a connection to it, and room for it in {part.parent}.",
            f"{kept} bytes have arrived and are kept in {part}.",
            "the same command again: it goes on from there.",
        )
    )


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _silent(name: str, done: int, total: int | None) -> None:
    pass
