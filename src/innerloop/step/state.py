"""State and meta-parameters: the arguments of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop import _tree
from innerloop._tree import differentiable as differentiable


class State(NamedTuple):
    """The state of training: θ, the buffers, and the optimizer's state."""

    params: Any
    """Tensors by name, or any nesting of tensors."""
    buffers: Mapping[str, Tensor] = {}
    """The model's by name; those of a loss that is a module as ``"loss:name"``."""
    opt: Any = None
    """The optimizer's state, as ``rule.init(params)`` makes it; ``None`` before the first step."""
    time: int = 0
    """The number of steps taken so far."""


# A run that is saved half-way can be read with weights_only=True.
torch.serialization.add_safe_globals([State])


class Meta(NamedTuple):
    """φ: what shapes a step and is not changed by it."""

    opt: Mapping[str, Any] = {}
    """φ_opt: settings of the optimizer by name, or the weights of a learned one."""
    loss: Mapping[str, Any] = {}
    """φ_loss: parameters of the loss by name."""
    anchor: Any = None
    """The weights that a proximal term pulls towards, if there is one."""


def named_leaves(params: Any) -> dict[str, Any]:
    """The leaves of any nesting by name; a flat mapping keeps its own names."""
    if _is_flat(params):
        return dict(params)
    return {str(i): leaf for i, leaf in enumerate(_tree.leaves(params))}


def rebuild(params: Any, named: Mapping[str, Any]) -> Any:
    """The inverse of :func:`named_leaves` for other leaves."""
    if _is_flat(params):
        return dict(zip(params, map(named.__getitem__, params), strict=True))
    return _tree.fill(params, [named[str(i)] for i in range(len(named))])


def _is_flat(params: Any) -> bool:
    """True for a mapping from names to tensors."""
    mapping = isinstance(params, (dict, Mapping))
    return mapping and all([isinstance(leaf, Tensor) for leaf in params.values()])


def buffers_of(part: str, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers of the model (``""``), of a loss or of an optimizer that is a module."""
    found = {}
    for name, buffer in buffers.items():
        owner, colon, own = name.rpartition(":")
        if owner == part:
            found[own if colon else name] = buffer
    return found
