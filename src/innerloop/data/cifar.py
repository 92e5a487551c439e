"""CIFAR-10 (Krizhevsky 2009), for ordinary training."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.data._archive import ENDINGS, Source, opened
from innerloop.data._cache import Content, cached
from innerloop.data._locate import data_root, first_of
from innerloop.data._pickles import Array, load_pickle
from innerloop.data._refusal import reading, refused
from innerloop.errors import InnerLoopError

CLASSES = 10
FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
EXPECTED = (
    "cifar-10-python.tar.gz (or .tgz, .tar, .zip), or its folder cifar-10-batches-py with "
    "data_batch_1 … 5"
)
EXPECTED_FILE = "a pickled dictionary with uint8 data [n, 3072] and n labels from 0 to 9"


class Labelled(NamedTuple):
    """Pictures with their classes."""

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
    hold any number of pictures. The pickles in it are read without running any code of theirs.
    """
    path = _find(data_root(root))
    content = cached("cifar10", [path], "", lambda: _decoded(path))
    train, test = (
        Labelled(content[part]["images"].to(device), content[part]["labels"].to(device))
        for part in FILES
    )
    return Cifar10(train, test, tuple(content["names"]))


def _find(root: Path) -> Path:
    if root.is_file() or (root / "data_batch_1").exists():
        return root
    names = (*(f"cifar-10-python{ending}" for ending in ENDINGS), "cifar-10-batches-py")
    return first_of(
        (place / name for place in (root / "cifar10", root) for name in names),
        root,
        EXPECTED,
        "root=... with the folder that holds it, or get it with: innerloop data fetch cifar10",
    )


def _decoded(path: Path) -> Content:
    with opened(path, EXPECTED) as source:
        files = {PurePosixPath(name).name: name for name in source.names()}
        wanted = [*FILES["train"], *FILES["test"], "batches.meta"]
        if missing := [name for name in wanted if name not in files]:
            raise refused(path, f"it lacks {', '.join(missing)}", EXPECTED, "a complete CIFAR-10")
        content: Content = {
            part: _joined([_batch(source, files[name]) for name in names])
            for part, names in FILES.items()
        }
        return {**content, "names": _names(source, files["batches.meta"])}


def _joined(batches: list[Labelled]) -> dict[str, Tensor]:
    images, labels = zip(*batches, strict=True)
    return {"images": torch.cat(images), "labels": torch.cat(labels)}


def _batch(source: Source, name: str) -> Labelled:
    with reading(source.where(name), EXPECTED_FILE):
        found = load_pickle(source.read(name))
        data, labels = found.get(b"data"), found.get(b"labels")
        if not isinstance(data, Array) or not isinstance(labels, list):
            raise _wrong(source, name, "it has no array 'data' or no list 'labels'")
        if not all(type(label) is int and 0 <= label < CLASSES for label in labels):
            raise _wrong(source, name, "it has labels that are not numbers from 0 to 9")
        pixels = data.tensor()
        if pixels.shape != (len(labels), 3 * 32 * 32):
            shape = list(pixels.shape)
            raise _wrong(source, name, f"it has data {shape} for {len(labels)} labels")
        return Labelled(pixels.view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64))


def _names(source: Source, name: str) -> list[str]:
    with reading(source.where(name), "a pickled dictionary with 10 label_names"):
        names = load_pickle(source.read(name)).get(b"label_names")
        if not isinstance(names, list) or len(names) != CLASSES:
            raise _wrong(source, name, "it has no list of 10 'label_names'")
        return [n.decode() if isinstance(n, bytes) else str(n) for n in names]


def _wrong(source: Source, name: str, problem: str) -> InnerLoopError:
    return refused(source.where(name), problem, EXPECTED_FILE, "the path of CIFAR-10's own file")
