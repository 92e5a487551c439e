"""Layers that several models share, and their initial weights."""

from __future__ import annotations

from torch import Tensor, nn

from innerloop.errors import InnerLoopError, refusal


def conv(channels: int, out: int, kernel: int = 3) -> nn.Conv2d:
    """Build a convolution that keeps height and width; no bias, since a batch norm follows."""
    return nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False)


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """Build a batch norm that uses the statistics of the batch, in evaluation mode too.

    "Batch normalization in training mode everywhere" (section 5.2): a task has no statistics but
    those of its own images.
    """
    return nn.BatchNorm2d(channels, track_running_stats=False)


def initialize_he(model: nn.Module) -> None:
    """Draw weights as He et al. 2015: normal, variance 2 / fan-out; linear biases are zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def flatten(x: Tensor, features: int) -> Tensor:
    """Flatten each image to a row; refuse images that leave another number of features."""
    rows = x.flatten(1)
    if rows.shape[1] != features:
        raise _other_features(rows.shape[1], features)
    return rows


def _other_features(found: int, needed: int) -> InnerLoopError:
    return refusal(
        f"You gave images that leave {found} features for the linear layer.",
        f"images that leave {needed}: square, of the size the model was built for.",
        "the layer has a weight for each of them.",
        "build(..., size=...) with the images' height and width, or a resnet, which takes any.",
    )
