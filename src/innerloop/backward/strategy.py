"""What a strategy is, and what all of them do with the outputs of steps."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from innerloop import _tree
from innerloop._tree import differentiable as differentiable
from innerloop.errors import RequirementError, four_part

Step = Callable[[Any, Any, Any], tuple[Any, Any]]


class Backward(abc.ABC):
    """A strategy: how the gradient gets back over the steps of an inner loop."""

    each_task_alone: ClassVar[bool] = False
    """Whether it is wrong for the steps of several tasks as one batched computation."""

    @abc.abstractmethod
    def run(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        """Fold ``step`` over the batches: the final state and the stacked outputs."""

    def for_tasks(self, count: int) -> Backward:
        """The strategy to use when so many inner loops are alive at once."""
        return self


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def cut(value: Any) -> Any:
    """The same without a graph, and not the same object: what is done to its flags stays here."""
    return value.detach() if isinstance(value, Tensor) else value


def taken(step: Step, state: Any, meta: Any, batch: Any) -> tuple[Any, Any]:
    """One step, which may write to the containers it is given, from a state that stays as it is.

    What :func:`innerloop.inner_step` makes does not write to them.
    """
    return step(state if is_known(step) else _tree.copied(state), meta, batch)


def is_known(step: Step) -> bool:
    """Whether :func:`innerloop.inner_step` made it."""
    return hasattr(getattr(step, "__self__", step), "roots")


def fold(step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The plain loop: the final state and a list of outputs."""
    outs = []
    for j in range(len(batches)):
        state, out = taken(step, state, meta, batches[j])
        outs.append(out)
    return state, outs


def check_visible(leaves: Iterable[Any]) -> None:
    """Refuse leaves of states and outputs that hold tensors which no strategy but the tape sees."""
    found = _tree.opaque(leaves)
    if found is not None:
        name = type(found).__name__
        raise RequirementError(
            four_part(
                f"A state or an output of a step has a {name}, an object that holds tensors.",
                "tensors in tuples, lists, dicts, NamedTuples, or a class that is registered as "
                "a container.",
                "this strategy takes states and outputs apart into tensors; those it does not see "
                "would silently get no gradient, or a wrong one.",
                f"{_tree.REGISTER}({name}) after the definition of a dataclass, a dict or a "
                "NamedTuple in its place, or backward=innerloop.Tape().",
            )
        )


def stacked(outs: Sequence[Any]) -> Any:
    """The outputs of all steps with a new first axis; what cannot be stacked becomes a list."""
    if not outs:
        return None
    found, spec = columns(outs)
    return _tree.unflatten(found, spec)


def columns(outs: Sequence[Any]) -> tuple[list[Any], Any]:
    """For each leaf of the outputs, its values at all steps: one tensor, or a list."""
    flat = [_tree.flatten(out) for out in outs]
    leaves = zip(*(leaves for leaves, _ in flat), strict=True)
    return [_stack(column) for column in leaves], flat[0][1]


def connected(
    state: Sequence[Any], outs: Sequence[Any], moved: Sequence[int], connect: Callable[..., Any]
) -> tuple[list[Any], list[Any]]:
    """State leaves and output columns, those that can have a gradient passed through ``connect``.

    ``moved`` are the places of such leaves in the state. What ``connect`` sees of the outputs are
    all tensors of differentiable columns, in order.
    """
    state, outs = list(state), list(outs)
    parts = [[c] if isinstance(c, Tensor) else c for c in outs]
    shown = [i for i, part in enumerate(parts) if all(map(differentiable, part))]
    values = [state[i] for i in moved] + [t for i in shown for t in parts[i]]
    rest = iter(connect(values))
    for i in moved:
        state[i] = next(rest)
    for i in shown:
        new = [next(rest) for _ in parts[i]]
        outs[i] = new[0] if isinstance(outs[i], Tensor) else new
    return state, outs


def by_step(outs: Sequence[Any], grads: Sequence[Tensor | None], j: int) -> list[Tensor | None]:
    """The gradients of one step's outputs, out of those of what ``connected`` showed of columns."""
    rest, found = iter(grads), []
    for column in outs:
        part = [column] if isinstance(column, Tensor) else column
        if not all(map(differentiable, part)):
            found.append(None)
        elif isinstance(column, Tensor):
            grad = next(rest)
            found.append(None if grad is None else grad[j])
        else:
            found.append([next(rest) for _ in part][j])
    return found


def _stack(column: Sequence[Any]) -> Any:
    if all(isinstance(value, Tensor) and value.shape == column[0].shape for value in column):
        return torch.stack(list(column))
    return list(column)
