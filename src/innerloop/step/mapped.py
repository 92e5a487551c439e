"""A function of one task, for all tasks at once.

Only values are batched by ``torch.vmap``. Derivatives are taken outside, by autograd on the batched
tensors, so that they are those of ordinary operations: tasks do not meet, and the gradient of the
sum of their losses is the gradient of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from innerloop import _tree
from innerloop.errors import InnerLoopError
from innerloop.guard.watch import BatchedWatch, Draws, ForeignError


class NotBatchableError(InnerLoopError):
    """What cannot be done for all tasks at once; a loop over the tasks can."""


def mapped(function: Callable[..., Any], *trees: Any) -> Any:
    """``function`` for each task.

    Tensors have a leading task axis, in ``trees`` and in the result. All else belongs to every
    task. Random numbers differ between tasks.
    """
    leaves, spec = _tree.flatten(trees)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    rest: list[Any] = []
    shape: list[Any] = []

    def one(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = list(leaves)
        for i, tensor in zip(where, tensors, strict=True):
            given[i] = tensor
        found, found_spec = _tree.flatten(function(*_tree.unflatten(given, spec)))
        rest[:], shape[:] = found, [found_spec]
        return tuple(t for t in found if isinstance(t, Tensor))

    batched = iter(_vmapped(one, [leaves[i] for i in where]))
    return _tree.unflatten([next(batched) if isinstance(v, Tensor) else v for v in rest], shape[0])


def _vmapped(one: Callable[..., Any], tensors: list[Tensor]) -> Any:
    draws = Draws()
    try:
        with BatchedWatch():
            found = torch.vmap(one, randomness="different")(*tensors)
    except InnerLoopError:
        raise
    except ForeignError as error:
        raise NotBatchableError(str(error)) from error
    except Exception as error:
        if not _refusals(error):
            raise
        raise NotBatchableError(f"{_layer(error)}: {first_line(error)}") from error
    if draws.undone():
        raise NotBatchableError("the loss or the model draws random numbers outside torch")
    return found


def _refusals(error: Exception) -> bool:
    """Whether ``vmap`` cannot do what was asked, rather than the function being wrong."""
    return isinstance(error, RuntimeError | ValueError | NotImplementedError | TypeError)


def _layer(error: BaseException) -> str:
    """The innermost module whose method was running."""
    found, trace = "the loss", error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and type(module).__module__ != "innerloop.inner_loop":
            found = f"the layer {type(module).__name__}"
        trace = trace.tb_next
    return found


def first_line(error: BaseException) -> str:
    """What an error says in short."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# Trees with a task axis. ------------------------------------------------------------------------


def spread(tree: Any, count: int) -> Any:
    """Every tensor once for each task, without copies."""
    return _tree.map(lambda v: v.expand(count, *v.shape) if isinstance(v, Tensor) else v, tree)


def sliced(tree: Any, task: int) -> Any:
    """One task's part of nested tensors; what is not a tensor belongs to all tasks."""
    return _tree.map(lambda v: v[task] if isinstance(v, Tensor) else v, tree)


def stacked(trees: list[Any], is_leaf: Any = None, shared: bool = False) -> Any:
    """The trees of several tasks as one; what is not a tensor becomes a list.

    With ``shared`` it is the same in all tasks, and stays one.
    """
    flat = [_tree.flatten(tree, is_leaf) for tree in trees]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    leaves = [
        torch.stack(list(c))
        if isinstance(c[0], Tensor)
        else (c[0] if c[0] is None or shared else list(c))
        for c in columns
    ]
    return _tree.unflatten(leaves, flat[0][1])
