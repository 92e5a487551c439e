"""Reads files by name from a folder, a zip or a tar. Nothing is unpacked to disk."""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from innerloop.data.refusals import reading, unusable_file
from innerloop.errors import InnerLoopError

LARGEST = 1 << 28  # bytes in one file of an archive; the largest real ones have 31 million
CHUNK = 1 << 20
TARS = (".tar.gz", ".tgz", ".tar")
ENDINGS = (".zip", *TARS)


class Source:
    """The files of a dataset. Names have forward slashes; hidden files are left out."""

    def __init__(
        self, path: Path, expected: str, entries: Mapping[str, Any], read: Callable[[Any], bytes]
    ) -> None:
        """Keep the entry of each file, which ``read`` turns into its content."""
        self.path, self.expected, self._entries, self._read = path, expected, entries, read
        shown = sorted(name for name in entries if name and not _is_hidden(name))
        self.names = [name for name in shown if not name.endswith("/")]
        self.folders = [name for name in shown if name.endswith("/")]

    def read(self, name: str) -> bytes:
        """Return the content of one file."""
        with reading(self.locate(name), "a regular, undamaged file"):
            return self._read(self._entries[name])

    def locate(self, name: str) -> str:
        """Describe where a file is, for messages."""
        return str(self.path / name) if self.path.is_dir() else f"{self.path}, file {name}"

    def unusable(self, problem: str) -> InnerLoopError:
        """Return the error for files that are not what they should be."""
        return unusable_file(self.path, problem, self.expected)


@contextmanager
def open_source(path: Path, expected: str) -> Iterator[Source]:
    """Open a folder, a zip or a tar; a failure inside names ``path`` and ``expected``."""
    with reading(path, expected):
        if path.is_dir():
            yield Source(path, expected, _list_folder(path), Path.read_bytes)
        elif path.name.endswith(TARS):
            with tarfile.open(path, "r:" if path.suffix == ".tar" else "r:gz") as tar:
                yield Source(path, expected, _list_tar(tar), lambda entry: _read_tar(tar, entry))
        else:
            with zipfile.ZipFile(path) as archive:
                yield Source(path, expected, _list_zip(archive), archive.read)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names, sizes and times of the files in a folder."""
    if path.is_dir():
        digest = hashlib.sha256()
        for name, file in sorted(_list_folder(path).items()):
            status = file.stat()
            known = "" if file.is_dir() else f"{status.st_size}\0{status.st_mtime_ns}"
            digest.update(f"{name}\0{known}\n".encode())
        return digest.hexdigest()
    return file_digest(path, "sha256")


def file_digest(path: Path, algorithm: str) -> str:
    """Return a checksum of a file, read in parts."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _list_folder(path: Path) -> dict[str, Path]:
    """List files and folders, also behind links; the name of a folder ends in a slash."""
    found: dict[str, Path] = {}
    for parent, folders, files in os.walk(path, followlinks=True):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        inside = Path(parent).relative_to(path)
        found |= {f"{(inside / name).as_posix()}/": path / inside / name for name in folders}
        found |= {(inside / name).as_posix(): path / inside / name for name in files}
    return {name: file for name, file in found.items() if not _is_hidden(name)}


def _list_zip(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    found = {}
    for info in archive.infolist():
        is_link = stat.S_ISLNK(info.external_attr >> 16)  # the upper half: the file's Unix mode
        found[_safe_name(info.filename, is_link, info.file_size)] = info
    return found


def _list_tar(tar: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
    found = {}
    for member in tar:
        is_special = not (member.isfile() or member.isdir())
        name = f"{member.name}/" if member.isdir() else member.name
        found[_safe_name(name, is_special, member.size)] = member
    _check_end(tar)
    return found


def _read_tar(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return file.read() if file else b""


def _check_end(tar: tarfile.TarFile) -> None:
    """Refuse a truncated tar: Python's reader takes a missing or broken header for the end."""
    file: Any = tar.fileobj
    file.seek(tar.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise EOFError(f"the archive is cut off or damaged after {tar.offset} bytes")
    while file.read(CHUNK):  # at its end gzip compares checksums
        pass


def _safe_name(name: str, is_special: bool, size: int) -> str:
    """Return ``a/b`` for ``./a/b``; refuse an entry that could do harm unpacked."""
    parts = name.replace("\\", "/").split("/")
    if ".." in parts or parts[0] == "" or parts[0].endswith(":"):
        raise ValueError(f"it holds {name!r}, which leads out of the archive")
    if is_special:
        raise ValueError(f"it holds {name!r}, which is a link or a device, not a file")
    if size > LARGEST:
        raise ValueError(f"it holds {name!r} of {size} bytes, more than the {LARGEST} allowed")
    return name.removeprefix("./")


def _is_hidden(name: str) -> bool:
    """Recognize what operating systems leave beside the data: ``.DS_Store``, ``__MACOSX/…``."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))
