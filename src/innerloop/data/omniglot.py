"""Omniglot (Lake et al. 2015): 1,623 handwritten characters, 20 drawings each."""

from __future__ import annotations

from pathlib import Path

import torch

from innerloop.data.archive import ENDINGS, Source, open_source
from innerloop.data.arguments import SEEDS, check_integer, data_root, find_file
from innerloop.data.cache import Content, load_or_decode
from innerloop.data.decode import decode, is_image
from innerloop.data.images import Images, Splits
from innerloop.data.refusals import unusable_file
from innerloop.data.splits import find_overlap
from innerloop.errors import InnerLoopError

SIZE = 28
DRAWINGS = 20
PARTS = ("images_background", "images_evaluation")
EXPECTED = (
    "a zip, tar or folder with alphabet/character/drawing.png, as in Omniglot's python/ folder"
)


def omniglot(
    root: Path | str | None = None,
    *,
    seed: int = 0,
    rotations: bool = True,
    splits: tuple[int, int, int] = (1150, 50, 423),
) -> Splits:
    """Read Omniglot as MAML++ does.

    Reads ``images_background`` and ``images_evaluation``, as zips, tars or unpacked, in ``root``
    (``$INNERLOOP_DATA``), ``root/omniglot`` or ``root/omniglot/python``. Drawings are reduced from
    105 x 105 to 28 x 28 (Lanczos) and inverted, so that strokes are bright. The characters of both
    parts are shuffled with ``seed`` and divided into train, val and test. With ``rotations``, the
    training characters turned by 90, 180 and 270 degrees are further training classes; use
    :meth:`Images.rotated` to do the same to the others.

    Returns images ``[n, 1, 28, 28]``.
    """
    paths = [_find(data_root(root), part) for part in PARTS]
    content = load_or_decode("omniglot", paths, f"size={SIZE}", lambda: _decode(paths))
    names = tuple(content["names"])
    images = Images(content["pixels"], torch.arange(len(names) + 1) * DRAWINGS, names)
    sizes = [check_integer("splits", size) for size in splits]
    if len(sizes) != 3 or sum(sizes) > len(images):
        raise _wrong_splits(paths[0].parent, len(images), sizes)
    generator = torch.Generator().manual_seed(check_integer("seed", seed, *SEEDS))
    order = torch.randperm(len(images), generator=generator)
    train, val, test = (images.select(part) for part in order[: sum(sizes)].split(sizes))
    return Splits(train.rotated() if rotations else train, val, test)


def _find(root: Path, part: str) -> Path:
    names = [f"{part}{ending}" for ending in (*ENDINGS, "")]
    expected = f"Omniglot's {' and '.join(PARTS)}, as {', '.join(ENDINGS)} or unpacked"
    write = "the folder that holds them, or get them with: innerloop data fetch omniglot"
    return find_file(root, ("omniglot", "omniglot/python", ""), names, expected, write)


def _decode(paths: list[Path]) -> Content:
    places, images = [], []
    for path in paths:
        with open_source(path, EXPECTED) as source:
            for character, files in _list_characters(source).items():
                places.append((character, path.name))
                images += [255 - decode(source, file, 1, SIZE) for file in files]
    if overlap := find_overlap(places):
        raise unusable_file(paths[0].parent, overlap, EXPECTED)
    return {"pixels": torch.stack(images), "names": [character for character, _ in places]}


def _list_characters(source: Source) -> dict[str, list[str]]:
    """List the drawings of every character, by ``alphabet/character``."""
    found: dict[str, list[str]] = {}
    for name in filter(is_image, source.names):
        parts = name.split("/")
        if len(parts) < 3:
            raise source.unusable(f"the image {name!r} belongs to no alphabet and character")
        found.setdefault("/".join(parts[-3:-1]), []).append(name)
    if not found:
        raise source.unusable("it holds no PNG images")
    for character, files in found.items():
        if len(files) != DRAWINGS:
            raise source.unusable(f"{character} has {len(files)} drawings, not {DRAWINGS}")
    return found


def _wrong_splits(folder: Path, characters: int, sizes: list[int]) -> InnerLoopError:
    return unusable_file(
        folder,
        f"both parts have {characters} characters, splits={tuple(sizes)} needs {sum(sizes)}",
        "all 1,623 characters, or three splits that sum to no more than there are",
        "root=... with the complete dataset, or splits=(...)",
    )
