"""A whole meta-step, losses and gradients, as one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop.compiled._program import (
    Flat,
    Layout,
    NotCompilableError,
    Programs,
    Recorded,
    Values,
)
from innerloop.guard import closures
from innerloop.step.gradient import refuse_higher

UNCOMPILED = "an uncompiled one for the inner one of two nested loops: do not compile it."


class TooLargeError(NotCompilableError):
    """A program that would take long to compile as a whole."""


class _Program(NamedTuple):
    run: Flat
    """From the tensors and a weight for each loss to the losses and the weighted gradients."""
    used: list[bool]
    """Which tensors have a gradient."""
    ones: Tensor


def whole(
    programs: Programs, key: Any, tree: Any, function: Callable[[Any], Tensor], limit: int
) -> Tensor:
    """``function(tree)``: a loss, or one for each task, with its gradient already in it.

    The program computes both, for given weights of the losses. It runs once, with ones: a backward
    with equal weights, as of a mean, scales what is there, and any other one runs it again.
    """
    layout = Layout(tree)
    program = programs.get(
        ("whole", key, layout.key, layout.requiring),
        lambda: _made(layout, function, limit, programs),
    )
    wanted = [t for t, used in zip(layout.tensors, program.used, strict=True) if used]
    return _Whole.apply(program, Values(layout.tensors), *wanted)  # type: ignore[return-value]


def _made(
    layout: Layout, function: Callable[[Any], Tensor], limit: int, programs: Programs
) -> _Program:
    needs, layout = layout.requiring, layout.detached()
    used: list[bool] = []
    shapes: list[Any] = []

    def losses_of(*tensors: Tensor) -> tuple[list[Tensor], Tensor]:
        own = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        since = closures.sequence_number()
        with torch.enable_grad():
            losses = function(layout.rebuilt(own)[1])
        refuse_strangers([losses], own, since)
        shapes[:] = [losses.shape, losses.dtype, losses.device]
        return own, losses

    def joint(*flat: Tensor) -> list[Tensor]:
        own, losses = losses_of(*flat[:-1])
        sources = [t for t in own if t.requires_grad]
        found = iter(torch.autograd.grad(losses, sources, flat[-1], allow_unused=True))
        grads = [next(found) if t.requires_grad else None for t in own]
        used[:] = [g is not None for g in grads]
        return [losses.detach(), *(g for g in grads if g is not None)]

    Recorded(lambda *flat: [losses_of(*flat)[1].detach()], layout.tensors)
    shape, dtype, device = shapes
    ones = torch.ones(shape, dtype=dtype, device=device)
    recorded = Recorded(joint, [*layout.tensors, ones])
    if recorded.size > limit:
        raise TooLargeError(f"it has {recorded.size} operations")
    return _Program(programs.compiled(recorded), used, ones)


def refuse_strangers(outputs: list[Tensor], known: list[Tensor], since: int) -> None:
    """A tensor that was closed over would be a constant of the program: its gradient, zero."""
    if any(closures.strangers(outputs, known, since)):
        raise NotCompilableError(
            "the loss uses a tensor requiring grad that the loop was not given"
        )


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: _Program, values: Values, *wanted: Tensor) -> Tensor:
        losses, *ctx.grads = program.run(*values.tensors, program.ones)
        ctx.program, ctx.values = program, values
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_higher("The backward of a compiled meta-step", UNCOMPILED)
        (g,) = grads
        if _equal(g):
            scale = g.flatten()[0]
            found = torch._foreach_mul(list(ctx.grads), scale)  # type: ignore[attr-defined]
        else:
            found = ctx.program.run(*ctx.values.tensors, g.contiguous())[1:]
        return None, None, *found


def _equal(weights: Tensor) -> bool:
    """Whether all losses have the same weight; seen without looking if it was expanded."""
    return not any(weights.stride()) or bool((weights == weights.flatten()[0]).all())
