"""A rule: a family with its parameter groups, as pure functions of tensors (Eq. 2)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.optim import refusals
from innerloop.optim.blocks import (
    Block,
    Members,
    OptState,
    as_slot,
    divide,
    pack,
    pack_slots,
    real,
    share_equal_counters,
    spreader,
    state_by_parameter,
    unpack,
)
from innerloop.optim.convert import write_state
from innerloop.optim.family import Elsewhere, Family, Group, Packed, Slots
from innerloop.optim.settings import (
    are_numbers,
    merge_settings,
    of_block,
    of_each_parameter,
    plain_settings,
    write_settings,
)

Evaluate = Callable[[Any], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Rule:
    """An optimizer as two pure functions.

    ``init(params)`` makes the state and ``update(params, grads, state, hyper)`` one step. Both take
    any nesting of tensors; its leaves, in order, are the parameters, group after group. ``hyper``
    replaces continuous settings by name, with numbers or with tensors to differentiate.

    >>> from innerloop import optim
    >>> rule = optim.sgd(lr=0.1)
    >>> lr = torch.tensor(0.5, requires_grad=True)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> grads = {"w": torch.tensor([1.0, 1.0])}
    >>> params, state = rule.update(params, grads, rule.init(params), {"lr": lr})
    >>> params["w"].sum().backward()
    >>> lr.grad
    tensor(-2.)
    """

    family: Family
    groups: tuple[Group, ...]
    sizes: tuple[int, ...] | None = None
    """Parameters per group; ``None`` when one group takes all there are."""
    warm: tuple[Slots, ...] | None = None
    """The state each parameter starts from, ``{}`` where it is fresh; ``None`` when all are."""
    shapes: tuple[torch.Size, ...] | None = None
    """The parameters' shapes, where they are known."""
    names: tuple[str, ...] | None = None
    """The parameters' names in a mapping; the rest of a mapping passes through unchanged."""

    @property
    def hyper(self) -> dict[str, list[Any]]:
        """The continuous settings the rule was made with, one value per group."""
        return {name: [group[name] for group in self.groups] for name in self.family.settings}

    def init(self, params: Any) -> OptState:
        """The state before the first step; where the optimizer was warm, its state."""
        leaves = self._leaves(params)
        groups: list[Group] = []
        for group, size in zip(self.groups, self._sizes(leaves), strict=True):
            groups += [group] * size
        found = [self._slots_of(i, leaf, groups[i]) for i, leaf in enumerate(leaves)]
        blocks: dict[Any, list[int]] = {}
        for index, param in enumerate(leaves):
            key = self._block_key(index, param, groups[index], found[index])
            blocks.setdefault(key, []).append(index)
        state = []
        for members in blocks.values():
            owners = members[:1] if self.family.layout == "whole" else members
            each = [found[i] for i in owners]
            share_equal_counters(self.family, each)
            slots = pack_slots(self.family, each, [leaves[i] for i in owners])
            state.append(Block(Members(members), slots))
        return tuple(state)

    def _block_key(self, index: int, param: Tensor, group: Group, slots: Slots) -> Any:
        if self.family.layout == "whole":
            return 0
        # An empty parameter is alone, because [parameters] and [elements] could be confused.
        if self.family.layout == "tensor" or param.numel() == 0:
            return index
        options = tuple(_options(self.family, group).values())
        return param.dtype, param.device, options, tuple(sorted(slots))

    def _slots_of(self, index: int, param: Tensor, group: Group) -> Slots:
        family = self.family
        if family.real_only and param.is_complex():
            raise refusals.complex_parameter(family.name)
        warm = self.warm[index] if self.warm else {}
        own = {name: as_slot(value, name in family.counters) for name, value in warm.items()}
        return family.fresh(real(param.detach()), group) | own

    def update(
        self,
        params: Any,
        grads: Any,
        state: OptState,
        hyper: Mapping[str, Any] | None = None,
        *,
        evaluate: Evaluate | None = None,
        checked: bool = False,
    ) -> tuple[Any, OptState]:
        """One step: the new parameters and the new state. Nothing is written in place.

        A gradient of ``None`` leaves its parameter and its state as they are. ``evaluate(params)``
        gives the loss and the gradients at other weights, for LBFGS. ``checked`` says that
        parameters, gradients and state are like those of an earlier step.
        """
        leaves = self._leaves(params)
        grad_leaves = self._align(params, grads, "gradients")
        if not checked:
            check_step(self.family, leaves, grad_leaves, state)
        settings = None
        # Dynamo does not enter a cached_property.
        if checked and not hyper and not torch.compiler.is_compiling():
            settings = self._numbers
        if settings is None:
            sizes = self._sizes(leaves)
            groups: Sequence[Group] = self.groups
            if hyper:
                shapes = _by_group([leaf.shape for leaf in leaves], sizes)
                groups = merge_settings(self.family, groups, shapes, hyper)
            settings = of_each_parameter(self.family, groups, sizes, leaves)
        elsewhere = None
        if evaluate is not None:
            elsewhere = self._evaluation_of_packed(evaluate, params, leaves)
        try:
            new, new_state = step(self.family, settings, leaves, grad_leaves, state, elsewhere)
        except KeyError as error:
            raise refusals.wrong_state(self.family.name, f"it has no {error}") from error
        return self._rebuild(params, new), new_state

    def _evaluation_of_packed(
        self, evaluate: Evaluate, params: Any, leaves: Sequence[Tensor]
    ) -> Elsewhere:
        """``evaluate`` as a function of all parameters as one tensor."""

        def at(flat: Tensor) -> tuple[Tensor, Tensor]:
            loss, found = evaluate(self._rebuild(params, unpack(flat, leaves)))
            return loss, pack(
                _fill_zeros(leaves, self._align(params, found, "gradients elsewhere"))
            )

        return Elsewhere(at, getattr(evaluate, "here", None))

    @functools.cached_property
    def _numbers(self) -> list[Group] | None:
        """The settings of each parameter where all are numbers, which are so at every step."""
        if self.sizes is None or not all(are_numbers(self.family, group) for group in self.groups):
            return None
        pairs = zip(self.groups, self.sizes, strict=True)
        return [group for group, size in pairs for _ in range(size)]

    def write_to(
        self,
        optimizer: torch.optim.Optimizer,
        state: OptState,
        hyper: Mapping[str, Any] | None = None,
    ) -> None:
        """Put a state, and settings if given, into an ordinary optimizer over the same shapes."""
        targets = [p for group in optimizer.param_groups for p in group["params"]]
        shapes = _by_group([p.shape for p in targets], self._sizes(targets))
        groups = merge_settings(self.family, self.groups, shapes, hyper)
        settings = [] if hyper is None else plain_settings(self.family, groups)
        write_state(self.family, optimizer, state_by_parameter(self.family, targets, state))
        if settings:
            write_settings(optimizer, settings)

    # Parameters and gradients as lists. ---------------------------------------------------------

    def _leaves(self, params: Any) -> list[Tensor]:
        """The rule's parameters, in its order."""
        if self.names is not None and isinstance(params, (dict, Mapping)):
            return self._by_name(params, "parameters")
        several = len(self.groups) > 1 or any(self.warm or ())
        if isinstance(params, Mapping) and self.shapes is not None and several:
            raise refusals.unnamed_mapping()
        return _tree.flatten(params)[0]

    def _align(self, params: Any, other: Any, what: str) -> list[Any]:
        """The leaves of ``other`` in the places of the rule's parameters."""
        if self.names is not None and isinstance(params, (dict, Mapping)):
            return self._by_name(other, what)
        return _align(params, other, what)

    def _by_name(self, given: Any, what: str) -> list[Any]:
        names = self.names or ()
        try:
            return list(map(given.__getitem__, names))
        except (KeyError, TypeError, AttributeError) as error:
            raise refusals.other_structure(what, f"they are not by the names {names}") from error

    def _rebuild(self, params: Any, leaves: list[Tensor]) -> Any:
        """``params`` with the rule's parameters replaced."""
        if self.names is not None and isinstance(params, (dict, Mapping)):
            return {**params, **dict(zip(self.names, leaves, strict=True))}
        return _tree.unflatten(leaves, _tree.flatten(params)[1])

    def _sizes(self, leaves: Sequence[Tensor]) -> tuple[int, ...]:
        sizes = self.sizes if self.sizes is not None else (len(leaves),)
        if sum(sizes) != len(leaves):
            raise refusals.wrong_count(len(leaves), sum(sizes))
        for i, (leaf, shape) in enumerate(zip(leaves, self.shapes or (), strict=False)):
            if leaf.shape != shape:
                raise refusals.wrong_shape(i, leaf.shape, shape)
        return sizes


def _align(params: Any, other: Any, what: str) -> list[Any]:
    if isinstance(params, Mapping):
        if not isinstance(other, Mapping) or set(other) != set(params):
            raise refusals.other_structure(what, "other names")
        return [leaf for key in params for leaf in _align(params[key], other[key], what)]
    if isinstance(params, list | tuple):
        if not isinstance(other, list | tuple):
            raise refusals.other_structure(what, type(other).__name__)
        if len(other) != len(params):
            raise refusals.other_structure(what, f"{len(other)} {what} for {len(params)}")
        return [leaf for p, o in zip(params, other, strict=True) for leaf in _align(p, o, what)]
    return [other] if isinstance(params, Tensor) else _tree.flatten(other)[0]


def _by_group(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    rest = iter(items)
    return [[next(rest) for _ in range(size)] for size in sizes]


def step(
    family: Family,
    settings: Sequence[Group],
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    state: OptState,
    evaluate: Elsewhere | None = None,
) -> tuple[list[Tensor], OptState]:
    """One update of all parameters, with the settings of each."""
    if family.update_each is not None:
        updated = family.update_each(params, grads, settings)
        if updated is not None:
            return updated, state
    if family.layout == "whole":
        grads = _fill_zeros(params, grads)
    new, new_state = list(params), []
    for block in state:
        moving, resting = divide(family, block, params, grads)
        if resting is not None:
            new_state.append(resting)
        if moving is None:
            continue
        tensors = [params[m] for m in moving.members]
        packed = _pack_block(
            family,
            moving.slots,
            tensors,
            [grads[m] for m in moving.members],
            [settings[m] for m in moving.members],
            evaluate,
        )
        flat, slots = family.update(packed)
        for member, tensor in zip(moving.members, unpack(flat, tensors), strict=True):
            new[member] = tensor
        new_state.append(Block(moving.members, _keep_dtypes(family, slots, moving.slots)))
    return new, tuple(new_state)


def check_step(
    family: Family,
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    state: OptState | None,
) -> None:
    """Refuses gradients or a state of other parameters."""
    for param, grad in zip(params, grads, strict=True):
        if grad is None:
            continue
        if grad.shape != param.shape:
            raise refusals.gradient_shape(grad, param)
        if grad.layout is not torch.strided:
            raise refusals.sparse_gradient()
    count = 0
    for block in state or ():
        count += len(block.members)
    if count != len(params):
        raise refusals.wrong_state(family.name, f"it is of {count}, not {len(params)}")


def _fill_zeros(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
    return [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]


def _options(family: Family, group: Group) -> dict[str, Any]:
    return {name: group.get(name, default) for name, default in family.options.items()}


def _pack_block(
    family: Family,
    slots: Slots,
    params: list[Tensor],
    grads: list[Any],
    settings: list[Group],
    evaluate: Elsewhere | None,
) -> Packed:
    flat = pack(params)
    spread = spreader(flat, params)
    hyper = of_block(family, settings, params)
    for name in slots.keys() & {"step", "started"}:  # Nothing is differentiated by a count.
        slots = {**slots, name: slots[name].detach()}
    if len(params) > 1:
        counters = [slot for name, slot in slots.items() if name in family.counters]
        values = _tree.leaves([*hyper.values(), *counters])
        if any(isinstance(v, Tensor) and v.shape == flat.shape for v in values):
            hyper = _tree.map(spread, hyper)
            slots = {name: spread(slot) for name, slot in slots.items()}
    options = _options(family, settings[0])
    return Packed(flat, pack(grads), slots, hyper, options, spread, evaluate)


def _keep_dtypes(family: Family, slots: Slots, before: Slots) -> Slots:
    """New slots in the dtypes of the old ones; counters stay in double precision."""
    kept = dict(slots)
    for name, slot in slots.items():
        old = before.get(name)
        if name not in family.counters and isinstance(slot, Tensor) and isinstance(old, Tensor):
            kept[name] = slot.to(old.dtype)
    return kept
