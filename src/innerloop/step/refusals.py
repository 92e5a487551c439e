"""The errors of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from innerloop.errors import InnerLoopError, RequirementError, four_part


def not_a_rule(rule: Any) -> InnerLoopError:
    found = rule.__name__ if isinstance(rule, type) else type(rule).__name__
    return InnerLoopError(
        four_part(
            f"You gave {found} as the rule of a step.",
            "a rule of innerloop.optim, or a learned optimizer.",
            "a step is a function, and a torch optimizer changes weights in place.",
            "innerloop.optim.from_torch(optimizer, innerloop.functional(model).params).",
        )
    )


def not_a_state(wrong: Any) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"You gave a step a {type(wrong).__name__}.",
            "innerloop.State and innerloop.Meta.",
            "a step takes weights, buffers and the optimizer's state out of the one, settings "
            "and the loss's parameters out of the other.",
            "step(State(params), Meta({'lr': lr}), batch).",
        )
    )


def nothing_moves() -> RequirementError:
    return RequirementError(
        four_part(
            "All weights that the optimizer trains are frozen (requires_grad is False).",
            "at least one weight that moves.",
            "a step takes the gradient of the loss by the weights it moves.",
            "model.requires_grad_(True), or .requires_grad_(True) for the layers to train.",
        )
    )


def no_gradient() -> RequirementError:
    return RequirementError(
        four_part(
            "The loss does not depend on any of the weights that the optimizer trains.",
            "a loss computed with the model it is handed.",
            "nothing would move.",
            "def loss(model, batch): ... model(x) ..., with that argument and not with a "
            "model from outside.",
        )
    )


def buffer_with_graph(name: str) -> RequirementError:
    return RequirementError(
        four_part(
            f"The forward left a tensor with a graph in the buffer {name!r}.",
            "buffers without a gradient.",
            "they are carried from step to step as numbers; the gradient through them would "
            "silently be missing.",
            "x.detach() where it is stored; or the quantity as an output of the loss.",
        )
    )


def transform_returned(found: Any) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"Your grad_transform returned {type(found).__name__}.",
            "a mapping of tensors with the names of the gradients it was given.",
            "gradients are matched to weights by name.",
            "return {name: f(g) for name, g in grads.items()}.",
        )
    )


def check_update(kind: str, found: Any, moving: Mapping[str, Tensor]) -> None:
    """Refuse what is not the new weights and the new state of a learned optimizer."""
    pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Mapping)
    shapes = {name: _shape(value) for name, value in found[0].items()} if pair else None
    if shapes == {name: p.shape for name, p in moving.items()}:
        return
    shown = f"weights {shapes}" if pair else f"a {type(found).__name__}"
    raise InnerLoopError(
        four_part(
            f"update of your {kind} returned {shown}.",
            "a pair: the new weights by name, each in its shape, and the new state.",
            "the next step goes on from them.",
            "return {name: p - step(g) for ...}, state.",
        )
    )


def add_step(error: Exception, time: int, has_model: bool, batch: Any) -> None:
    """Add to an error in which step it happened."""
    add_note = getattr(error, "add_note", None)
    if add_note is None:  # Python 3.10
        return
    add_note(
        f"This happened in inner step {time} (counted from 0), where the loss was called with "
        f"{'the model' if has_model else 'params'} and the batch {_shown(batch)}."
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)}"
    if isinstance(value, tuple | list):
        inside = ", ".join(map(_shown, value[:4])) + (", ..." if len(value) > 4 else "")
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    return type(value).__name__


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None
