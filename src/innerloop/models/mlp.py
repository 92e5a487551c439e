"""The fully connected net of MAML's Omniglot experiment."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from innerloop.models.checks import check_counts
from innerloop.models.layers import flatten

# TensorFlow's truncated normal, in MAML's code, ends at two standard deviations.
_DEVIATION = 0.01


class MLP(nn.Module):
    """Four hidden layers with batch norm and ReLU, then a linear layer.

    As in MAML (Finn et al. 2017), sizes 256, 128, 64, 64. Batch norms always
    use the statistics of the batch. Weights start normal with standard deviation 0.01, cut off at
    twice that, biases zero.

    Args:
        in_channels: 1 for gray images, 3 for color.
        classes: the number of outputs.
        size: height and width of the images.
        filters: size of the last hidden layers; the first are four times and twice as large.

    >>> import torch
    >>> MLP(in_channels=1, classes=5)(torch.rand(10, 1, 28, 28)).shape
    torch.Size([10, 5])
    """

    def __init__(self, in_channels: int, classes: int, size: int = 28, filters: int = 64) -> None:
        super().__init__()
        in_channels, classes, size, filters = check_counts(
            in_channels=in_channels, classes=classes, size=size, filters=filters
        )
        self._features = in_channels * size**2
        widths = [self._features, 4 * filters, 2 * filters, filters, filters]
        self.hidden = nn.Sequential(*[_hidden(n, m) for n, m in pairwise(widths)])
        self.linear = nn.Linear(filters, classes)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images. [batch, channel, size, size] -> [batch, classes]"""
        return self.linear(self.hidden(flatten(x, self._features)))


def _hidden(inputs: int, outputs: int) -> nn.Sequential:
    norm = nn.BatchNorm1d(outputs, track_running_stats=False)
    return nn.Sequential(nn.Linear(inputs, outputs, bias=False), norm, nn.ReLU())


def _initialize(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            limit = 2 * _DEVIATION
            nn.init.trunc_normal_(module.weight, std=_DEVIATION, a=-limit, b=limit)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
