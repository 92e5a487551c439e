"""The equation that holds where an optimizer has converged: gradient and penalty are zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from innerloop.errors import RequirementError, four_part
from innerloop.optim import Rule
from innerloop.optim.family import off
from innerloop.optim.sgd import SGD

_DECOUPLED = ("AdamW", "Muon", "Adafactor")


def descent_with_penalty(rule: Any, hyper: Mapping[str, Any]) -> tuple[Rule, dict[str, Any]] | None:
    """A plain descent with the rule's weight decay, which rests where the rule does.

    ``None`` for a rule that adds nothing to the gradient.
    """
    if not isinstance(rule, Rule):
        return None
    groups = []
    for group in rule.groups:
        decoupled = rule.family.name in _DECOUPLED or group.get("decoupled_weight_decay", False)
        decay = hyper.get("weight_decay", group.get("weight_decay", 0))
        if (decoupled and not off(decay)) or not off(group.get("lambd", 0)):
            raise RequirementError(
                four_part(
                    f"You gave Implicit() {rule.family.name} with decoupled weight decay or lambd.",
                    "an optimizer that rests where the gradient, with a penalty, is zero.",
                    "decoupled decay pulls against an update that the optimizer has rescaled, so "
                    "where it rests depends on its way there.",
                    "weight_decay=0 and the penalty in the loss, or an optimizer such as SGD whose "
                    "weight_decay is part of the gradient.",
                )
            )
        groups.append(
            {
                "lr": 1.0,
                "momentum": 0.0,
                "dampening": 0.0,
                "weight_decay": 0.0 if decoupled else group.get("weight_decay", 0.0),
                "nesterov": False,
                "maximize": group.get("maximize", False),
            }
        )
    own = {name: value for name, value in hyper.items() if name == "weight_decay"}
    plain = Rule(SGD, tuple(groups), rule.sizes, None, rule.shapes, rule.names)
    return plain, own if "weight_decay" in rule.family.settings else {}


def lasting_settings(rule: Any) -> frozenset[str]:
    """The settings that influence where a rule converges."""
    coupled = isinstance(rule, Rule) and "weight_decay" in rule.family.settings
    return frozenset({"weight_decay"} if coupled else ())
