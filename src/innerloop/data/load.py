"""Loads few-shot datasets by name."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from innerloop.data.folder import folder
from innerloop.data.glyphs import glyphs
from innerloop.data.images import Splits
from innerloop.data.locate import data_root
from innerloop.data.mini_imagenet import mini_imagenet
from innerloop.data.omniglot import omniglot
from innerloop.data.refusals import refusal
from innerloop.errors import InnerLoopError

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
        raise _unknown_dataset(name)
    reader = _READERS[name]
    known = [setting for setting in signature(reader).parameters if setting not in ("root", "seed")]
    if unknown := [setting for setting in settings if setting not in known]:
        raise _unknown_settings(name, unknown, known)
    if name == "glyphs":
        return glyphs(seed=seed, **settings).to(device)
    if name == "cifar-fs":
        settings = {"size": 32, **settings}
        inside = data_root(root) / "cifar-fs"
        root = inside if inside.exists() else root
    return reader(root, seed=seed, **settings).to(device)


def _unknown_dataset(name: object) -> InnerLoopError:
    return refusal(
        f"You asked for the dataset {name!r}.",
        f"one of {', '.join(NAMES)}.",
        "these are the few-shot datasets that innerloop reads.",
        "load('glyphs'), or load('folder', root) for your own images.",
    )


def _unknown_settings(name: str, unknown: list[str], known: list[str]) -> InnerLoopError:
    return refusal(
        f"You gave {', '.join(unknown)} to the dataset {name!r}.",
        f"nothing further, or one of {', '.join(known)}." if known else "nothing further.",
        "the dataset has no setting of that name, so it would have no effect.",
        f"load({name!r}) without {', '.join(unknown)}.",
    )
