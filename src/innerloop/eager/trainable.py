"""Settings of an ordinary optimizer as trainable tensors, and back as numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop.eager.optimizer import Override
from innerloop.eager.rules import class_for, unwrap_optimizer
from innerloop.errors import InnerLoopError
from innerloop.optim import FAMILIES
from innerloop.optim.convert import family_of
from innerloop.optim.refusals import unknown_setting
from innerloop.optim.settings import per_group, plain_value, write_settings


def get_trainable_opt_params(
    opt: torch.optim.Optimizer, device: torch.device | str | None = None
) -> dict[str, list[Any]]:
    """Every continuous setting of an optimizer as tensors that require grad, group by group.

    The result is an ``override``. For a registered optimizer all numbers count as continuous.

    >>> net = torch.nn.Linear(1, 1)
    >>> opt = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> get_trainable_opt_params(opt)["lr"]
    [tensor(0.1000, requires_grad=True)]
    """
    opt = unwrap_optimizer(opt)
    params = [p for group in opt.param_groups for p in group["params"]]
    dtype = torch.get_default_dtype()
    if any(p.dtype in (torch.float64, torch.complex128) for p in params):
        dtype = torch.float64  # a number goes back as it came if nothing is learned
    found: dict[str, list[Any]] = {}
    for name in _continuous_settings(opt):
        values = [group[name] for group in opt.param_groups]
        if all(_is_numeric(value) for value in values):
            found[name] = [_trainable(value, device, dtype) for value in values]
    return found


def _continuous_settings(opt: torch.optim.Optimizer) -> list[str]:
    try:
        return list(family_of(type(opt), FAMILIES).settings)
    except InnerLoopError:
        class_for(type(opt))  # raises unless it was registered
        return [name for name in opt.param_groups[0] if name != "params"]


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_numeric(v) for v in value)
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _trainable(value: Any, device: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_trainable(v, device, dtype) for v in value)
    if isinstance(value, Tensor):
        return value.detach().clone().to(device).requires_grad_()
    return torch.tensor(float(value), device=device, dtype=dtype, requires_grad=True)


def apply_trainable_opt_params(opt: torch.optim.Optimizer, override: Override) -> None:
    """Put learned settings back into an ordinary optimizer, each in the type it has there.

    A setting that is an integer there becomes a float if its learned value is none: rounding would
    undo the learning.

    >>> net = torch.nn.Linear(1, 1)
    >>> opt = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> apply_trainable_opt_params(opt, {"lr": [torch.tensor(0.5)]})
    >>> opt.param_groups[0]["lr"]
    0.5
    """
    opt = unwrap_optimizer(opt)
    settings: list[dict[str, Any]] = [{} for _ in opt.param_groups]
    for name, given in override.items():
        for group in opt.param_groups:
            if name not in group:
                known = [key for key in group if key != "params"]
                raise unknown_setting(type(opt).__name__, name, known)
        present = [group[name] for group in opt.param_groups]
        arity = len(present[0]) if isinstance(present[0], list | tuple) else 1
        values = per_group(name, given, len(present), arity)
        for found, value, old in zip(settings, values, present, strict=True):
            found[name] = _in_type_of(old, plain_value(name, value, arity))
    write_settings(opt, settings)


def _in_type_of(present: Any, value: Any) -> Any:
    if isinstance(present, list | tuple):
        pairs = zip(present, value, strict=True)
        return type(present)(as_type_of(old, number) for old, number in pairs)
    return as_type_of(present, value)


def as_type_of(present: Any, number: Any) -> Any:
    """A number in the type of the present setting, if that type can hold it."""
    if not isinstance(number, int | float):
        return number
    if isinstance(present, bool):
        return bool(number)
    if isinstance(present, int):
        return int(number) if float(number).is_integer() else number
    return float(number) if isinstance(present, float) else number
