"""Errors of rules: parameters, gradients and states that do not fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop.errors import InnerLoopError, four_part


def foreign_state(name: str, key: KeyError) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"The state has no {key}, which {name} keeps.",
            "a state of this rule.",
            "each rule keeps other things.",
            "state = rule.init(params).",
        )
    )


def wrong_state(count: int) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"The state does not belong to these {count} parameters.",
            "the state that init made for them, or that the last update returned.",
            "parameters without a state would silently stay where they are.",
            "state = rule.init(params).",
        )
    )


def unnamed_mapping() -> InnerLoopError:
    return InnerLoopError(
        four_part(
            "You gave a mapping to a rule that does not know its parameters by name.",
            "names, for an optimizer with several groups or with a state.",
            "which settings and which state belong to a parameter goes by the optimizer's order, "
            "which need not be that of the mapping.",
            "optim.from_torch(optimizer, functional(model).params).",
        )
    )


def other_structure(what: str, found: str) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"The {what} do not have the structure of the parameters: {found}.",
            "the same nesting with the same names.",
            "a value that went to another parameter would be a silent mistake.",
            "one entry, or None for a gradient, wherever the parameters have one.",
        )
    )


def wrong_count(found: int, needed: int) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"You gave {found} parameters to a rule for {needed}.",
            "the optimizer's parameters, group after group, and no others.",
            "each has its own settings and state, found by position.",
            "[p for group in optimizer.param_groups for p in group['params']].",
        )
    )


def wrong_shape(position: int, found: torch.Size, needed: torch.Size) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"Parameter {position} you gave has the shape {tuple(found)}.",
            f"{tuple(needed)}, as in the optimizer the rule was made from.",
            "parameters are matched to settings and state by position.",
            "them in the optimizer's order, or a mapping and optim.from_torch("
            "optimizer, functional(model).params).",
        )
    )


def complex_parameter(name: str) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"You gave {name} a complex parameter.",
            "real parameters.",
            f"torch.optim.{name} has no rule for complex ones.",
            "another optimizer for them, such as torch.optim.Adam.",
        )
    )


def gradient_shape(grad: Tensor, param: Any) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"A gradient has the shape {tuple(grad.shape)}.",
            f"{tuple(param.shape)}, that of its parameter.",
            "it would be broadcast or shifted into its neighbors.",
            "gradients in the order and the shapes of the parameters.",
        )
    )


def sparse_gradient() -> InnerLoopError:
    return InnerLoopError(
        four_part(
            "A parameter has a sparse gradient.",
            "dense gradients.",
            "torch cannot differentiate a sparse gradient again.",
            "torch.nn.Embedding(..., sparse=False).",
        )
    )
