"""Closed-over tensors: detection and naming.

A loss may close over a tensor that requires grad. A strategy that computes a step twice must know
of it, or its gradient would silently be missing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from innerloop.errors import RequirementError, four_part
from innerloop.guard import graph


class ComputedOutsideError(Exception):
    """A step uses a tensor that was computed before the loop began, and that requires grad."""

    def __init__(self, node: Any) -> None:
        super().__init__(node)
        self.node = node


def closed_over(
    outputs: Iterable[Tensor], given: Iterable[Tensor], since: int
) -> tuple[list[Tensor], list[Any]]:
    """The leaves, and the nodes older than ``since``, that ``outputs`` depend on besides ``given``.

    Among the leaves are those that the step made for itself.
    """
    given = list(given)
    known = {id(t) for t in given}
    ends = [t.grad_fn for t in given if t.grad_fn is not None]
    found, older = graph.nodes([t.grad_fn for t in outputs], ends, since)
    variables = [getattr(node, "variable", None) for node in found]
    leaves = [v for v in variables if v is not None and id(v) not in known]
    return leaves, older


class Observer:
    """Collects the leaves that steps close over, from graphs that are dropped afterwards.

    Raises :class:`ComputedOutsideError` at a tensor that was computed before the observer was made.
    """

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}
        self._since = graph.now()
        self._suspects: list[weakref.ref[Tensor]] = []

    def look(self, outputs: Iterable[Tensor], given: Iterable[Tensor]) -> None:
        """Note what a step used without being given it; :meth:`settle` after its graph is gone."""
        leaves, older = closed_over(outputs, given, self._since)
        if older:
            raise ComputedOutsideError(older[0])
        self._suspects += [weakref.ref(leaf) for leaf in leaves if id(leaf) not in self.found]

    def settle(self) -> None:
        """Keep the leaves that are still alive: those that the step made for itself are gone."""
        if self._suspects:
            self.found.update((id(leaf), leaf) for leaf in _alive(self._suspects))
            self._suspects = []


class Suspects:
    """Leaves that a computation used without being given them: from outside, or made by itself.

    They are held weakly. Those made by the computation are gone when its graph is, or are others
    when it is done again.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._leaves = [weakref.ref(leaf) for leaf in leaves]

    @property
    def alive(self) -> list[Tensor]:
        """The leaves that something still holds."""
        return _alive(self._leaves)

    def refuse(self, again: Callable[[], Iterable[Tensor]], roots: Sequence[Any]) -> None:
        """Raise an error that names a leaf from outside, if there is one.

        ``again`` repeats the computation and returns the leaves it used.
        """
        if not self._leaves or not self.alive:
            return
        gc.collect()  # a graph in a reference cycle holds its leaves for some time
        alive = self.alive
        repeated = {id(leaf) for leaf in again()} if alive else set()
        for leaf in alive:
            if id(leaf) in repeated:
                raise closure_error(leaf, None, roots)


def _alive(references: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    found = [reference() for reference in references]
    return [tensor for tensor in found if tensor is not None]


def suspects(
    outputs: Iterable[Tensor], given: Iterable[Tensor], since: int, roots: Sequence[Any]
) -> Suspects:
    """The leaves that ``outputs`` depend on besides ``given``.

    Raises an error that names what was computed before ``since``, if there is anything.
    """
    leaves, older = closed_over(outputs, given, since)
    if older:
        raise closure_error(None, older[0], roots)
    return Suspects(leaves)


def closure_error(tensor: Tensor | None, node: Any, roots: Sequence[Any]) -> RequirementError:
    """The error for a tensor, or one computed by a node, whose gradient cannot be given."""
    named = _find(lambda t: t is tensor or (node is not None and t.grad_fn is node), roots)
    name, tensor = named if named is not None else (None, tensor)
    what = f"{name!r}, a tensor" if name else "a tensor"
    shape = f" of shape {tuple(tensor.shape)}" if tensor is not None else ""
    made = f" (computed by {node.name()})" if node is not None else ""
    return RequirementError(
        four_part(
            f"The step uses {what}{shape}{made} that requires grad and that it was not given.",
            "every tensor that is to get a gradient in the state, in the meta-parameters, as a "
            "parameter of a loss module, or in the batch (Requirement III).",
            "this strategy takes derivatives step by step and by what a step is given; the "
            "gradient of this tensor would be silently zero.",
            "loss as an nn.Module with it as a parameter, backward=Tape(), or .detach() it if no "
            "gradient is wanted.",
        )
    )


# What functions and modules hold. ---------------------------------------------------------------

_INTERNAL = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_DEPTH = 5
_MANY = 100
"""The most members of a container that are searched for modules."""


def held_modules(roots: Sequence[Any]) -> list[nn.Module]:
    """The modules that functions and objects among ``roots`` hold, a few levels deep."""
    held = [value for _, value in _held(roots, _MANY) if isinstance(value, nn.Module)]
    return list({id(module): module for owner in held for module in owner.modules()}.values())


def _find(wanted: Callable[[Tensor], bool], roots: Sequence[Any]) -> tuple[str, Tensor] | None:
    """A tensor that functions or modules among ``roots`` hold, and how they call it."""
    for path, value in _held(roots):
        if isinstance(value, Tensor) and path and wanted(value):
            return path, value
    return None


def _held(roots: Sequence[Any], most: int | None = None) -> Iterator[tuple[str, Any]]:
    """The values that ``roots`` hold, the nearest first, each with its path."""
    level = [("", root) for root in roots]
    seen: set[int] = set()
    for _ in range(_DEPTH):
        following = []
        for path, value in level:
            yield path, value
            if id(value) not in seen:
                seen.add(id(value))
                held = _members(value)[:most]
                following += [(f"{path}.{name}".strip("."), member) for name, member in held]
        level = following


def _members(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, type | Tensor | ModuleType):
        return []
    if isinstance(value, FunctionType):
        return _members_of_function(value)
    if isinstance(value, MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if isinstance(value, functools.partial):
        return [("", value.func), *_members(value.args), *value.keywords.items()]
    if isinstance(value, nn.Module):
        inside = [item for module in value.modules() for item in vars(module).items()]
        own = [(name, held) for name, held in inside if name not in _INTERNAL]
        hooks = [("", hook) for name, held in inside if name in _HOOKS for hook in held.values()]
        return [*value.named_parameters(), *value.named_buffers(), *own, *hooks]
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(str(i), item) for i, item in enumerate(value)]
    return list(getattr(value, "__dict__", {}).items())


def _members_of_function(function: FunctionType) -> list[tuple[str, Any]]:
    code, defaults = function.__code__, function.__defaults__ or ()
    found: list[tuple[str, Any]] = []
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            found.append((name, cell.cell_contents))
    arguments = code.co_varnames[: code.co_argcount]
    found += zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    found += (function.__kwdefaults__ or {}).items()
    names = [name for name in code.co_names if name in function.__globals__]
    return found + [(name, function.__globals__[name]) for name in names]
