"""A rule: a family with its parameter groups, as pure functions of tensors (Eq. 2).

Parameters that share dtype, device and options form a *block* and are updated as one concatenated
tensor, whatever group they are in: 299 groups of one tensor cost as many kernels as one. A
parameter that gets no gradient leaves its block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.errors import InnerLoopError, four_part
from innerloop.optim._family import Family, Packed, Slots
from innerloop.optim._settings import Group, merged, seen_by_block


class Block(NamedTuple):
    """The state of some parameters: their positions, and named tensors packed as they are."""

    members: tuple[int, ...]
    slots: Slots


OptState = tuple[Block, ...]
Evaluate = Callable[[Any], tuple[Tensor, Any]]
FlatEvaluate = Callable[[list[Tensor]], tuple[Tensor, list[Tensor | None]]]


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
            _share_equal_scalars(self.family, each)
            slots = _pack_slots(self.family, each, [leaves[i] for i in owners])
            state.append(Block(tuple(members), slots))
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
                self.family, groups, sizes, leaves, grad_leaves, state, at if evaluate else None
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
            **{name: _as_slot(value, name in self.family.scalars) for name, value in warm.items()},
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
    evaluate: FlatEvaluate | None = None,
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
        moving, resting = _divide(family, block, params, grads)
        if resting is not None:
            new_state.append(resting)
        if moving is None:
            continue
        members = moving.members
        tensors = [params[m] for m in members]
        group = groups[place[members[0]][0]]
        hyper = seen_by_block(family, groups, [place[m] for m in members], tensors, sizes)
        if family.light(hyper) and not any(_many(value) for value in _components(hyper)):
            for m in members:
                alone = _packed(family, moving, [params[m]], [grads[m]], hyper, group, None, params)
                new[m] = unpack(family.update(alone)[0], [params[m]])[0]
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
    flat = pack(tensors)
    spread = _spreader(flat, tensors)
    slots = block.slots
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
        evaluate=None if evaluate is None else at,
    )


def _components(hyper: Mapping[str, Any]) -> list[Any]:
    return [
        v for value in hyper.values() for v in (value if isinstance(value, tuple) else (value,))
    ]


def _many(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _per_element(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


# Packing: many tensors as one. ------------------------------------------------------------------


def real(tensor: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts; torch's rules treat them as two numbers.

    A 0-d tensor becomes ``[1]``: settings in double precision would promote a 0-d one to theirs.
    """
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.dim() else tensor.reshape(1)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """One real tensor of all elements; a single tensor keeps its shape."""
    if len(tensors) == 1:
        return real(tensors[0])
    return torch.cat([real(tensor).reshape(-1) for tensor in tensors])


def unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of :func:`pack`, with the shapes and dtypes of ``like``."""
    parts = [flat] if len(like) == 1 else flat.split([real(tensor).numel() for tensor in like])
    return [_restored(part, tensor) for part, tensor in zip(parts, like, strict=True)]


def _restored(part: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        return torch.view_as_complex(part.view(real(like).shape))
    return (part if part.shape == like.shape else part.view(like.shape)).to(like.dtype)


def _spreader(flat: Tensor, tensors: Sequence[Tensor]) -> Callable[[Any], Any]:
    count = len(tensors)
    owner: list[Tensor] = []

    def spread(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != (count,) or count in (1, flat.numel()):
            return value
        if not owner:
            owner.append(_owner([real(tensor).numel() for tensor in tensors], flat.device))
        if value.is_floating_point():
            value = value.to(flat.dtype if flat.dtype.itemsize >= 4 else torch.float32)
        return value.to(flat.device)[owner[0]]

    return spread


def _owner(sizes: list[int], device: torch.device) -> Tensor:
    """For each element of a block, the position of the parameter it belongs to."""
    repeats = torch.tensor(sizes, device=device)
    owners = torch.arange(len(sizes), device=device)
    return torch.repeat_interleave(owners, repeats, output_size=sum(sizes))


# The state of a block, and of its parameters. ---------------------------------------------------


def _as_slot(value: Any, scalar: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if scalar:
        return value if value.device.type == "mps" else value.to(torch.float64)
    return real(value)


def _share_equal_scalars(family: Family, each: Sequence[Slots]) -> None:
    """Let parameters with equal counters hold the same one, so that a block keeps a single one."""
    for name in family.scalars & each[0].keys():
        values = [slots[name] for slots in each]
        first = values[0]
        known = not any(v.requires_grad or v.dim() > 0 for v in values)
        if known and all(bool(v == first) for v in values[1:]):
            for slots in each:
                slots[name] = first


def _is_wide(slot: Any) -> bool:
    return isinstance(slot, Tensor) and slot.dim() > 0


def _pack_slots(family: Family, each: Sequence[Slots], params: Sequence[Tensor]) -> Slots:
    """The slots of several parameters as those of a block."""
    if len(each) == 1:
        return dict(each[0])
    return {
        name: _pack_slot([slots[name] for slots in each], name in family.scalars, params)
        for name in each[0]
    }


def _pack_slot(values: Sequence[Tensor], scalar: bool, params: Sequence[Tensor]) -> Tensor:
    if scalar and all(value is values[0] for value in values):
        return values[0]
    if scalar and not any(_is_wide(value) for value in values):
        return torch.stack(list(values))
    full = [v.expand(real(p).shape) if scalar else v for v, p in zip(values, params, strict=True)]
    return torch.cat([value.reshape(-1) for value in full])


def _slots_per_member(slots: Slots, params: Sequence[Tensor]) -> list[Slots]:
    """The slots of a block as those of each of its parameters, real and in their shapes."""
    if len(params) == 1:
        return [slots]
    shapes = [real(p).shape for p in params]
    total = sum(shape.numel() for shape in shapes)
    each: list[Slots] = [{} for _ in params]
    for name, slot in slots.items():
        if not _is_wide(slot):
            parts: Sequence[Any] = [slot] * len(params)
        elif slot.shape == (len(params),) and total != len(params):
            parts = slot.unbind()
        else:
            pieces = slot.split([shape.numel() for shape in shapes])
            parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        for member, part in zip(each, parts, strict=True):
            member[name] = part
    return each


def _divide(
    family: Family, block: Block, params: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Block | None, Block | None]:
    """The part of a block that has gradients, and the part that has none."""
    moving = [m for m in block.members if grads[m] is not None]
    if len(moving) == len(block.members):
        return block, None
    if not moving:
        return None, block
    each = dict(
        zip(
            block.members,
            _slots_per_member(block.slots, [params[m] for m in block.members]),
            strict=True,
        )
    )
    resting = [m for m in block.members if grads[m] is None]

    def part(members: list[int]) -> Block:
        slots = _pack_slots(family, [each[m] for m in members], [params[m] for m in members])
        return Block(tuple(members), slots)

    return part(moving), part(resting)


def unpacked(family: Family, params: Sequence[Tensor], state: OptState) -> list[Slots]:
    """The state of each parameter in torch's names and shapes, still part of the graph."""
    found: list[Slots] = [{} for _ in params]
    for block in state:
        if family.layout == "whole":
            found[block.members[0]] = family.write(block.slots)
            continue
        members = [params[m] for m in block.members]
        for m, slots in zip(block.members, _slots_per_member(block.slots, members), strict=True):
            found[m] = {
                name: value if name in family.scalars else _from_slot(value, params[m])
                for name, value in family.write(slots).items()
            }
    return found


def _from_slot(value: Any, param: Tensor) -> Any:
    if not _is_wide(value) or value.shape != real(param).shape:
        return value
    return torch.view_as_complex(value) if param.is_complex() else value.view(param.shape)


def write_state(family: Family, optimizer: torch.optim.Optimizer, state: Sequence[Slots]) -> None:
    """Put each parameter's state into an ordinary optimizer, as numbers."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    plain = [
        {
            name: _scalar(name, value) if name in family.scalars else _tree.map(_plain, value)
            for name, value in slots.items()
        }
        for slots in state
    ]
    for param, slots in zip(params, plain, strict=True):
        if slots:
            optimizer.state[param] = slots


def _plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _scalar(name: str, value: Tensor) -> Tensor:
    """One number per parameter, in the dtype in which torch keeps it."""
    values = value.detach().reshape(-1)
    if bool((values != values[:1]).any()):
        raise InnerLoopError(
            four_part(
                f"The state {name!r} differs between the elements of a parameter.",
                "one number per parameter.",
                "torch.optim keeps one number; settings per element have made it differ.",
                "settings per parameter or per group where the state is to go back into torch.",
            )
        )
    double = torch.get_default_dtype() == torch.float64
    # A sum of one value, or of none: to an empty parameter every number is the same.
    return values[:1].sum().to(torch.float64 if double else torch.float32)


def plain_settings(family: Family, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The groups' continuous settings as numbers, or an error where they have no such form."""
    return [
        {name: _number(family, name, group[name]) for name in family.settings} for group in groups
    ]


def write_settings(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Put settings into an ordinary optimizer; a tensor it has keeps its identity."""
    for target, values in zip(optimizer.param_groups, settings, strict=True):
        for name, value in values.items():
            if isinstance(target[name], Tensor) and not isinstance(value, tuple):
                with torch.no_grad():
                    target[name].copy_(torch.as_tensor(value))
            else:
                target[name] = value


def _number(family: Family, name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        if family.settings[name] > 1:
            return tuple(_number(family, name, v) for v in value)
    elif not isinstance(value, Tensor):
        return value
    elif value.numel() == 1:
        return value.item()
    elif family.settings[name] == value.numel():
        return tuple(value.tolist())
    raise InnerLoopError(
        four_part(
            f"The setting {name!r} has a value for each parameter or element.",
            "one number per group.",
            "torch.optim keeps one number per group.",
            "an optimizer with one group per parameter, or write the state only.",
        )
    )


def _by_group(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    grouped, start = [], 0
    for size in sizes:
        grouped.append(list(items[start : start + size]))
        start += size
    return grouped
