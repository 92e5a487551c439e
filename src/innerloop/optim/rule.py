"""A rule: a family with its parameter groups, as pure functions of tensors (Eq. 2)."""

from __future__ import annotations

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
    plain_settings,
    real,
    share_equal_scalars,
    spreader,
    unpack,
    unpacked,
    write_settings,
    write_state,
)
from innerloop.optim.family import Elsewhere, Family, Group, Packed, Slots
from innerloop.optim.settings import merged, seen_by_block

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
        sizes = self._sizes(leaves)
        group_of = [
            group for group, size in zip(self.groups, sizes, strict=True) for _ in range(size)
        ]
        found = [self._slots_of(i, leaf, group_of[i]) for i, leaf in enumerate(leaves)]
        blocks: dict[Any, list[int]] = {}
        for index, param in enumerate(leaves):
            key = self._block_key(index, param, group_of[index], found[index])
            blocks.setdefault(key, []).append(index)
        state = []
        for members in blocks.values():
            owners = members[:1] if self.family.layout == "whole" else members
            each = [found[i] for i in owners]
            share_equal_scalars(self.family, each)
            slots = pack_slots(self.family, each, [leaves[i] for i in owners])
            state.append(Block(Members(members), slots))
        return tuple(state)

    def update(
        self,
        params: Any,
        grads: Any,
        state: OptState,
        hyper: Mapping[str, Any] | None = None,
        *,
        evaluate: Evaluate | None = None,
    ) -> tuple[Any, OptState]:
        """One step: the new parameters and the new state. Nothing is written in place.

        A gradient of ``None`` leaves its parameter and its state as they are. ``evaluate(params)``
        gives the loss and the gradients at other weights, for LBFGS.
        """
        leaves = self._leaves(params)
        grad_leaves = self._aligned(params, grads, "gradients")
        sizes = self._sizes(leaves)
        _check_state(state, len(leaves))
        groups: Sequence[Group] = self.groups
        if hyper:
            shapes = _by_group([leaf.shape for leaf in leaves], sizes)
            groups = merged(self.family, groups, shapes, hyper)

        def at(new: list[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
            assert evaluate is not None
            loss, found = evaluate(self._rebuilt(params, new))
            return loss, self._aligned(params, found, "gradients from evaluate")

        try:
            new, new_state = step(
                self.family,
                groups,
                sizes,
                leaves,
                grad_leaves,
                state,
                Elsewhere(at, getattr(evaluate, "here", None)) if evaluate else None,
            )
        except KeyError as error:
            raise refusals.foreign_state(self.family.name, error) from error
        return self._rebuilt(params, new), new_state

    def write_to(
        self,
        optimizer: torch.optim.Optimizer,
        state: OptState,
        hyper: Mapping[str, Any] | None = None,
    ) -> None:
        """Put a state, and settings if given, into an ordinary optimizer over the same shapes."""
        targets = [p for group in optimizer.param_groups for p in group["params"]]
        shapes = _by_group([p.shape for p in targets], self._sizes(targets))
        groups = merged(self.family, self.groups, shapes, hyper)
        settings = None if hyper is None else plain_settings(self.family, groups)
        write_state(self.family, optimizer, unpacked(self.family, targets, state))
        if settings is not None:
            write_settings(optimizer, settings)

    def _leaves(self, params: Any) -> list[Tensor]:
        """The rule's parameters, in its order."""
        if self.names is not None and isinstance(params, (dict, Mapping)):
            for name in self.names:
                if name not in params:
                    raise refusals.other_structure("parameters", f"no {name!r}")
            return list(map(params.__getitem__, self.names))
        several = len(self.groups) > 1 or any(self.warm or ())
        if isinstance(params, Mapping) and self.shapes is not None and several:
            raise refusals.unnamed_mapping()
        return _tree.flatten(params)[0]

    def _aligned(self, params: Any, other: Any, what: str) -> list[Any]:
        """The leaves of ``other`` in the places of the rule's parameters."""
        if self.names is not None and isinstance(params, (dict, Mapping)):
            if not isinstance(other, (dict, Mapping)) or not set(self.names).issubset(other):
                raise refusals.other_structure(what, "other names")
            return list(map(other.__getitem__, self.names))
        return _aligned(params, other, what)

    def _rebuilt(self, params: Any, leaves: list[Tensor]) -> Any:
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

    def _block_key(self, index: int, param: Tensor, group: Group, slots: Slots) -> Any:
        if self.family.layout == "tensor":
            return index
        if self.family.layout == "whole":
            return 0
        if param.numel() == 0:
            # Alone, because [parameters] and [elements] could not be told from each other.
            return index
        options = tuple(group.get(name, default) for name, default in self.family.options.items())
        return param.dtype, param.device, options, tuple(sorted(slots))

    def _slots_of(self, index: int, param: Tensor, group: Group) -> Slots:
        if self.family.real_only and param.is_complex():
            raise refusals.complex_parameter(self.family.name)
        fresh = self.family.fresh(real(param.detach()), group)
        warm = self.warm[index] if self.warm else {}
        return {
            **fresh,
            **{name: as_slot(value, name in self.family.scalars) for name, value in warm.items()},
        }


def _aligned(params: Any, other: Any, what: str) -> list[Any]:
    if isinstance(params, Mapping):
        if not isinstance(other, Mapping) or set(other) != set(params):
            raise refusals.other_structure(what, "other names")
        return [leaf for key in params for leaf in _aligned(params[key], other[key], what)]
    if isinstance(params, list | tuple):
        if not isinstance(other, list | tuple) or len(other) != len(params):
            some = isinstance(other, list | tuple)
            found = f"{len(other)} {what} for {len(params)}" if some else type(other).__name__
            raise refusals.other_structure(what, found)
        return [leaf for p, o in zip(params, other, strict=True) for leaf in _aligned(p, o, what)]
    return [other] if isinstance(params, Tensor) else _tree.flatten(other)[0]


def _check_state(state: Any, count: int) -> None:
    members: list[int] = []
    for block in state if isinstance(state, tuple) else ():
        members += block.members
    if sorted(members) != list(range(count)):
        raise refusals.wrong_state(count)


def step(
    family: Family,
    groups: Sequence[Group],
    sizes: Sequence[int],
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    state: OptState,
    evaluate: Elsewhere | None = None,
) -> tuple[list[Tensor], OptState]:
    """One update of every block, with the settings of ``groups``."""
    _check_gradients(params, grads)
    place = [(g, i) for g, size in enumerate(sizes) for i in range(size)]
    new = list(params)
    new_state: list[Block] = []
    if family.layout == "whole":
        grads = [
            torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)
        ]
    for block in state:
        moving, resting = divide(family, block, params, grads)
        if resting is not None:
            new_state.append(resting)
        if moving is None:
            continue
        members = moving.members
        tensors = list(map(params.__getitem__, members))
        own: list[Any] = list(map(grads.__getitem__, members))
        group = groups[place[members[0]][0]]
        places = list(map(place.__getitem__, members))
        hyper = seen_by_block(family, groups, places, tensors, sizes)
        updated = None
        if family.update_each is not None:
            updated = family.update_each(tensors, own, hyper, group)
        if updated is None:
            packed = _packed(family, moving, tensors, own, hyper, group, evaluate, params)
            flat, slots = family.update(packed)
            moving = Block(members, _as_kept(family, slots, moving.slots))
            updated = unpack(flat, tensors)
        for member, tensor in zip(members, updated, strict=True):
            new[member] = tensor
        new_state.append(moving)
    return new, tuple(new_state)


def _check_gradients(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        if grad is None:
            continue
        if grad.shape != param.shape:
            raise refusals.gradient_shape(grad, param)
        if grad.layout is not torch.strided:
            raise refusals.sparse_gradient()


def _as_kept(family: Family, slots: Slots, before: Slots) -> Slots:
    """New slots in the dtypes of the old ones; counters stay in double precision."""
    return {
        name: slot.to(before[name].dtype)
        if name not in family.scalars
        and isinstance(slot, Tensor)
        and isinstance(before.get(name), Tensor)
        else slot
        for name, slot in slots.items()
    }


def _packed(
    family: Family,
    block: Block,
    tensors: list[Tensor],
    grads: list[Any],
    hyper: dict[str, Any],
    group: Group,
    evaluate: Any,
    params: Sequence[Tensor],
) -> Packed:
    flat = pack(tensors)
    spread = spreader(flat, tensors)
    slots = {name: _uncounted(name, slot) for name, slot in block.slots.items()}
    scalars = [slot for name, slot in slots.items() if name in family.scalars]
    if len(tensors) > 1 and any(_per_element(v, flat) for v in (*_components(hyper), *scalars)):
        hyper = _tree.map(spread, hyper)
        slots = {name: spread(slot) for name, slot in slots.items()}

    def at(other: Tensor) -> tuple[Tensor, Tensor]:
        loss, found = evaluate(unpack(other, params))
        return loss, pack(
            [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]
        )

    return Packed(
        params=flat,
        grads=pack(grads),
        slots=slots,
        hyper=hyper,
        options={name: group.get(name, default) for name, default in family.options.items()},
        spread=spread,
        evaluate=None if evaluate is None else Elsewhere(at, evaluate.here),
    )


def _components(hyper: Mapping[str, Any]) -> list[Any]:
    return [
        v for value in hyper.values() for v in (value if isinstance(value, tuple) else (value,))
    ]


def _uncounted(name: str, slot: Any) -> Any:
    """A slot; a step counter without a graph, since nothing is differentiated by a count."""
    return slot.detach() if name in ("step", "started") and isinstance(slot, Tensor) else slot


def _per_element(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _by_group(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    grouped, start = [], 0
    for size in sizes:
        grouped.append(list(items[start : start + size]))
        start += size
    return grouped
