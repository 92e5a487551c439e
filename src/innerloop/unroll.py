"""The fold of a step over batches, differentiated as a strategy says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from innerloop._tree import has_tangents
from innerloop.backward import Backward, Tape
from innerloop.errors import InnerLoopError, RequirementError, four_part
from innerloop.guard.writes import check_unwritten, versions_of
from innerloop.step.protocol import as_step
from innerloop.step.state import State, named_leaves


def unroll(
    step: Any, state: Any, meta: Any, batches: Iterable[Any], backward: Backward | None = None
) -> tuple[Any, Any]:
    """Take one step per batch: the final state, and the outputs of all steps stacked.

    ``step(state, meta, batch) -> (state, out)`` is a pure function of nested tensors, such as
    :func:`innerloop.inner_step` makes. State and outputs are differentiable with respect to every
    tensor requiring grad in ``state``, ``meta`` and ``batches``; ``backward`` says how the gradient
    is computed (by default :class:`innerloop.Tape`). Without batches the state comes back as it is,
    and the outputs are ``None``.

    >>> import torch, innerloop as il
    >>> step = il.inner_step(lambda params, batch: (params["w"] - batch) ** 2, il.optim.sgd(0.1))
    >>> w = torch.tensor(1.0, requires_grad=True)
    >>> lr = torch.tensor(0.1, requires_grad=True)
    >>> state, losses = il.unroll(
    ...     step, il.State({"w": w}), il.Meta({"lr": lr}), [3.0, 3.0], backward=il.Remat()
    ... )
    >>> state.params["w"].backward()
    >>> w.grad, lr.grad, losses.detach()
    (tensor(0.6400), tensor(6.4000), tensor([4.0000, 2.5600]))
    """
    backward = check_strategy(Tape() if backward is None else backward)
    step = as_step(step)
    step.check_state(state)
    batches = as_batches(batches)
    if has_tangents(state, meta, batches):
        raise RequirementError(
            four_part(
                "You take forward-mode derivatives of an inner loop.",
                "derivatives in reverse mode.",
                "inner gradients are taken in reverse mode, and a tangent ends there.",
                "backward() of the result; backward=innerloop.Forward() carries tangents itself.",
            )
        )
    weights = named_leaves(state.params) if isinstance(state, State) else {}
    versions = versions_of(weights)
    found = backward.run(step.with_guard(), state, meta, batches)
    check_unwritten(weights, versions)
    return found


def check_strategy(backward: Any) -> Backward:
    """The strategy itself, or an error that says what to write."""
    if isinstance(backward, Backward):
        return backward
    name = getattr(backward, "__name__", type(backward).__name__)
    known = isinstance(backward, type) and issubclass(backward, Backward)
    raise InnerLoopError(
        four_part(
            f"You gave backward={name}.",
            "a strategy.",
            "it decides what is kept for the gradient.",
            f"backward=innerloop.{name}(...)."
            if known
            else "backward=innerloop.Remat(), or Tape(), Binomial(8), Auto(memory='2GB').",
        )
    )


def as_batches(batches: Any) -> Sequence[Any]:
    """One batch per step as something that can be indexed, or an error."""
    wrong = isinstance(batches, Tensor | str | bytes | dict)
    if isinstance(batches, Dataset) and callable(getattr(batches, "__len__", None)):
        return batches  # type: ignore[return-value]  # map-style: fetched step by step
    if wrong or not isinstance(batches, Iterable):
        raise InnerLoopError(
            four_part(
                f"You gave a {type(batches).__name__} as the batches to train on.",
                "a sequence with one batch for each step.",
                "the number of steps is its length.",
                "[batch] * 5 for five steps on the same batch.",
            )
        )
    return batches if isinstance(batches, Sequence) else list(batches)
