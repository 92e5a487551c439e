"""Many tensors as one, and the state of a block of parameters in that form.

Parameters that share dtype, device and options form a *block* and are updated as one concatenated
tensor, whatever group they are in: 299 groups of one tensor cost as many kernels as one. All
members of a block have the same history; a parameter that gets no gradient leaves its block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop.optim.family import Family, Slots


class Members(tuple[int, ...]):
    """Positions of parameters. Not a plain tuple, so that nested containers end at it."""


class Block(NamedTuple):
    """The state of some parameters: their positions, and named tensors packed as they are."""

    members: Members
    slots: Slots


torch.serialization.add_safe_globals([Members, Block])  # read with weights_only=True

OptState = tuple[Block, ...]


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
    return [_restore(part, tensor) for part, tensor in zip(parts, like, strict=True)]


def _restore(part: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        return torch.view_as_complex(part.view(real(like).shape))
    return (part if part.shape == like.shape else part.view(like.shape)).to(like.dtype)


def spreader(flat: Tensor, tensors: Sequence[Tensor]) -> Callable[[Any], Any]:
    """A function from one value per parameter to one per element of the packed tensor."""
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


def _owner(sizes: Sequence[int], device: torch.device) -> Tensor:
    """For each element of a block, the position of the parameter it belongs to."""
    # Not repeat_interleave, whose result has a shape that compilers do not know.
    ends = torch.tensor(sizes, device=device).cumsum(0)
    return torch.bucketize(torch.arange(sum(sizes), device=device), ends, right=True)


# The state of a block, and of its parameters. ---------------------------------------------------


def as_slot(value: Any, counter: bool) -> Any:
    """A part of torch's state as a slot: counters in double precision, the rest real."""
    if not isinstance(value, Tensor):
        return value
    if counter:
        return value if value.device.type == "mps" else value.to(torch.float64)
    return real(value)


def share_equal_counters(family: Family, each: Sequence[Slots]) -> None:
    """Let parameters with equal counters hold the same one, so that a block keeps a single one."""
    for name in family.counters.keys() & each[0].keys():
        values = [slots[name] for slots in each]
        first = values[0]
        numbers = not any(v.requires_grad or v.dim() > 0 for v in values)
        if numbers and all(bool(v == first) for v in values[1:]):
            for slots in each:
                slots[name] = first


def _is_wide(slot: Any) -> bool:
    return isinstance(slot, Tensor) and slot.dim() > 0


def pack_slots(family: Family, each: Sequence[Slots], params: Sequence[Tensor]) -> Slots:
    """The slots of several parameters as those of a block."""
    if len(each) == 1:
        return dict(each[0])
    return {
        name: _pack_slot([slots[name] for slots in each], name in family.counters, params)
        for name in each[0]
    }


def _pack_slot(values: Sequence[Tensor], counter: bool, params: Sequence[Tensor]) -> Tensor:
    if counter and all(value is values[0] for value in values):
        return values[0]
    if counter and not any(_is_wide(value) for value in values):
        return torch.stack(list(values))
    full = [v.expand(real(p).shape) if counter else v for v, p in zip(values, params, strict=True)]
    return torch.cat([value.reshape(-1) for value in full])


def slots_by_member(block: Block, all_params: Sequence[Tensor]) -> dict[int, Slots]:
    """The slots of each parameter of a block, real and in its shape, by its position."""
    members, slots = block
    if len(members) == 1:
        return {members[0]: slots}
    shapes = [real(all_params[m]).shape for m in members]
    sizes = [shape.numel() for shape in shapes]
    each: dict[int, Slots] = {m: {} for m in members}
    for name, slot in slots.items():
        if not _is_wide(slot):
            parts: Sequence[Any] = [slot] * len(members)
        elif slot.shape == (len(members),) and sum(sizes) != len(members):
            parts = slot.unbind()
        else:
            pieces = slot.split(sizes)
            parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        for member, part in zip(members, parts, strict=True):
            each[member][name] = part
    return each


def divide(
    family: Family, block: Block, params: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Block | None, Block | None]:
    """The part of a block that has gradients, and the part that has none."""
    if not any([grads[m] is None for m in block.members]):
        return block, None
    moving = [m for m in block.members if grads[m] is not None]
    if not moving:
        return None, block
    resting = [m for m in block.members if grads[m] is None]
    each = slots_by_member(block, params)

    def part(members: list[int]) -> Block:
        slots = pack_slots(family, [each[m] for m in members], [params[m] for m in members])
        return Block(Members(members), slots)

    return part(moving), part(resting)


def state_by_parameter(family: Family, params: Sequence[Tensor], state: OptState) -> list[Slots]:
    """The state of each parameter in torch's names and shapes, still part of the graph."""
    found: list[Slots] = [{} for _ in params]
    for block in state:
        if family.layout == "whole":
            found[block.members[0]] = family.write(block.slots)
            continue
        for m, slots in slots_by_member(block, params).items():
            found[m] = {
                name: value if name in family.counters else _from_slot(value, params[m])
                for name, value in family.write(slots).items()
            }
    return found


def _from_slot(value: Any, param: Tensor) -> Any:
    if not _is_wide(value) or value.shape != real(param).shape:
        return value
    return torch.view_as_complex(value) if param.is_complex() else value.view(param.shape)
