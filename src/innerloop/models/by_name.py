"""Builds models by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from innerloop.errors import InnerLoopError, refusal
from innerloop.models.checks import check_size
from innerloop.models.densenet import DenseNet, DenseNetBC
from innerloop.models.mlp import MLP
from innerloop.models.resnet import ResNet
from innerloop.models.vgg import VGG

_MODELS: dict[str, Callable[..., nn.Module]] = {
    "vgg": VGG,
    "resnet-4": partial(ResNet, layers=1),
    "resnet-8": partial(ResNet, layers=2),
    "resnet-12": partial(ResNet, layers=3),
    "densenet-8": DenseNet,
    "densenet-bc-12-100": DenseNetBC,
    "mlp": MLP,
}
NAMES = tuple(_MODELS)
MOST_WEIGHTS = 10**8  # DenseNet-BC(40, 190), the largest of Huang et al., has 26 million

_GROWTH_AND_DEPTH = re.compile(r"densenet-bc-([0-9]{1,6})-([0-9]{1,6})")


def build(
    name: str, *, in_channels: int, classes: int, size: int = 28, filters: int | None = None
) -> nn.Module:
    """Build a model by its name, with random weights.

    Args:
        name: one of :data:`NAMES`, or ``densenet-bc-K-DEPTH`` with another growth rate and depth.
        in_channels: 1 for gray images, 3 for color.
        classes: the number of outputs.
        size: height and width of the images.
        filters: the width of the model; each model documents its meaning and its default.

    >>> build("resnet-8", in_channels=3, classes=5, size=84, filters=16).linear
    Linear(in_features=128, out_features=5, bias=True)
    >>> build("resnet8", in_channels=3, classes=5)
    Traceback (most recent call last):
    innerloop.errors.InnerLoopError: You asked for the model 'resnet8'. ...Write: 'resnet-8'.
    """
    constructor = _constructor(name)
    shape = {"in_channels": in_channels, "classes": classes}
    if _GROWTH_AND_DEPTH.fullmatch(name):
        if filters is not None:
            raise _filters_beside_growth(name, filters)
        check_size(size, 4, name)  # its two poolings
    else:
        shape["size"] = size
        if filters is not None:
            shape["filters"] = filters
    _check_weights(name, partial(constructor, **shape), shape)
    return constructor(**shape)


def check(name: str) -> None:
    """Refuse an unknown name, and a DenseNet-BC that cannot be built, before any work."""
    constructor = _constructor(name)
    if _GROWTH_AND_DEPTH.fullmatch(name):
        _check_weights(name, constructor, {})


def _constructor(name: str) -> Callable[..., nn.Module]:
    if growth_and_depth := _GROWTH_AND_DEPTH.fullmatch(str(name)):
        growth, depth = map(int, growth_and_depth.groups())
        return partial(DenseNetBC, growth, depth)
    if str(name) not in NAMES:
        raise _unknown_name(name)
    return _MODELS[name]


def _check_weights(name: str, build: Callable[[], nn.Module], shape: dict[str, int]) -> None:
    """Refuse a model that is too large, before it fills the memory."""
    with torch.device("meta"):  # takes no memory, and no random numbers
        count = sum(p.numel() for p in build().parameters())
    if count > MOST_WEIGHTS:
        raise _too_large(name, shape, count)


def _unknown_name(name: object) -> InnerLoopError:
    wrote = str(name).lower()
    likely = [known for known in NAMES if known.startswith(wrote)] or NAMES
    nearest = difflib.get_close_matches(wrote, likely, n=1, cutoff=0)[0]
    return refusal(
        f"You asked for the model {name!r}.",
        f"one of {', '.join(NAMES)}.",
        "models are built by these names only.",
        f"{nearest!r}.",
    )


def _filters_beside_growth(name: str, filters: int) -> InnerLoopError:
    return refusal(
        f"You gave filters={filters!r} to {name}.",
        "no filters.",
        "the name already says how wide the model is.",
        f"the growth rate into the name: 'densenet-bc-{filters}-100'.",
    )


def _too_large(name: str, shape: dict[str, int], count: int) -> InnerLoopError:
    given = "".join(f", {setting}={value}" for setting, value in shape.items())
    smaller = "filters=64" if "filters" in shape else "'densenet-bc-12-100'"
    return refusal(
        f"You asked for {name}{given}, which has {count:.1e} weights.",
        f"at most {MOST_WEIGHTS:.0e}.",
        "weights, their gradients and the optimizer's state have to be in memory.",
        f"smaller numbers, for example {smaller}.",
    )
