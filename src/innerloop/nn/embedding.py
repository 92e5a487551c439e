"""Embeddings whose padding has no derivative of any kind, forward-mode ones included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """``F.embedding``; the rules of ``vmap`` and of forward mode forget its padding."""
    found = functional.embedding(input, weight, None, max_norm, *args, **kwargs)
    if padding_idx is None:
        return found
    return _without_padding(found, input, padding_idx % weight.shape[0])


def plain_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, *args: Any, **kwargs: Any
) -> Tensor:
    """``torch.embedding``, where a negative ``padding_idx`` means that there is none."""
    found = torch.embedding(weight, indices, -1, *args, **kwargs)
    return found if padding_idx < 0 else _without_padding(found, indices, padding_idx)


def _without_padding(found: Tensor, indices: Tensor, padding: int) -> Tensor:
    return torch.where((indices == padding).unsqueeze(-1), found.detach(), found)
