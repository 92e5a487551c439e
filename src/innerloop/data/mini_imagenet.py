"""mini-ImageNet (Vinyals et al. 2016), split as Ravi and Larochelle (2017) do."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from innerloop.data._archive import ENDINGS, Source, opened
from innerloop.data._cache import Content, cached
from innerloop.data._decode import decode
from innerloop.data._locate import data_root, first_of
from innerloop.data._refusal import reading, refused
from innerloop.data._splits import PARTS, packed, repeated, unpacked
from innerloop.data.images import Images, Splits
from innerloop.errors import InnerLoopError

SIZE = 84
EXPECTED = "images/*.jpg beside train.csv, val.csv and test.csv with the columns filename and label"

Listings = dict[str, tuple[str, dict[str, list[str]]]]


def mini_imagenet(root: Path | str | None = None, *, seed: int = 0) -> Splits:
    """Read mini-ImageNet: 64 training, 16 validation and 20 test classes.

    Reads ``mini-imagenet.zip`` (or .tar.gz, .tgz, .tar), or the unpacked ``images`` and csv files,
    in ``root`` (``$INNERLOOP_DATA``) or ``root/mini-imagenet``. Pictures that are not 84 x 84 are
    resized (Lanczos). The split is the one in the csv files, so ``seed`` changes nothing.

    Returns pictures ``[n, 3, 84, 84]``.
    """
    path = _find(data_root(root))
    return unpacked(cached("mini-imagenet", [path], f"size={SIZE}", lambda: _decoded(path)))


def _find(root: Path) -> Path:
    if root.is_file():
        return root
    for place in (root / "mini-imagenet", root):
        if (place / "train.csv").exists():
            return place
    return first_of(
        (
            place / f"mini-imagenet{ending}"
            for place in (root / "mini-imagenet", root)
            for ending in ENDINGS
        ),
        root,
        f"mini-imagenet.zip (or .tar.gz, .tgz, .tar), or {EXPECTED}",
        "root=... with the folder that holds it",
    )


def _decoded(path: Path) -> Content:
    with opened(path, EXPECTED) as source:
        listings = _listings(source)
        known = set(source.names())
        return packed(
            {part: _images(source, known, *listing) for part, listing in listings.items()}
        )


def _listings(source: Source) -> Listings:
    """For each split: the folder of its csv file, and the pictures of each class."""
    names = source.names()
    listings: Listings = {}
    for part in PARTS:
        found = [name for name in names if PurePosixPath(name).name == f"{part}.csv"]
        if len(found) != 1:
            raise _wrong(source, f"it holds {len(found)} files named {part}.csv, not one")
        by_class = _rows(source, found[0])
        listings[part] = (found[0].removesuffix(f"{part}.csv"), by_class)
    if problem := repeated(_places(listings)):
        raise _wrong(source, problem)
    return listings


def _places(listings: Listings) -> Iterator[tuple[str, str]]:
    """Every class with its csv file, and every picture with its class."""
    for part, (folder, by_class) in listings.items():
        for label, files in by_class.items():
            yield f"class {label!r}", f"{part}.csv"
            for file in files:
                yield f"{folder}images/{file}", f"class {label!r} of {part}.csv"


def _rows(source: Source, name: str) -> dict[str, list[str]]:
    with reading(source.where(name), EXPECTED):
        rows = csv.DictReader(io.StringIO(source.read(name).decode("utf-8-sig")))
        by_class: dict[str, list[str]] = {}
        for row in rows:
            file, label = row.get("filename"), row.get("label")
            if not file or not label:
                raise _wrong(source, f"line {rows.line_num} of {name} lacks a filename or a label")
            by_class.setdefault(label, []).append(file)
    if not by_class:
        raise _wrong(source, f"{name} lists no pictures")
    return by_class


def _images(source: Source, known: set[str], folder: str, by_class: dict[str, list[str]]) -> Images:
    for label, files in by_class.items():
        for file in files:
            if f"{folder}images/{file}" not in known:
                raise _wrong(source, f"images/{file}, listed for class {label!r}, is missing")
    return Images.stack(
        {
            label: [decode(source, f"{folder}images/{file}", 3, SIZE) for file in files]
            for label, files in by_class.items()
        }
    )


def _wrong(source: Source, problem: str) -> InnerLoopError:
    return refused(source.path, problem, EXPECTED, "the path of a complete mini-ImageNet")
