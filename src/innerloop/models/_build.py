"""Models by name."""

from __future__ import annotations

import difflib
import re
from functools import partial

import torch
from torch import nn

from innerloop.errors import InnerLoopError, four_part
from innerloop.models._layers import check_size, check_weights
from innerloop.models.densenet import DenseNet, DenseNetBC, check_dense
from innerloop.models.mlp import MLP
from innerloop.models.resnet import BLOCKS, ResNet
from innerloop.models.vgg import VGG

_GROWTH_AND_DEPTH = re.compile(r"densenet-bc-([0-9]{1,6})-([0-9]{1,6})")
NAMES = ("vgg", "resnet-4", "resnet-8", "resnet-12", "densenet-8", "densenet-bc-12-100", "mlp")


def build(
    name: str, *, in_channels: int, classes: int, size: int = 28, filters: int | None = None
) -> nn.Module:
    """A new model by its name, with random weights.

    Args:
        name: one of :data:`NAMES`, or ``densenet-bc-K-DEPTH`` with another growth rate and depth.
        in_channels: 1 for grey images, 3 for colour.
        classes: the number of outputs.
        size: height and width of the images.
        filters: how wide the model is; what it means and its default are told by each model.

    >>> build("resnet-8", in_channels=3, classes=5, size=84, filters=16).linear
    Linear(in_features=128, out_features=5, bias=True)
    >>> build("resnet8", in_channels=3, classes=5)
    Traceback (most recent call last):
    innerloop.errors.InnerLoopError: You asked for the model 'resnet8'. ...Write: 'resnet-8'.
    """
    check(name)
    if growth_and_depth := _GROWTH_AND_DEPTH.fullmatch(str(name)):
        growth, depth = (int(number) for number in growth_and_depth.groups())
        if filters is not None:
            raise InnerLoopError(_width_twice(name, filters))
        check_size(size, 4, name)  # its two poolings
        return DenseNetBC(growth, depth, classes, in_channels)
    shape = {"in_channels": in_channels, "classes": classes, "size": size}
    if filters is not None:
        shape["filters"] = filters
    make = {"vgg": VGG, "densenet-8": DenseNet, "mlp": MLP}.get(name)
    if make is None:
        make = partial(ResNet, layers=int(name.removeprefix("resnet-")) // BLOCKS)
    with torch.device("meta"):  # takes no memory, and no random numbers
        count = sum(p.numel() for p in make(**shape).parameters())
    what = ", ".join(f"{key}={value}" for key, value in shape.items())
    check_weights(count, f"{name} with {what}", "filters=64")
    return make(**shape)


def check(name: str) -> None:
    """Refuse a name that no model has, and a DenseNet-BC that cannot be, before any work."""
    if growth_and_depth := _GROWTH_AND_DEPTH.fullmatch(str(name)):
        check_dense(*map(int, growth_and_depth.groups()))
    elif name not in NAMES:
        raise InnerLoopError(_unknown(name))


def _unknown(name: object) -> str:
    wrote = str(name).lower()
    likely = [known for known in NAMES if known.startswith(wrote)] or NAMES
    nearest = difflib.get_close_matches(wrote, likely, n=1, cutoff=0)[0]
    return four_part(
        f"You asked for the model {name!r}.",
        f"one of {', '.join(NAMES)}.",
        "models are built by these names only.",
        f"{nearest!r}.",
    )


def _width_twice(name: str, filters: int) -> str:
    return four_part(
        f"You gave filters={filters!r} to {name}.",
        "no filters.",
        "the name says how wide it is.",
        f"the growth rate into the name: 'densenet-bc-{filters}-100'.",
    )
