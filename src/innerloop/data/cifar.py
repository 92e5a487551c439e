"""CIFAR-10 (Krizhevsky 2009), for ordinary training."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.data.archive import ENDINGS, Source, open_source
from innerloop.data.cache import Content, load_or_decode
from innerloop.data.locate import data_root, find_file
from innerloop.data.pickles import Record, load_pickle
from innerloop.data.refusals import reading, unusable_file
from innerloop.errors import InnerLoopError

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
    return find_file(
        root,
        ("cifar10", ""),
        (*(f"cifar-10-python{ending}" for ending in ENDINGS), "cifar-10-batches-py"),
        EXPECTED,
        "root=... with the folder that holds it, or get it with: innerloop data fetch cifar10",
    )


def _decode(path: Path) -> Content:
    with open_source(path, EXPECTED) as source:
        files = {PurePosixPath(name).name: name for name in source.names}
        needed = [*FILES["train"], *FILES["test"], NAMES_FILE]
        if missing := [name for name in needed if name not in files]:
            problem = f"it lacks {', '.join(missing)}"
            raise unusable_file(path, problem, EXPECTED, "the path of a complete CIFAR-10")
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
        found = load_pickle(source.read(name))
        data, labels = found.get(b"data"), found.get(b"labels")
        if not isinstance(data, Record) or not isinstance(labels, list):
            raise _wrong_content(source, name, "it has no array 'data' or no list 'labels'")
        if not all(type(label) is int and 0 <= label < CLASSES for label in labels):
            raise _wrong_content(source, name, "it has labels that are not numbers from 0 to 9")
        pixels = _as_tensor(data)
        if pixels.shape != (len(labels), 3 * 32 * 32):
            problem = f"it has data {list(pixels.shape)} for {len(labels)} labels"
            raise _wrong_content(source, name, problem)
        return Labelled(pixels.view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64))


def _as_tensor(array: Record) -> Tensor:
    _, shape, kind, is_fortran, content = array.state
    if not isinstance(kind, Record) or kind.arguments[0] not in ("u1", b"u1"):
        raise TypeError("its array is not of type uint8")
    if is_fortran or not isinstance(content, bytes):
        raise TypeError("its array is not laid out row by row in bytes")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)


def _read_names(source: Source, name: str) -> list[str]:
    with reading(source.locate(name), "a pickled dictionary with 10 label_names"):
        names = load_pickle(source.read(name)).get(b"label_names")
        if not isinstance(names, list) or len(names) != CLASSES:
            raise _wrong_content(source, name, "it has no list of 10 'label_names'")
        return [n.decode() if isinstance(n, bytes) else str(n) for n in names]


def _wrong_content(source: Source, name: str, problem: str) -> InnerLoopError:
    write = "the path of CIFAR-10's own file"
    return unusable_file(source.locate(name), problem, EXPECTED_FILE, write)
