"""What functions and objects hold, and with it all that a recorded program took for constants."""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import ctypes
import dis
import functools
import itertools
import logging
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class NotCompilableError(Exception):
    """Why a computation has to run as it is."""


_PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device}
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS = (list, tuple, dict, types.MappingProxyType, set, frozenset, collections.deque)
_CONTAINERS += _VIEWS
# What every class has from Python itself.
_OF_PYTHON = (
    types.BuiltinFunctionType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
_COPIED = frozenset({list, tuple, dict, set, collections.OrderedDict, collections.deque})
_SIMPLE_C: type = ctypes.c_int.__mro__[1]
_MEMORY = (bytearray, memoryview, array.array)
_MEMORY += (_SIMPLE_C, ctypes.Array, ctypes.Structure, ctypes.Union)
_STREAMS = (torch.Generator, random.Random, weakref.ProxyType)
_DEPTH = 50
_MOST = 200_000  # values: a look at everything must not take longer than the program
_BYTES = 1 << 20
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
# Hooks of all modules.
_EVERYWHERE = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_backward_hooks,
    nn.modules.module._global_backward_pre_hooks,
)
_ANYWHERE = frozenset({"__import__", "eval", "exec", "globals"})
"""What reads names that are not in the code."""
_BY_NAME = frozenset({"attrgetter", "getattr", "vars"})
_SITES = frozenset({"site-packages", "dist-packages"})
_LIBRARIES = frozenset({"torch", "innerloop", "builtins", "numpy", "typing", "collections", "abc"})
_NOT_READ = _LIBRARIES | sys.stdlib_module_names
"""Whose code is not read; values of modules that code names are, as ``os.environ``."""


class _Print(tuple[Any, ...]):
    """A fingerprint. What it knows by identity lives as long: an address is used again."""

    held: list[Any]


def fingerprint(*roots: Any) -> tuple[Any, ...]:
    """Values that differ if a program recorded from ``roots`` could be another one.

    Numbers, strings and flags by value; tensors and everything else by identity, tensors that are
    attributes of a module by content too. Followed are closures, context variables, globals that
    functions name, defaults, partials, bound objects, containers, attributes, the methods and
    attributes of classes, and hooks of all modules. What cannot be looked through is refused: a
    change in it would go unnoticed.
    """
    seen: dict[int, Any] = {}
    found: list[Any] = []
    level: list[Any] = [*roots, *_EVERYWHERE]
    # One level after another, and types looked at once: this is done at every call.
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind in _PLAIN:
                found += (kind, value)
                continue
            mark, parts = _treatment(kind)
            found.append(mark(value))
            if id(value) not in seen:
                seen[id(value)] = value
                if parts is not None:
                    below += parts(value)
        level = below
        if len(found) + len(level) > _MOST:
            break
        if not level:
            made = _Print(found)
            made.held = list(seen.values())
            return made
    raise NotCompilableError("the model or the loss holds more objects than can be looked through")


def reached(*roots: Any) -> list[Any]:
    """Every object that ``roots`` hold, as far as they can be looked through.

    The code of packages that are installed is left out: it names far more than it uses.
    """
    seen: dict[int, Any] = {}
    level: list[Any] = list(roots)
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind in _PLAIN or id(value) in seen:
                continue
            seen[id(value)] = value
            parts = _treatment(kind)[1]
            code = isinstance(value, type | types.FunctionType)
            if parts is not None and not (code and _is_installed(str(value.__module__))):
                with contextlib.suppress(NotCompilableError):
                    below += parts(value)
        level = below
        if not level or len(seen) > _MOST:
            break
    return list(seen.values())


def generators(values: Iterable[Any]) -> list[Any]:
    """Those of Python and NumPy among them, the global ones left out."""
    shared = getattr(random.seed, "__self__", None)
    return [
        value
        for value in values
        if (isinstance(value, random.Random) and value is not shared)
        or (_of_numpy_random(type(value)) and hasattr(value, "standard_normal"))
    ]


def _of_numpy_random(kind: type) -> bool:
    return str(kind.__module__).startswith("numpy.random")


# What becomes of a value, by its type. --------------------------------------------------------

_Parts = Callable[[Any], Iterable[Any]]


@functools.cache
def _treatment(kind: type) -> tuple[Callable[[Any], Any], _Parts | None]:
    """What tells a value of this type from another, and what it is made of."""
    if issubclass(kind, Tensor):
        return _tensor, _of_tensor
    if issubclass(kind, _STREAMS) or hasattr(kind, "__next__"):
        return _refused, None
    if _of_numpy_random(kind):
        return _refused, None
    if issubclass(kind, functools._lru_cache_wrapper):
        return _cached, None
    if issubclass(kind, _MEMORY):
        return _bytes, None
    if hasattr(kind, "tobytes") and hasattr(kind, "dtype"):
        return _array, None
    if issubclass(kind, _CONTAINERS):
        base = next(base for base in _CONTAINERS if issubclass(kind, base))
        mark, parts = _container(base), _contained(base)
        return mark, parts if _is_library(kind.__module__) else _with_attributes(parts)
    return id, next((parts for base, parts in _OBJECTS if issubclass(kind, base)), _of_object)


def _tensor(value: Tensor) -> Any:
    return id(value), value.requires_grad, value.shape


def _of_tensor(value: Tensor) -> Iterable[Any]:
    """Attributes that somebody gave it, such as a rate of its own."""
    own = value.__dict__
    return (tuple(own), *own.values()) if own else ()


def _refused(value: Any) -> Any:
    raise NotCompilableError(f"it has a {type(value).__name__} of its own, which may change")


def _cached(value: Any) -> Any:
    """What it has returned may be changed, and is out of reach."""
    return id(value) if _is_library(value.__module__) else _refused(value)


def _bytes(value: Any) -> Any:
    return type(value), getattr(value, "typecode", ""), bytes(value)


def _array(value: Any) -> Any:
    if value.nbytes > _BYTES:
        raise NotCompilableError("it uses a large NumPy array, which may change")
    if value.dtype.hasobject:
        raise NotCompilableError("it uses a NumPy array of objects, which may change")
    return type(value), value.dtype.str, value.shape, value.tobytes()


# By the methods of Python's own classes: those of a subclass may do anything.


def _container(base: Any) -> Callable[[Any], Any]:
    """Not its identity: it may have been made for the occasion."""
    return lambda value: (type(value), base.__len__(value))


def _contained(base: Any) -> _Parts:
    if base in (dict, types.MappingProxyType):
        return lambda value: [*base.keys(value), *base.values(value)]
    return lambda value: list(base.__iter__(value))


def _with_attributes(parts: _Parts) -> _Parts:
    return lambda value: [*parts(value), *_of_object(value)]


def _of_method(value: types.MethodType) -> Iterable[Any]:
    return value.__func__, value.__self__


def _of_partial(value: functools.partial[Any]) -> Iterable[Any]:
    return value.func, value.args, value.keywords, vars(value)


def _of_reference(value: weakref.ref[Any]) -> Iterable[Any]:
    return (value(),)


def _of_variable(value: contextvars.ContextVar[Any]) -> Iterable[Any]:
    try:
        return (value.get(),)
    except LookupError:
        return ()


def _of_held_module(module: types.ModuleType) -> Iterable[Any]:
    """Its plain values: what code reads of it is not known."""
    if _is_library(module.__name__):
        return ()
    kinds = (*_PLAIN, *_CONTAINERS, *_MEMORY)
    public = ((n, v) for n, v in vars(module).items() if not n.startswith("__"))
    return [part for n, v in public if isinstance(v, kinds) for part in (n, v)]


def _of_optimizer(value: torch.optim.Optimizer) -> Iterable[Any]:
    return value.param_groups


def _of_layer(module: nn.Module) -> Iterable[Any]:
    own = [name for name in vars(module) if name not in _INTERNAL]
    values = [vars(module)[name] for name in own]
    found: list[Any] = [tuple(own), *values, *_copies(values)]
    for given in (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        module._parameters,
        module._buffers,
        module._modules,
    ):
        found.append(tuple(given))
        found += given.values()
    found.append(type(module))
    return found


def _copies(values: Iterable[Any], depth: int = 5) -> Iterator[Any]:
    """The content of tensors that are plain attributes: a replica has copies of its own."""
    for value in values:
        if type(value) in _PLAIN:
            continue
        if isinstance(value, Tensor):
            if not value.requires_grad:
                yield from _content(value)
        elif type(value) in _COPIED and depth:
            yield from _copies(value.values() if isinstance(value, dict) else value, depth - 1)


def _content(value: Tensor) -> tuple[Any, ...]:
    """When it was last written to, where it is, and its bytes if there are few.

    A write to ``.data`` leaves no other trace.
    """
    version = 0 if value.is_inference() else value._version
    if value.layout is not torch.strided:
        return (version,)
    at, size = value.data_ptr(), value.numel() * value.element_size()
    if not value.is_cpu or not value.is_contiguous() or not 0 < size <= _BYTES:
        return version, at
    return version, at, ctypes.string_at(at, size)


def _of_class(kind: type) -> Iterable[Any]:
    """Plain attributes and methods, of classes that are not a library's."""
    found = []
    for base in _own_bases(kind):
        for member in vars(base).values():
            taken = _member(type(member))
            if taken is not None:
                found.append(taken(member))
    return found


@functools.cache
def _member(kind: type) -> Callable[[Any], Any] | None:
    """What to take of a class's member of this type, if anything."""
    if issubclass(kind, staticmethod | classmethod):
        return lambda member: member.__func__
    if issubclass(kind, property):
        return lambda member: member.fget
    return None if issubclass(kind, _OF_PYTHON) else lambda member: member


def _of_function(function: types.FunctionType) -> Iterable[Any]:
    if _is_not_read(function.__module__) and function.__closure__ is None:
        return ()
    code, names = function.__code__, function.__globals__
    found: list[Any] = [code, *(function.__defaults__ or ())]
    if function.__kwdefaults__:
        found += function.__kwdefaults__.values()
    if function.__dict__:
        found.append(function.__dict__)
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)
    if _is_not_read(names.get("__name__")):
        return found  # It may wrap something of the user's.
    reads = _reads(code)
    anywhere = (reads.names & _ANYWHERE) - names.keys()
    if any("import_module" in group for group in reads.groups):
        anywhere |= {"import_module"}
    if anywhere:
        raise NotCompilableError(f"it calls {min(anywhere)}(), which may read anything")
    for group in reads.groups:
        for name in group:
            value = names.get(name)
            if value is None:
                value = sys.modules.get(name)
            if isinstance(value, types.ModuleType):
                by_name = reads.names & _BY_NAME
                found += _of_held_module(value) if by_name else _of_module(value, group)
            elif value is not None:
                found.append(value)
    return found


class _Reads(NamedTuple):
    """What code names of its module."""

    groups: tuple[tuple[str, ...], ...]
    """For a function and each that is defined in it, with attributes."""
    names: frozenset[str]
    """Without attributes."""


@functools.cache
def _reads(code: types.CodeType) -> _Reads:
    inner = [_reads(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    groups = itertools.chain.from_iterable(reads.groups for reads in inner)
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    own = {i.argval for i in dis.get_instructions(code) if i.opname in loads}
    return _Reads((code.co_names, *groups), frozenset(own).union(*(r.names for r in inner)))


def _of_module(module: types.ModuleType, names: tuple[str, ...], depth: int = 3) -> Iterator[Any]:
    """What code that names these attributes may read of a module that is not a library's."""
    if _is_library(module.__name__):
        return
    for name in names:
        found = vars(module).get(name)
        if isinstance(found, types.ModuleType):
            if depth and found is not module:
                yield from _of_module(found, names, depth - 1)
        elif found is not None:
            yield found


def _of_object(value: Any) -> Iterable[Any]:
    kind = type(value)
    own = getattr(value, "__dict__", {})
    found: list[Any] = [tuple(own), *own.values()]
    found += [getattr(value, name, None) for name in _slots(kind)]
    found.append(kind)
    return found


def _of_builtin(value: types.BuiltinFunctionType) -> Iterable[Any]:
    """What a method of a list or the like belongs to."""
    own = value.__self__
    return () if own is None or isinstance(own, types.ModuleType) else (own,)


_OPAQUE = types.CodeType | logging.Logger
_OBJECTS: tuple[tuple[Any, _Parts | None], ...] = (
    (types.MethodType, _of_method),
    (types.BuiltinFunctionType, _of_builtin),
    (types.MethodWrapperType, _of_builtin),
    (types.FunctionType, _of_function),
    (functools.partial, _of_partial),
    (nn.Module, _of_layer),
    (torch.optim.Optimizer, _of_optimizer),
    (type, _of_class),
    (types.ModuleType, _of_held_module),
    (weakref.ref, _of_reference),
    (contextvars.ContextVar, _of_variable),
    (_OPAQUE, None),
)


@functools.cache
def _own_bases(kind: type) -> tuple[type, ...]:
    return tuple(base for base in kind.__mro__ if not _is_not_read(base.__module__))


@functools.cache
def _is_library(module: Any) -> bool:
    return str(module or "").partition(".")[0] in _LIBRARIES


@functools.cache
def _is_not_read(module: Any) -> bool:
    return str(module or "").partition(".")[0] in _NOT_READ


@functools.cache
def _is_installed(module: str) -> bool:
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None) or ""
    return not _SITES.isdisjoint(Path(file).parts)


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    found = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                found.append(name)
            elif not name.endswith("__"):
                found.append(f"_{base.__name__.lstrip('_')}{name}")
    return tuple(found)
