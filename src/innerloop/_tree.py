"""Nested containers of tensors. The only importer of torch's pytree, which is private."""

from __future__ import annotations

from torch.utils._pytree import tree_flatten as flatten
from torch.utils._pytree import tree_map as map
from torch.utils._pytree import tree_unflatten as unflatten

__all__ = ["flatten", "map", "unflatten"]
