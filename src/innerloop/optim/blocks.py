"""Many tensors as one, and the state of a block of parameters in that form.

Parameters that share dtype, device and options form a *block* and are updated as one concatenated
tensor, whatever group they are in: 299 groups of one tensor cost as many kernels as one. All
members of a block have the same history; a parameter that gets no gradient leaves its block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.errors import InnerLoopError, four_part
from innerloop.optim.family import Family, Group, Slots


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
    return [_restored(part, tensor) for part, tensor in zip(parts, like, strict=True)]


def _restored(part: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        return torch.view_as_complex(part.view(real(like).shape))
    return (part if part.shape == like.shape else part.view(like.shape)).to(like.dtype)


def spreader(flat: Tensor, tensors: Sequence[Tensor]) -> Callable[[Any], Any]:
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


def as_slot(value: Any, scalar: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if scalar:
        return value if value.device.type == "mps" else value.to(torch.float64)
    return real(value)


def share_equal_scalars(family: Family, each: Sequence[Slots]) -> None:
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


def pack_slots(family: Family, each: Sequence[Slots], params: Sequence[Tensor]) -> Slots:
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


def divide(
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
        slots = pack_slots(family, [each[m] for m in members], [params[m] for m in members])
        return Block(Members(members), slots)

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
    flags = [group.get("capturable") or group.get("fused") for group in optimizer.param_groups]
    plain = [
        {
            name: _scalar(name, value, any(flags))
            if name in family.scalars
            else _tree.map(_plain, value)
            for name, value in slots.items()
        }
        for slots in state
    ]
    for param, slots in zip(params, plain, strict=True):
        if slots:
            optimizer.state[param] = slots


def _plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _scalar(name: str, value: Tensor, on_device: bool) -> Tensor:
    """One number per parameter, in the dtype and on the device on which torch keeps it."""
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
    found = values[:1].sum().to(torch.float64 if double else torch.float32)
    return found if on_device else found.cpu()


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
    arity = family.settings[name]
    if arity == 1:
        return _single(name, value)
    parts = value.unbind() if isinstance(value, Tensor) and value.dim() else value
    if isinstance(parts, list | tuple) and len(parts) == arity:
        return tuple(_single(name, part) for part in parts)
    return _single(name, list(parts))


def _single(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if not isinstance(value, Tensor | list | tuple):
        return value
    raise InnerLoopError(
        four_part(
            f"The setting {name!r} has a value for each parameter or element.",
            "one number per group.",
            "torch.optim keeps one number per group.",
            "an optimizer with one group per parameter, or a setting with one value per group.",
        )
    )
