"""Densely connected nets (Huang et al. 2017): one for few-shot learning, and DenseNet-BC."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from innerloop.errors import InnerLoopError, refusal
from innerloop.models.checks import check_counts, check_size
from innerloop.models.layers import batch_norm, conv, initialize_he

BLOCKS = 4
LAYERS = 2
DEEPEST = 1000  # the deepest of Huang et al. has 250

Norm = Callable[[int], nn.Module]


class DenseNet(nn.Module):
    """Four dense blocks of two layers: the paper's densenet-8.

    A layer is batch norm, ReLU, convolution 3 × 3; its output is appended to its input. Between
    blocks, batch norm, ReLU, a 1 × 1 convolution to half the channels and mean-pooling. There is
    no convolution before the first block. Batch norms always use the statistics of the batch.
    Weights start as in He et al. (2015), which Huang et al. use.

    Args:
        in_channels: 1 for gray images, 3 for color.
        classes: the number of outputs.
        size: height and width of the images, at least 8; any larger ones work too.
        filters: the growth rate, channels that each layer adds.

    >>> import torch
    >>> DenseNet(in_channels=1, classes=5)(torch.rand(10, 1, 28, 28)).shape
    torch.Size([10, 5])
    """

    def __init__(self, in_channels: int, classes: int, size: int = 28, filters: int = 32) -> None:
        super().__init__()
        in_channels, classes, filters = check_counts(
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
                parts.append(_Layer(_norm_relu_conv(batch_norm, channels, filters, 3)))
                channels += filters
        self.features = nn.Sequential(*parts, batch_norm(channels), nn.ReLU())
        self.linear = nn.Linear(channels, classes)
        initialize_he(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images. [batch, channel, height, width] -> [batch, classes]"""
        return self.linear(self.features(x).mean((2, 3)))


class DenseNetBC(nn.Module):
    """DenseNet-BC for images of 32 × 32, as Huang et al. train it on CIFAR.

    Three blocks of ``(depth - 4) / 6`` layers with bottlenecks (a 1 × 1 convolution to four times
    the growth rate), halved channels between blocks, no dropout. An ordinary model: batch norms
    keep running statistics and use them in evaluation mode. Weights start as He et al. (2015).

    Args:
        growth: channels that each layer adds, k in the paper.
        depth: 4 more than a multiple of 6.
        classes: the number of outputs.
        in_channels: 3 for color images.

    >>> model = DenseNetBC(growth=12, depth=100)
    >>> len(list(model.parameters())), sum(p.numel() for p in model.parameters())
    (299, 769162)
    """

    def __init__(
        self, growth: int = 12, depth: int = 100, classes: int = 10, in_channels: int = 3
    ) -> None:
        super().__init__()
        growth, depth, classes, in_channels = check_counts(
            growth=growth, depth=depth, classes=classes, in_channels=in_channels
        )
        layers = _layers_per_block(depth)
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
        initialize_he(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images. [batch, channel, height, width] -> [batch, classes]"""
        return self.linear(self.features(x).mean((2, 3)))


def _layers_per_block(depth: int) -> int:
    if depth % 6 != 4 or not 4 < depth <= DEEPEST:
        raise _wrong_depth(depth)
    return (depth - 4) // 6


def _wrong_depth(depth: int) -> InnerLoopError:
    return refusal(
        f"You gave depth={depth!r} to DenseNet-BC.",
        f"4 more than a multiple of 6: 10, 16, …, 40, 100, 190, 250, at most {DEEPEST}.",
        "three blocks share the layers evenly, two convolutions in each layer.",
        "depth=100, or depth=10 for the smallest.",
    )


class _Layer(nn.Module):
    """Appends the output of a layer to its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layer(x)], 1)


def _norm_relu_conv(norm: Norm, channels: int, out: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(norm(channels), nn.ReLU(), conv(channels, out, kernel))


def _bottleneck(channels: int, growth: int) -> nn.Sequential:
    wide = 4 * growth
    narrow = _norm_relu_conv(nn.BatchNorm2d, wide, growth, 3)
    return nn.Sequential(_norm_relu_conv(nn.BatchNorm2d, channels, wide, 1), narrow)


def _transition(norm: Norm, channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(_norm_relu_conv(norm, channels, out, 1), nn.AvgPool2d(2))
