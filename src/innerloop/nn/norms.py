"""Norms composed of elementary operations, with derivatives of every order.

The third derivatives of torch's batch, instance and layer norm are silently wrong: their second
derivatives take mean and deviation for constants (pytorch#186256, pytorch#175754). Inner loops
inside the losses of other inner loops need them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """``F.layer_norm``."""
    functional.layer_norm(input.detach(), normalized_shape, weight, bias, eps)  # Its checks.
    y = _normalize(input, [-1 - d for d in range(len(normalized_shape))], eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm``."""
    given = running_mean, running_var, weight, bias, training, momentum, eps
    over = [d for d in range(input.dim()) if d != 1]
    return _by_input(functional.batch_norm, input, over, given)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.instance_norm``."""
    given = running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    return _by_input(functional.instance_norm, input, list(range(2, input.dim())), given)


def _reorder(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with its arguments in the order of ``torch.batch_norm``."""

    def reordered(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        by_input: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Tensor:
        return function(input, running_mean, running_var, weight, bias, by_input, momentum, eps)

    return reordered


def _by_input(function: Callable[..., Tensor], x: Tensor, over: list[int], given: Any) -> Tensor:
    """Torch's function; composed if it normalizes by the input's statistics."""
    _, _, weight, bias, by_input, _, eps = given
    if not by_input:
        return function(x, *given)
    function(x.detach(), *given)  # Its checks, and the running statistics.
    y, shape = _normalize(x, over, eps), [-1, *[1] * (x.dim() - 2)]
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def _normalize(x: Tensor, over: list[int], eps: float) -> Tensor:
    variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
    return (x - mean) * (variance + eps).rsqrt()


COMPOSED: dict[Any, Callable[..., Tensor]] = {
    functional.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    functional.batch_norm: batch_norm,
    torch.batch_norm: _reorder(batch_norm),
    functional.instance_norm: instance_norm,
    torch.instance_norm: _reorder(instance_norm),
}
"""Replacements for a mode for functions of torch."""
