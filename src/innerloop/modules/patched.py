"""The patched model: a stand-in for a module whose weights can be replaced at every step.

Users hold a tree of *handles*. A handle reads like the module it stands for and always has the
latest weights, so a reference to a submodule never becomes stale. Calls run on a *version*: a
replica for the present weights that keeps them afterwards. A forward that is recomputed during
backward (activation checkpointing) therefore finds the weights of its own step.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from innerloop.errors import InnerLoopError, refusal
from innerloop.modules.exact import exact_methods, own_methods, twice_differentiable
from innerloop.modules.functional import check_buffers
from innerloop.modules.rebind import Rebinder
from innerloop.modules.replica import (
    References,
    Replicator,
    as_plain,
    derive_class,
    original,
    set_references,
)
from innerloop.modules.tree import named_tensors, parameters_of, survey, unwrap

_NODE = "_innerloop"


class Core:
    """The weights of one patched model: the present ones, their history, and the present version.

    Handles own the core. It refers to them weakly and to their dictionaries of weights strongly, so
    that everything is freed with the last handle and the last graph.
    """

    def __init__(
        self,
        originals: Sequence[nn.Module],
        parameters: Sequence[Tensor],
        buffers: dict[int, Tensor],
        track: bool,
    ) -> None:
        self.originals = originals
        self.index = {id(module): i for i, module in enumerate(originals)}
        self.param_index = {id(p): i for i, p in enumerate(parameters)}
        self.buffers = buffers
        self.track = track
        self.weights: list[Tensor] | None = None
        self.history: list[list[Tensor]] | None = None
        self.moved = False
        self.task = torch._C._current_graph_task_id()
        """The backward pass in which the weights moved last; -1 outside of any."""
        self.versions: dict[int, nn.Module] = {}
        self.handles: list[weakref.ref[nn.Module]] = []
        self.places: list[list[tuple[dict[str, Tensor | None], str]]] = [
            [] for _ in self.param_index
        ]
        """For each weight the dictionaries of parameters that hold it, with its names there."""
        self.special: dict[int, References] = {}
        """By module: what refers into the module tree."""

    def add(self, handle: nn.Module, references: References) -> None:
        """Adds the handle of the next module."""
        number, attributes = len(self.handles), vars(handle)
        own = attributes["_parameters"]
        attributes[_NODE] = Node(self, number)
        if references:
            self.special[number] = references
        self.handles.append(weakref.ref(handle))
        for name, parameter in self.originals[number]._parameters.items():
            if parameter is not None:
                self.places[self.param_index[id(parameter)]].append((own, name))

    def show(self, weights: list[Tensor]) -> None:
        """Make these the present weights."""
        if len(weights) != len(self.places):
            raise _wrong_number_of_weights(len(weights), len(self.places))
        if self.weights is not None:
            if all(map(operator.is_, weights, self.weights)):
                return
            self.moved = True
        self.task = torch._C._current_graph_task_id()
        self.weights = weights
        for places, weight in zip(self.places, weights, strict=True):
            for owner, name in places:
                owner[name] = weight
        self.versions.clear()
        for i, references in self.special.items():
            handle = self.handles[i]()
            if handle is not None:  # It never runs its hooks.
                own = {at: value for at, value in references.items() if at[1] is None}
                set_references(vars(handle), own, Rebinder(self._handle_of, self._tensor_of))

    def record(self, weights: list[Tensor]) -> None:
        """Make these the present weights, and a point in time."""
        self.show(weights)
        if self.track and self.history is not None:
            self.history.append(weights)
        else:
            self.history = [weights]

    def version(self, handle: nn.Module) -> nn.Module:
        """The replica of a handle for the present weights."""
        index = vars(handle)[_NODE].number
        if index in self.versions:
            return self.versions[index]
        if self.weights is None:
            raise _no_weights_to_call_with()
        version = self.versions[index] = object.__new__(_version_class(type(handle)))
        attributes = dict(vars(handle))
        attributes[_NODE] = self.handles[index]
        attributes["_parameters"] = dict(attributes["_parameters"])
        children = attributes["_modules"] = dict(attributes["_modules"])
        for name, child in children.items():
            if isinstance(child, Patched):
                children[name] = self.version(child)
        object.__setattr__(version, "__dict__", attributes)
        if index in self.special:
            rebind = Rebinder(self._version_of, self._tensor_of)
            set_references(attributes, self.special[index], rebind)
        return version

    def _handle_of(self, module: nn.Module) -> nn.Module | None:
        index = self.index.get(id(unwrap(module)))
        return None if index is None else self.handles[index]()

    def _version_of(self, module: nn.Module) -> nn.Module | None:
        handle = self._handle_of(module)
        return None if handle is None else self.version(handle)

    def _tensor_of(self, original: int) -> Tensor | None:
        position = self.param_index.get(original)
        if position is None or self.weights is None:
            return self.buffers.get(original)
        return self.weights[position]


class Node(NamedTuple):
    """A handle's place: the core it belongs to and its number in the module tree."""

    core: Core
    number: int


class Patched(nn.Module):
    """Mixin of the classes of handles. Its public names are those of the paper's library."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the hooks for subclasses of the user's classes from running for a handle."""

    @property
    def fast_params(self) -> list[Tensor] | None:
        """The present weights, one per parameter; ``None`` if the model has none of its own."""
        return self.__dict__[_NODE].core.weights

    @fast_params.setter
    def fast_params(self, value: Iterable[Tensor]) -> None:
        _core(self).record(list(value))

    @property
    def init_fast_params(self) -> list[Tensor]:
        """The weights the model started from."""
        core = _core(self)
        if not core.track or not core.history:
            raise _no_history("init_fast_params")
        return core.history[0]

    @property
    def _fast_params(self) -> list[list[Tensor]] | None:
        return self.__dict__[_NODE].core.history

    @_fast_params.setter
    def _fast_params(self, value: list[list[Tensor]] | None) -> None:
        core = _core(self)
        core.history = value
        if value and value[-1]:
            core.show(value[-1])

    @property
    def track_higher_grads(self) -> bool:
        """True if updates stay in the graph and in the history."""
        return _core(self).track

    @track_higher_grads.setter
    def track_higher_grads(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise _not_a_switch(value)
        _core(self).track = value

    def update_params(self, params: Iterable[Tensor]) -> None:
        """Make these the present weights and remember them as the next point in time."""
        self.__dict__[_NODE].core.record(list(params))

    def parameters(self, recurse: bool = True, time: int | None = None) -> Iterator[Any]:
        """The present weights, or those ``time`` updates after the start."""
        core, index = vars(self)[_NODE]
        if index != 0:
            return super().parameters(recurse)
        if time is None or time == -1:
            if core.weights is None:
                raise _no_history("parameters()")
            return iter(core.weights)
        if not core.track and time != 0:
            raise _no_history(f"parameters(time={time})")
        history = core.history or []
        if not -len(history) <= time < len(history):
            raise _no_such_time(time, len(history))
        return iter(history[time])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self, None, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward with the present weights, without hooks."""
        return _run(self, "forward", args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if _NODE not in vars(self):
            super().__setattr__(name, value)
            return
        core, index = vars(self)[_NODE]
        if isinstance(value, Tensor) and name in self._parameters:
            position = _position(core, self._parameters, name)
            if position is not None and core.weights is not None:
                weights = list(core.weights)
                weights[position] = value
                core.record(weights)
                return
        core.versions.clear()
        core.special.get(index, {}).pop((name, None), None)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        _core(self).versions.clear()
        super().__delattr__(name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of those weights that are leaves; the others have none."""
        for weight in super().parameters():
            if weight.is_leaf and weight.grad is not None:
                weight.grad = None if set_to_none else torch.zeros_like(weight)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load into new weights; those of earlier steps stay as they are."""
        plain = as_module(self)
        result = plain.load_state_dict(state_dict, strict=strict, assign=assign)
        loaded = named_tensors(plain, "_parameters")
        core = _core(self)
        weights = list(core.weights or [])
        for name, weight in named_tensors(self, "_parameters").items():
            position = next(i for i, w in enumerate(weights) if w is weight)
            weights[position] = loaded[name].detach().requires_grad_(weight.requires_grad)
        core.record(weights)
        for ours, theirs in zip(self.modules(), plain.modules(), strict=True):
            ours._buffers.update(theirs._buffers)
        return result

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        core = _core(self)
        below = {id(weight) for weight in super().parameters(recurse)}
        core.show([fn(w) if id(w) in below else w for w in core.weights or []])
        if core.history and core.weights is not None:
            core.history[-1] = core.weights
        for module in self.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restore, (as_module(self), _core(self).track)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = _restore(as_module(self), _core(self).track)
        memo[id(self)] = copied
        return copied


def _core(handle: nn.Module) -> Core:
    return vars(handle)[_NODE].core


def _position(core: Core, owner: Any, name: str) -> int | None:
    for i, places in enumerate(core.places):
        if any(d is owner and n == name for d, n in places):
            return i
    return None


def _run(handle: nn.Module, method: str | None, args: Any, kwargs: Any) -> Any:
    core: Core = handle.__dict__[_NODE].core
    if "params" in kwargs and not _takes_params(handle):
        params = kwargs.pop("params")
        if params is not None:
            core.show(list(params))
    if core.moved and torch._C._current_graph_task_id() not in (-1, core.task):
        raise _recomputed_from_outside()
    version = core.version(handle)
    called = version if method is None else getattr(version, method)
    if core.track:
        with twice_differentiable():
            result = called(*args, **kwargs)
    else:
        result = called(*args, **kwargs)
    return handle if result is version else result


def _takes_params(handle: nn.Module) -> bool:
    """True if the model's forward has an argument of that name itself; then it is the model's."""
    forward = vars(handle).get("forward") or original(type(handle)).forward
    return "params" in inspect.signature(forward).parameters


# Classes: one of handles and one of versions for each class of the user's. ----------------------


@functools.cache
def _handle_class(kind: type[nn.Module]) -> type[nn.Module]:
    ours = vars(Patched)
    methods = {n: _on_version(n, m) for n, m in own_methods(kind).items() if n not in ours}
    return derive_class(kind, Patched, methods)


def _on_version(name: str, member: Any) -> Any:
    @functools.wraps(member)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        core = _core(self)
        if core.weights is None:
            return member(self, *args, **kwargs)
        version = core.version(self)
        result = getattr(version, name)(*args, **kwargs)
        return self if result is version else result

    return method


class Version(nn.Module):
    """Mixin of the classes of versions: attributes that a forward sets reach the handle."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """As in :class:`Patched`."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in vars(self):
            handle = vars(self)[_NODE]()
            if handle is not None:
                vars(handle)[name] = value
                core, index = vars(handle)[_NODE]
                core.special.get(index, {}).pop((name, None), None)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        handle = vars(self)[_NODE]()
        if handle is not None:
            vars(handle).pop(name, None)


@functools.cache
def _version_class(kind: type[nn.Module]) -> type[nn.Module]:
    return derive_class(original(kind), Version, exact_methods(original(kind)))


# Patching a module, and the way back. -----------------------------------------------------------


def patch_module(
    originals: Sequence[nn.Module],
    weights: Sequence[Tensor] | None,
    device: torch.device | str | None = None,
    track: bool = True,
) -> Any:
    """Handles for a module tree, with these initial weights; ``None`` gives it none of its own.

    ``originals`` are all modules of the tree, as ``survey`` returns them.
    """
    if isinstance(originals[0], Patched):
        raise _patched_twice()
    if track and torch.is_grad_enabled():
        check_buffers(dict(originals[0].named_buffers()))
    own = parameters_of(originals)
    start = dict(zip(map(id, own), own if weights is None else weights, strict=True))
    shared = {id(b): b for m in originals for b in m._buffers.values() if b is not None}
    buffers = {key: b.detach().clone() for key, b in shared.items()}
    if device is not None:
        buffers = {key: b.to(device) for key, b in buffers.items()}
    replicator = Replicator({**start, **buffers})
    handle = replicator.copy(originals, _handle_class)
    core = Core(originals, own, buffers, track)
    for source in originals:
        core.add(replicator.copies[id(source)], replicator.special.get(id(source), {}))
    if weights is not None:
        core.record(list(weights))
    return handle


def as_module(handle: nn.Module) -> nn.Module:
    """An ordinary module of the original class with copies of the present weights and buffers."""
    plain = as_plain(handle)
    for module in plain.modules():
        vars(module).pop(_NODE, None)
    return plain


def _restore(module: nn.Module, track: bool) -> Any:
    originals = survey(module)
    weights = [p.detach().clone().requires_grad_(p.requires_grad) for p in parameters_of(originals)]
    return patch_module(originals, weights, track=track)


def reference_params(fmodel: nn.Module) -> list[Tensor]:
    """The parameters of the module that a patched model stands for."""
    return parameters_of(_core(fmodel).originals)


# Refusals. --------------------------------------------------------------------------------------


def _wrong_number_of_weights(found: int, needed: int) -> InnerLoopError:
    return refusal(
        f"You gave {found} weights to a model that has {needed}.",
        "one tensor for each parameter, in the order of model.parameters().",
        "they are matched by position.",
        "list(fmodel.parameters()) with some entries replaced.",
    )


def _no_weights_to_call_with() -> InnerLoopError:
    return refusal(
        "You called a patched model that has no weights.",
        "weights for this call.",
        "it was made by make_functional, which gives it none of its own.",
        "fmodel(x, params=list_of_weights).",
    )


def _no_history(what: str) -> InnerLoopError:
    return refusal(
        f"You asked for {what}.",
        "a patched model that keeps its history.",
        "track_higher_grads is False or the model has no weights yet, so only the latest remain.",
        "monkeypatch(model, track_higher_grads=True).",
    )


def _no_such_time(time: int, count: int) -> InnerLoopError:
    return refusal(
        f"You asked for parameters(time={time}).",
        f"a time from 0 to {count - 1}.",
        f"the weights were updated {max(count - 1, 0)} times.",
        "fmodel.parameters(time=0) for the first, fmodel.parameters() for the latest.",
    )


def _not_a_switch(value: Any) -> InnerLoopError:
    return refusal(
        f"You set track_higher_grads to {value!r}.",
        "True or False.",
        "it is a switch.",
        "fmodel.track_higher_grads = False.",
    )


def _recomputed_from_outside() -> InnerLoopError:
    return refusal(
        "A patched model was called during a backward pass, after its weights had moved.",
        "a recomputation that finds the weights of its own step.",
        "torch.utils.checkpoint was given the patched model itself, which only knows the "
        "latest weights.",
        "torch.utils.checkpoint inside the model's forward, where this works.",
    )


def _patched_twice() -> InnerLoopError:
    return refusal(
        "You patched a patched model.",
        "a plain module.",
        "a patched model already is a function of its weights.",
        "monkeypatch(model), with the model it was made from.",
    )
