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
from torch.nn.utils.weight_norm import WeightNorm

from innerloop.modules import refusals
from innerloop.modules.exact import ExactWeightNorm, exact_methods
from innerloop.modules.rebind import PLAIN, Rebinder
from innerloop.modules.tree import named_tensors, survey, unwrapped

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
        replicator = Replicator(own, {})
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
        self._special = _by_position(replicator.special, self._index)
        self._hooks = _by_position(replicator.special_hooks, self._index)

    def bind(
        self,
        params: Mapping[str, Tensor] | Sequence[Tensor],
        buffers: Mapping[str, Tensor] | None = None,
    ) -> nn.Module:
        """A new replica with these weights; see :meth:`Functional.bind`."""
        # The last entry is what a parameter or child that is None has, at position -1.
        weights = [*self._weights(params), None]
        values = [*self._buffers(buffers), None]
        copies: list[Any] = []
        for part in self._parts:
            copies.append(object.__new__(part.kind))
        copies.append(None)
        # One loop in one function, since it runs for every module in every step.
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
        if self._special or self._hooks:
            self._rebind(copies, weights, values)
        return copies[0]

    def buffers_of(self, replica: nn.Module) -> dict[str, Tensor]:
        """The buffers of a replica by their names here, as its forward left them."""
        return named_tensors(replica, "_buffers")

    def _weights(self, given: Mapping[str, Tensor] | Sequence[Tensor]) -> Sequence[Tensor]:
        """The weights in the order of ``self.params``."""
        if isinstance(given, (dict, Mapping)):
            if given.keys() != self.params.keys():
                raise refusals.wrong_names("weights", given, list(self.params))
            return list(map(given.__getitem__, self.params))
        weights = list(given)
        if len(weights) != len(self.params):
            raise refusals.wrong_number(len(weights), len(self.params))
        return weights

    def _buffers(self, given: Mapping[str, Tensor] | None) -> list[Tensor]:
        """Copies of the buffers in the order of ``self.buffers``, the own ones where not given."""
        merged = self.buffers
        if given:
            merged = {**merged, **given}
            if len(merged) > len(self.buffers):
                raise refusals.wrong_names("buffers", given, list(self.buffers))
        values = []
        for value in merged.values():
            values.append(value.detach().clone())
        return values

    def _rebind(self, copies: list[Any], weights: list[Any], values: list[Any]) -> None:
        """Points attributes and hooks that refer into the tree to the replica's own parts."""
        tensors = dict(zip(map(id, self.params.values()), weights, strict=False))
        tensors.update(zip(map(id, self.buffers.values()), values, strict=False))

        def copy_of(module: nn.Module) -> nn.Module | None:
            index = self._index.get(id(unwrapped(module)))
            return None if index is None else copies[index]

        rebind = Rebinder(copy_of, tensors.get)
        for i, attributes in self._special.items():
            for name, value in attributes.items():
                vars(copies[i])[name] = rebind(value)
        for i, hooks in self._hooks.items():
            attributes = vars(copies[i])
            for name in {name for name, _, _ in hooks}:
                attributes[name] = attributes[name].copy()
            for name, key, hook in hooks:
                attributes[name][key] = _exact(rebind(hook))


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


def _by_position(found: Mapping[int, Any], index: Mapping[int, int]) -> dict[int, Any]:
    return {index[source]: value for source, value in found.items()}


def _is_mutable(name: str, value: Any) -> bool:
    """Whether a forward could write to an attribute's value, which then must not be shared."""
    if name in _INTERNAL:
        return False
    plain = isinstance(value, Tensor) and not value.requires_grad
    return plain or type(value) in (list, dict, set, OrderedDict, deque)


class Replicator:
    """Copies a module tree, replacing its tensors by id and rebinding what refers into the tree."""

    def __init__(self, weights: Mapping[int, Tensor], buffers: Mapping[int, Tensor]) -> None:
        self.weights = weights
        self.tensors = {**weights, **buffers}
        self.copies: dict[int, nn.Module] = {}
        self.special: dict[int, dict[str, Any]] = {}
        """Attributes that refer into the tree, by module: they differ in every replica."""
        self.special_hooks: dict[int, list[tuple[str, Any, Any]]] = {}
        """Hooks that do, as (which hooks, key, hook)."""

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
        return self.copies.get(id(unwrapped(module)))

    def _fill(self, source: nn.Module, target: nn.Module, rebind: Rebinder) -> None:
        attributes = dict(vars(source))
        tensors, copies = self.tensors, self.copies
        for kind in ("_parameters", "_buffers"):
            attributes[kind] = {
                name: None if tensor is None else tensors.get(id(tensor), tensor)
                for name, tensor in attributes[kind].items()
            }
        attributes["_modules"] = {
            name: None if child is None else copies[id(unwrapped(child))]
            for name, child in attributes["_modules"].items()
        }
        attributes["_non_persistent_buffers_set"] = set(attributes["_non_persistent_buffers_set"])
        for name in _HOOKS:
            hooks, attributes[name] = attributes[name], OrderedDict()
            for key, hook in hooks.items():
                rebind.special = False
                attributes[name][key] = _exact(rebind(hook))
                if rebind.special:
                    self.special_hooks.setdefault(id(source), []).append((name, key, hook))
        attributes.pop("_compiled_call_impl", None)
        for name, value in attributes.items():
            if name in _INTERNAL or type(value) in PLAIN:
                continue
            rebind.special = False
            attributes[name] = rebind(value)
            if rebind.special:
                self.special.setdefault(id(source), {})[name] = value
        object.__setattr__(target, "__dict__", attributes)


def _exact(hook: Any) -> Any:
    return ExactWeightNorm(hook) if type(hook) is WeightNorm else hook


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
    return derived(kind, Exact, methods) if methods else kind


def derived(kind: type[nn.Module], mixin: type, namespace: dict[str, Any]) -> type[nn.Module]:
    """A class that passes for ``kind``, with a mixin before it."""
    body = {**namespace, "__module__": kind.__module__, "_innerloop_original": original(kind)}
    return types.new_class(kind.__name__, (mixin, kind), {}, lambda space: space.update(body))


def original(kind: type) -> type[nn.Module]:
    """The user's class behind a derived one."""
    return getattr(kind, "_innerloop_original", kind)


def as_plain(module: nn.Module) -> nn.Module:
    """An ordinary module of the original classes with copies of the weights and buffers."""
    weights: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    for weight in named_tensors(module, "_parameters").values():
        weights[id(weight)] = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    for buffer in named_tensors(module, "_buffers").values():
        buffers[id(buffer)] = buffer.detach().clone()
    return Replicator(weights, buffers).copy(survey(module), original)
