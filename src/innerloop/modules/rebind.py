"""Carrying a value from one module tree over into its replica."""

from __future__ import annotations

import copy
import copyreg
import functools
import gc
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from innerloop.modules.exact import ExactWeightNorm

PLAIN = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type, torch.dtype, torch.device}
    | {torch.Size, types.BuiltinFunctionType, torch.Generator, torch.layout}
)


class Rebinder:
    """Carries a value over into a replica: what refers into the original tree refers into the new.

    Containers and tensors are copied, so that the replica can write to its own; other objects are
    copied only if they lead into the tree. ``special`` is set when something was rebound.
    """

    def __init__(
        self,
        module_of: Callable[[nn.Module], nn.Module | None],
        tensor_of: Callable[[int], Tensor | None],
    ) -> None:
        self.module_of = module_of
        self.tensor_of = tensor_of
        self.special = False
        self.seen: dict[int, tuple[Any, Any, bool]] = {}
        self.outside: dict[int, Any] = {}
        """Values known not to lead into the tree."""

    def __call__(self, value: Any) -> Any:
        if type(value) in PLAIN:
            return value
        if isinstance(value, nn.Module):
            return self._exchange(value, self.module_of(value))
        if id(value) in self.seen:
            _, new, special = self.seen[id(value)]
            self.special |= special
            return new
        if isinstance(value, Tensor):
            new = self.tensor_of(id(value))
            if new is None:
                new = value if value.requires_grad else value.detach().clone()
                self.seen[id(value)] = (value, new, False)
                return new
            return self._exchange(value, new)
        outer, self.special = self.special, False
        new = self._compound(value)
        self.seen[id(value)] = (value, new, self.special)
        self.special |= outer
        return new

    def _exchange(self, old: Any, new: Any) -> Any:
        if new is None:
            return old
        self.special = True
        return new

    def _compound(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, list | dict | set | deque):
            return self._mutable(value)
        if isinstance(value, tuple | frozenset):
            items = [self(item) for item in value]
            if not self.special:
                return value
            return kind(*items) if hasattr(value, "_fields") else kind(items)
        self.seen[id(value)] = (value, value, False)
        if kind is types.MethodType:
            owner, function = self(value.__self__), self(value.__func__)
            return types.MethodType(function, owner) if self.special else value
        if kind is functools.partial:
            return self._partial(value)
        if kind is types.FunctionType:
            return self._function(value)
        if kind is weakref.ref:
            target = self(value())
            return weakref.ref(target) if self.special else value
        if kind is WeightNorm:
            return ExactWeightNorm(value)
        return self._object(value)

    def _mutable(self, value: Any) -> Any:
        new = copy.copy(value)
        self.seen[id(value)] = (value, new, False)
        if all(type(item) in PLAIN for item in value) and not isinstance(value, dict):
            return new
        new.clear()
        if isinstance(value, dict):
            for key, item in value.items():
                new[self(key)] = self(item)
        elif isinstance(value, set):
            new.update(map(self, value))
        else:
            new.extend(map(self, value))
        return new

    def _partial(self, value: functools.partial) -> Any:
        function, args, keywords, attributes = self(
            (value.func, value.args, value.keywords, vars(value))
        )
        if not self.special:
            return value
        new = functools.partial(function, *args, **keywords)
        vars(new).update(attributes)
        return new

    def _function(self, value: types.FunctionType) -> Any:
        if not (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
            return value
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        new = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, self(value.__defaults__), cells
        )
        new.__kwdefaults__ = self(value.__kwdefaults__)
        new.__dict__.update(vars(value))
        self.seen[id(value)] = (value, new, False)
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            for contents in gc.get_referents(old):  # An empty cell has none.
                cell.cell_contents = self(contents)
        return new if self.special else value

    def _object(self, value: Any) -> Any:
        """A plain object that leads into the tree is copied and rebound."""
        if not self._leads_into_the_tree(value):
            return value
        new = object.__new__(type(value))
        self.seen[id(value)] = (value, new, True)
        for name, item in _attributes(value).items():
            object.__setattr__(new, name, self(item))
        self.special = True
        return new

    def _leads_into_the_tree(self, value: Any) -> bool:
        visited: dict[int, Any] = {}
        waiting = [value]
        while waiting and len(visited) < _SEARCH_LIMIT:
            item = waiting.pop()
            if type(item) in PLAIN or id(item) in visited or id(item) in self.outside:
                continue
            visited[id(item)] = item
            if isinstance(item, nn.Module):
                if self.module_of(item) is not None:
                    return True
            elif isinstance(item, Tensor):
                if self.tensor_of(id(item)) is not None:
                    return True
            else:
                waiting.extend(_parts(item))
        self.outside.update(visited)
        return False


# Enough for the helpers and records people hang on a module; not for a whole data set.
_SEARCH_LIMIT = 10_000


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, in slots or in a dictionary."""
    if isinstance(value, type | types.ModuleType):
        return {}
    slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


# Their references are those that the garbage collector sees.
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, functools.partial)
_CONTAINERS += (types.MethodType, types.CellType)


def _parts(value: Any) -> list[Any]:
    """The values that a value refers to directly."""
    if isinstance(value, _CONTAINERS):
        return gc.get_referents(value)
    if isinstance(value, types.FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, weakref.ref):
        return [value()]
    return list(_attributes(value).values())
