"""``higher.optim``: differentiable optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from innerloop.compat.higher import patch as _patch  # noqa: F401
from innerloop.compat.higher import utils as _utils
from innerloop.eager.interface import apply_trainable_opt_params as apply_trainable_opt_params
from innerloop.eager.interface import create_diff_optim as create_diff_optim
from innerloop.eager.interface import get_diff_optim as get_diff_optim
from innerloop.eager.interface import get_trainable_opt_params as get_trainable_opt_params
from innerloop.eager.interface import register_optim as register_optim
from innerloop.eager.optimizer import BY_CLASS as _opt_mapping
from innerloop.eager.optimizer import DifferentiableOptimizer as DifferentiableOptimizer

_GroupedGradsType = list[list[Tensor]]
_StateType = list[defaultdict[int, Any]]
_GradClosureType = Callable[[Tensor], Tensor]
_OverrideType = dict[str, list[Any]]
_GradCallbackType = Callable[[list[Tensor]], list[Tensor]]
_OptMappingType = dict[type[torch.optim.Optimizer], type[DifferentiableOptimizer]]

DifferentiableSGD = _opt_mapping[torch.optim.SGD]
DifferentiableAdam = _opt_mapping[torch.optim.Adam]
DifferentiableAdamW = _opt_mapping[torch.optim.AdamW]
DifferentiableAdadelta = _opt_mapping[torch.optim.Adadelta]
DifferentiableAdagrad = _opt_mapping[torch.optim.Adagrad]
DifferentiableAdamax = _opt_mapping[torch.optim.Adamax]
DifferentiableASGD = _opt_mapping[torch.optim.ASGD]
DifferentiableRMSprop = _opt_mapping[torch.optim.RMSprop]
DifferentiableRprop = _opt_mapping[torch.optim.Rprop]


def _get_mask_closure(mask: Tensor) -> _GradClosureType:
    def closure(grad: Tensor) -> Tensor:
        masked = torch.where(mask, torch.zeros_like(grad), grad)
        _maybe_mask(masked, mask)
        return masked

    return closure


def _maybe_mask(tensor: Tensor, mask: Tensor) -> None:
    """Zero the gradient of ``tensor``, and of that gradient, wherever ``mask`` is set."""
    if tensor.requires_grad:
        tensor.register_hook(_get_mask_closure(mask))


def _add(tensor: Tensor, a1: Any, a2: Tensor | None = None) -> Tensor:
    return tensor + a1 if a2 is None else tensor + a1 * a2


def _addcdiv(tensor: Tensor, a1: Any, a2: Tensor, a3: Tensor | None = None) -> Tensor:
    return tensor + a1 / a2 if a3 is None else tensor + a1 * (a2 / a3)


def _addcmul(tensor: Tensor, a1: Any, a2: Tensor, a3: Tensor | None = None) -> Tensor:
    return tensor + a1 * a2 if a3 is None else tensor + a1 * a2 * a3


def _recursive_apply(replacement: Any, target: Any) -> Any:
    """``target`` with the values of ``replacement``: tensors in place, numbers as numbers."""
    if _utils._is_container(target) != _utils._is_container(replacement):
        raise ValueError(f"{type(replacement)} cannot replace {target!r} of type {type(target)}")
    if isinstance(target, dict):
        values = zip(target, replacement.values(), strict=True)
        return type(target)({key: _recursive_apply(r, target[key]) for key, r in values})
    if _utils._is_container(target):
        return type(target)(
            [_recursive_apply(r, t) for r, t in zip(replacement, target, strict=True)]
        )
    if isinstance(target, Tensor):
        target.data = torch.as_tensor(replacement).to(target.device)
        return target
    return replacement.item() if isinstance(replacement, Tensor) else replacement
