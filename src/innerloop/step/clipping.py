"""Gradient transforms for the inner loop, exactly differentiated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from innerloop._numerics import safe_norm, safe_sqrt, widened
from innerloop.errors import InnerLoopError, four_part


@dataclass(frozen=True)
class ClipNorm:
    """Made by :func:`clip_norm`."""

    max_norm: Any

    def __call__(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        real = [torch.view_as_real(g) if g.is_complex() else g for g in grads.values()]
        norms = [safe_norm(widened(g)) for g in real]
        total = safe_sqrt(torch.stack(norms).square().sum())
        # The small number is torch's, so that the values are those of clip_grad_norm_.
        factor = torch.clamp(self.max_norm / (total + 1e-6), max=1.0)
        return {name: grad * factor.to(grad.dtype) for name, grad in grads.items()}


@dataclass(frozen=True)
class ClipValue:
    """Made by :func:`clip_value`."""

    limit: Any

    def __call__(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: grad.clamp(-self.limit, self.limit) for name, grad in grads.items()}


def clip_norm(max_norm: Any) -> ClipNorm:
    """Scale the inner gradients so that their joint norm is at most ``max_norm``.

    The values are those of ``torch.nn.utils.clip_grad_norm_``; the derivative of the scaling is
    part of the meta-gradient. ``max_norm`` may be a tensor that is learned.

    >>> clip_norm(1.0)({"w": torch.tensor([3.0, 4.0])})
    {'w': tensor([0.6000, 0.8000])}
    """
    _check("clip_norm", max_norm)
    return ClipNorm(max_norm)


def clip_value(limit: Any) -> ClipValue:
    """Clamp every element of the inner gradients to ``[-limit, limit]``.

    >>> clip_value(1.0)({"w": torch.tensor([3.0, -0.5])})
    {'w': tensor([ 1.0000, -0.5000])}
    """
    _check("clip_value", limit)
    return ClipValue(limit)


def _check(name: str, limit: Any) -> None:
    if isinstance(limit, Tensor) and limit.numel() == 1:
        return
    if isinstance(limit, int | float) and not isinstance(limit, bool) and limit > 0:
        return
    wrote = f"wrote {name}({limit!r})"
    if isinstance(limit, Mapping):  # of gradients, which can be long
        wrote = f"wrote grad_transform={name}"
    raise InnerLoopError(
        four_part(
            f"You {wrote}.",
            "a number above 0, or a tensor with one.",
            "it bounds the size of the gradients.",
            f"innerloop.{name}(1.0).",
        )
    )
