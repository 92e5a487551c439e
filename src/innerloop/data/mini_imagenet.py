"""mini-ImageNet (Vinyals et al. 2016), split as Ravi and Larochelle (2017) do."""

from __future__ import annotations

import csv
import io
from pathlib import Path, PurePosixPath

from innerloop.data.archive import ENDINGS, Source, open_source
from innerloop.data.arguments import data_root, find_file
from innerloop.data.images import Images, Splits
from innerloop.data.refusals import reading
from innerloop.data.splits import PARTS, Listing, decode_splits, find_overlap, load_splits

SIZE = 84
EXPECTED = "images/*.jpg beside train.csv, val.csv and test.csv with the columns filename and label"


def mini_imagenet(root: Path | str | None = None, *, seed: int = 0) -> Splits:
    """Read mini-ImageNet: 64 training, 16 validation and 20 test classes.

    Reads ``mini-imagenet.zip`` (or .tar.gz, .tgz, .tar), or the unpacked ``images`` and csv files,
    in ``root`` (``$INNERLOOP_DATA``) or ``root/mini-imagenet``. Images that are not 84 x 84 are
    resized (Lanczos). The split is the one in the csv files, so ``seed`` changes nothing.

    Returns images ``[n, 3, 84, 84]``.
    """
    path = _find(data_root(root))
    return load_splits("mini-imagenet", path, f"size={SIZE}", lambda: _decode(path))


def _find(root: Path) -> Path:
    if root.is_file():
        return root
    for place in (root / "mini-imagenet", root):
        if (place / "train.csv").exists():
            return place
    names = [f"mini-imagenet{ending}" for ending in ENDINGS]
    expected = f"mini-imagenet.zip (or .tar.gz, .tgz, .tar), or {EXPECTED}"
    write = "root=... with the folder that holds it"
    return find_file(root, ("mini-imagenet", ""), names, expected, write)


def _decode(path: Path) -> dict[str, Images]:
    with open_source(path, EXPECTED) as source:
        return decode_splits(source, _list_files(source), 3, SIZE)


def _list_files(source: Source) -> Listing:
    """List the images by split and class, as the csv files state them."""
    listing = {}
    for part in PARTS:
        tables = [name for name in source.names if PurePosixPath(name).name == f"{part}.csv"]
        if len(tables) != 1:
            raise source.unusable(f"it holds {len(tables)} files named {part}.csv, not one")
        listing[part] = _read_table(source, tables[0])
    _check_files(source, listing)
    return listing


def _read_table(source: Source, table: str) -> dict[str, list[str]]:
    images = PurePosixPath(table).parent / "images"
    by_class: dict[str, list[str]] = {}
    with reading(source.locate(table), EXPECTED):
        rows = csv.DictReader(io.StringIO(source.read(table).decode("utf-8-sig")))
        for row in rows:
            file, label = row.get("filename"), row.get("label")
            if not file or not label:
                problem = f"line {rows.line_num} of {table} lacks a filename or a label"
                raise source.unusable(problem)
            by_class.setdefault(label, []).append(str(images / file))
    if not by_class:
        raise source.unusable(f"{table} lists no images")
    return by_class


def _check_files(source: Source, listing: Listing) -> None:
    """Refuse missing images, and a class or an image that is listed twice."""
    present = set(source.names)
    places = []
    for part, by_class in listing.items():
        for label, files in by_class.items():
            places.append((f"class {label!r}", f"{part}.csv"))
            for file in files:
                if file not in present:
                    raise source.unusable(f"{file}, listed for class {label!r}, is missing")
                places.append((file, f"class {label!r} of {part}.csv"))
    if overlap := find_overlap(places):
        raise source.unusable(overlap)
