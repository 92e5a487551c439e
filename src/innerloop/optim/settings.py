"""Settings: as users write them, and as one block of parameters sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from innerloop.errors import InnerLoopError, four_part
from innerloop.optim.family import Family, Group

Shapes = Sequence[Sequence[torch.Size]]


def merged(
    family: Family, groups: Sequence[Group], shapes: Shapes, hyper: Mapping[str, Any] | None
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
    known = ", ".join(family.settings)
    if name in family.options or name in _FLAGS:
        raise InnerLoopError(
            four_part(
                f"You gave a value for {name!r}, an option of {family.name}.",
                f"a continuous setting: {known}.",
                f"{name!r} takes discrete values, so nothing can be differentiated through it.",
                f"torch.optim.{family.name}(..., {name}=...) when you build the optimizer.",
            )
        )
    raise InnerLoopError(
        four_part(
            f"You gave a value for {name!r}.",
            f"a continuous setting of {family.name}: {known}.",
            f"{family.name} has no setting of that name, so the value would have no effect.",
            f"one of these names: {known}.",
        )
    )


def per_group(name: str, given: Any, groups: int, arity: int = 1) -> list[Any]:
    """One value per group out of what was written for all of them."""
    if isinstance(given, Tensor) and given.dim() > (1 if arity > 1 else 0):
        if groups == 1 and given.shape[0] != 1:
            return [given]
        given = list(given.unbind())
    if isinstance(given, torch.nn.ParameterList) or _tuple_over_groups(given, arity):
        given = list(given)
    if not isinstance(given, list):
        return [given] * groups
    if len(given) not in (1, groups):
        raise InnerLoopError(wrong_count(name, len(given), groups, arity))
    return given * groups if len(given) == 1 else given


def _tuple_over_groups(given: Any, arity: int) -> bool:
    return isinstance(given, tuple) and (arity == 1 or isinstance(given[0], list | tuple))


def wrong_count(name: str, found: int, groups: int, arity: int) -> str:
    one = f"({', '.join('abc'[:arity])})" if arity > 1 else "value"
    return four_part(
        f"You gave {found} values for {name!r}, and the optimizer has {groups} parameter groups.",
        f"a list of one value, used for every group, or of {groups}, one for each.",
        "values are matched to groups by position.",
        f"{{{name!r}: [{one}]}} or {{{name!r}: [{one}, ...]}} with {groups} entries.",
    )


def check_value(family: Family, name: str, value: Any, shapes: Sequence[torch.Size]) -> None:
    """Refuses what cannot be a value of this setting for a group of parameters of these shapes."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
        return
    for part in components(family.name, name, value, family.settings[name]):
        several = isinstance(part, list | tuple)
        if several and len(part) != len(shapes):
            raise InnerLoopError(
                four_part(
                    f"You gave {len(part)} values of {name!r} for a group of {len(shapes)} "
                    "parameters.",
                    f"one value, or {len(shapes)}, one for each parameter of the group.",
                    "values inside a group are matched to its parameters by position.",
                    f"{{{name!r}: [[v1, ..., v{len(shapes)}]]}}.",
                )
            )
        for one in part if several else [part]:
            if isinstance(one, Tensor):
                if not one.is_floating_point() and one.dtype not in _INTEGERS:
                    raise InnerLoopError(_not_a_number(family.name, name, one.dtype))
                for position, shape in enumerate(shapes if not several else []):
                    _of_parameter(family, name, one, position, shape, len(shapes))
            elif one is None and name in family.optional:
                continue
            elif isinstance(one, bool) or not isinstance(one, Real):
                raise InnerLoopError(_not_a_number(family.name, name, type(one).__name__))
        if several:
            for position, shape in enumerate(shapes):
                _of_parameter(family, name, part, position, shape, len(shapes))


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _not_a_number(family: str, name: str, found: Any) -> str:
    return four_part(
        f"You gave a {found} as {name!r} of {family}.",
        "a number, or a floating-point tensor.",
        "the setting is continuous.",
        f"{{{name!r}: [torch.tensor(0.1, requires_grad=True)]}}.",
    )


def components(family: str, name: str, value: Any, arity: int) -> tuple[Any, ...]:
    """The components of one group's value: one for ``lr``, two for ``betas``."""
    if arity == 1:
        return (value,)
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == arity:
        return value.unbind()
    if isinstance(value, list | tuple) and len(value) == arity:
        return tuple(value)
    raise InnerLoopError(
        four_part(
            f"You gave {value!r} as {name!r} of {family}.",
            f"{arity} values for each parameter group.",
            f"{name!r} of {family} has {arity} components.",
            f"{{{name!r}: [({', '.join('abc'[:arity])})]}}: a list over groups, and in it a tuple.",
        )
    )


def seen_by_block(
    family: Family,
    groups: Sequence[Group],
    members: Sequence[tuple[int, int]],
    params: Sequence[Tensor],
    sizes: Sequence[int],
) -> dict[str, Any]:
    """Every continuous setting as one block sees it.

    ``members`` are the block's parameters as (group, position in it), ``params`` its tensors,
    ``sizes`` the number of parameters in each group.
    Each component becomes a number, a 0-d tensor, ``[parameters]``, or one value per element in the
    packed shape of the block.
    """
    touched = [0] if len(groups) == 1 else sorted({group for group, _ in members})
    alone = len(touched) == 1
    seen: dict[str, Any] = {}
    for name, arity in family.settings.items():
        value = groups[touched[0]][name]
        if alone and _is_plain(value, arity):
            seen[name] = value
            continue
        if alone and arity == 1 and isinstance(value, Tensor) and value.dim() == 0:
            seen[name] = _placed(value, params[0].device)
            continue
        split = {
            index: components(family.name, name, groups[index][name], arity) for index in touched
        }
        parts = tuple(
            _component(family, name, {i: v[k] for i, v in split.items()}, members, params, sizes)
            for k in range(arity)
        )
        seen[name] = parts if arity > 1 else parts[0]
    return seen


_NUMBERS = frozenset({int, float, type(None)})


def _is_plain(value: Any, arity: int) -> bool:
    """Whether this is a number for each component, which every block sees as it is."""
    if arity == 1:
        return type(value) in _NUMBERS
    return type(value) is tuple and len(value) == arity and _NUMBERS.issuperset(map(type, value))


def _component(
    family: Family,
    name: str,
    by_group: Mapping[int, Any],
    members: Sequence[tuple[int, int]],
    params: Sequence[Tensor],
    sizes: Sequence[int],
) -> Any:
    values = list(by_group.values())
    first = values[0]
    if all(not isinstance(v, Tensor | list | tuple) and v == first for v in values):
        return first
    device = params[0].device
    if isinstance(first, Tensor) and first.numel() == 1 and all(v is first for v in values):
        return _placed(first.reshape(()), device)
    each = [
        _of_parameter(family, name, by_group[group], position, param.shape, sizes[group])
        for (group, position), param in zip(members, params, strict=True)
    ]
    if any(isinstance(v, Tensor) and v.dim() > 0 for v in each):
        return _per_element(each, params)
    if len(each) == 1:
        return _placed(each[0], device) if isinstance(each[0], Tensor) else each[0]
    dtype = torch.float64 if device.type != "mps" else torch.float32
    if not any(isinstance(v, Tensor) for v in each):
        return torch.tensor(each, device=device, dtype=dtype)
    return torch.stack([torch.as_tensor(v, device=device, dtype=dtype) for v in each])


def _placed(value: Tensor, device: torch.device) -> Tensor:
    return value if value.device.type == "cpu" else value.to(device)


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
        raise InnerLoopError(
            four_part(
                f"You gave a tensor of shape {tuple(value.shape)} as {name!r} of {family.name}, "
                f"whose parameter group holds {size} parameters.",
                f"one value, {size} values (one per parameter), or a shape that fits the "
                f"parameter's {tuple(shape)}.",
                "the setting multiplies a parameter of that shape.",
                f"{{{name!r}: [[v1, v2, ...]]}} with one number or tensor for each parameter.",
            )
        ) from None


def _per_element(each: Sequence[Any], params: Sequence[Tensor]) -> Tensor:
    """One value per element of the block, in its packed shape."""
    full = []
    for value, param in zip(each, params, strict=True):
        real = param.real.dtype if param.is_complex() else param.dtype
        value = torch.as_tensor(value, device=param.device, dtype=real).expand(param.shape)
        if param.is_complex():
            value = value.unsqueeze(-1).expand(*param.shape, 2)
        full.append(value)
    return full[0] if len(full) == 1 else torch.cat([value.reshape(-1) for value in full])
