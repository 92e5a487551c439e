"""Tasks spread over threads, in the forward and in the backward."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _autograd
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from innerloop import _tree
from innerloop._tree import differentiable, has_tangents
from innerloop.backward.attach import attach
from innerloop.errors import InnerLoopError, four_part
from innerloop.guard import closures
from innerloop.guard.randomness import Autocast, Draws, Randomness
from innerloop.tasks.corrections import NoGenerators, OrderError, saved_tensor_hooks
from innerloop.tasks.loop import loop
from innerloop.tasks.way import Ended, Way, warn_of_loop

T = TypeVar("T")
_local = threading.local()


@dataclasses.dataclass
class threads(Way):
    """Tasks spread over threads, each with a replica and one core of its own.

    The way for models whose operations are large but do not fill all cores. By default there are
    as many threads as torch uses. What draws random numbers runs in a loop instead, since the
    order of the draws must not depend on the speed of threads, and so do models with forward
    hooks. The loss is called by several threads at once: what it keeps outside is theirs together.
    """

    n: int | None = None

    def __post_init__(self) -> None:
        if self.n is not None and (
            isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1
        ):
            raise InnerLoopError(
                four_part(
                    f"You gave threads({self.n!r}).",
                    "a number of threads, 1 or more, or None.",
                    "the tasks are divided among them.",
                    "innerloop.tasks.threads(2).",
                )
            )
        self._refused: set[Any] = set()
        self._seen: set[Any] = set()

    def run(self, tasks: Any) -> Ended:
        if tasks.mark not in self._refused:
            found, why = self.run_parallel(tasks)
            if found is not None:
                return found
            if not _for_now(tasks):
                self._refused.add(tasks.mark)
            warn_of_loop(self, why)
        return loop().run(tasks)

    def run_parallel(self, tasks: Any) -> tuple[Ended | None, str]:
        """The result, or the reason why there is none."""
        first = tasks.mark not in self._seen
        if why := _for_now(tasks) or (_hooks(tasks) if first else ""):
            return None, why
        before, draws = Randomness(()), Draws()
        count = min(self.n or torch.get_num_threads(), tasks.count)
        each = [_Task(tasks, t, first) for t in range(tasks.count)]
        try:
            _parallel(count, each, _Task.run)
        except OrderError as error:
            draws.undo()
            before.set()
            return None, f"that {error}"
        if draws.undo() or not before.is_now():
            before.set()
            return None, "that the model or the loss draws random numbers, as dropout does"
        if _share_leaves(each):
            return None, "that the loss uses a tensor requiring grad that the loop was not given"
        self._seen.add(tasks.mark)
        return _join(each, count), ""


class _NoDraws(TorchDispatchMode):
    """Refuses random numbers, those too after which the random state is put back."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise OrderError("the model or the loss draws random numbers, as dropout does")
        return func(*args, **(kwargs or {}))


class _Task:
    """One task with stand-ins for all tensors that a gradient is asked of."""

    def __init__(self, tasks: Any, number: int, first: bool) -> None:
        self.tasks, self.number, self.first = tasks, number, first
        self.tracked, self.autocast = torch.is_grad_enabled(), Autocast(())
        self.stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self.closed_over: set[int] = set()
        """The ids of leaves that the task used without being given them."""
        self.has_strangers = False
        """Whether one of them was not made by a step."""
        self.leaves: list[Any] = []
        self.spec: Any = None
        self.where: list[int] = []
        """Which leaves of the result a gradient can come to."""

    def run(self) -> None:
        draws = _NoDraws() if self.first else contextlib.nullcontext()
        with torch.set_grad_enabled(self.tracked), self.autocast.restore(), NoGenerators(), draws:
            found = self.tasks.one(self.number, self._stand_in)
        self.leaves, self.spec = _tree.flatten(found)
        self.where = [i for i, t in enumerate(self.leaves) if differentiable(t) and t.requires_grad]
        known = [new for _, new in self.stand_ins.values()]
        # Numbers of autograd's nodes differ between threads, so all are followed to their leaves.
        leaves = closures.closed_over(self.outputs, known, 0)[0]
        self.closed_over = {id(leaf) for leaf in leaves}
        self.has_strangers = any(not hasattr(leaf, "_innerloop_made") for leaf in leaves)

    def _stand_in(self, value: Any) -> Any:
        if not (self.tracked and isinstance(value, Tensor) and value.requires_grad):
            return value
        if id(value) not in self.stand_ins:
            # In the graph: what the loss leaves elsewhere leads to the caller's tensors too.
            self.stand_ins[id(value)] = (value, value.view_as(value))
        return self.stand_ins[id(value)][1]

    @property
    def outputs(self) -> list[Tensor]:
        return [self.leaves[i] for i in self.where]

    def pull(self, grads: Sequence[Tensor | None], keep: bool) -> Iterator[tuple[int, Tensor]]:
        """Gradients of the caller's tensors, by id."""
        pairs = [(t, g) for t, g in zip(self.outputs, grads, strict=True) if g is not None]
        targets = [new for _, new in self.stand_ins.values()]
        if not pairs or not targets:
            return iter(())
        with self.autocast.restore():
            found = torch.autograd.grad(
                [t for t, _ in pairs],
                targets,
                [g for _, g in pairs],
                retain_graph=keep,
                allow_unused=True,
            )
        named = zip(self.stand_ins, found, strict=True)
        return iter([(key, grad) for key, grad in named if grad is not None])


def _share_leaves(each: list[_Task]) -> bool:
    """Whether tasks use a leaf from outside: leaves that steps make differ between tasks."""
    if any(task.has_strangers for task in each):
        return True
    seen: set[int] = set()
    for task in each:
        if not seen.isdisjoint(task.closed_over):
            return True
        seen |= task.closed_over
    return False


def _join(each: list[_Task], count: int) -> Ended:
    """The results of all tasks, in the caller's graph; the backward runs in threads again."""
    inputs = {key: old for task in each for key, (old, _) in task.stand_ins.items()}
    values: Sequence[Tensor] = [t.detach() for task in each for t in task.outputs]

    def pull(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        keep = _autograd._get_current_graph_task_keep_graph()
        rest = iter(grads)
        given = [(task, [next(rest) for _ in task.where]) for task in each]
        found = _parallel(count, given, lambda pair: list(pair[0].pull(pair[1], keep)))
        sums: dict[int, Tensor] = {}
        for key, grad in (item for items in found for item in items):
            sums[key] = sums[key] + grad if key in sums else grad
        return [sums.get(key) for key in inputs]

    if inputs and values:
        values = attach(values, list(inputs.values()), pull, name="tasks in threads")
    rest = iter(values)
    found = []
    for task in each:
        leaves = list(task.leaves)
        for i in task.where:
            leaves[i] = next(rest)
        found.append(_tree.unflatten(leaves, task.spec))
    losses = [loss for _, _, loss in found]
    joined = None if losses[0] is None else torch.stack(losses)
    return Ended([(state, outs) for state, outs, _ in found], joined)


def _parallel(count: int, items: Sequence[Any], function: Callable[[Any], T]) -> list[T]:
    """``function`` of each item, by several threads, one core for each."""
    if getattr(_local, "at_work", False):
        # In a task of other tasks: the threads are taken, and would wait for themselves.
        return [function(item) for item in items]
    # What the caller has set for itself by a ContextVar holds for the tasks too.
    contexts = [contextvars.copy_context() for _ in items]
    with _one_core_each():
        pairs = zip(contexts, items, strict=True)
        running = [_pool(count).submit(context.run, function, item) for context, item in pairs]
        try:
            return [future.result() for future in running]
        finally:
            # After an error: none of them goes on beside what follows.
            for future in running:
                future.cancel()
            concurrent.futures.wait(running)


def _for_now(tasks: Any) -> str:
    """A reason that may be gone in the next call.

    What the calling thread has around it that other threads have not, or forward-mode derivatives.
    """
    if has_tangents(tasks.prepared.state, tasks.prepared.meta, tasks.batches, tasks.val):
        return "that forward-mode derivatives are taken, which end between threads"
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    for mode in modes:
        if type(mode).__module__.partition(".")[0] != "innerloop":
            return f"that {type(mode).__name__} is active, which is so for one thread only"
    if saved_tensor_hooks() is not None:
        return "that hooks for saved tensors are active, which is so for one thread only"
    return ""


def _hooks(tasks: Any) -> str:
    """A module with a hook, as a reason: what hooks keep is shared by the threads."""
    if _global_forward_hooks or _global_forward_pre_hooks:
        return "that there is a forward hook of all modules, which may keep what it sees"
    for module in closures.held_modules([*tasks.prepared.step.roots, tasks.value]):
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(not _of_torch(hook) for hook in hooks):
            name = type(module).__name__
            return f"that {name} has a forward hook, which may keep what it sees"
    return ""


def _of_torch(hook: Any) -> bool:
    kind = hook if isinstance(hook, FunctionType) else type(hook)
    return kind.__module__.partition(".")[0] == "torch"


@functools.cache
def _pool(count: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(count, "innerloop-tasks", initializer=_begin)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # Threads stay behind.


def _begin() -> None:
    _local.at_work = True
    torch.set_num_threads(1)


@contextlib.contextmanager
def _one_core_each() -> Iterator[None]:
    """Have each thread compute alone; the setting of the calling thread comes back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
