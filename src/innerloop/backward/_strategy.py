"""What a strategy is, and what all of them do with the outputs of steps."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree

Step = Callable[[Any, Any, Any], tuple[Any, Any]]


class Backward(abc.ABC):
    """A strategy: how the gradient gets back over the steps of an inner loop."""

    @abc.abstractmethod
    def run(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        """Fold ``step`` over the batches: the final state and the stacked outputs."""

    def for_tasks(self, count: int) -> Backward:
        """The strategy to use when so many inner loops are alive at once."""
        return self


def differentiable(value: Any) -> bool:
    """Whether a value can have a derivative: a tensor of real or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def fold(step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The plain loop: the final state and a list of outputs."""
    outs = []
    for j in range(len(batches)):
        state, out = step(state, meta, batches[j])
        outs.append(out)
    return state, outs


def stacked(outs: Sequence[Any]) -> Any:
    """The outputs of all steps with a new first axis; what is not a tensor becomes a list."""
    if not outs:
        return None
    flat = [_tree.flatten(out) for out in outs]
    spec = flat[0][1]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return _tree.unflatten([_stack(column) for column in columns], spec)


def _stack(column: Sequence[Any]) -> Any:
    if all(isinstance(value, Tensor) and value.shape == column[0].shape for value in column):
        return torch.stack(list(column))
    return list(column)
