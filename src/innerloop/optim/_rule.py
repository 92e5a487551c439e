"""A rule: a family with its parameter groups, as pure functions of tensors (Eq. 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.errors import InnerLoopError, four_part
from innerloop.optim._blocks import (
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
from innerloop.optim._family import Elsewhere, Family, Packed, Slots
from innerloop.optim._settings import Group, merged, seen_by_block

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
        shapes = _by_group([leaf.shape for leaf in leaves], sizes)
        groups = merged(self.family, self.groups, shapes, hyper)

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
            raise InnerLoopError(
                four_part(
                    f"The state has no {error}, which {self.family.name} keeps.",
                    "a state of this rule.",
                    "each rule keeps other things.",
                    "state = rule.init(params).",
                )
            ) from error
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
        if isinstance(params, Mapping) and self.names is not None:
            missing = [name for name in self.names if name not in params]
            if missing:
                raise InnerLoopError(_not_alike("parameters", f"no {missing[0]!r}"))
            return [params[name] for name in self.names]
        several = len(self.groups) > 1 or any(self.warm or ())
        if isinstance(params, Mapping) and self.shapes is not None and several:
            raise InnerLoopError(
                four_part(
                    "You gave a mapping to a rule that does not know its parameters by name.",
                    "names, for an optimizer with several groups or with a state.",
                    "which settings and which state belong to a parameter goes by the "
                    "optimizer's order, which need not be that of the mapping.",
                    "optim.from_torch(optimizer, functional(model).params).",
                )
            )
        return _tree.flatten(params)[0]

    def _aligned(self, params: Any, other: Any, what: str) -> list[Any]:
        """The leaves of ``other`` in the places of the rule's parameters."""
        if isinstance(params, Mapping) and self.names is not None:
            if not isinstance(other, Mapping) or any(name not in other for name in self.names):
                raise InnerLoopError(_not_alike(what, "other names"))
            return [other[name] for name in self.names]
        return _aligned(params, other, what)

    def _rebuilt(self, params: Any, leaves: list[Tensor]) -> Any:
        """``params`` with the rule's parameters replaced."""
        if isinstance(params, Mapping) and self.names is not None:
            return {**params, **dict(zip(self.names, leaves, strict=True))}
        return _tree.unflatten(leaves, _tree.flatten(params)[1])

    def _sizes(self, leaves: Sequence[Tensor]) -> tuple[int, ...]:
        sizes = self.sizes if self.sizes is not None else (len(leaves),)
        if sum(sizes) != len(leaves):
            raise InnerLoopError(
                four_part(
                    f"You gave {len(leaves)} parameters to a rule for {sum(sizes)}.",
                    "the optimizer's parameters, group after group, and no others.",
                    "each has its own settings and state, found by position.",
                    "[p for group in optimizer.param_groups for p in group['params']].",
                )
            )
        for i, (leaf, shape) in enumerate(zip(leaves, self.shapes or (), strict=False)):
            if leaf.shape != shape:
                raise InnerLoopError(
                    four_part(
                        f"Parameter {i} you gave has the shape {tuple(leaf.shape)}.",
                        f"{tuple(shape)}, as in the optimizer the rule was made from.",
                        "parameters are matched to settings and state by position.",
                        "them in the optimizer's order, or a mapping and optim.from_torch("
                        "optimizer, functional(model).params).",
                    )
                )
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
            raise InnerLoopError(
                four_part(
                    f"You gave {self.family.name} a complex parameter.",
                    "real parameters.",
                    f"torch.optim.{self.family.name} has no rule for complex ones.",
                    "another optimizer for them, such as torch.optim.Adam.",
                )
            )
        fresh = self.family.fresh(real(param.detach()), group)
        warm = self.warm[index] if self.warm else {}
        return {
            **fresh,
            **{name: as_slot(value, name in self.family.scalars) for name, value in warm.items()},
        }


def _aligned(params: Any, other: Any, what: str) -> list[Any]:
    if isinstance(params, Mapping):
        if not isinstance(other, Mapping) or set(other) != set(params):
            raise InnerLoopError(_not_alike(what, "other names"))
        return [leaf for key in params for leaf in _aligned(params[key], other[key], what)]
    if isinstance(params, list | tuple):
        if not isinstance(other, list | tuple) or len(other) != len(params):
            some = isinstance(other, list | tuple)
            found = f"{len(other)} {what} for {len(params)}" if some else type(other).__name__
            raise InnerLoopError(_not_alike(what, found))
        return [leaf for p, o in zip(params, other, strict=True) for leaf in _aligned(p, o, what)]
    return [other] if isinstance(params, Tensor) else _tree.flatten(other)[0]


def _not_alike(what: str, found: str) -> str:
    return four_part(
        f"The {what} do not have the structure of the parameters: {found}.",
        "the same nesting with the same names.",
        "a value that went to another parameter would be a silent mistake.",
        "one entry, or None for a gradient, wherever the parameters have one.",
    )


def _check_state(state: Any, count: int) -> None:
    members = [m for block in state for m in block.members] if isinstance(state, tuple) else None
    if members is None or sorted(members) != list(range(count)):
        raise InnerLoopError(
            four_part(
                f"The state does not belong to these {count} parameters.",
                "the state that init made for them, or that the last update returned.",
                "parameters without a state would silently stay where they are.",
                "state = rule.init(params).",
            )
        )


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
        tensors = [params[m] for m in members]
        group = groups[place[members[0]][0]]
        hyper = seen_by_block(family, groups, [place[m] for m in members], tensors, sizes)
        each = _of_members(hyper, len(members)) if family.light(hyper) else None
        if each is not None:
            options = _options(family, group)
            for m, own in zip(members, each, strict=True):
                new[m] = _updated_alone(family, params[m], grads[m], own, options)
            new_state.append(moving)
            continue
        packed = _packed(
            family, moving, tensors, [grads[m] for m in members], hyper, group, evaluate, params
        )
        flat, slots = family.update(packed)
        dtypes = {
            name: slot.dtype
            for name, slot in moving.slots.items()
            if isinstance(slot, Tensor) and name not in family.scalars
        }
        slots = {
            name: slot.to(dtypes[name]) if name in dtypes and isinstance(slot, Tensor) else slot
            for name, slot in slots.items()
        }
        for member, tensor in zip(members, unpack(flat, tensors), strict=True):
            new[member] = tensor
        new_state.append(Block(members, slots))
    return new, tuple(new_state)


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
    for tensor, grad in zip(tensors, grads, strict=True):
        _check_gradient(tensor, grad)
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
        options=_options(family, group),
        spread=spread,
        evaluate=None if evaluate is None else Elsewhere(at, evaluate.here),
    )


def _updated_alone(
    family: Family, param: Tensor, grad: Any, hyper: Mapping[str, Any], options: Mapping[str, Any]
) -> Tensor:
    """One parameter after an update that keeps no state."""
    _check_gradient(param, grad)
    if param.is_complex() or param.dim() == 0:
        packed = Packed(real(param), real(grad), {}, hyper, options, _unchanged)
        return unpack(family.update(packed)[0], [param])[0]
    packed = Packed(param, grad, {}, hyper, options, _unchanged)
    return family.update(packed)[0].to(param.dtype)


def _unchanged(value: Any) -> Any:
    return value


def _options(family: Family, group: Group) -> dict[str, Any]:
    return {name: group.get(name, default) for name, default in family.options.items()}


def _check_gradient(tensor: Tensor, grad: Tensor) -> None:
    if grad.shape != tensor.shape:
        raise InnerLoopError(
            four_part(
                f"A gradient has the shape {tuple(grad.shape)}.",
                f"{tuple(tensor.shape)}, that of its parameter.",
                "it would be broadcast or shifted into its neighbours.",
                "gradients in the order and the shapes of the parameters.",
            )
        )
    if grad.layout is not torch.strided:
        raise InnerLoopError(
            four_part(
                "A parameter has a sparse gradient.",
                "dense gradients.",
                "torch cannot differentiate a sparse gradient again.",
                "torch.nn.Embedding(..., sparse=False).",
            )
        )


def _components(hyper: Mapping[str, Any]) -> list[Any]:
    return [
        v for value in hyper.values() for v in (value if isinstance(value, tuple) else (value,))
    ]


def _uncounted(name: str, slot: Any) -> Any:
    """A slot; a step counter without a graph, since nothing is differentiated by a count."""
    return slot.detach() if name in ("step", "started") and isinstance(slot, Tensor) else slot


def _of_members(hyper: Mapping[str, Any], count: int) -> list[dict[str, Any]] | None:
    """The settings of each member of a block; ``None`` if single elements have their own."""
    many = [value for value in _components(hyper) if isinstance(value, Tensor) and value.dim() > 0]
    if not many:
        return [dict(hyper)] * count
    if any(value.shape != (count,) for value in many):
        return None
    own = {id(value): value.unbind() for value in many}

    def of(value: Any, i: int) -> Any:
        if isinstance(value, tuple):
            return tuple(of(part, i) for part in value)
        return own[id(value)][i] if id(value) in own else value

    return [{name: of(value, i) for name, value in hyper.items()} for i in range(count)]


def _per_element(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _by_group(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    grouped, start = [], 0
    for size in sizes:
        grouped.append(list(items[start : start + size]))
        start += size
    return grouped
