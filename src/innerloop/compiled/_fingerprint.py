"""What a recorded program took for constants: the plain values that functions and objects hold."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
_DEPTH = 6
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}


def fingerprint(*roots: Any) -> tuple[Any, ...]:
    """Values that differ if a program recorded from ``roots`` could be another one.

    Numbers, strings and flags by value; tensors and everything else by identity. Followed are
    closures, globals that functions name, defaults, partials, bound objects, containers and
    attributes, to some depth.
    """
    seen: set[int] = set()
    return tuple(v for root in roots for v in _values(root, _DEPTH, seen))


def _values(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, _PLAIN):
        yield type(value), value
        return
    if isinstance(value, Tensor):
        yield id(value), value.requires_grad
        return
    # Containers may have been made for the occasion.
    yield type(value) if isinstance(value, Mapping | list | tuple | set | frozenset) else id(value)
    if id(value) in seen or depth == 0 or isinstance(value, types.ModuleType):
        return
    seen.add(id(value))
    for part in _parts(value):
        yield from _values(part, depth - 1, seen)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, Mapping):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, nn.Module):
        for name, attribute in vars(value).items():
            if name not in _INTERNAL:
                yield attribute
        for hooks in (value._forward_hooks, value._forward_pre_hooks):
            yield from hooks.values()
        for tensors in (value._parameters, value._buffers):
            yield from tensors.values()
        yield from value._modules.values()
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield {name: v for name, v in group.items() if name != "params"}
    elif not isinstance(value, types.BuiltinFunctionType):
        yield from getattr(value, "__dict__", {}).values()


def _parts_of_function(function: types.FunctionType) -> Iterator[Any]:
    yield function.__code__
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield None
    for name in function.__code__.co_names:
        found = function.__globals__.get(name)
        if isinstance(found, (*_PLAIN, Tensor, list, dict, tuple, types.FunctionType)):
            yield found
