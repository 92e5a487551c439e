"""Differentiable optimizers with the paper's imperative interface: ``diffopt.step(loss)``."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree, optim
from innerloop._numerics import full_precision
from innerloop.errors import InnerLoopError, RequirementError, four_part
from innerloop.guard import second_order
from innerloop.guard.arguments import check_loss, check_requires_grad
from innerloop.modules.exact import twice_differentiable
from innerloop.modules.patched import Patched
from innerloop.optim.blocks import (
    OptState,
    plain_settings,
    unpacked,
    write_settings,
    write_state,
)
from innerloop.optim.convert import family_of
from innerloop.optim.family import Family
from innerloop.optim.rule import Rule, step
from innerloop.optim.settings import check_name, check_value, per_group

GradCallback = Callable[[Any], Any]
_SAME_AS = "_innerloop_same_as"
Override = Mapping[str, Any]


class DifferentiableOptimizer(torch.optim.Optimizer):
    """The base of all differentiable optimizers. Subclass it, with ``_update``, to add your own.

    ``_update(grouped_grads)`` finds the parameters in ``self.param_groups[g]["params"]``, their
    gradients in ``grouped_grads[g]`` (``None`` where there is none) and may keep what it likes in
    ``self.state[g][i]``; it replaces the parameters in their lists by new tensors.
    """

    def __init__(
        self,
        other: torch.optim.Optimizer,
        reference_params: Iterable[Tensor],
        fmodel: Any = None,
        device: torch.device | str | None = None,
        override: Override | None = None,
        grad_callback: GradCallback | None = None,
        track_higher_grads: bool = True,
        first_order: bool = False,
        **kwargs: Any,
    ) -> None:
        reference = list(reference_params)
        index = {id(p): i for i, p in enumerate(reference)}
        self._reference = reference
        self._group_to_param_list = [
            [_index_of(p, index, g, i) for i, p in enumerate(group["params"])]
            for g, group in enumerate(other.param_groups)
        ]
        self.param_groups: list[dict[str, Any]] = [
            {name: _own(value) for name, value in group.items()} for group in other.param_groups
        ]
        self.defaults = dict(other.defaults)
        self._device = device
        self._fmodel = fmodel
        self._grad_callback = grad_callback
        self._track_higher_grads = track_higher_grads
        self._first_order = first_order
        # What torch.optim.Optimizer expects of its instances, for schedulers and hooks.
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._warned_capturable_if_run_uncaptured = True
        if override is not None:
            self._apply_override(override)
        self._start(other)

    # What a subclass may replace. ---------------------------------------------------------------

    def _start(self, other: torch.optim.Optimizer) -> None:
        """Copy the state of the optimizer this one continues."""
        self.state: Any = [defaultdict(dict) for _ in self.param_groups]
        for g, group in enumerate(other.param_groups):
            for i, param in enumerate(group["params"]):
                if param in other.state:
                    self.state[g][i] = _moved(other.state[param], self._device)

    def _update(self, grouped_grads: list[list[Tensor | None]], **kwargs: Any) -> None:
        raise NotImplementedError

    def _check_override(self, name: str, values: Sequence[Any]) -> None:
        if name not in self.param_groups[0]:
            known = ", ".join(key for key in self.param_groups[0] if key != "params")
            raise InnerLoopError(
                four_part(
                    f"You gave a value for {name!r}.",
                    f"a setting of the optimizer: {known}.",
                    "it has no setting of that name, so the value would have no effect.",
                    "one of these names.",
                )
            )

    # The interface. -----------------------------------------------------------------------------

    def step(  # type: ignore[override]
        self,
        loss: Tensor,
        params: Iterable[Tensor] | None = None,
        override: Override | None = None,
        grad_callback: GradCallback | None = None,
        *,
        retain_graph: bool | None = None,
        **kwargs: Any,
    ) -> list[Tensor]:
        """One update of the parameters by the gradient of ``loss``, kept in the graph (Eq. 2).

        ``params`` are the present parameters, needed when there is no patched model. ``override``
        replaces continuous settings from now on. ``grad_callback`` gets the gradients as a tuple,
        ``None`` where there is none, and returns those to use. ``retain_graph=True`` lets another
        optimizer take a step by the same loss.
        """
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (loss,), kwargs)
        weights = self._present(params)
        check_loss(loss)
        check_requires_grad(loss)
        settings = self._checked(override)
        callback = grad_callback if grad_callback is not None else self._grad_callback
        grads = self._gradients(loss, weights, retain_graph, everywhere=callback is not None)
        if callback is not None:
            grads = _from_callback(callback(grads), len(weights))
        before = [dict(group) for group in self.param_groups]
        grouped = []
        for group, positions in zip(self.param_groups, self._group_to_param_list, strict=True):
            group["params"] = [weights[p] for p in positions]
            grouped.append([grads[p] for p in positions])
        try:
            self._set(settings)
            with torch.set_grad_enabled(self._track_higher_grads), full_precision(loss.device):
                self._update(grouped)
        except BaseException:
            for group, kept in zip(self.param_groups, before, strict=True):
                group.clear()
                group.update(kept)
            raise
        new = list(weights)
        for group, positions in zip(self.param_groups, self._group_to_param_list, strict=True):
            for i, p in enumerate(positions):
                new[p] = self._kept(group["params"][i], weights[p])
        if self._track_higher_grads:
            new = [_renewed(n) if n is w else n for n, w in zip(new, weights, strict=True)]
        for group, positions in zip(self.param_groups, self._group_to_param_list, strict=True):
            group["params"] = [new[p] for p in positions]
        if self._fmodel is not None:
            self._fmodel.update_params(new)
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, (loss,), kwargs)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An independent copy at the same point, cut off from earlier steps; so is its model."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.param_groups = [dict(group) for group in self.param_groups]
        for group in copied.param_groups:
            group["params"] = [p.detach() for p in group["params"]]
        copied._group_to_param_list = [list(p) for p in self._group_to_param_list]
        copied._set_flat_state([_moved(slots, None) for slots in self._flat_state()])
        copied._fmodel = copy.deepcopy(self._fmodel, memo)
        return copied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: ``step`` computes gradients afresh and leaves none behind."""

    def state_dict(self) -> dict[str, Any]:
        """The state and settings in torch's format, as plain numbers and tensors."""
        numbering, groups = 0, []
        for group in self.param_groups:
            count = len(group["params"])
            plain = {k: _tree.map(_detached, v) for k, v in group.items() if k != "params"}
            groups.append({**plain, "params": list(range(numbering, numbering + count))})
            numbering += count
        state = {
            n: _tree.map(_detached, dict(slots))
            for n, slots in enumerate(self._flat_state())
            if slots
        }
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Take over a state and settings, from here or from ``torch.optim``.

        ``diffopt.load_state_dict(diffopt.state_dict())`` cuts the state off from earlier steps, for
        truncated backpropagation; learned settings stay learned.
        """
        sizes = [len(group["params"]) for group in self.param_groups]
        given = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != given:
            raise InnerLoopError(
                four_part(
                    f"You gave the state of an optimizer with groups of {given} parameters.",
                    f"groups of {sizes} parameters.",
                    "state is matched to parameters by position.",
                    "the state_dict of an optimizer built over the same groups.",
                )
            )
        flat: list[Any] = []
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: _loaded(v, group.get(k)) for k, v in saved.items() if k != "params"})
            flat.extend(
                _moved(state_dict["state"].get(n, {}), self._device) for n in saved["params"]
            )
        self._set_flat_state(flat)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, of the original model or present ones of the patched."""
        group = dict(param_group)
        given = group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        index = {id(p): i for i, p in enumerate(self._reference)}
        if self._fmodel is not None and self._fmodel.fast_params is not None:
            index |= {id(p): i for i, p in enumerate(self._fmodel.fast_params)}
        positions = [_index_of(p, index, len(self.param_groups), i) for i, p in enumerate(given)]
        taken = {p for group in self._group_to_param_list for p in group}
        if taken & set(positions):
            raise InnerLoopError(
                four_part(
                    "You added a group with a parameter that is in a group already.",
                    "each parameter in one group.",
                    "it would be updated twice in a step.",
                    "add_param_group({'params': other_parameters}).",
                )
            )
        flat = self._flat_state() + [{} for _ in given]
        self._group_to_param_list.append(positions)
        self.param_groups.append({**self.defaults, **group, "params": given})
        self._set_flat_state(flat)

    def write_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Put this optimizer's state and settings into an ordinary one over the same parameters."""
        self._check_sizes(optimizer)
        optimizer.load_state_dict(self.state_dict())

    def _check_sizes(self, optimizer: torch.optim.Optimizer) -> None:
        theirs = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
        ours = [[tuple(p.shape) for p in group["params"]] for group in self.param_groups]
        if theirs != ours:
            raise InnerLoopError(
                four_part(
                    f"You wrote to an optimizer with groups of {[len(g) for g in theirs]} "
                    "parameters, of other numbers or shapes.",
                    f"an optimizer built over the same groups, of {[len(g) for g in ours]}.",
                    "state is matched to parameters by position.",
                    "diffopt.write_to(optimizer), with the optimizer it was made from.",
                )
            )

    # Its parts. ---------------------------------------------------------------------------------

    def _present(self, params: Iterable[Tensor] | None) -> list[Tensor]:
        if params is not None:
            weights = list(params)
        elif self._fmodel is not None and self._fmodel.fast_params is not None:
            weights = list(self._fmodel.fast_params)
        else:
            raise InnerLoopError(
                four_part(
                    "You called step(loss) without params.",
                    "the present parameters.",
                    "this optimizer has no patched model to take them from.",
                    "params = diffopt.step(loss, params=params).",
                )
            )
        if len(weights) != len(self._reference):
            raise InnerLoopError(
                four_part(
                    f"You gave {len(weights)} parameters to step.",
                    f"{len(self._reference)}, as when the optimizer was made.",
                    "they are matched by position.",
                    "all parameters, in the order of reference_params.",
                )
            )
        return weights

    def _gradients(
        self, loss: Tensor, weights: list[Tensor], retain_graph: bool | None, everywhere: bool
    ) -> tuple[Tensor | None, ...]:
        """The partial derivatives by the present weights, ``None`` where there is none.

        ``everywhere`` asks for those of parameters outside the optimizer too.
        """
        create = self._track_higher_grads and not self._first_order
        own = {p for positions in self._group_to_param_list for p in positions}
        wanted = [p for p, w in enumerate(weights) if w.requires_grad and (everywhere or p in own)]
        sources = [weights[p] for p in wanted]
        found: tuple[Tensor | None, ...] = ()
        while sources:
            with twice_differentiable() if create else contextlib.nullcontext():
                found = torch.autograd.grad(
                    loss, sources, None, retain_graph, create, allow_unused=True
                )
            if any(g is not None for g in found):
                break
            sources = self._before_last_step(loss, weights, sources)
        if create:
            second_order.guard(loss, found, weights, self._name_of)
        grads: list[Tensor | None] = [None] * len(weights)
        for p, grad in zip(wanted, found, strict=True):
            grads[p] = grad
        return tuple(grads)

    def _before_last_step(
        self, loss: Tensor, weights: list[Tensor], sources: list[Tensor]
    ) -> list[Tensor]:
        """The same parameters as a loss saw them by which another optimizer has made its step.

        Nothing if the loss does reach some present weight: then these parameters just have no part
        in it. An error if it reaches none of them, present or past.
        """
        others = [w for w in weights if w.requires_grad]
        reached = torch.autograd.grad(loss, others, retain_graph=True, allow_unused=True)
        if any(g is not None for g in reached):
            return []
        earlier = [t for t in (getattr(s, _SAME_AS, None) for s in sources) if t is not None]
        if len(earlier) < len(sources):
            raise RequirementError(
                four_part(
                    "The loss given to step does not depend on the present weights.",
                    "a loss computed with them.",
                    "it was computed before an earlier step, or by the original model instead of "
                    "the patched one, so nothing would move.",
                    "loss = loss_fn(fmodel(x), y) before every diffopt.step(loss).",
                )
            )
        return earlier

    def _name_of(self, position: int) -> str:
        present = self._fmodel.fast_params if isinstance(self._fmodel, Patched) else None
        if not present:
            return f"parameter {position}"
        names = {id(p): name for name, p in self._fmodel.named_parameters()}
        return names.get(id(present[position]), f"parameter {position}")

    def _kept(self, new: Tensor, old: Tensor) -> Tensor:
        if self._track_higher_grads or new is old:
            return new
        return new.detach().requires_grad_(old.requires_grad)

    def _apply_override(self, override: Override) -> None:
        self._set(self._checked(override))

    def _checked(self, override: Override | None) -> dict[str, list[Any]]:
        """One value per group for each setting in an override, or an error."""
        if not isinstance(override, Mapping | None):
            raise InnerLoopError(
                four_part(
                    f"You gave a {type(override).__name__} as override.",
                    "a dictionary of settings.",
                    "each value belongs to a setting.",
                    "override={'lr': [torch.tensor(0.1, requires_grad=True)]}.",
                )
            )
        checked = {}
        for name, given in (override or {}).items():
            checked[name] = per_group(name, given, len(self.param_groups), self._arity(name))
            self._check_override(name, checked[name])
        return checked

    def _set(self, settings: Mapping[str, Sequence[Any]]) -> None:
        for name, values in settings.items():
            for group, value in zip(self.param_groups, values, strict=True):
                group[name] = value

    def _arity(self, name: str) -> int:
        return 1

    def _flat_state(self) -> list[Any]:
        return [
            self.state[g].get(i, {})
            for g, group in enumerate(self.param_groups)
            for i in range(len(group["params"]))
        ]

    def _set_flat_state(self, flat: Sequence[Any]) -> None:
        rest = iter(flat)
        state = []
        for group in self.param_groups:
            state.append(defaultdict(dict))
            for i in range(len(group["params"])):
                slots = next(rest)
                if slots:
                    state[-1][i] = slots
        self.state = state


class RuleOptimizer(DifferentiableOptimizer):
    """A differentiable optimizer by one of the rules of :mod:`innerloop.optim`.

    ``state`` can be read and written as a list over groups of dictionaries; the rule keeps its own
    packed form, and the two are converted when the other one is asked for.
    """

    family: Family

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._packed: OptState | None = None
        self._open: list[Any] | None = None
        super().__init__(*args, **kwargs)

    def _start(self, other: torch.optim.Optimizer) -> None:
        if self.family.layout == "whole":
            raise InnerLoopError(
                four_part(
                    f"You made a differentiable {self.family.name} for step(loss).",
                    "a loss that can be evaluated again at other weights.",
                    f"{self.family.name} evaluates it several times in one step.",
                    "innerloop.optim.lbfgs() and rule.update(..., evaluate=loss_and_gradients).",
                )
            )
        flat = [other.state.get(p, {}) for group in other.param_groups for p in group["params"]]
        self._set_flat_state([_moved(slots, self._device) for slots in flat])

    @property
    def state(self) -> list[Any]:  # type: ignore[override]
        """For each group a dictionary by position in it, of each parameter's state."""
        if self._open is None:
            assert self._packed is not None
            flat = iter(unpacked(self.family, self._flat_params(), self._packed))
            self._open = []
            for group in self.param_groups:
                slots = defaultdict(dict)
                slots.update({i: s for i, s in enumerate(_take(flat, len(group["params"]))) if s})
                self._open.append(slots)
            self._packed = None
        return self._open

    @state.setter
    def state(self, value: list[Any]) -> None:
        self._open, self._packed = value, None

    def _flat_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _update(self, grouped_grads: list[list[Tensor | None]], **kwargs: Any) -> None:
        params = self._flat_params()
        grads = [g for group in grouped_grads for g in group]
        sizes = [len(group["params"]) for group in self.param_groups]
        if self._packed is None:
            warm = tuple(self.family.read(dict(slots)) for slots in self._flat_state())
            self._packed = Rule(self.family, tuple(self.param_groups), tuple(sizes), warm).init(
                params
            )
            self._open = None
        new, self._packed = step(self.family, self.param_groups, sizes, params, grads, self._packed)
        rest = iter(new)
        for group, size in zip(self.param_groups, sizes, strict=True):
            group["params"] = _take(rest, size)

    def _check_override(self, name: str, values: Sequence[Any]) -> None:
        check_name(self.family, name)
        for group, value in zip(self.param_groups, values, strict=True):
            check_value(self.family, name, value, [p.shape for p in group["params"]])

    def _arity(self, name: str) -> int:
        return self.family.settings.get(name, 1)

    def write_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Put state and settings into an ordinary optimizer, as numbers where it has numbers."""
        self._check_sizes(optimizer)
        if class_for(type(optimizer)) is not type(self):
            raise InnerLoopError(
                four_part(
                    f"You wrote the state of {self.family.name} to {type(optimizer).__name__}.",
                    f"an optimizer of the kind of torch.optim.{self.family.name}.",
                    "each kind has a state and settings of its own.",
                    "diffopt.write_to(optimizer), with the optimizer it was made from.",
                )
            )
        settings = plain_settings(self.family, self.param_groups)
        write_state(self.family, optimizer, self._flat_state())
        write_settings(optimizer, settings)


def _renewed(weight: Tensor) -> Tensor:
    """The same weight as a new point of the graph, for one that this step has not moved.

    Other weights now depend on it through this step. The next inner gradient is the *partial*
    derivative by the present weights, so it must not follow that path.
    """
    if not weight.requires_grad:
        return weight
    same = weight.view_as(weight)
    setattr(same, _SAME_AS, weight)
    return same


def _index_of(param: Tensor, index: Mapping[int, int], group: int, position: int) -> int:
    found = index.get(id(param))
    if found is None:
        raise InnerLoopError(
            four_part(
                f"Parameter {position} of group {group} of the optimizer, of shape "
                f"{tuple(param.shape)}, is not a parameter of the model.",
                "an optimizer over parameters of that model.",
                "its updates would reach nothing.",
                "opt = torch.optim.SGD(model.parameters(), ...) with the model given here.",
            )
        )
    return found


def _from_callback(grads: Any, count: int) -> tuple[Tensor | None, ...]:
    given = tuple(grads) if isinstance(grads, Iterable) else None
    if given is None or len(given) != count:
        raise InnerLoopError(
            four_part(
                f"The grad_callback returned {'nothing' if given is None else len(given)}.",
                f"{count} gradients, or None in the place of one.",
                "they are matched to the model's parameters by position.",
                "return [g if g is None else g.clamp(-1, 1) for g in grads].",
            )
        )
    return given


def _loaded(saved: Any, present: Any) -> Any:
    """A saved setting; if it is the value of a present tensor that is learned, that tensor."""
    if isinstance(saved, list | tuple) and isinstance(present, list | tuple):
        return type(saved)(_loaded(s, p) for s, p in zip(saved, present, strict=True))
    if isinstance(present, Tensor) and present.requires_grad and saved is not None:
        same = torch.as_tensor(saved, dtype=present.dtype, device=present.device)
        if same.shape == present.shape and torch.equal(same, present.detach()):
            return present
    return saved


def _own(value: Any) -> Any:
    """A setting for this optimizer alone: torch's schedulers write to tensors in place.

    One that requires grad stays the same tensor, so that its gradient reaches it.
    """
    if isinstance(value, list):
        return list(value)
    if isinstance(value, Tensor) and not value.requires_grad:
        return value.clone()
    return value


def _moved(state: Any, device: Any) -> Any:
    if not state:
        return {}
    return _tree.map(
        lambda v: v.detach().clone().to(device) if isinstance(v, Tensor) else v, dict(state)
    )


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _take(items: Any, count: int) -> list[Any]:
    return [next(items) for _ in range(count)]


def _named(family: Family) -> type[RuleOptimizer]:
    doc = f"A differentiable ``torch.optim.{family.name}``; see :class:`RuleOptimizer`."
    name = f"Differentiable{family.name}"
    return type(name, (RuleOptimizer,), {"family": family, "__doc__": doc, "__module__": __name__})


BY_CLASS: dict[type[torch.optim.Optimizer], type[DifferentiableOptimizer]] = {
    kind: _named(family) for kind, family in optim.FAMILIES.items()
}
"""The differentiable optimizer of each ``torch.optim`` class; ``register_optim`` adds to it."""


def class_for(kind: type[torch.optim.Optimizer]) -> type[DifferentiableOptimizer]:
    """The differentiable class for an optimizer class, or for the one whose step it inherits."""
    if kind in BY_CLASS:
        return BY_CLASS[kind]
    for base in kind.__mro__:
        if base in BY_CLASS and inspect.unwrap(kind.step) is inspect.unwrap(base.step):
            return BY_CLASS[base]
    return BY_CLASS[family_of(kind, optim.FAMILIES).torch_class]
