"""Reads files by name from a folder, a zip or a tar. Nothing is unpacked to disk."""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
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
        self,
        path: Path,
        files: dict[str, Any],
        folders: Iterable[str],
        read: Callable[[Any], bytes],
    ) -> None:
        """Keep the entry of each file, which ``read`` turns into its content."""
        self.path, self._files, self._read = path, files, read
        self.names = sorted(name for name in files if not _is_hidden(name))
        self.folders = sorted(name for name in folders if name and not _is_hidden(name))

    def read(self, name: str) -> bytes:
        """Return the content of one file."""
        with reading(self.locate(name), "a regular, undamaged file"):
            return self._read(self._files[name])

    def locate(self, name: str) -> str:
        """Describe where a file is, for messages."""
        return str(self.path / name) if self.path.is_dir() else f"{self.path}, file {name}"


@contextmanager
def open_source(path: Path, expected: str) -> Iterator[Source]:
    """Open a folder, a zip or a tar; a failure inside names ``path`` and ``expected``."""
    with reading(path, expected):
        if path.is_dir():
            yield _folder(path)
        elif path.name.endswith(TARS):
            with tarfile.open(path, "r:" if path.suffix == ".tar" else "r:gz") as archive:
                yield _tar(path, archive, expected)
        else:
            with zipfile.ZipFile(path) as archive:
                yield _zip(path, archive, expected)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names, sizes and times of the files in a folder."""
    digest = hashlib.sha256()
    if path.is_dir():
        source = _folder(path)
        digest.update("\n".join([*source.folders, ""]).encode())
        for name in source.names:
            status = (path / name).stat()
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        return digest.hexdigest()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _folder(path: Path) -> Source:
    files: dict[str, Path] = {}
    folders = []
    for found in _walk(path, {path.resolve()}):
        name = found.relative_to(path).as_posix()
        if found.is_dir():
            folders.append(name)
        else:
            files[name] = found
    return Source(path, files, folders, _read_regular_file)


def _walk(folder: Path, ancestors: set[Path]) -> Iterator[Path]:
    """Yield all files and folders. A link back to an ancestor would never end, and is left out."""
    for path in folder.iterdir():
        if _is_hidden(path.name):
            continue
        if not path.is_dir():
            yield path
        elif (real := path.resolve()) not in ancestors:
            yield path
            yield from _walk(path, ancestors | {real})


def _read_regular_file(path: Path) -> bytes:
    if not path.is_file():  # a pipe would block forever, a device fill the memory
        raise OSError("it is not a file")
    return path.read_bytes()


def _zip(path: Path, archive: zipfile.ZipFile, expected: str) -> Source:
    files, folders = {}, []
    for info in archive.infolist():
        # The upper half of these bits is the file's Unix mode.
        is_link = (info.external_attr >> 16) & 0o170000 == 0o120000
        name = _safe_name(path, info.filename, is_link, info.file_size, expected)
        if info.is_dir():
            folders.append(name)
        else:
            files[name] = info
    return Source(path, files, folders, archive.read)


def _tar(path: Path, archive: tarfile.TarFile, expected: str) -> Source:
    files, folders = {}, []
    for member in archive:
        is_special = not (member.isfile() or member.isdir())
        name = _safe_name(path, member.name, is_special, member.size, expected)
        if member.isdir():
            folders.append(name)
        else:
            files[name] = member
    _check_end(archive)

    def read(member: tarfile.TarInfo) -> bytes:
        file = archive.extractfile(member)
        content = file.read() if file else b""
        if len(content) != member.size:
            raise EOFError(f"{len(content)} of {member.size} bytes are there")
        return content

    return Source(path, files, folders, read)


def _check_end(archive: tarfile.TarFile) -> None:
    """Refuse a truncated tar: Python's reader takes a missing or broken header for the end."""
    file: Any = archive.fileobj
    file.seek(archive.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise EOFError(f"the archive is cut off or damaged after {archive.offset} bytes")
    while file.read(CHUNK):  # at its end gzip compares checksums
        pass


def _safe_name(path: Path, name: str, is_special: bool, size: int, expected: str) -> str:
    """Return ``a/b`` for ``./a/b`` and ``a/b/``; refuse an entry that could do harm unpacked."""
    parts = name.replace("\\", "/").split("/")
    if parts[0] == "" or parts[0].endswith(":"):
        raise _unsafe_entry(path, name, "is an absolute path", expected)
    if ".." in parts:
        raise _unsafe_entry(path, name, "leads out of the archive", expected)
    if is_special:
        raise _unsafe_entry(path, name, "is a link or a device, not a file", expected)
    if size > LARGEST:
        problem = f"says it has {size} bytes, more than the {LARGEST} that are read"
        raise _unsafe_entry(path, name, problem, expected)
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _is_hidden(name: str) -> bool:
    """Recognize what operating systems leave beside the data: ``.DS_Store``, ``__MACOSX/…``."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _unsafe_entry(path: Path, name: str, problem: str, expected: str) -> InnerLoopError:
    return unusable_file(
        path,
        f"it holds {name!r}, which {problem}",
        expected,
        "the path of the dataset's own archive, which has no such entry",
    )
