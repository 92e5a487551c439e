"""Omniglot (Lake et al. 2015): 1,623 handwritten characters, 20 drawings each."""

from __future__ import annotations

from pathlib import Path

import torch

from innerloop.data._archive import ENDINGS, Source, opened
from innerloop.data._cache import Content, cached
from innerloop.data._decode import decode, is_picture
from innerloop.data._locate import data_root, first_of
from innerloop.data._numbers import SEEDS, whole
from innerloop.data._refusal import refused
from innerloop.data._splits import repeated
from innerloop.data.images import Images, Splits
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
    parts are shuffled with ``seed`` and dealt out to train, val and test. With ``rotations``, the
    training characters turned by 90, 180 and 270 degrees are further training classes; use
    :meth:`Images.rotated` to do the same to the others.

    Returns pictures ``[n, 1, 28, 28]``.
    """
    paths = [_part(data_root(root), part) for part in PARTS]
    content = cached("omniglot", paths, f"size={SIZE}", lambda: _decoded(paths))
    pixels, names = content["pixels"], tuple(content["names"])
    images = Images(pixels, torch.arange(len(names) + 1) * DRAWINGS, names)
    sizes = [whole("splits", size) for size in splits]
    if len(sizes) != 3 or sum(sizes) > len(images):
        raise refused(
            paths[0].parent,
            f"both parts have {len(images)} characters, the splits {splits} need {sum(sizes)}",
            "all 1,623 characters, or three splits that sum to no more than there are",
            "root=... with the complete dataset, or splits=(...)",
        )
    generator = torch.Generator().manual_seed(whole("seed", seed, *SEEDS))
    order = torch.randperm(len(images), generator=generator)
    train, val, test = (images.select(part) for part in order[: sum(sizes)].split(sizes))
    return Splits(train.rotated() if rotations else train, val, test)


def _part(root: Path, part: str) -> Path:
    folders = (root / "omniglot", root / "omniglot" / "python", root)
    return first_of(
        (folder / f"{part}{ending}" for folder in folders for ending in (*ENDINGS, "")),
        root,
        f"Omniglot's {' and '.join(PARTS)}, as {', '.join(ENDINGS)} or unpacked",
        "the folder that holds them, or get them with: innerloop data fetch omniglot",
    )


def _decoded(paths: list[Path]) -> Content:
    places, pictures = [], []
    for path in paths:
        with opened(path, EXPECTED) as source:
            for character, files in _characters(source).items():
                places.append((character, path.name))
                pictures += [255 - decode(source, file, 1, SIZE) for file in files]
    if problem := repeated(places):
        raise refused(paths[0].parent, problem, EXPECTED, "root=... with Omniglot's own two parts")
    return {"pixels": torch.stack(pictures), "names": [character for character, _ in places]}


def _characters(source: Source) -> dict[str, list[str]]:
    """The drawings of every character, by ``alphabet/character``."""
    found: dict[str, list[str]] = {}
    for name in filter(is_picture, source.names()):
        parts = name.split("/")
        if len(parts) < 3:
            raise _wrong(source, f"the picture {name!r} belongs to no alphabet and character")
        found.setdefault("/".join(parts[-3:-1]), []).append(name)
    if not found:
        raise _wrong(source, "it holds no PNG pictures")
    for character, files in found.items():
        if len(files) != DRAWINGS:
            raise _wrong(source, f"{character} has {len(files)} drawings, not {DRAWINGS}")
    return found


def _wrong(source: Source, problem: str) -> InnerLoopError:
    return refused(source.path, problem, EXPECTED, "the path of the complete part of Omniglot")
