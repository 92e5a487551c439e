"""Replicas: copies of a module tree that take other weights and share no state with the original.

A replica has the same classes, the same sharing of submodules and weights, the same hooks, and its
own dictionaries of weights and buffers. ``forward``, every other method and every direct call of a
submodule then use the weights it was given, at native speed. The original is only read.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from innerloop.modules import refusals
from innerloop.modules.exact import exact_methods
from innerloop.modules.rebind import PLAIN, Rebinder
from innerloop.modules.tree import named_tensors, survey, unwrap

_BASE = nn.Module()
_HOOKS = tuple(name for name, value in vars(_BASE).items() if isinstance(value, OrderedDict))
_INTERNAL = frozenset(vars(_BASE)) | {"_compiled_call_impl"}


class Template:
    """A module as it was at one moment, to be given weights again and again.

    Modes, hooks and attributes are those of that moment, whatever becomes of the module later: a
    step that is computed a second time must not see what was changed in between.
    """

    def __init__(self, module: nn.Module) -> None:
        self.source = module
        self.params = named_tensors(module, "_parameters")
        # The weights of a replica are no Parameters; whether they require grad says nothing.
        self.trained = {
            name: p.requires_grad for name, p in self.params.items() if isinstance(p, nn.Parameter)
        }
        self.buffers = named_tensors(module, "_buffers")
        self.requiring = {name: b for name, b in self.buffers.items() if b.requires_grad}
        """Buffers that no gradient would get to; see :func:`check_buffers`."""
        sources = survey(module)
        own = {id(t): t for t in (*self.params.values(), *self.buffers.values())}
        replicator = Replicator(own)
        replicator.copy(sources, exact_class)
        self._sources = sources  # keeps their ids from being used again
        self._index = {id(source): i for i, source in enumerate(sources)}
        # A replica with the module's own weights: all others start from its attributes.
        first = [replicator.copies[id(source)] for source in sources]
        copies = {id(copy): i for i, copy in enumerate(first)}
        weights = {id(p): i for i, p in enumerate(self.params.values())}
        buffers = {id(b): i for i, b in enumerate(self.buffers.values())}
        self._parts = [
            _Part(
                type(copy),
                vars(copy),
                _positions(copy._parameters, weights),
                _positions(copy._buffers, buffers),
                _positions(copy._modules, copies),
                [name for name, value in vars(copy).items() if _is_mutable(name, value)],
            )
            for copy in first
        ]
        self._special = {self._index[source]: r for source, r in replicator.special.items()}

    def bind(
        self,
        params: Mapping[str, Tensor] | Sequence[Tensor],
        buffers: Mapping[str, Tensor] | None = None,
    ) -> nn.Module:
        """A new replica with these weights; see :meth:`Functional.bind`."""
        # One function without calls of others, since it runs in every step.
        if isinstance(params, dict) and params.keys() == self.params.keys():
            weights: list[Any] = list(map(params.__getitem__, self.params))
        else:
            weights = match_weights(params, self.params)
        values: list[Any] = copy_buffers(buffers, self.buffers) if self.buffers or buffers else []
        copies: list[Any] = []
        for part in self._parts:
            copies.append(object.__new__(part.kind))
        # At position -1: a parameter, buffer or child that is None.
        for found in (weights, values, copies):
            found.append(None)
        for copy, part in zip(copies, self._parts, strict=False):
            attributes = copy.__dict__
            attributes.update(part.shared)
            attributes["_parameters"] = own = {}
            for name, i in part.parameters:
                own[name] = weights[i]
            attributes["_buffers"] = own = {}
            for name, i in part.buffers:
                own[name] = values[i]
            attributes["_modules"] = own = {}
            for name, i in part.children:
                own[name] = copies[i]
            for name in part.mutable:
                value = attributes[name]
                attributes[name] = value.clone() if isinstance(value, Tensor) else value.copy()
        if self._special:
            self._rebind(copies, weights, values)
        return copies[0]

    def buffers_of(self, replica: nn.Module) -> dict[str, Tensor]:
        """The buffers of a replica by their names here, as its forward left them."""
        return named_tensors(replica, "_buffers")

    def _rebind(self, copies: list[Any], weights: list[Any], values: list[Any]) -> None:
        """Points attributes and hooks that refer into the tree to the replica's own parts."""
        tensors = dict(zip(map(id, self.params.values()), weights, strict=False))
        tensors.update(zip(map(id, self.buffers.values()), values, strict=False))

        def copy_of(module: nn.Module) -> nn.Module | None:
            index = self._index.get(id(unwrap(module)))
            return None if index is None else copies[index]

        rebind = Rebinder(copy_of, tensors.get)
        for i, references in self._special.items():
            set_references(vars(copies[i]), references, rebind)


def match_weights(
    given: Mapping[str, Tensor] | Sequence[Tensor], own: Mapping[str, Tensor]
) -> list[Tensor]:
    """The given weights in the order of a module's own."""
    if isinstance(given, Mapping):
        if given.keys() != own.keys():
            raise refusals.wrong_names("weights", given, list(own))
        return [given[name] for name in own]
    weights = list(given)
    if len(weights) != len(own):
        raise refusals.wrong_number(len(weights), len(own))
    return weights


def copy_buffers(given: Mapping[str, Tensor] | None, own: Mapping[str, Tensor]) -> list[Tensor]:
    """Copies of the given buffers in the order of a module's own, and of those not given."""
    merged = {**own, **(given or {})}
    if len(merged) > len(own):
        raise refusals.wrong_names("buffers", given or {}, list(own))
    return [value.detach().clone() for value in merged.values()]


class _Part(NamedTuple):
    """One module of a template: its class, its attributes, and what each replica has of its own.

    ``parameters``, ``buffers`` and ``children`` are (name, position), ``mutable`` the names of
    attributes that a forward could write to.
    """

    kind: type[nn.Module]
    shared: dict[str, Any]
    parameters: list[tuple[str, int]]
    buffers: list[tuple[str, int]]
    children: list[tuple[str, int]]
    mutable: list[str]


def _positions(named: Mapping[str, Any], index: Mapping[int, int]) -> list[tuple[str, int]]:
    return [(name, -1 if value is None else index[id(value)]) for name, value in named.items()]


def _is_mutable(name: str, value: Any) -> bool:
    """True if a forward could write to an attribute's value, which then must not be shared."""
    if name in _INTERNAL:
        return False
    plain = isinstance(value, Tensor) and not value.requires_grad
    return plain or type(value) in (list, dict, set, OrderedDict, deque)


# Attributes of a module, by (name, None), and its hooks, by (name of the dictionary, key).
References = dict[tuple[str, Any], Any]


def set_references(attributes: dict[str, Any], references: References, rebind: Rebinder) -> None:
    """Sets attributes and hooks to what they are in a replica."""
    for (name, key), value in references.items():
        if key is None:
            attributes[name] = rebind(value)
        elif key in attributes[name]:
            attributes[name] = attributes[name].copy()
            attributes[name][key] = rebind(value)


class Replicator:
    """Copies a module tree, replacing its tensors by id and rebinding what refers into the tree."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self.tensors = tensors
        self.copies: dict[int, nn.Module] = {}
        self.special: dict[int, References] = {}
        """By module: what refers into the tree, and so differs in every replica."""

    def copy(
        self,
        sources: Sequence[nn.Module],
        class_of: Callable[[type[nn.Module]], type[nn.Module]],
    ) -> nn.Module:
        """A copy of the first of these modules; the others are all that is below it."""
        for source in sources:
            self.copies[id(source)] = object.__new__(class_of(type(source)))
        rebind = Rebinder(self._copy_of, self.tensors.get)
        for source in sources:
            self._fill(source, self.copies[id(source)], rebind)
        return self.copies[id(sources[0])]

    def _copy_of(self, module: nn.Module) -> nn.Module | None:
        return self.copies.get(id(unwrap(module)))

    def _fill(self, source: nn.Module, target: nn.Module, rebind: Rebinder) -> None:
        attributes = dict(vars(source))
        tensors, copies = self.tensors, self.copies
        for kind in ("_parameters", "_buffers"):
            attributes[kind] = {
                name: None if tensor is None else tensors.get(id(tensor), tensor)
                for name, tensor in attributes[kind].items()
            }
        attributes["_modules"] = {
            name: None if child is None else copies[id(unwrap(child))]
            for name, child in attributes["_modules"].items()
        }
        attributes["_non_persistent_buffers_set"] = set(attributes["_non_persistent_buffers_set"])
        attributes.pop("_compiled_call_impl", None)
        special: References = {}
        for name in _HOOKS:
            hooks, attributes[name] = attributes[name], OrderedDict()
            for key, hook in hooks.items():
                rebind.special = False
                attributes[name][key] = rebind(hook)
                if rebind.special:
                    special[name, key] = hook
        for name, value in attributes.items():
            if name in _INTERNAL or type(value) in PLAIN:
                continue
            rebind.special = False
            attributes[name] = rebind(value)
            if rebind.special:
                special[name, None] = value
        if special:
            self.special[id(source)] = special
        object.__setattr__(target, "__dict__", attributes)


# Classes of replicas. ---------------------------------------------------------------------------


class Exact(nn.Module):
    """Mixed into the classes of a replica whose methods choose kernels of their own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the hooks for subclasses of the user's classes from running for a replica."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return as_plain, (as_plain(self),)


@functools.cache
def exact_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class itself, or one like it whose methods use kernels with second derivatives."""
    if issubclass(kind, Exact):
        return kind
    methods = exact_methods(kind)
    return derive_class(kind, Exact, methods) if methods else kind


def derive_class(kind: type[nn.Module], mixin: type, namespace: dict[str, Any]) -> type[nn.Module]:
    """A class that passes for ``kind``, with a mixin before it."""
    body = {**namespace, "__module__": kind.__module__, "_innerloop_original": original(kind)}
    return types.new_class(kind.__name__, (mixin, kind), {}, lambda space: space.update(body))


def original(kind: type) -> type[nn.Module]:
    """The user's class behind a derived one."""
    return getattr(kind, "_innerloop_original", kind)


def as_plain(module: nn.Module) -> nn.Module:
    """An ordinary module of the original classes with copies of the weights and buffers."""
    tensors: dict[int, Tensor] = {}
    for weight in named_tensors(module, "_parameters").values():
        tensors[id(weight)] = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    for buffer in named_tensors(module, "_buffers").values():
        tensors[id(buffer)] = buffer.detach().clone()
    return Replicator(tensors).copy(survey(module), original)
