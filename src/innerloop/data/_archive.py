"""Read files by name from a zip, a tar or a folder. Nothing is ever unpacked to disk."""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from innerloop.data._refusal import reading, refused
from innerloop.errors import InnerLoopError

LARGEST = 1 << 28  # bytes in one file of an archive; the largest real ones have 31 million
CHUNK = 1 << 20
ENDINGS = (".zip", ".tar.gz", ".tgz", ".tar")


class Source(Protocol):
    """Files of a dataset, wherever they lie. Names have forward slashes."""

    path: Path

    def names(self) -> list[str]:
        """Return the names of all files, sorted, without hidden ones."""
        ...

    def folders(self) -> list[str]:
        """Return the names of all folders that are listed as such, sorted, without hidden ones."""
        ...

    def read(self, name: str) -> bytes:
        """Return the content of one file."""
        ...

    def where(self, name: str) -> str:
        """Say where a file is, for messages."""
        ...


@contextmanager
def opened(path: Path, expected: str) -> Iterator[Source]:
    """Open a folder, a zip, a tar or a tar.gz; a failure inside names ``path`` and ``expected``."""
    with reading(path, expected):
        if path.is_dir():
            yield Folder(path)
        elif path.name.endswith((".tar.gz", ".tgz", ".tar")):
            with tarfile.open(path, "r:" if path.suffix == ".tar" else "r:gz") as archive:
                source = Tar(path, archive, expected)
                _check_end(archive)
                yield source
        else:
            with zipfile.ZipFile(path) as archive:
                yield Zip(path, archive, expected)


class Folder:
    """The files of an unpacked dataset."""

    def __init__(self, path: Path) -> None:
        """Read from ``path``."""
        self.path = path

    def names(self) -> list[str]:
        """Return the names of all files, sorted, without hidden ones."""
        return sorted(name for name, is_folder in self._found if not is_folder)

    def folders(self) -> list[str]:
        """Return the names of all folders, sorted, without hidden ones."""
        return sorted(name for name, is_folder in self._found if is_folder)

    @cached_property
    def _found(self) -> list[tuple[str, bool]]:
        below = _below(self.path, {self.path.resolve()})
        return [(path.relative_to(self.path).as_posix(), is_folder) for path, is_folder in below]

    def read(self, name: str) -> bytes:
        """Return the content of one file."""
        path = self.path / name
        with reading(path, "a file"):
            if not path.is_file():  # a pipe would wait for ever, a device fill the memory
                raise OSError("it is not a file")
            return path.read_bytes()

    def where(self, name: str) -> str:
        """Say where a file is, for messages."""
        return str(self.path / name)


class Zip:
    """The files in a zip archive."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, expected: str) -> None:
        """Refuse the archive if any name in it is unsafe."""
        self.path, self._archive, self._members = path, archive, {}
        for info in archive.infolist():
            # The upper half of these bits is the file's Unix mode.
            is_link = (info.external_attr >> 16) & 0o170000 == 0o120000
            _check(path, info.filename, is_link, info.file_size, expected)
            if not info.is_dir():
                self._members[_plain(info.filename)] = info

    def names(self) -> list[str]:
        """Return the names of all files, sorted, without hidden ones."""
        return _shown(self._members)

    def folders(self) -> list[str]:
        """Return the names of all folders that are listed as such, sorted, without hidden ones."""
        return _shown(_plain(info.filename) for info in self._archive.infolist() if info.is_dir())

    def read(self, name: str) -> bytes:
        """Return the content of one file."""
        with reading(self.where(name), "a file as it was packed"):
            return self._archive.read(self._members[name])

    def where(self, name: str) -> str:
        """Say where a file is, for messages."""
        return f"{self.path}, file {name}"


class Tar:
    """The files in a tar archive."""

    def __init__(self, path: Path, archive: tarfile.TarFile, expected: str) -> None:
        """Refuse the archive if any name in it is unsafe."""
        self.path, self._archive, self._members = path, archive, {}
        for member in archive:
            special = not (member.isfile() or member.isdir())
            _check(path, member.name, special, member.size, expected)
            if member.isfile():
                self._members[_plain(member.name)] = member

    def names(self) -> list[str]:
        """Return the names of all files, sorted, without hidden ones."""
        return _shown(self._members)

    def folders(self) -> list[str]:
        """Return the names of all folders that are listed as such, sorted, without hidden ones."""
        listed = (_plain(member.name) for member in self._archive.getmembers() if member.isdir())
        return _shown(listed)

    def read(self, name: str) -> bytes:
        """Return the content of one file."""
        member = self._members[name]
        with reading(self.where(name), "a file as it was packed"):
            file = self._archive.extractfile(member)
            content = file.read() if file else b""
            if len(content) != member.size:
                raise EOFError(f"{len(content)} of {member.size} bytes are there")
            return content

    def where(self, name: str) -> str:
        """Say where a file is, for messages."""
        return f"{self.path}, file {name}"


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names, sizes and times of the files in a folder."""
    digest = hashlib.sha256()
    if path.is_dir():
        source = Folder(path)
        digest.update("\n".join([*source.folders(), ""]).encode())
        for name in source.names():
            status = (path / name).stat()
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        return digest.hexdigest()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _check_end(archive: tarfile.TarFile) -> None:
    """A tar ends in zeros. Python's reader takes a cut or a broken header for the end as well."""
    file: Any = archive.fileobj
    file.seek(archive.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise EOFError(f"the archive is cut off or damaged after {archive.offset} bytes")
    while file.read(CHUNK):  # at its end gzip compares checksums
        pass


def _below(folder: Path, above: set[Path]) -> Iterator[tuple[Path, bool]]:
    """All files and folders, and which it is; no links that lead back to a folder above them."""
    for path in folder.iterdir():
        if _hidden(path.name):
            continue
        if not path.is_dir():
            yield path, False
        elif (real := path.resolve()) not in above:
            yield path, True
            yield from _below(path, above | {real})


def _shown(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name and not _hidden(name))


def _plain(name: str) -> str:
    """``a/b`` for ``./a/b`` and ``a/b/``: a packed ``.`` names its files like the former."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _hidden(name: str) -> bool:
    """What operating systems leave beside the data: ``.DS_Store``, ``__MACOSX/…``."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _check(path: Path, name: str, special: bool, size: int, expected: str) -> None:
    if problem := _problem(name, special, size):
        raise _unsafe(path, name, problem, expected)


def _problem(name: str, special: bool, size: int) -> str | None:
    parts = name.replace("\\", "/").split("/")
    if PurePosixPath(name).is_absolute() or parts[0] == "" or parts[0].endswith(":"):
        return "is an absolute path"
    if ".." in parts:
        return "leads out of the archive"
    if special:
        return "is a link or a device, not a file"
    if size > LARGEST:
        return f"says it has {size} bytes, more than the {LARGEST} that are read"
    return None


def _unsafe(path: Path, name: str, problem: str, expected: str) -> InnerLoopError:
    return refused(
        path,
        f"it holds {name!r}, which {problem}",
        expected,
        "the path of the dataset's own archive, which has no such entry",
    )
