"""CIFAR-10 (Krizhevsky 2009), for ordinary training."""

from __future__ import annotations

import codecs
import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop.data.archive import ENDINGS, Source, open_source
from innerloop.data.arguments import data_root, find_file
from innerloop.data.cache import Content, load_or_decode
from innerloop.data.refusals import reading

CLASSES = 10
FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
NAMES_FILE = "batches.meta"
EXPECTED = (
    "cifar-10-python.tar.gz (or .tgz, .tar, .zip), or its folder cifar-10-batches-py with "
    "data_batch_1 … 5"
)
EXPECTED_FILE = "a pickled dictionary with uint8 data [n, 3072] and n labels from 0 to 9"


class Labelled(NamedTuple):
    """Images with their classes."""

    images: Tensor
    """``[n, 3, 32, 32]``, uint8."""
    labels: Tensor
    """``[n]``, int64 from 0 to 9."""


class Cifar10(NamedTuple):
    """The two parts of CIFAR-10, and the names of its classes."""

    train: Labelled
    test: Labelled
    names: tuple[str, ...]


def cifar10(root: Path | str | None = None, *, device: torch.device | str = "cpu") -> Cifar10:
    """Read CIFAR-10.

    Reads ``cifar-10-python.tar.gz`` (or .tgz, .tar, .zip), or the unpacked
    ``cifar-10-batches-py``, in ``root`` (``$INNERLOOP_DATA``) or ``root/cifar10``. Each file may
    hold any number of images. The pickles in it are read without running code.
    """
    path = _find(data_root(root))
    content = load_or_decode("cifar10", [path], "", lambda: _decode(path))
    train, test = (
        Labelled(content[part]["images"].to(device), content[part]["labels"].to(device))
        for part in FILES
    )
    return Cifar10(train, test, tuple(content["names"]))


def _find(root: Path) -> Path:
    if root.is_file() or (root / "data_batch_1").exists():
        return root
    names = [*(f"cifar-10-python{ending}" for ending in ENDINGS), "cifar-10-batches-py"]
    write = "root=... with the folder that holds it, or get it with: innerloop data fetch cifar10"
    return find_file(root, ("cifar10", ""), names, EXPECTED, write)


def _decode(path: Path) -> Content:
    with open_source(path, EXPECTED) as source:
        files = {PurePosixPath(name).name: name for name in source.names}
        needed = [*FILES["train"], *FILES["test"], NAMES_FILE]
        if missing := [name for name in needed if name not in files]:
            raise source.unusable(f"it lacks {', '.join(missing)}")
        content: Content = {"names": _read_names(source, files[NAMES_FILE])}
        for part, names in FILES.items():
            batches = [_read_batch(source, files[name]) for name in names]
            content[part] = {
                "images": torch.cat([batch.images for batch in batches]),
                "labels": torch.cat([batch.labels for batch in batches]),
            }
        return content


def _read_batch(source: Source, name: str) -> Labelled:
    with reading(source.locate(name), EXPECTED_FILE):
        found = _load_pickle(source.read(name))
        pixels, labels = _as_tensor(found[b"data"]), found[b"labels"]
        if pixels.shape != (len(labels), 3 * 32 * 32):
            raise ValueError(f"it has data {list(pixels.shape)} for {len(labels)} labels")
        if not all(type(label) is int and 0 <= label < CLASSES for label in labels):
            raise ValueError("it has labels that are not numbers from 0 to 9")
        return Labelled(pixels.view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64))


def _as_tensor(array: _Record) -> Tensor:
    _, shape, kind, is_fortran, content = array.state
    if kind.arguments[0] not in ("u1", b"u1"):
        raise TypeError("its array is not of type uint8")
    if is_fortran:
        raise TypeError("its array is not laid out row by row")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)


def _read_names(source: Source, name: str) -> list[str]:
    with reading(source.locate(name), f"a pickled dictionary with {CLASSES} label_names"):
        names = _load_pickle(source.read(name))[b"label_names"]
        if len(names) != CLASSES:
            raise ValueError(f"it has {len(names)} label_names")
        return [n.decode() if isinstance(n, bytes) else str(n) for n in names]


# Pickles. ---------------------------------------------------------------------------------------
# A pickle is a program that may call anything by name. Only the names that describe an array in
# CIFAR's files are known here. They lead to a stand-in that records its arguments: numpy's own
# constructors trust the pickled state, and can be made to use raw bytes as pointers.


class _Record:
    """Stands in for an array or its element type."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: Any = ()

    def __setstate__(self, state: object) -> None:
        self.state = state


_KNOWN = {
    "numpy.core.multiarray._reconstruct": _Record,
    "numpy._core.multiarray._reconstruct": _Record,
    "numpy.ndarray": _Record,
    "numpy.dtype": _Record,
    "_codecs.encode": codecs.encode,  # how Python 3 writes bytes at protocol 2
}


class _Unpickler(pickle._Unpickler):  # in Python: the one in C would reserve any length it reads
    def find_class(self, module: str, name: str) -> Any:
        if (path := f"{module}.{name}") not in _KNOWN:
            raise pickle.UnpicklingError(f"it holds the name {path}, which could run code")
        return _KNOWN[path]


def _load_pickle(content: bytes) -> dict[bytes, Any]:
    """Return the dictionary in a pickle. Arrays are records, strings are bytes."""
    found = _Unpickler(io.BytesIO(content), fix_imports=False, encoding="bytes").load()
    if not isinstance(found, dict):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__}, not a dictionary")
    return found
