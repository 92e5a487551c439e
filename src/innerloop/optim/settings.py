"""Settings: as users write them, as parameters and blocks see them, and as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from innerloop.optim import refusals
from innerloop.optim.family import Family, Group, Packed

# As users write them. ---------------------------------------------------------------------------


def merge_settings(
    family: Family,
    groups: Sequence[Group],
    shapes: Sequence[Sequence[torch.Size]],
    hyper: Mapping[str, Any] | None,
) -> list[Group]:
    """The groups with some continuous settings replaced. Checks all of it, changes nothing given.

    ``shapes`` are the parameters' shapes, group by group. A list, or a tensor with one dimension
    more than a value has, gives one value for each group; anything else is the value of all.
    """
    new = [dict(group) for group in groups]
    for name, given in (hyper or {}).items():
        check_name(family, name)
        values = per_group(name, given, len(groups), family.settings[name])
        for group, shape, value in zip(new, shapes, values, strict=True):
            check_value(family, name, value, shape)
            group[name] = value
    return new


_FLAGS = ("foreach", "fused", "capturable", "differentiable")


def check_name(family: Family, name: str) -> None:
    if name in family.settings:
        return
    if name in family.options or name in _FLAGS:
        raise refusals.discrete_setting(family.name, name, family.settings)
    raise refusals.unknown_setting(family.name, name, family.settings)


def per_group(name: str, given: Any, groups: int, arity: int = 1) -> list[Any]:
    """One value per group out of what was written for all of them."""
    if isinstance(given, Tensor) and given.dim() > (1 if arity > 1 else 0):
        if groups == 1 and given.shape[0] != 1:
            return [given]
        given = list(given.unbind())
    over_groups = arity == 1 or (isinstance(given, tuple) and isinstance(given[0], list | tuple))
    if isinstance(given, torch.nn.ParameterList) or (isinstance(given, tuple) and over_groups):
        given = list(given)
    if not isinstance(given, list):
        return [given] * groups
    if len(given) not in (1, groups):
        raise refusals.values_for_groups(name, len(given), groups, arity)
    return given * groups if len(given) == 1 else given


def check_value(family: Family, name: str, value: Any, shapes: Sequence[torch.Size]) -> None:
    """Refuses what cannot be a value of this setting for a group of parameters of these shapes."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
        return
    for part in components(family, name, value):
        several = isinstance(part, list | tuple)
        if several and len(part) != len(shapes):
            raise refusals.values_in_a_group(name, len(part), len(shapes))
        for one in part if several else [part]:
            if not _is_number(one) and not (one is None and name in family.optional):
                found = one.dtype if isinstance(one, Tensor) else type(one).__name__
                raise refusals.not_a_number(family.name, name, found)
        for position, shape in enumerate(shapes):
            _of_parameter(family, name, part, position, shape, len(shapes))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, Real) and not isinstance(value, bool)


def components(family: Family, name: str, value: Any) -> tuple[Any, ...]:
    """The components of one group's value: one for ``lr``, two for ``betas``."""
    arity = family.settings[name]
    if arity == 1:
        return (value,)
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == arity:
        return value.unbind()
    if isinstance(value, list | tuple) and len(value) == arity:
        return tuple(value)
    raise refusals.number_of_components(family.name, name, value, arity)


def _of_parameter(
    family: Family, name: str, value: Any, position: int, shape: torch.Size, size: int
) -> Any:
    """The value of one parameter out of its group's: a number, a 0-d tensor, or its own shape."""
    if isinstance(value, list | tuple):
        value = value[position]
    elif isinstance(value, Tensor) and size > 1 and value.shape == (size,):
        return value[position]
    if not isinstance(value, Tensor):
        return value
    if value.numel() == 1:
        return value.reshape(())
    try:
        return value.expand(shape)
    except RuntimeError:
        raise refusals.setting_shape(family.name, name, value, shape, size) from None


# As parameters and blocks see them. -------------------------------------------------------------

_NUMBERS = frozenset({int, float, type(None)})


def of_each_parameter(
    family: Family, groups: Sequence[Group], sizes: Sequence[int], params: Sequence[Tensor]
) -> list[Group]:
    """The settings of each parameter; those of a group share a dictionary where they are equal.

    Each component of a setting is a number, a 0-d tensor, or a tensor of the parameter's shape.
    """
    one_device = len(set(map(attrgetter("device"), params))) == 1
    each: list[Group] = []
    for group, size in zip(groups, sizes, strict=True):
        if one_device and _is_shared(family, group, params[0].device):
            each += [group] * size
        else:
            each += _split(family, group, params[len(each) : len(each) + size])
    return each


def _is_shared(family: Family, group: Group, device: torch.device) -> bool:
    """Tests whether all parameters of a group see its settings as they are."""
    for name, arity in family.settings.items():
        parts = (group[name],) if arity == 1 else group[name]
        if type(parts) is not tuple or len(parts) != arity:
            return False
        for part in parts:
            if type(part) in _NUMBERS:
                continue
            if not isinstance(part, Tensor) or part.dim() or part.device not in (device, _CPU):
                return False
    return True


def are_numbers(family: Family, group: Group) -> bool:
    """Tests whether no setting of a group is a tensor."""
    for name, arity in family.settings.items():
        parts = (group[name],) if arity == 1 else group[name]
        if not all([type(part) in _NUMBERS for part in parts]):
            return False
    return True


_CPU = torch.device("cpu")


def _split(family: Family, group: Group, params: Sequence[Tensor]) -> list[Group]:
    each = [dict(group) for _ in params]
    for name, arity in family.settings.items():
        parts = [
            part.reshape(()) if isinstance(part, Tensor) and part.numel() == 1 else part
            for part in components(family, name, group[name])
        ]
        for i, param in enumerate(params):
            values = [
                _place(_of_parameter(family, name, part, i, param.shape, len(params)), param)
                for part in parts
            ]
            each[i][name] = tuple(values) if arity > 1 else values[0]
    return each


def _place(value: Any, param: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim():
        return value.to(param.device, param.dtype.to_real())
    return value if value.device == _CPU else value.to(param.device)


def of_block(family: Family, groups: Sequence[Group], params: Sequence[Tensor]) -> dict[str, Any]:
    """Every continuous setting as a block sees it, given those of each of its parameters.

    Each component becomes a number, a 0-d tensor, ``[parameters]``, or one value per element in the
    packed shape of the block.
    """
    if len(groups) > 1 and len(set(map(id, groups))) == 1:
        return {name: groups[0][name] for name in family.settings}
    seen: dict[str, Any] = {}
    for name, arity in family.settings.items():
        values = [group[name] for group in groups]
        if arity == 1:
            seen[name] = _component(values, params)
        else:
            seen[name] = tuple(_component(part, params) for part in zip(*values, strict=True))
    return seen


def _component(values: Sequence[Any], params: Sequence[Tensor]) -> Any:
    first, device = values[0], params[0].device
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any([value.dim() for value in tensors]):
        return _per_element(values, params)
    if all([value is first for value in values]) or (
        not tensors and all([value == first for value in values])
    ):
        return first
    dtype = torch.float64 if device.type != "mps" else torch.float32
    if not tensors:
        return torch.tensor(values, device=device, dtype=dtype)
    return torch.stack([torch.as_tensor(v, device=device, dtype=dtype) for v in values])


def _per_element(values: Sequence[Any], params: Sequence[Tensor]) -> Tensor:
    """One value per element of the block, in its packed shape."""
    full = []
    for value, param in zip(values, params, strict=True):
        value = torch.as_tensor(value, device=param.device, dtype=param.dtype.to_real())
        value = value.expand(param.shape)
        if param.is_complex():
            value = value.unsqueeze(-1).expand(*param.shape, 2)
        full.append(value)
    return full[0] if len(full) == 1 else torch.cat([value.reshape(-1) for value in full])


def scalar_setting(packed: Packed, name: str) -> Any:
    """A setting that acts on a parameter as a whole, refused where it is given per element."""
    value = packed.hyper[name]
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, Tensor) and part.dim() > 0:
            raise refusals.per_element(name)
    return value


# As plain numbers. ------------------------------------------------------------------------------


def plain_settings(family: Family, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The groups' continuous settings as numbers, or an error where they have no such form."""
    return [
        {name: plain_value(name, group[name], arity) for name, arity in family.settings.items()}
        for group in groups
    ]


def plain_value(name: str, value: Any, arity: int) -> Any:
    """The value of one group as a number, or as a tuple of ``arity`` numbers."""
    if arity == 1:
        return _number(name, value)
    parts = value.unbind() if isinstance(value, Tensor) and value.dim() else value
    if not isinstance(parts, list | tuple) or len(parts) != arity:
        raise refusals.not_one_number(name)
    return tuple(_number(name, part) for part in parts)


def _number(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Tensor | list | tuple):
        raise refusals.not_one_number(name)
    return value


def write_settings(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Put settings into an ordinary optimizer; a tensor it has keeps its identity."""
    for target, values in zip(optimizer.param_groups, settings, strict=True):
        for name, value in values.items():
            if isinstance(target[name], Tensor) and not isinstance(value, tuple):
                with torch.no_grad():
                    target[name].copy_(torch.as_tensor(value))
            else:
                target[name] = value
