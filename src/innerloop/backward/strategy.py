"""The base class of the strategies, and what all of them do with the outputs of steps."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from innerloop import _tree
from innerloop._tree import differentiable
from innerloop.errors import InnerLoopError, RequirementError, four_part
from innerloop.step.protocol import Step, fold


class Backward(abc.ABC):
    """A strategy: how the gradient gets back over the steps of an inner loop."""

    each_task_alone: ClassVar[bool] = False
    """True if it is wrong for the steps of several tasks as one batched computation."""

    @abc.abstractmethod
    def run(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        """Fold ``step`` over the batches: the final state and the stacked outputs."""

    def for_tasks(self, count: int) -> Backward:
        """The strategy to use when ``count`` inner loops are alive at once."""
        return self


def run_plainly(step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
    """One graph over all steps, or none where gradients are off."""
    state, outs = fold(step, state, meta, batches)
    return state, stack_outputs(outs)


def cut(value: Any) -> Any:
    """Detaches every tensor, as a new object: changes of its flags do not reach the original."""
    return value.detach() if isinstance(value, Tensor) else value


def check_count(owner: str, name: str, value: Any) -> None:
    """Refuse anything but a whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InnerLoopError(
            four_part(
                f"You wrote {owner}({name}={value!r}).",
                "a whole number, 1 or more.",
                f"{name!r} counts steps or states.",
                f"{owner}({name}=1).",
            )
        )


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


def stack_outputs(outs: Sequence[Any]) -> Any:
    """The outputs of all steps with a new first axis; what cannot be stacked becomes a list."""
    if not outs:
        return None
    return _tree.fill(outs[0], columns(outs))


def columns(outs: Sequence[Any]) -> list[Any]:
    """For each leaf of the outputs, its values at all steps: one tensor, or a list."""
    leaves = zip(*[_tree.leaves(out) for out in outs], strict=True)
    return [_stack(column) for column in leaves]


def parts(column: Any) -> list[Any]:
    """The values of a column: one tensor for all steps, or one for each."""
    return [column] if isinstance(column, Tensor) else column


def shown(columns: Sequence[Any]) -> list[int]:
    """The places of the columns that can have a gradient."""
    return [i for i, column in enumerate(columns) if all(map(differentiable, parts(column)))]


def connect(
    state: Sequence[Any], outs: Sequence[Any], moved: Sequence[int], attach: Callable[..., Any]
) -> tuple[list[Any], list[Any]]:
    """State leaves and output columns, those that can have a gradient passed through ``attach``.

    ``moved`` are the places of such leaves in the state. What ``attach`` sees of the outputs are
    the values of the columns that are :func:`shown`, in order.
    """
    state, outs = list(state), list(outs)
    places = shown(outs)
    rest = iter(attach([state[i] for i in moved] + [t for i in places for t in parts(outs[i])]))
    for i in moved:
        state[i] = next(rest)
    for i in places:
        new = [next(rest) for _ in parts(outs[i])]
        outs[i] = new[0] if isinstance(outs[i], Tensor) else new
    return state, outs


def grads_of_step(
    outs: Sequence[Any], grads: Sequence[Tensor | None], j: int
) -> list[Tensor | None]:
    """The gradients of one step's outputs, out of those of what ``connect`` showed of columns."""
    rest = iter(grads)
    found: list[Tensor | None] = [None] * len(outs)
    for i in shown(outs):
        if isinstance(outs[i], Tensor):
            grad = next(rest)
            found[i] = None if grad is None else grad[j]
        else:
            found[i] = [next(rest) for _ in outs[i]][j]
    return found


def _stack(column: Sequence[Any]) -> Any:
    if all([isinstance(value, Tensor) and value.shape == column[0].shape for value in column]):
        return torch.stack(list(column))
    return list(column)
