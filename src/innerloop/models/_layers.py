"""Layers that several models are made of, and how their weights start."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, nn

from innerloop.errors import InnerLoopError, four_part

MOST = 10**8  # weights; DenseNet-BC(40, 190), the largest of Huang et al., has 26 million


def conv(channels: int, out: int, kernel: int = 3) -> nn.Conv2d:
    """A convolution that keeps height and width; without bias, since a batch norm follows."""
    return nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False)


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """Batch norm by the statistics of the batch always, in evaluation mode too.

    "Batch normalization in training mode everywhere" (section 5.2): a task has no statistics but
    those of its own images.
    """
    return nn.BatchNorm2d(channels, track_running_stats=False)


def he_start(model: nn.Module) -> None:
    """Weights as He et al. 2015: normal, variance 2 / fan-out; biases of linear layers zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def average(x: Tensor) -> Tensor:
    """The mean over height and width. [batch, channel]"""
    return x.mean((2, 3))


def counts(**given: Any) -> list[int]:
    """Return positive whole numbers as ints, or refuse the first that is none."""
    return [_count(name, value) for name, value in given.items()]


def _count(name: str, value: Any) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise InnerLoopError(
            four_part(
                f"You gave {name}={value!r}.",
                "a whole number, at least 1.",
                "it says how large a layer is.",
                f"for example {name}=5.",
            )
        )
    return number


def check_size(size: Any, least: int, model: str) -> None:
    """Refuse images that the model's pooling would shrink to nothing."""
    (number,) = counts(size=size)
    if number < least:
        raise InnerLoopError(
            four_part(
                f"You gave size={size} to {model}.",
                f"images of at least {least} by {least} pixels.",
                "each of its poolings halves them, and nothing would be left.",
                f"size={least} or more, or a model without pooling: mlp.",
            )
        )


def check_weights(count: int, what: str, smaller: str) -> None:
    """Refuse a model that is too large, before it fills the memory."""
    if count > MOST:
        raise InnerLoopError(
            four_part(
                f"You asked for {what}, which has {count:.1e} weights.",
                f"at most {MOST:.0e}.",
                "weights, their gradients and the optimizer's state have to be in memory.",
                f"smaller numbers, for example {smaller}.",
            )
        )


def flattened(x: Tensor, features: int) -> Tensor:
    """One row per image; refuse images that do not leave so many features each."""
    rows = x.flatten(1)
    if rows.shape[1] != features:
        raise InnerLoopError(
            four_part(
                f"You gave images that leave {rows.shape[1]} features for the linear layer.",
                f"images that leave {features}: square, of the size the model was built for.",
                "the layer has a weight for each of them.",
                "build(..., size=...) with the images' height and width, or a resnet, which takes "
                "any.",
            )
        )
    return rows
