"""Loads few-shot datasets by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from innerloop.data.arguments import data_root
from innerloop.data.folder import folder
from innerloop.data.glyphs import glyphs
from innerloop.data.images import Splits
from innerloop.data.mini_imagenet import mini_imagenet
from innerloop.data.omniglot import omniglot
from innerloop.data.refusals import refusal

_READERS: dict[str, Callable[..., Splits]] = {
    "glyphs": glyphs,
    "omniglot": omniglot,
    "mini-imagenet": mini_imagenet,
    "cifar-fs": folder,
    "folder": folder,
}
NAMES = tuple(_READERS)


def load(
    name: str,
    root: Path | str | None = None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **settings: Any,
) -> Splits:
    """Load the three splits of a dataset: ``glyphs``, ``omniglot``, ``mini-imagenet``, ``folder``.

    ``root`` is the folder with the data (``$INNERLOOP_DATA`` if not given; glyphs needs none);
    ``seed`` draws the glyphs or divides Omniglot's characters into splits. Further settings are
    those of the functions :func:`glyphs`, :func:`omniglot`, :func:`mini_imagenet` and
    :func:`folder` (``cifar-fs`` is ``folder`` at 32 x 32, in ``root/cifar-fs`` if there is one).

    Example:
        >>> from innerloop.data import load
        >>> splits = load("glyphs", seed=1, train=10, val=5, test=5)
        >>> len(splits.train), list(splits.train.pixels.shape)
        (10, [200, 1, 28, 28])
    """
    if name not in NAMES:
        raise refusal(
            f"You asked for the dataset {name!r}.",
            f"one of {', '.join(NAMES)}.",
            "these are the few-shot datasets that innerloop reads.",
            "load('glyphs'), or load('folder', root) for your own images.",
        )
    if name == "glyphs":
        return glyphs(seed=seed, **settings).to(device)
    if name == "cifar-fs":
        settings = {"size": 32, **settings}
        inside = data_root(root) / "cifar-fs"
        root = inside if inside.exists() else root
    return _READERS[name](root, seed=seed, **settings).to(device)
