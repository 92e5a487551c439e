"""Differentiable optimizers with the paper's imperative interface: ``diffopt.step(loss)``."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop._numerics import full_precision
from innerloop.eager import refusals
from innerloop.guard import graph, second_order
from innerloop.guard.losses import check_loss, no_graph
from innerloop.optim.refusals import unknown_setting
from innerloop.optim.settings import per_group

GradCallback = Callable[[Any], Any]
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
        self._reference = list(reference_params)
        index = {id(p): i for i, p in enumerate(self._reference)}
        self._group_to_param_list = [
            _positions(group["params"], index, g) for g, group in enumerate(other.param_groups)
        ]
        self.param_groups: list[dict[str, Any]] = [
            {name: _own_setting(value) for name, value in group.items()}
            for group in other.param_groups
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
            self._set(self._values_of_override(override))
        params = [p for group in other.param_groups for p in group["params"]]
        self._set_flat_state([copy_state(other.state.get(p), device) for p in params])

    # For subclasses to replace. -----------------------------------------------------------------

    def _update(self, grouped_grads: list[list[Tensor | None]], **kwargs: Any) -> None:
        raise NotImplementedError

    def _values(self, name: str, given: Any) -> list[Any]:
        """The values of a setting in an override, one per group, or an error."""
        if name not in self.param_groups[0]:
            known = [key for key in self.param_groups[0] if key != "params"]
            raise unknown_setting(type(self).__name__, name, known)
        return per_group(name, given, len(self.param_groups))

    # A step. ------------------------------------------------------------------------------------

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
        """Update the parameters by the gradient of ``loss``, as part of the graph (Eq. 2).

        ``params`` are the present parameters, needed when there is no patched model. ``override``
        replaces continuous settings from now on. ``grad_callback`` gets the gradients as a tuple,
        ``None`` where there is none, and returns those to use. ``retain_graph=True`` lets another
        optimizer take a step by the same loss. A loss that is NaN makes the weights NaN, as in
        plain PyTorch.
        """
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (loss,), kwargs)
        weights = self._present_weights(params)
        check_loss(loss)
        if not loss.requires_grad:
            raise no_graph()
        settings = {} if override is None else self._values_of_override(override)
        callback = self._grad_callback if grad_callback is None else grad_callback
        own = [p for positions in self._group_to_param_list for p in positions]
        wanted = own if callback is None else range(len(weights))
        grads = self._gradients(loss, weights, wanted, retain_graph, given=params is not None)
        if callback is not None:
            grads = _from_callback(callback(tuple(grads)), len(weights))
        self._set(settings)
        new = self._apply_update(weights, grads, loss.device)
        if self._fmodel is not None:
            self._fmodel.update_params(new)
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, (loss,), kwargs)
        return new

    def _present_weights(self, params: Iterable[Tensor] | None) -> list[Tensor]:
        if params is None and self._fmodel is not None:
            params = self._fmodel.fast_params
        if params is None:
            raise refusals.step_without_params()
        weights = list(params)
        if len(weights) != len(self._reference):
            raise refusals.wrong_number_of_params(len(weights), len(self._reference))
        return weights

    def _gradients(
        self,
        loss: Tensor,
        weights: list[Tensor],
        positions: Sequence[int],
        retain_graph: bool | None,
        given: bool,
    ) -> list[Tensor | None]:
        """Partial derivatives by the weights at ``positions``; ``None`` for all others.

        ``given`` says that the weights were passed to ``step`` instead of taken from the model.
        """
        grads: list[Tensor | None] = [None] * len(weights)
        wanted = [p for p in positions if weights[p].requires_grad]
        if not wanted:
            return grads
        create = self._track_higher_grads and not self._first_order
        cuts = _cut_below(weights) if given or self._has_unmoved(weights, wanted) else ()
        try:
            found = torch.autograd.grad(
                loss, [weights[p] for p in wanted], None, retain_graph, create, allow_unused=True
            )
        finally:
            for cut in cuts:
                cut.remove()
        if all([grad is None for grad in found]) and not graph.reaches(loss, weights):
            raise refusals.loss_of_other_weights()
        for p, grad in zip(wanted, found, strict=True):
            grads[p] = grad
        if create:
            second_order.guard(loss, found, weights, self._name_of)
        return grads

    def _has_unmoved(self, weights: list[Tensor], wanted: list[int]) -> bool:
        """Tests whether the last update of the patched model left a wanted weight as it was.

        Other weights then depend on it through that update.
        """
        history = self._fmodel._fast_params if self._track_higher_grads else ()
        return len(history) > 1 and any([history[-2][p] is weights[p] for p in wanted])

    def _name_of(self, position: int) -> str:
        if self._fmodel is None or self._fmodel.fast_params is None:
            return f"parameter {position}"
        weight = self._fmodel.fast_params[position]
        names = (name for name, p in self._fmodel.named_parameters() if p is weight)
        return next(names, f"parameter {position}")

    def _apply_update(
        self,
        weights: list[Tensor],
        grads: Sequence[Tensor | None],
        device: torch.device,
    ) -> list[Tensor]:
        """The weights after ``_update``, which finds its parameters in the groups."""
        grouped = []
        for group, positions in self._groups():
            group["params"] = [weights[p] for p in positions]
            grouped.append([grads[p] for p in positions])
        track = self._track_higher_grads
        if track == torch.is_grad_enabled() and not torch._C._is_any_autocast_enabled():
            self._update(grouped)
        else:
            with torch.set_grad_enabled(track), full_precision(device):
                self._update(grouped)
        new = list(weights)
        for group, positions in self._groups():
            for p, param in zip(positions, group["params"], strict=True):
                new[p] = param
        if not track:
            new = [_leaf(n, w) for n, w in zip(new, weights, strict=True)]
            for group, positions in self._groups():
                group["params"] = [new[p] for p in positions]
        return new

    def _groups(self) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Each group with the positions of its parameters in the model."""
        return zip(self.param_groups, self._group_to_param_list, strict=True)

    # Settings. ----------------------------------------------------------------------------------

    def _values_of_override(self, override: Override) -> dict[str, list[Any]]:
        """One value per group for each setting in an override, or an error."""
        if not isinstance(override, Mapping):
            raise refusals.override_not_a_dictionary(override)
        return {name: self._values(name, given) for name, given in override.items()}

    def _set(self, settings: Mapping[str, Sequence[Any]]) -> None:
        for name, values in settings.items():
            for group, value in zip(self.param_groups, values, strict=True):
                group[name] = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, of the original model or present ones of the patched."""
        given = as_list(param_group["params"])
        index = {id(p): i for i, p in enumerate(self._reference)}
        if self._fmodel is not None and self._fmodel.fast_params is not None:
            index |= {id(p): i for i, p in enumerate(self._fmodel.fast_params)}
        positions = _positions(given, index, len(self.param_groups))
        if any(p in group for group in self._group_to_param_list for p in positions):
            raise refusals.parameter_in_two_groups()
        flat = self._flat_state() + [{} for _ in given]
        self._group_to_param_list.append(positions)
        self.param_groups.append({**self.defaults, **param_group, "params": given})
        self._set_flat_state(flat)

    # State. -------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: ``step`` computes gradients afresh and leaves none behind."""

    def state_dict(self) -> dict[str, Any]:
        """The state and settings in torch's format, as plain numbers and tensors."""
        numbering, groups = 0, []
        for group in self.param_groups:
            count = len(group["params"])
            plain = {k: copy_of(v) for k, v in group.items() if k != "params"}
            groups.append({**plain, "params": list(range(numbering, numbering + count))})
            numbering += count
        state = {n: copy_state(slots) for n, slots in enumerate(self._flat_state()) if slots}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Take over a state and settings, from here or from ``torch.optim``.

        ``diffopt.load_state_dict(diffopt.state_dict())`` cuts the state off from earlier steps, for
        truncated backpropagation; learned settings stay learned.
        """
        sizes = [len(group["params"]) for group in self.param_groups]
        given = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != given:
            raise refusals.other_groups("loaded the state of", given, sizes)
        flat: list[Any] = []
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for name, value in saved.items():
                if name != "params":
                    group[name] = _loaded_setting(value, group.get(name))
            flat += [copy_state(state_dict["state"].get(n), self._device) for n in saved["params"]]
        self._set_flat_state(flat)

    def write_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Put this optimizer's state and settings into an ordinary one over the same parameters."""
        self._check_shapes(optimizer)
        optimizer.load_state_dict(self.state_dict())

    def _check_shapes(self, optimizer: torch.optim.Optimizer) -> None:
        theirs, ours = (
            [[p.shape for p in group["params"]] for group in groups]
            for groups in (optimizer.param_groups, self.param_groups)
        )
        if theirs != ours:
            raise refusals.other_groups("wrote to", list(map(len, theirs)), list(map(len, ours)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An independent copy at the same point, cut off from earlier steps; so is its model."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.param_groups = [
            {**group, "params": [p.detach() for p in group["params"]]}
            for group in self.param_groups
        ]
        copied._group_to_param_list = [list(p) for p in self._group_to_param_list]
        copied._set_flat_state([copy_state(slots) for slots in self._flat_state()])
        copied._fmodel = copy.deepcopy(self._fmodel, memo)
        return copied

    def _flat_state(self) -> list[Any]:
        return [
            self.state[g].get(i, {})
            for g, group in enumerate(self.param_groups)
            for i in range(len(group["params"]))
        ]

    def _set_flat_state(self, flat: Iterable[Any]) -> None:
        """Sets the state: for each group a dictionary by position in it."""
        rest = iter(flat)
        self.state: Any = []
        for group in self.param_groups:
            slots = {i: next(rest) for i in range(len(group["params"]))}
            self.state.append(defaultdict(dict, {i: s for i, s in slots.items() if s}))


def _cut_below(weights: list[Tensor]) -> list[Any]:
    """Stop gradients at the weights: an inner gradient is a *partial* derivative.

    Hooks of a node run after the gradients of its outputs were captured.
    """
    outputs: dict[Any, set[int]] = defaultdict(set)
    for weight in weights:
        if weight.grad_fn is not None:
            outputs[weight.grad_fn].add(weight.output_nr)
    return [
        node.register_prehook(
            lambda grads, numbers=numbers: tuple(
                None if i in numbers else grad for i, grad in enumerate(grads)
            )
        )
        for node, numbers in outputs.items()
    ]


def copy_of(value: Any, device: Any = None) -> Any:
    """A setting or a state without a graph, its tensors copied."""
    return _tree.map(lambda v: v.detach().clone().to(device) if isinstance(v, Tensor) else v, value)


def copy_state(state: Any, device: Any = None) -> Any:
    """A copy of one parameter's state without a graph; ``{}`` for none."""
    return copy_of(dict(state or {}), device)


def as_list(params: Any) -> list[Tensor]:
    """The parameters of a group, which torch lets users write as a single tensor."""
    return [params] if isinstance(params, Tensor) else list(params)


def _positions(params: Iterable[Tensor], index: Mapping[int, int], group: int) -> list[int]:
    found = []
    for i, param in enumerate(params):
        if id(param) not in index:
            raise refusals.parameter_of_another_model(param, group, i)
        found.append(index[id(param)])
    return found


def _from_callback(grads: Any, count: int) -> list[Tensor | None]:
    given = list(grads) if isinstance(grads, Iterable) else None
    if given is None or len(given) != count:
        raise refusals.wrong_number_of_gradients(None if given is None else len(given), count)
    return given


def _leaf(new: Tensor, old: Tensor) -> Tensor:
    """The weight without a graph; one that did not move stays the same leaf."""
    if new is old and new.is_leaf:
        return new
    return new.detach().requires_grad_(old.requires_grad)


def _loaded_setting(saved: Any, present: Any) -> Any:
    """A saved setting; if it is the value of a present tensor that is learned, that tensor."""
    if isinstance(saved, list | tuple) and isinstance(present, list | tuple):
        return type(saved)(_loaded_setting(s, p) for s, p in zip(saved, present, strict=True))
    if isinstance(present, Tensor) and present.requires_grad and saved is not None:
        same = torch.as_tensor(saved, dtype=present.dtype, device=present.device)
        if same.shape == present.shape and torch.equal(same, present.detach()):
            return present
    return saved


def _own_setting(value: Any) -> Any:
    """A setting for this optimizer alone: torch's schedulers write to tensors in place.

    One that requires grad stays the same tensor, so that its gradient reaches it.
    """
    if isinstance(value, list):
        return list(value)
    if isinstance(value, Tensor) and not value.requires_grad:
        return value.clone()
    return value
