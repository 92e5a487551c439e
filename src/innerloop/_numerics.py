"""Derivatives that stay finite at zero, and numbers with enough digits."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def safe_sqrt(x: Tensor) -> Tensor:
    """The square root with derivative 0 where ``x`` is not positive.

    An adaptive rule meets ``sqrt(0)`` wherever a gradient is exactly zero (a dead ReLU, an unused
    embedding row). There the root is multiplied by a moment that is zero too, so the derivative of
    the product has a limit, and that limit takes 0 from this factor. The argument is masked before
    the root, not after: ``0 * inf`` would already be NaN.

    >>> x = torch.tensor([0.0, 4.0], requires_grad=True)
    >>> safe_sqrt(x).sum().backward()
    >>> x.grad
    tensor([0.0000, 0.2500])
    """
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def safe_norm(x: Tensor) -> Tensor:
    """The Euclidean norm of all elements with derivative 0 at the origin.

    >>> x = torch.zeros(3, requires_grad=True)
    >>> safe_norm(x).backward()
    >>> x.grad
    tensor([0., 0., 0.])
    """
    return safe_sqrt(x.square().sum())


def widened(x: Tensor) -> Tensor:
    """In float32 at least, as torch's own losses have it: sums of halves are rounded away.

    >>> widened(torch.ones(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


_UNCHANGED = contextlib.nullcontext()


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """No part of an autocast region, as updates of ``torch.optim`` and losses are not."""
    # The meta device has no autocast, and asking for it is an error.
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _UNCHANGED
