"""Any module as a function of its weights, by a replica of its tree that shares no state with it.

A replica has the same classes, the same sharing of submodules and weights, the same hooks, and its
own dictionaries of weights and buffers. ``forward``, every other method and every direct call of a
submodule then see the weights it was given, at native speed; the original is only read.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from innerloop._kernels import ExactWeightNorm, exact_forward, twice_differentiable
from innerloop.errors import InnerLoopError, four_part


class Functional:
    """A module as a pure function: ``f(params, *args, **kwargs)``.

    ``params`` is a mapping by name or a sequence in the order of ``module.parameters()``. All
    other arguments go to ``forward`` as they are. See :func:`functional`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = unwrapped(module)
        check(self.module)

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
        names = self.params
        given = _by_name(names, params)
        weights = {id(own): given[name] for name, own in names.items()}
        own_buffers = self.buffers
        chosen = {id(t): (buffers or {}).get(name, t) for name, t in own_buffers.items()}
        unknown = sorted(set(buffers or {}) - set(own_buffers))
        if unknown:
            raise InnerLoopError(_unknown_names("buffers", unknown, list(own_buffers)))
        copies = {key: tensor.detach().clone() for key, tensor in chosen.items()}
        return Replicator(weights, copies).copy(self.module)

    def __call__(
        self, params: Mapping[str, Tensor] | Sequence[Tensor], /, *args: Any, **kwargs: Any
    ) -> Any:
        with twice_differentiable:
            return self.bind(params)(*args, **kwargs)

    def __repr__(self) -> str:
        return f"functional({type(self.module).__name__})"


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


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrapper of ``torch.compile``, DataParallel or its distributed kin."""
    while True:
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules and type(module).__name__ == "OptimizedModule":
            module = module._modules["_orig_mod"]  # type: ignore[assignment]
        else:
            return module


def check(root: nn.Module) -> None:
    """Refuse what has no replica, before any work is done."""
    if not isinstance(root, nn.Module):
        raise InnerLoopError(
            four_part(
                f"You gave a {type(root).__name__}.",
                "a torch.nn.Module.",
                "its weights are found in its module tree.",
                "class Model(torch.nn.Module): ...",
            )
        )
    for name, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InnerLoopError(
                four_part(
                    f"The module {name or 'you gave'!r} is a ScriptModule.",
                    "a module written in Python.",
                    "a compiled script owns its weights and does not take others.",
                    "the module as it was before torch.jit.script or torch.jit.trace.",
                )
            )
        for weight, parameter in module._parameters.items():
            if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
                raise InnerLoopError(
                    four_part(
                        f"The lazy module {name or type(module).__name__!r} has no {weight!r} yet.",
                        "a module whose weights have shapes.",
                        "a lazy module makes its weights in its first call.",
                        "model(example_input) once before.",
                    )
                )


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
_PLAIN = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type, torch.dtype, torch.device}
    | {torch.Size, types.BuiltinFunctionType, torch.Generator, torch.layout}
)


class Replicator:
    """Copies a module tree, replacing its tensors by id and rebinding what refers into the tree."""

    def __init__(self, weights: Mapping[int, Tensor], buffers: Mapping[int, Tensor]) -> None:
        self.weights = weights
        self.tensors = {**weights, **buffers}
        self.copies: dict[int, nn.Module] = {}
        self.special: dict[int, dict[str, Any]] = {}
        """Attributes that refer into the tree, by module: they differ in every replica."""

    def copy(
        self, root: nn.Module, class_of: Callable[[type[nn.Module]], type[nn.Module]] | None = None
    ) -> nn.Module:
        order: list[tuple[nn.Module, nn.Module]] = []
        copied = self._allocate(root, order, class_of)
        rebind = Rebinder(self.copies.get, self.tensors.get)
        for source, target in order:
            self._fill(source, target, rebind)
        return copied

    def _allocate(self, module: nn.Module, order: list[Any], class_of: Any) -> nn.Module:
        source = unwrapped(module)
        target = self.copies.get(id(source))
        if target is None:
            kind = type(source) if class_of is None else class_of(type(source))
            target = object.__new__(kind)
            self.copies[id(source)] = target
            order.append((source, target))
            for child in source._modules.values():
                if child is not None:
                    self._allocate(child, order, class_of)
        self.copies[id(module)] = target
        return target

    def _fill(self, source: nn.Module, target: nn.Module, rebind: Rebinder) -> None:
        attributes = dict(vars(source))
        tensors, copies = self.tensors, self.copies
        for kind in ("_parameters", "_buffers"):
            attributes[kind] = {
                name: None if tensor is None else tensors.get(id(tensor), tensor)
                for name, tensor in attributes[kind].items()
            }
        attributes["_modules"] = {
            name: None if child is None else copies[id(child)]
            for name, child in attributes["_modules"].items()
        }
        attributes["_non_persistent_buffers_set"] = set(attributes["_non_persistent_buffers_set"])
        for name in _HOOKS:
            hooks = attributes[name]
            attributes[name] = (
                OrderedDict((key, _exact(rebind(hook))) for key, hook in hooks.items())
                if hooks
                else OrderedDict()
            )
        attributes.pop("_compiled_call_impl", None)
        for name, value in attributes.items():
            if name in _INTERNAL or type(value) in _PLAIN:
                continue
            rebind.special = False
            attributes[name] = rebind(value)
            if rebind.special:
                self.special.setdefault(id(source), {})[name] = value
        object.__setattr__(target, "__dict__", attributes)
        replaced = exact_forward(target) if "forward" not in attributes else None
        if replaced is not None:
            attributes["forward"] = replaced


def _exact(hook: Any) -> Any:
    return ExactWeightNorm(hook) if type(hook) is WeightNorm else hook


class Rebinder:
    """Carries a value over into a replica: what refers into the original tree refers into the new.

    Mutable containers are copied, so that the replica can write to its own. ``special`` is set when
    something in the value was rebound.
    """

    def __init__(
        self,
        module_of: Callable[[int], nn.Module | None],
        tensor_of: Callable[[int], Tensor | None],
    ) -> None:
        self.module_of = module_of
        self.tensor_of = tensor_of
        self.special = False
        self.seen: dict[int, tuple[Any, Any, bool]] = {}

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, nn.Module):
            return self._mapped(value, self.module_of(id(value)))
        if isinstance(value, Tensor):
            return self._mapped(value, self.tensor_of(id(value)))
        if id(value) in self.seen:
            _, new, special = self.seen[id(value)]
            self.special |= special
            return new
        outer, self.special = self.special, False
        self.seen[id(value)] = (value, value, False)
        new = self._compound(value, kind)
        self.seen[id(value)] = (value, new, self.special)
        self.special |= outer
        return new

    def _mapped(self, old: Any, new: Any) -> Any:
        if new is None:
            return old
        self.special = True
        return new

    def _compound(self, value: Any, kind: type) -> Any:
        if kind in (list, deque, set):
            return kind(map(self, value)) if value else kind()
        if isinstance(value, tuple):
            items = [self(item) for item in value]
            if not self.special:
                return value
            return kind(*items) if hasattr(value, "_fields") else kind(items)
        if kind in (dict, OrderedDict):
            return kind((key, self(item)) for key, item in value.items())
        if kind is types.MethodType:
            owner = self(value.__self__)
            return types.MethodType(value.__func__, owner) if self.special else value
        if kind is functools.partial:
            return self._partial(value)
        if kind is types.FunctionType:
            return self._function(value)
        return self._object(value)

    def _partial(self, value: functools.partial) -> Any:
        function = self(value.func)
        args = [self(arg) for arg in value.args]
        kwargs = {key: self(arg) for key, arg in value.keywords.items()}
        if not self.special:
            return value
        new = functools.partial(function, *args, **kwargs)
        new.__dict__.update({key: self(item) for key, item in vars(value).items()})
        return new

    def _function(self, value: types.FunctionType) -> Any:
        if not value.__closure__:
            return value
        cells = []
        for cell in value.__closure__:
            try:
                cells.append(types.CellType(self(cell.cell_contents)))
            except ValueError:  # a cell that is still empty
                cells.append(cell)
        if not self.special:
            return value
        new = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells)
        )
        new.__kwdefaults__ = value.__kwdefaults__
        new.__dict__.update(vars(value))
        return new

    def _object(self, value: Any) -> Any:
        """A plain object that directly holds a part of the tree is copied and rebound."""
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or isinstance(value, type | types.ModuleType):
            return value
        if not any(self._refers(item) for item in attributes.values()):
            return value
        new = object.__new__(type(value))
        new.__dict__.update({key: self(item) for key, item in attributes.items()})
        self.special = True
        return new

    def _refers(self, item: Any) -> bool:
        if isinstance(item, nn.Module):
            return self.module_of(id(item)) is not None
        if isinstance(item, Tensor):
            return self.tensor_of(id(item)) is not None
        return isinstance(item, types.MethodType) and self._refers(item.__self__)
