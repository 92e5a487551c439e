"""Densely connected nets (Huang et al. 2017): one for few-shot learning, and DenseNet-BC."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from innerloop.errors import InnerLoopError, four_part
from innerloop.models._layers import (
    average,
    batch_norm,
    check_size,
    check_weights,
    conv,
    counts,
    he_start,
)

BLOCKS = 4
LAYERS = 2

Norm = Callable[[int], nn.Module]


class DenseNet(nn.Module):
    """Four dense blocks of two layers: the paper's densenet-8.

    A layer is batch norm, ReLU, convolution 3 × 3; its output is appended to its input. Between
    blocks, batch norm, ReLU, a 1 × 1 convolution to half the channels and mean-pooling. There is
    no convolution before the first block. Batch norm goes by the batch always. Weights start as
    He et al. (2015), which is what Huang et al. use.

    Args:
        in_channels: 1 for grey images, 3 for colour.
        classes: the number of outputs.
        size: height and width of the images, at least 8; any larger ones work too.
        filters: the growth rate, channels that each layer adds.

    >>> import torch
    >>> DenseNet(in_channels=1, classes=5)(torch.rand(10, 1, 28, 28)).shape
    torch.Size([10, 5])
    """

    def __init__(self, in_channels: int, classes: int, size: int = 28, filters: int = 32) -> None:
        super().__init__()
        in_channels, classes, filters = counts(
            in_channels=in_channels, classes=classes, filters=filters
        )
        check_size(size, 2 ** (BLOCKS - 1), "densenet-8")
        parts: list[nn.Module] = []
        channels = in_channels
        for block in range(BLOCKS):
            if block:
                parts.append(_transition(batch_norm, channels, channels // 2))
                channels //= 2
            for _ in range(LAYERS):
                parts.append(_Layer(_activated(batch_norm, channels, filters, 3)))
                channels += filters
        self.features = nn.Sequential(*parts, batch_norm(channels), nn.ReLU())
        self.linear = nn.Linear(channels, classes)
        he_start(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images. [batch, channel, height, width] -> [batch, classes]"""
        return self.linear(average(self.features(x)))


class DenseNetBC(nn.Module):
    """DenseNet-BC for images of 32 × 32, as Huang et al. train it on CIFAR.

    Three blocks of ``(depth - 4) / 6`` layers with bottlenecks (a 1 × 1 convolution to four times
    the growth rate), halved channels between blocks, no dropout. An ordinary model: batch norms
    keep running statistics and use them in evaluation mode. Weights start as He et al. (2015).

    Args:
        growth: channels that each layer adds, k in the paper.
        depth: 4 more than a multiple of 6.
        classes: the number of outputs.
        in_channels: 3 for colour images.

    >>> model = DenseNetBC(growth=12, depth=100)
    >>> len(list(model.parameters())), sum(p.numel() for p in model.parameters())
    (299, 769162)
    """

    def __init__(
        self, growth: int = 12, depth: int = 100, classes: int = 10, in_channels: int = 3
    ) -> None:
        super().__init__()
        growth, depth, classes, in_channels = counts(
            growth=growth, depth=depth, classes=classes, in_channels=in_channels
        )
        layers = check_dense(growth, depth)
        channels = 2 * growth
        parts: list[nn.Module] = [conv(in_channels, channels)]
        for block in range(3):
            if block:
                parts.append(_transition(nn.BatchNorm2d, channels, channels // 2))
                channels //= 2
            for _ in range(layers):
                parts.append(_Layer(_bottleneck(channels, growth)))
                channels += growth
        self.features = nn.Sequential(*parts, nn.BatchNorm2d(channels), nn.ReLU())
        self.linear = nn.Linear(channels, classes)
        he_start(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images. [batch, channel, height, width] -> [batch, classes]"""
        return self.linear(average(self.features(x)))


def check_dense(growth: int, depth: int) -> int:
    """The layers of a block; refuses what DenseNet-BC cannot be, or is too large to be built."""
    growth, depth = counts(growth=growth, depth=depth)
    layers = _layers_per_block(depth)
    what = f"DenseNet-BC with growth={growth} and depth={depth}"
    check_weights(_weights(growth, layers), what, "growth=12 and depth=100")
    return layers


def _weights(growth: int, layers: int) -> int:
    """In the convolutions of the three blocks, nearly all that there are."""
    total, channels = 0, 2 * growth
    for block in range(3):
        if block:
            channels //= 2
            total += 2 * channels * channels
        # Of each layer, 1 x 1 from all channels to 4 growth, then 3 x 3 to growth.
        total += 4 * growth * (layers * channels + growth * layers * (layers - 1) // 2)
        total += 36 * growth * growth * layers
        channels += growth * layers
    return total


def _layers_per_block(depth: int) -> int:
    if depth > 4 and depth % 6 == 4:
        return (depth - 4) // 6
    raise InnerLoopError(
        four_part(
            f"You gave depth={depth!r} to DenseNet-BC.",
            "4 more than a multiple of 6: 10, 16, …, 40, 100, 190, 250.",
            "three blocks share the layers evenly, two convolutions in each layer.",
            "depth=100, or depth=10 for the smallest.",
        )
    )


class _Layer(nn.Module):
    """Appends what the layer computes to what it was given."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layer(x)], 1)


def _activated(norm: Norm, channels: int, out: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(norm(channels), nn.ReLU(), conv(channels, out, kernel))


def _bottleneck(channels: int, growth: int) -> nn.Sequential:
    wide = 4 * growth
    narrow = _activated(nn.BatchNorm2d, wide, growth, 3)
    return nn.Sequential(_activated(nn.BatchNorm2d, channels, wide, 1), narrow)


def _transition(norm: Norm, channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(_activated(norm, channels, out, 1), nn.AvgPool2d(2))
