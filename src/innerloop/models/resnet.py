"""Small residual nets, as in TADAM."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from innerloop.models.checks import check_counts, check_size
from innerloop.models.layers import batch_norm, conv, initialize_he

BLOCKS = 4


class ResNet(nn.Module):
    """Four residual blocks, each ending in a max-pooling, then a mean and a linear layer.

    The paper's resnet-4, -8 and -12 have 1, 2 and 3 convolutions in each block and, as TADAM
    (Oreshkin et al. 2018), no convolution before the first block. The paper does not state their
    widths: here the channels double from block to block as in TADAM and in torchvision, and the
    shortcut of a block is a 1 × 1 convolution with batch norm. Batch norms always use the
    statistics of the batch. Weights start as in He et al. (2015), with which ResNet was published,
    and the batch norms of the shortcuts start at zero, so that a block starts as its convolutions
    alone: few-shot learning is faster from there (docs/few_shot.md).

    Args:
        in_channels: 1 for gray images, 3 for color.
        classes: the number of outputs.
        layers: convolutions in each block.
        size: height and width of the images, at least 16; any larger ones work too.
        filters: channels of the first block.

    >>> import torch
    >>> ResNet(in_channels=1, classes=5, layers=1, filters=8)(torch.rand(10, 1, 28, 28)).shape
    torch.Size([10, 5])
    """

    def __init__(
        self, in_channels: int, classes: int, layers: int, size: int = 28, filters: int = 64
    ) -> None:
        super().__init__()
        in_channels, classes, layers, filters = check_counts(
            in_channels=in_channels, classes=classes, layers=layers, filters=filters
        )
        check_size(size, 2**BLOCKS, f"resnet-{BLOCKS * layers}")
        widths = [in_channels, *[filters * 2**i for i in range(BLOCKS)]]
        self.blocks = nn.Sequential(*[_Block(n, m, layers) for n, m in pairwise(widths)])
        self.linear = nn.Linear(widths[-1], classes)
        initialize_he(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images. [batch, channel, height, width] -> [batch, classes]"""
        return self.linear(self.blocks(x).mean((2, 3)))


class _Block(nn.Module):
    """``pool(relu(layers(x) + shortcut(x)))``."""

    def __init__(self, channels: int, filters: int, layers: int) -> None:
        super().__init__()
        parts: list[nn.Module] = [conv(channels, filters), batch_norm(filters)]
        for _ in range(layers - 1):
            parts += [nn.ReLU(), conv(filters, filters), batch_norm(filters)]
        self.layers = nn.Sequential(*parts)
        norm = batch_norm(filters)
        nn.init.zeros_(norm.weight)
        self.shortcut = nn.Sequential(conv(channels, filters, kernel=1), norm)
        self.finish = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.layers(x) + self.shortcut(x))
