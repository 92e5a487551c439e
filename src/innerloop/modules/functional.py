"""Any module as a function of its weights, by a replica of its tree that shares no state with it.

A replica has the same classes, the same sharing of submodules and weights, the same hooks, and its
own dictionaries of weights and buffers. ``forward``, every other method and every direct call of a
submodule then see the weights it was given, at native speed; the original is only read.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.weight_norm import WeightNorm

from innerloop.errors import InnerLoopError, RequirementError, four_part
from innerloop.modules.exact import ExactWeightNorm, exact_methods
from innerloop.modules.rebind import PLAIN, Rebinder


class Functional:
    """A module as a pure function: ``f(params, *args, **kwargs)``.

    ``params`` is a mapping by name or a sequence in the order of ``module.parameters()``. All
    other arguments go to ``forward`` as they are. See :func:`functional`.
    """

    def __init__(self, module: nn.Module) -> None:
        survey(module)
        self.module = unwrapped(module)

    @property
    def params(self) -> dict[str, Tensor]:
        """The module's own parameters by name, each tied one once."""
        return dict(named_parameters(self.module))

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The module's own buffers by name."""
        return dict(_named(self.module, "_buffers"))

    def bind(
        self,
        params: Mapping[str, Tensor] | Sequence[Tensor],
        buffers: Mapping[str, Tensor] | None = None,
    ) -> nn.Module:
        """A module with these weights: a new replica, independent of every other one.

        Buffers not given are copies of the module's own; those given are copied too, so what the
        forward does to them stays in the replica. Read them with ``replica.named_buffers()``.
        """
        if torch.is_grad_enabled():
            check_buffers({**self.buffers, **(buffers or {})})
        return Template(self.module).bind(params, buffers)

    def template(self) -> Template:
        """The module as it is now, to be bound to weights many times."""
        return Template(self.module)

    def __call__(
        self, params: Mapping[str, Tensor] | Sequence[Tensor], /, *args: Any, **kwargs: Any
    ) -> Any:
        return self.bind(params)(*args, **kwargs)

    def __repr__(self) -> str:
        return f"functional({type(self.module).__name__})"


class Template:
    """A module as it was at one moment, to be given weights again and again.

    Modes, hooks and attributes are those of that moment, whatever becomes of the module later: a
    step that is computed a second time must not see what was changed in between.
    """

    def __init__(self, module: nn.Module) -> None:
        self.source = module
        self.params = dict(named_parameters(module))
        # The weights of a replica are no Parameters; whether they require grad says nothing.
        self.trained = {
            name: p.requires_grad for name, p in self.params.items() if isinstance(p, nn.Parameter)
        }
        self.buffers = dict(_named(module, "_buffers"))
        self.requiring = {name: b for name, b in self.buffers.items() if b.requires_grad}
        """Buffers that no gradient would get to; see :func:`check_buffers`."""
        sources = survey(module)
        own = {id(t): t for t in (*self.params.values(), *self.buffers.values())}
        replicator = Replicator(own, {})
        replicator.copy(sources, exact_class)
        self._kept = [replicator.copies[id(source)] for source in sources]
        self._index = {id(source): i for i, source in enumerate(sources)}
        self._index |= {id(kept): i for i, kept in enumerate(self._kept)}
        self._special = [replicator.special.get(id(source), {}) for source in sources]
        self._hooks = [replicator.special_hooks.get(id(source), ()) for source in sources]
        self._mutable = [
            [name for name, value in vars(kept).items() if _is_mutable(name, value)]
            for kept in self._kept
        ]

    def bind(
        self,
        params: Mapping[str, Tensor] | Sequence[Tensor],
        buffers: Mapping[str, Tensor] | None = None,
    ) -> nn.Module:
        """A new replica with these weights; see :meth:`Functional.bind`."""
        given = _by_name(self.params, params)
        unknown = sorted(set(buffers or {}) - set(self.buffers))
        if unknown:
            raise InnerLoopError(_unknown_names("buffers", unknown, list(self.buffers)))
        tensors = {id(own): given[name] for name, own in self.params.items()}
        for name, own in self.buffers.items():
            tensors[id(own)] = (buffers or {}).get(name, own).detach().clone()
        copies = [object.__new__(type(kept)) for kept in self._kept]

        def copy_of(module: nn.Module) -> nn.Module | None:
            index = self._index.get(id(unwrapped(module)))
            return None if index is None else copies[index]

        rebind = Rebinder(copy_of, tensors.get)
        for i, kept in enumerate(self._kept):
            object.__setattr__(copies[i], "__dict__", self._filled(i, kept, copies, tensors))
            for name, value in self._special[i].items():
                vars(copies[i])[name] = rebind(value)
            for name, key, hook in self._hooks[i]:
                vars(copies[i])[name][key] = _exact(rebind(hook))
        return copies[0]

    def buffers_of(self, replica: nn.Module) -> dict[str, Tensor]:
        """The buffers of a replica by their names here, as its forward left them."""
        return dict(_named(replica, "_buffers"))

    def _filled(
        self, i: int, kept: nn.Module, copies: list[nn.Module], tensors: Mapping[int, Tensor]
    ) -> dict[str, Any]:
        attributes = dict(vars(kept))
        for kind in ("_parameters", "_buffers"):
            attributes[kind] = {
                name: None if t is None else tensors[id(t)] for name, t in attributes[kind].items()
            }
        attributes["_modules"] = {
            name: None if child is None else copies[self._index[id(child)]]
            for name, child in attributes["_modules"].items()
        }
        for name in self._mutable[i]:
            value = attributes[name]
            attributes[name] = value.clone() if isinstance(value, Tensor) else copy.copy(value)
        for name in {name for name, _, _ in self._hooks[i]}:
            attributes[name] = attributes[name].copy()
        return attributes


def _is_mutable(name: str, value: Any) -> bool:
    """Whether a forward could write to an attribute's value, which then must not be shared."""
    if name in _INTERNAL:
        return False
    plain = isinstance(value, Tensor) and not value.requires_grad
    return plain or type(value) in (list, dict, set, OrderedDict, deque)


def functional(module: nn.Module) -> Functional:
    """Any ``nn.Module`` as a function of its weights; the module itself is never touched.

    >>> net = nn.Linear(2, 1)
    >>> f = functional(net)
    >>> weights = {name: torch.ones_like(p) for name, p in f.params.items()}
    >>> f(weights, torch.tensor([[2.0, 3.0]]))
    tensor([[6.]])

    ``f.bind(weights)`` gives a module with these weights, for other methods than ``forward``.
    """
    return Functional(module)


def check_buffers(buffers: Mapping[str, Tensor]) -> None:
    """Refuse buffers that are to have a gradient."""
    for name, buffer in buffers.items():
        if buffer.requires_grad:
            raise RequirementError(
                four_part(
                    f"The buffer {name!r} of shape {tuple(buffer.shape)} requires grad.",
                    "buffers without a gradient.",
                    "they are copied and carried from step to step as numbers; the gradient by "
                    "this one would silently be missing.",
                    "it as a torch.nn.Parameter, as a part of the batch, or as a plain attribute "
                    "of the module; .detach() it where it is registered, or torch.no_grad(), if "
                    "no gradient is wanted.",
                )
            )


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrapper of ``torch.compile``, DataParallel or its distributed kin."""
    inner = _wraps(type(module))
    while inner is not None:
        module = module._modules[inner]  # type: ignore[assignment]
        inner = _wraps(type(module))
    return module


@functools.cache
def _wraps(kind: type) -> str | None:
    """The name under which a wrapper class keeps its module."""
    if issubclass(kind, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return "module"
    # By name: importing torch._dynamo takes as long as importing torch.
    compiled = any(b.__module__ == "torch._dynamo.eval_frame" for b in kind.__mro__)
    return "_orig_mod" if compiled else None


def survey(root: nn.Module) -> list[nn.Module]:
    """All modules of a tree, each once, wrappers left out. Refuses what has no replica."""
    if not isinstance(root, nn.Module):
        raise InnerLoopError(
            four_part(
                f"You gave a {type(root).__name__}.",
                "a torch.nn.Module.",
                "its weights are found in its module tree.",
                "class Model(torch.nn.Module): ...",
            )
        )
    found: dict[int, nn.Module] = {}
    _visit(unwrapped(root), found)
    for module in found.values():
        if isinstance(module, torch.jit.ScriptModule):
            raise InnerLoopError(
                four_part(
                    f"The module {_path(root, module)} is a ScriptModule.",
                    "a module written in Python.",
                    "a compiled script owns its weights and does not take others.",
                    "the module as it was before torch.jit.script or torch.jit.trace.",
                )
            )
        for name, parameter in module._parameters.items():
            if isinstance(parameter, UninitializedParameter | UninitializedBuffer):
                raise InnerLoopError(
                    four_part(
                        f"The lazy module {_path(root, module)} has no {name!r} yet.",
                        "a module whose weights have shapes.",
                        "a lazy module makes its weights in its first call.",
                        "model(example_input) once before.",
                    )
                )
    return list(found.values())


def _visit(module: nn.Module, found: dict[int, nn.Module]) -> None:
    if id(module) in found:
        return
    found[id(module)] = module
    for child in module._modules.values():
        if child is not None:
            _visit(unwrapped(child), found)


def _path(root: nn.Module, wanted: nn.Module) -> str:
    paths = [name for name, module in root.named_modules() if module is wanted]
    return repr(paths[0] if paths and paths[0] else type(wanted).__name__)


def parameters_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Each parameter of these modules once, in the order of ``root.parameters()``."""
    found = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    return list(found.values())


def named_parameters(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter once, in the order of ``root.parameters()``, wrappers left out."""
    return _named(root, "_parameters")


def _named(root: nn.Module, kind: str) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for prefix, module in _named_modules(root, "", set()):
        for name, tensor in getattr(module, kind).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}{name}", tensor


def _named_modules(
    module: nn.Module, prefix: str, seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    module = unwrapped(module)
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _named_modules(child, f"{prefix}{name}.", seen)


def _by_name(
    names: Mapping[str, Tensor], given: Mapping[str, Tensor] | Sequence[Tensor]
) -> Mapping[str, Tensor]:
    if not isinstance(given, Mapping):
        given = list(given)
        if len(given) != len(names):
            raise InnerLoopError(
                four_part(
                    f"You gave {len(given)} weights.",
                    f"{len(names)}, in the order of module.parameters().",
                    "weights given as a sequence are matched by position.",
                    "list(module.parameters()) with the tensors you want in their places.",
                )
            )
        return dict(zip(names, given, strict=True))
    missing = sorted(set(names) - set(given))
    if missing or len(given) > len(names):
        unknown = sorted(set(given) - set(names))
        raise InnerLoopError(_unknown_names("weights", unknown or missing, list(names)))
    return given


def _unknown_names(kind: str, wrong: Sequence[str], known: Sequence[str]) -> str:
    return four_part(
        f"These {kind} are missing or unknown: {', '.join(wrong[:5])}.",
        f"exactly the module's own: {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}.",
        "a weight left out would silently be the original's.",
        "f.params as a starting point; a tied weight goes by its first name.",
    )


# The replica. -----------------------------------------------------------------------------------

_BASE = nn.Module()
_HOOKS = tuple(name for name, value in vars(_BASE).items() if isinstance(value, OrderedDict))
_INTERNAL = frozenset(vars(_BASE)) | {"_compiled_call_impl"}


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
    for _, weight in _named(module, "_parameters"):
        weights[id(weight)] = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    for _, buffer in _named(module, "_buffers"):
        buffers[id(buffer)] = buffer.detach().clone()
    return Replicator(weights, buffers).copy(survey(module), original)
