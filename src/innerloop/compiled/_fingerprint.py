"""What a recorded program took for constants: the plain values that functions and objects hold."""

from __future__ import annotations

import collections
import functools
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from innerloop.compiled._program import NotCompilableError

_PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device}
_CONTAINERS = (list, tuple, dict, Mapping, set, frozenset, collections.deque)
_DEPTH = 50
_MOST = 200_000  # values: a look at everything must not take longer than the program
_BYTES = 1 << 20
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_LIBRARIES = frozenset({"torch", "innerloop", "builtins", "numpy", "typing", "collections", "abc"})


def fingerprint(*roots: Any) -> tuple[Any, ...]:
    """Values that differ if a program recorded from ``roots`` could be another one.

    Numbers, strings and flags by value; tensors and everything else by identity. Followed are
    closures, globals that functions name, defaults, partials, bound objects, containers,
    attributes, and the methods and attributes of classes. What cannot be looked through is refused:
    a change in it would go unnoticed.
    """
    seen: set[int] = set()
    found: list[Any] = []
    level: list[Any] = list(roots)
    # One level after another: at every call, so without a generator for each.
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind in _PLAIN:
                found += (kind, value)
            elif isinstance(value, Tensor):
                found += (id(value), value.requires_grad)
            elif isinstance(value, torch.Generator):
                raise NotCompilableError("it has a torch.Generator of its own")
            elif kind.__module__ == "numpy" and hasattr(value, "tobytes"):
                if value.nbytes > _BYTES:
                    raise NotCompilableError("it uses a large NumPy array, which may change")
                found += (kind, value.tobytes())
            else:
                # Containers may have been made for the occasion.
                found.append(kind if isinstance(value, _CONTAINERS) else id(value))
                if id(value) not in seen:
                    seen.add(id(value))
                    below += _parts(value)
        level = below
        if len(found) + len(level) > _MOST:
            break
        if not level:
            return tuple(found)
    raise NotCompilableError("the model or the loss holds more objects than can be looked through")


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
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        yield from value
    elif isinstance(value, nn.Module):
        yield from _parts_of_module(value)
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield {name: v for name, v in group.items() if name != "params"}
    elif isinstance(value, type):
        yield from _parts_of_class(value)
    elif not isinstance(value, types.BuiltinFunctionType | types.ModuleType | types.CodeType):
        yield from getattr(value, "__dict__", {}).values()
        yield from (getattr(value, name, None) for name in _slots(type(value)))
        yield type(value)


def _parts_of_module(module: nn.Module) -> Iterator[Any]:
    for name, attribute in vars(module).items():
        if name not in _INTERNAL:
            yield attribute
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        yield from hooks.values()
    for tensors in (module._parameters, module._buffers):
        yield from tensors.values()
    yield from module._modules.values()
    yield type(module)


def _parts_of_class(kind: type) -> Iterator[Any]:
    """Plain attributes and methods, of classes that are not a library's."""
    for base in _own_bases(kind):
        for member in vars(base).values():
            if isinstance(member, staticmethod | classmethod):
                yield member.__func__
            elif isinstance(member, property):
                yield member.fget
            elif isinstance(member, (*_PLAIN, *_CONTAINERS, Tensor, types.FunctionType)):
                yield member


def _of_module(module: types.ModuleType, names: tuple[str, ...], depth: int = 3) -> Iterator[Any]:
    """What code that names these attributes may read of a module that is not a library's."""
    if module.__name__.partition(".")[0] in _LIBRARIES:
        return
    for name in names:
        found = vars(module).get(name)
        if isinstance(found, types.ModuleType):
            if depth and found is not module:
                yield from _of_module(found, names, depth - 1)
        elif found is not None:
            yield found


@functools.cache
def _own_bases(kind: type) -> tuple[type, ...]:
    return tuple(b for b in kind.__mro__ if b.__module__.partition(".")[0] not in _LIBRARIES)


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    found = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = itertools.chain.from_iterable([n] if isinstance(n, str) else n for n in found)
    return tuple(name for name in names if not name.startswith("__"))


def _parts_of_function(function: types.FunctionType) -> Iterator[Any]:
    if function.__module__.partition(".")[0] in _LIBRARIES:
        return
    yield function.__code__
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield None
    yield from _globals(function, function.__code__)


def _globals(function: types.FunctionType, code: types.CodeType) -> Iterator[Any]:
    """What a function, or one defined in it, finds by name in its module."""
    for name in code.co_names:
        found = function.__globals__.get(name, sys.modules.get(name))
        if isinstance(found, types.ModuleType):
            yield from _of_module(found, code.co_names)
        elif found is not None:
            yield found
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals(function, constant)
