"""Differentiable versions of torch's optimizers, by the rules of :mod:`innerloop.optim`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop import _tree, optim
from innerloop.eager import refusals
from innerloop.eager.optimizer import DifferentiableOptimizer
from innerloop.optim.blocks import OptState, state_by_parameter
from innerloop.optim.convert import family_of, known_base, write_state
from innerloop.optim.family import Family
from innerloop.optim.rule import Rule, check_step, step
from innerloop.optim.settings import (
    check_name,
    check_value,
    of_each_parameter,
    per_group,
    plain_settings,
    write_settings,
)


class RuleOptimizer(DifferentiableOptimizer):
    """A differentiable optimizer by one of the rules of :mod:`innerloop.optim`.

    ``state`` can be read and written as a list over groups of dictionaries. The rule keeps its own
    packed form; each form is made from the other when it is asked for.
    """

    family: Family
    _packed: OptState | None = None
    _open: list[Any] | None = None

    @property
    def state(self) -> list[Any]:  # type: ignore[override]
        """For each group a dictionary by position in it, of each parameter's state."""
        if self._open is None:
            assert self._packed is not None
            params = [p for group in self.param_groups for p in group["params"]]
            flat = state_by_parameter(self.family, params, self._packed)
            self._set_flat_state([_tree.map(_independent, slots) for slots in flat])
        assert self._open is not None
        return self._open

    @state.setter
    def state(self, value: list[Any]) -> None:
        self._open, self._packed = value, None

    def _update(self, grouped_grads: list[list[Tensor | None]], **kwargs: Any) -> None:
        params: list[Tensor] = []
        grads: list[Tensor | None] = []
        sizes = []
        for group, group_grads in zip(self.param_groups, grouped_grads, strict=True):
            params += group["params"]
            grads += group_grads
            sizes.append(len(group_grads))
        if self._packed is None:
            warm = tuple(self.family.read(dict(slots)) for slots in self._flat_state())
            rule = Rule(self.family, tuple(self.param_groups), tuple(sizes), warm)
            self._packed, self._open = rule.init(params), None
        check_step(self.family, params, grads, self._packed)
        settings = of_each_parameter(self.family, self.param_groups, sizes, params)
        new, self._packed = step(self.family, settings, params, grads, self._packed)
        start = 0
        for group, size in zip(self.param_groups, sizes, strict=True):
            group["params"] = new[start : start + size]
            start += size

    def _values(self, name: str, given: Any) -> list[Any]:
        check_name(self.family, name)
        values = per_group(name, given, len(self.param_groups), self.family.settings[name])
        for group, value in zip(self.param_groups, values, strict=True):
            check_value(self.family, name, value, [p.shape for p in group["params"]])
        return values

    def write_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Put state and settings into an ordinary optimizer, as numbers where it has numbers."""
        optimizer = unwrap_optimizer(optimizer)
        self._check_shapes(optimizer)
        if class_for(type(optimizer)) is not type(self):
            raise refusals.target_of_another_kind(self.family.name, optimizer)
        settings = plain_settings(self.family, self.param_groups)
        write_state(self.family, optimizer, self._flat_state())
        write_settings(optimizer, settings)


def _independent(value: Any) -> Any:
    """A tensor that is no view: users detach state in place, which torch refuses for views."""
    return value.clone() if isinstance(value, Tensor) and value._is_view() else value


def _class_of(family: Family) -> type[RuleOptimizer]:
    doc = f"A differentiable ``torch.optim.{family.name}``; see :class:`RuleOptimizer`."
    name = f"Differentiable{family.name}"
    return type(name, (RuleOptimizer,), {"family": family, "__doc__": doc, "__module__": __name__})


BY_CLASS: dict[type[torch.optim.Optimizer], type[DifferentiableOptimizer]] = {
    kind: _class_of(family)
    for kind, family in optim.FAMILIES.items()
    if family.layout != "whole"  # which evaluates the loss at other weights
}
"""The differentiable optimizer of each ``torch.optim`` class; ``register_optim`` adds to it."""


def class_for(kind: type[torch.optim.Optimizer]) -> type[DifferentiableOptimizer]:
    """The differentiable class for an optimizer class, or for the one whose step it inherits."""
    base = kind if kind in BY_CLASS else known_base(kind, BY_CLASS)
    if base is None:
        raise refusals.loss_evaluated_again(family_of(kind, optim.FAMILIES).name)
    return BY_CLASS[base]


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's wrapper, which adds gradient accumulation and scaling."""
    # By name: Accelerate need not be installed.
    while any(base.__module__ == "accelerate.optimizer" for base in type(optimizer).__mro__):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer
