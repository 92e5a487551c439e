"""``higher.optim``: differentiable optimizers."""

from __future__ import annotations

import abc as _abc  # noqa: F401
import collections as _collections
import copy as _copy  # noqa: F401
import math as _math  # noqa: F401
import typing as _typing  # noqa: F401
import warnings as _warnings  # noqa: F401
from collections.abc import Callable as _Callable
from typing import Any as _Any

import torch as _torch
from torch import Tensor as _Tensor

from innerloop.compat.higher import patch as _patch  # noqa: F401
from innerloop.compat.higher import utils as _utils
from innerloop.eager.interface import create_diff_optim as create_diff_optim
from innerloop.eager.interface import get_diff_optim as get_diff_optim
from innerloop.eager.interface import register_optim as register_optim
from innerloop.eager.optimizer import DifferentiableOptimizer as DifferentiableOptimizer
from innerloop.eager.rules import BY_CLASS as _opt_mapping
from innerloop.eager.trainable import apply_trainable_opt_params as apply_trainable_opt_params
from innerloop.eager.trainable import as_type_of as _as_type_of
from innerloop.eager.trainable import get_trainable_opt_params as get_trainable_opt_params

_GroupedGradsType = list[list[_Tensor]]
_StateType = list[_collections.defaultdict[int, _Any]]
_GradClosureType = _Callable[[_Tensor], _Tensor]
_OverrideType = dict[str, list[_Any]]
_GradCallbackType = _Callable[[list[_Tensor]], list[_Tensor]]
_OptMappingType = dict[type[_torch.optim.Optimizer], type[DifferentiableOptimizer]]

DifferentiableSGD = _opt_mapping[_torch.optim.SGD]
DifferentiableAdam = _opt_mapping[_torch.optim.Adam]
DifferentiableAdamW = _opt_mapping[_torch.optim.AdamW]
DifferentiableAdadelta = _opt_mapping[_torch.optim.Adadelta]
DifferentiableAdagrad = _opt_mapping[_torch.optim.Adagrad]
DifferentiableAdamax = _opt_mapping[_torch.optim.Adamax]
DifferentiableASGD = _opt_mapping[_torch.optim.ASGD]
DifferentiableRMSprop = _opt_mapping[_torch.optim.RMSprop]
DifferentiableRprop = _opt_mapping[_torch.optim.Rprop]


def _get_mask_closure(mask: _Tensor) -> _GradClosureType:
    def closure(grad: _Tensor) -> _Tensor:
        masked = _torch.where(mask, _torch.zeros_like(grad), grad)
        _maybe_mask(masked, mask)
        return masked

    return closure


def _maybe_mask(tensor: _Tensor, mask: _Tensor) -> None:
    """Zero the gradient of ``tensor``, and of that gradient, wherever ``mask`` is set."""
    if tensor.requires_grad:
        tensor.register_hook(_get_mask_closure(mask))


def _add(tensor: _Tensor, a1: _Any, a2: _Tensor | None = None) -> _Tensor:
    return tensor + a1 if a2 is None else tensor + a1 * a2


def _addcdiv(tensor: _Tensor, a1: _Any, a2: _Tensor, a3: _Tensor | None = None) -> _Tensor:
    return tensor + a1 / a2 if a3 is None else tensor + a1 * (a2 / a3)


def _addcmul(tensor: _Tensor, a1: _Any, a2: _Tensor, a3: _Tensor | None = None) -> _Tensor:
    return tensor + a1 * a2 if a3 is None else tensor + a1 * a2 * a3


def _recursive_apply(replacement: _Any, target: _Any) -> _Any:
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
    if isinstance(target, _Tensor):
        target.data = _torch.as_tensor(replacement).to(target.device)
        return target
    number = replacement.item() if isinstance(replacement, _Tensor) else replacement
    return _as_type_of(target, number)
