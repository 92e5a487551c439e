"""A task axis: the first one of every tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.errors import InnerLoopError, four_part


def count(train: Sequence[Any], val: Any = None) -> int:
    """The number of tasks: the size of the first axis of every tensor."""
    distinct = {id(batch): batch for batch in (*train, val)}
    found = _tree.leaves(list(distinct.values()))
    for leaf in found:
        if not isinstance(leaf, Tensor | int | float | complex | str | bytes | None):
            raise InnerLoopError(
                four_part(
                    f"You called with tasks=True and a {type(leaf).__name__} in a batch.",
                    "tensors in tuples, lists and dictionaries.",
                    "what is inside other objects cannot be divided among the tasks.",
                    "torch.as_tensor(array), or the object's tensors in a tuple.",
                )
            )
    leaves = [t for t in found if isinstance(t, Tensor)]
    sizes = {t.shape[0] if t.dim() else -1 for t in leaves}
    if len(sizes) == 1 and min(sizes) > 0:
        return sizes.pop()
    raise InnerLoopError(
        four_part(
            f"You called with tasks=True, and the tensors have first axes of {_shown(sizes)}.",
            "the same number of tasks, 1 or more, as the first axis of every tensor.",
            "each task gets its own slice of every tensor.",
            "tensors of shape [tasks, ...] in all batches, or tasks=False.",
        )
    )


def _shown(sizes: set[int]) -> str:
    words = ["no size (a 0-d tensor)" if s == -1 else str(s) for s in sizes]
    return ", ".join(sorted(words)) or "no size (there is no tensor)"


def slice_batches(
    train: Sequence[Any], task: int, of: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> list[Any]:
    """The batches of one task; a batch that is used several times stays the same object."""
    slices: dict[int, Any] = {}
    for batch in train:
        if id(batch) not in slices:
            slices[id(batch)] = slice_task(batch, task, of)
    return [slices[id(batch)] for batch in train]


def spread(tree: Any, count: int) -> Any:
    """Every tensor once for each task, without copies."""
    return _tree.map(lambda v: v.expand(count, *v.shape) if isinstance(v, Tensor) else v, tree)


def slice_task(tree: Any, task: int, of: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """One task's part of ``of(tensor)`` for all tensors; the rest belongs to all tasks."""
    return _tree.map(lambda v: of(v)[task] if isinstance(v, Tensor) else v, tree)


def stack_tasks(trees: list[Any], is_leaf: Any = None, shared: bool = False) -> Any:
    """The trees of several tasks as one; what is not a tensor becomes a list.

    With ``shared`` it is the same in all tasks, and stays one.
    """

    def join(*column: Any) -> Any:
        first = column[0]
        if isinstance(first, Tensor):
            return torch.stack(column)
        return first if first is None or shared else list(column)

    return _tree.map_together(join, *trees, is_leaf=is_leaf)
