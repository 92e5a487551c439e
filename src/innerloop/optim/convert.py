"""From a ``torch.optim`` instance, fresh or warm, to a rule; and a rule's state back into one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.errors import InnerLoopError
from innerloop.optim import refusals
from innerloop.optim.family import Family, Slots


class NoRule(torch.optim.Optimizer):
    """An optimizer that no inner loop takes as it is."""

    refusal: ClassVar[str]
    """Advice: what to write instead, and why."""


def family_of(kind: type[torch.optim.Optimizer], families: Mapping[type, Family]) -> Family:
    """The family of an optimizer class: its own, or the one whose ``step`` it inherits."""
    base = known_base(kind, families)
    if base is not None:
        return families[base]
    if issubclass(kind, NoRule):
        raise InnerLoopError(kind.refusal)
    if issubclass(kind, torch.optim.SparseAdam):
        raise refusals.sparse_adam()
    raise refusals.unknown_optimizer(kind, [family.name for family in families.values()])


def known_base(kind: type[torch.optim.Optimizer], known: Mapping[type, Any]) -> type | None:
    """The first known class whose ``step`` an optimizer class has, or ``None``."""
    for base in kind.__mro__:
        if base in known and inspect.unwrap(kind.step) is inspect.unwrap(base.step):
            return base
    return None


def names_of(params: Sequence[Tensor], named: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The names of an optimizer's parameters in a model."""
    by_id = {id(p): name for name, p in named.items()}
    for position, param in enumerate(params):
        if id(param) not in by_id:
            raise refusals.unnamed_parameter(position, param)
    return tuple(by_id[id(p)] for p in params)


def read_state(family: Family, state: Mapping[str, Any]) -> Slots:
    """One parameter's state out of torch's dictionary, copied."""
    return family.read(_tree.map(_copy, dict(state)))


def write_state(family: Family, optimizer: torch.optim.Optimizer, state: Sequence[Slots]) -> None:
    """Put each parameter's state into an ordinary optimizer, as numbers."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    groups = optimizer.param_groups
    on_device = any(group.get("capturable") or group.get("fused") for group in groups)
    found = [
        {
            name: _counter(name, value, on_device)
            if name in family.counters
            else _tree.map(_copy, value)
            for name, value in slots.items()
        }
        for slots in state
    ]
    for param, slots in zip(params, found, strict=True):
        if slots:
            optimizer.state[param] = slots


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _counter(name: str, value: Tensor, on_device: bool) -> Tensor:
    """One number per parameter, in the dtype and on the device on which torch keeps it."""
    values = value.detach().reshape(-1)
    if bool((values != values[:1]).any()):
        raise refusals.state_per_element(name)
    double = torch.get_default_dtype() == torch.float64
    # A sum of one value, or of none: to an empty parameter every number is the same.
    found = values[:1].sum().to(torch.float64 if double else torch.float32)
    return found if on_device else found.cpu()
