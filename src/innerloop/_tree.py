"""Nested containers of tensors. The only importer of torch's pytree, which is private."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten as flatten
from torch.utils._pytree import tree_map as map
from torch.utils._pytree import tree_unflatten as unflatten

__all__ = ["differentiable", "flatten", "map", "unflatten"]


def differentiable(value: Any) -> bool:
    """Whether a leaf can have a derivative: a tensor of real or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
