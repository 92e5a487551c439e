"""From a ``torch.optim`` instance, fresh or warm, to a rule."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from innerloop.errors import InnerLoopError, four_part
from innerloop.optim.family import Family, Slots
from innerloop.optim.rule import Rule


class NoRule(torch.optim.Optimizer):
    """An optimizer that no inner loop takes as it is."""

    refusal: ClassVar[str]
    """Advice: what to write instead, and why."""


def family_of(kind: type[torch.optim.Optimizer], families: Mapping[type, Family]) -> Family:
    """The family of an optimizer class: its own, or the one whose ``step`` it inherits."""
    for base in kind.__mro__:
        if base in families and inspect.unwrap(kind.step) is inspect.unwrap(base.step):
            return families[base]
    if issubclass(kind, NoRule):
        raise InnerLoopError(kind.refusal)
    if issubclass(kind, torch.optim.SparseAdam):
        raise InnerLoopError(
            four_part(
                "You gave a SparseAdam optimizer.",
                "an optimizer with dense gradients.",
                "torch cannot differentiate a sparse gradient again.",
                "torch.optim.Adam, with torch.nn.Embedding(..., sparse=False).",
            )
        )
    known = ", ".join(sorted(family.name for family in families.values()))
    raise InnerLoopError(
        four_part(
            f"You gave an optimizer of type {kind.__name__}.",
            f"one of {known}, or a subclass that does not override step.",
            "what its step does is not known here, so it cannot be differentiated.",
            f"innerloop.register_optim({kind.__name__}, YourDifferentiableOptimizer).",
        )
    )


def read(
    optimizer: torch.optim.Optimizer, family: Family, named: Mapping[str, Tensor] | None = None
) -> Rule:
    """A rule with the optimizer's groups and a copy of its current state."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    groups = tuple(
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    )
    return Rule(
        family,
        groups,
        tuple(len(group["params"]) for group in optimizer.param_groups),
        tuple(read_state(family, optimizer.state.get(p, {})) for p in params),
        tuple(p.shape for p in params),
        None if named is None else tuple(_names(params, named)),
    )


def _names(params: list[Tensor], named: Mapping[str, Tensor]) -> list[str]:
    by_id = {id(p): name for name, p in named.items()}
    unknown = [i for i, p in enumerate(params) if id(p) not in by_id]
    if unknown:
        raise InnerLoopError(
            four_part(
                f"Parameter {unknown[0]} of the optimizer, of shape "
                f"{tuple(params[unknown[0]].shape)}, is not among the parameters you named.",
                "a name for every parameter of the optimizer.",
                "its updates would reach nothing.",
                "optim.from_torch(optimizer, functional(model).params), with its model.",
            )
        )
    return [by_id[id(p)] for p in params]


def read_state(family: Family, state: Mapping[str, Any]) -> Slots:
    """One parameter's state out of torch's dictionary, copied."""
    return family.read({name: copied(value) for name, value in state.items()})


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [copied(v) for v in value] if isinstance(value, list) else value
