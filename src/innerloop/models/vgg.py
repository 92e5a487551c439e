"""The VGG variant of MAML++."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from innerloop.models.checks import check_counts, check_size
from innerloop.models.layers import batch_norm, conv, flatten


class VGG(nn.Module):
    """Four stages of convolution 3 × 3, batch norm, ReLU and max-pooling, then a linear layer.

    The net of MAML++ (Antoniou et al. 2019), with 64 filters for Omniglot and 48 for mini-ImageNet.
    Batch norms always use the statistics of the batch. Weights start Xavier uniform, biases zero.
    Convolutions have no bias, since batch norm would remove it.

    Args:
        in_channels: 1 for gray images, 3 for color.
        classes: the number of outputs.
        size: height and width of the images, at least 16.
        filters: channels of every stage.

    >>> import torch
    >>> VGG(in_channels=1, classes=5)(torch.rand(10, 1, 28, 28)).shape
    torch.Size([10, 5])
    """

    def __init__(self, in_channels: int, classes: int, size: int = 28, filters: int = 64) -> None:
        super().__init__()
        in_channels, classes, size, filters = check_counts(
            in_channels=in_channels, classes=classes, size=size, filters=filters
        )
        check_size(size, 16, "vgg")
        widths = [in_channels, *[filters] * 4]
        self.stages = nn.Sequential(*[_stage(n, m) for n, m in pairwise(widths)])
        self._features = filters * (size // 16) ** 2
        self.linear = nn.Linear(self._features, classes)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images. [batch, channel, size, size] -> [batch, classes]"""
        return self.linear(flatten(self.stages(x), self._features))


def _stage(channels: int, filters: int) -> nn.Sequential:
    return nn.Sequential(conv(channels, filters), batch_norm(filters), nn.ReLU(), nn.MaxPool2d(2))


def _initialize(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
