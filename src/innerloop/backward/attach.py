"""Values put into the graph with a backward of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop.errors import RequirementError, four_part

Grads = Sequence[Tensor | None]
Pull = Callable[[Grads], Grads]


def attach(
    values: Sequence[Tensor],
    inputs: Sequence[Tensor],
    pull: Pull,
    pull_with_graph: Pull | None = None,
    name: str = "",
) -> tuple[Tensor, ...]:
    """The values as functions of the inputs; ``pull`` gives the gradients of the inputs.

    ``pull_with_graph`` does the same where the gradients are to be differentiated again. Without
    it, that is refused, as a limit of the strategy ``name``.
    """
    return _Attach.apply(pull, pull_with_graph, name, values, *inputs)  # type: ignore[return-value]


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pull: Pull, with_graph: Pull | None, name: str, values: Any, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.pull, ctx.with_graph, ctx.strategy = pull, with_graph, name
        ctx.set_materialize_grads(False)
        return tuple([value.view_as(value) for value in values])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        pull = ctx.pull
        if torch.is_grad_enabled():
            pull = ctx.with_graph
            if pull is None:
                raise _no_second_backward(ctx.strategy)
        return None, None, None, None, *pull(grads)


def _no_second_backward(name: str) -> RequirementError:
    return RequirementError(
        four_part(
            f"The backward of {name} was run with create_graph=True, as when an inner loop is "
            "differentiated inside another one.",
            "a backward that has a graph of its own.",
            "this one works with values only, and the outer gradient would be wrong.",
            "backward=innerloop.Tape() or innerloop.Remat() for the inner one of two nested "
            "loops, and tasks=innerloop.tasks.loop() or innerloop.tasks.vmap().",
        )
    )
