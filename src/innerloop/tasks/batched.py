"""A function of one task, for all tasks at once.

Only values are batched by ``torch.vmap``. Derivatives are taken outside, by autograd on the batched
tensors, so that they are those of ordinary operations: tasks do not meet, and the gradient of the
sum of their losses is the gradient of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from innerloop import _tree
from innerloop.errors import InnerLoopError, NotBatchableError
from innerloop.step.protocol import as_step
from innerloop.step.step import InnerStep
from innerloop.tasks.corrections import Corrections


def over_tasks(function: Callable[..., Any], *trees: Any) -> Any:
    """``function`` for each task.

    Tensors have a leading task axis, in ``trees`` and in the result. All else belongs to every
    task. Random numbers differ between tasks.
    """
    given = _tree.tensors(trees)
    results: list[Any] = []

    def one(*tensors: Tensor) -> tuple[Tensor, ...]:
        results[:] = [function(*_fill_tensors(trees, tensors))]
        return tuple(_tree.tensors(results))

    batched = _vmap(one, [_beside(tensor, given[0].device) for tensor in given])
    return _fill_tensors(results[0], batched)


def _fill_tensors(tree: Any, tensors: Iterable[Tensor]) -> Any:
    rest = iter(tensors)
    return _tree.map(lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, tree)


def _beside(leaf: Tensor, device: torch.device) -> Tensor:
    """One number for each task, on the device of the weights.

    An optimizer counts on the CPU. torch mixes devices only for a 0-d tensor, which a counter is
    no longer with a task axis.
    """
    if leaf.device == device or leaf.device.type != "cpu" or leaf.dim() != 1:
        return leaf
    return (leaf.float() if device.type == "mps" else leaf).to(device)  # mps has no float64


def _vmap(one: Callable[..., Any], tensors: list[Tensor]) -> Any:
    try:
        with Corrections():
            return torch.vmap(one, randomness="different")(*tensors)
    except InnerLoopError:
        raise
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        raise NotBatchableError(f"{_layer(error)}: {first_line(error)}") from error


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
    """The first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def batched(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step for many tasks at once: every tensor of a state and a batch has a leading task axis.

    Meta-parameters are shared by the tasks. Each task has its own buffers and random numbers.

    >>> import innerloop as il
    >>> step = il.inner_step(lambda params, x: ((params["w"] - x) ** 2).sum(), il.optim.sgd(0.1))
    >>> state = il.State({"w": torch.tensor([[1.0], [2.0]])})
    >>> batched(step)(state, il.Meta(), torch.tensor([[3.0], [2.0]]))[0].params["w"]
    tensor([[1.4000],
            [2.0000]])
    """
    if isinstance(step, InnerStep):
        return dataclasses.replace(step, map_tasks=over_tasks)
    plain = as_step(step)

    def for_tasks(state: Any, meta: Any, batch: Any) -> Any:
        return over_tasks(lambda state, batch: plain(state, meta, batch), state, batch)

    return for_tasks
