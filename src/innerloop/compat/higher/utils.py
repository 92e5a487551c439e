"""``higher.utils``: copying and mapping over nested containers."""

from __future__ import annotations

import typing as _typing
from collections.abc import Callable as _Callable
from collections.abc import Iterable as _Iterable
from typing import Any as _Any

import torch as _torch
from torch import Tensor as _Tensor
from torch import nn as _nn

_T = _typing.TypeVar("_T")
_U = _typing.TypeVar("_U")


def _copy_tensor(t: _Tensor, safe_copy: bool, device: _torch.device | str | None = None) -> _Tensor:
    copy = t.detach().clone() if safe_copy else t.detach()
    if device is not None:
        copy = copy.to(device)
    return copy.requires_grad_(t.requires_grad)


def _is_container(target: _Any) -> bool:
    return isinstance(target, list | tuple | dict | set)


def _recursive_map(target: _Any, map_fn: _Callable[[_Any], _Any]) -> _Any:
    if isinstance(target, dict):
        return type(target)({key: _recursive_map(value, map_fn) for key, value in target.items()})
    if _is_container(target):
        return type(target)([_recursive_map(value, map_fn) for value in target])
    return map_fn(target)


def _recursive_copy_and_cast(target: _Any, device: _torch.device | str | None) -> _Any:
    return _recursive_map(
        target, lambda x: _copy_tensor(x, True, device) if isinstance(x, _Tensor) else x
    )


def _find_param_in_list(param: _Tensor, params: _Iterable[_Tensor]) -> int | None:
    return next((i for i, p in enumerate(params) if p is param), None)


def _get_param_mapping(module: _nn.Module, seen: list[_Tensor], mapping: list[int]) -> list[int]:
    """For each place a parameter stands in, its number; tied ones have the same."""
    for param in module._parameters.values():
        if param is not None:
            found = _find_param_in_list(param, seen)
            if found is None:
                found = len(seen)
                seen.append(param)
            mapping.append(found)
    for child in module._modules.values():
        if child is not None:
            _get_param_mapping(child, seen, mapping)
    return mapping


def flatten(x: _Any) -> list[_Any]:
    """All the things in a nested structure, in order."""
    if isinstance(x, dict):
        x = list(x.values())
    if not _is_container(x):
        return [x]
    return [leaf for part in x for leaf in flatten(part)]


def get_func_params(
    module: _nn.Module, device: _torch.device | str | None = None, safe_copy: bool = True
) -> list[_Tensor]:
    """Detached copies of a module's parameters that require grad where those do."""
    return [_copy_tensor(p, safe_copy, device) for p in module.parameters()]
