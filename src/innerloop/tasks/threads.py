"""Tasks spread over threads, in the forward and in the backward."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _autograd
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from innerloop import _tree
from innerloop.backward.attach import attach
from innerloop.errors import InnerLoopError, NotBatchableError, four_part
from innerloop.guard import closures
from innerloop.guard.randomness import Autocast
from innerloop.tasks.corrections import NoGenerators
from innerloop.tasks.way import Ended, Way, active_mode, join, refuse_draws, situation

T = TypeVar("T")


@dataclasses.dataclass
class threads(Way):
    """Tasks spread over threads, each with a replica and one core of its own.

    The way for models whose operations are large but do not fill all cores. By default there are
    as many threads as torch uses. What draws random numbers runs in a loop instead, since the
    order of the draws must not depend on the speed of threads, and so do models with forward
    hooks. The loss is called by several threads at once: what it keeps outside is theirs together.
    """

    n: int | None = None
    _checked: set[Any] = dataclasses.field(
        default_factory=set, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        whole = isinstance(self.n, int) and not isinstance(self.n, bool) and self.n > 0
        if self.n is not None and not whole:
            raise InnerLoopError(
                four_part(
                    f"You gave threads({self.n!r}).",
                    "a number of threads, 1 or more, or None.",
                    "the tasks are divided among them.",
                    "innerloop.tasks.threads(2).",
                )
            )

    def attempt(self, tasks: Any) -> Ended:
        if active := active_mode():
            raise NotBatchableError(f"{active} is active, which is so for one thread only")
        key = situation(tasks)
        is_first = key not in self._checked
        if is_first:
            _check_hooks([*tasks.call.step.roots, tasks.call.val_loss])
        count = min(self.n or torch.get_num_threads(), tasks.count)
        each = [_Task(tasks, t, is_first) for t in range(tasks.count)]
        with refuse_draws(tasks, of_torch=True):
            _parallel(count, each, _Task.run)
        _check_leaves(each)
        self._checked.add(key)
        return _join(each, count)


class _NoDraws(TorchDispatchMode):
    """Refuses random numbers, those too after which the random state is put back."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotBatchableError("the model or the loss draws random numbers, as dropout does")
        return func(*args, **(kwargs or {}))


class _Task:
    """One task with stand-ins for all tensors that a gradient is asked of."""

    def __init__(self, tasks: Any, number: int, is_first: bool) -> None:
        self.tasks, self.number, self.is_first = tasks, number, is_first
        self.tracked, self.autocast = torch.is_grad_enabled(), Autocast(())
        self.stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self.found: Any = None
        """The state, the outputs and the loss."""
        self.outputs: list[Tensor] = []
        """The tensors among them that have a graph."""
        self.closed_over: list[Tensor] = []
        """The leaves that the task used without being given them."""

    def run(self) -> None:
        draws = _NoDraws() if self.is_first else contextlib.nullcontext()
        with torch.set_grad_enabled(self.tracked), self.autocast.restore(), draws:
            self.found = self.tasks.one(self.number, self._stand_in)
        self.outputs = list(filter(_requires_grad, _tree.leaves(self.found)))
        known = [new for _, new in self.stand_ins.values()]
        # Numbers of autograd's nodes differ between threads, so all are followed to their leaves.
        self.closed_over = closures.closed_over(self.outputs, known, 0)[0]

    def _stand_in(self, value: Any) -> Any:
        if not (self.tracked and _requires_grad(value)):
            return value
        if id(value) not in self.stand_ins:
            # In the graph: what the loss leaves elsewhere leads to the caller's tensors too.
            self.stand_ins[id(value)] = (value, value.view_as(value))
        return self.stand_ins[id(value)][1]

    def pull(self, grads: Sequence[Tensor | None], keep: bool) -> dict[int, Tensor]:
        """Gradients of the caller's tensors, by id."""
        pairs = [(t, g) for t, g in zip(self.outputs, grads, strict=True) if g is not None]
        targets = [new for _, new in self.stand_ins.values()]
        if not pairs or not targets:
            return {}
        outputs, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, targets, given, retain_graph=keep, allow_unused=True)
        named = zip(self.stand_ins, found, strict=True)
        return {key: grad for key, grad in named if grad is not None}


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _check_hooks(roots: Sequence[Any]) -> None:
    """Refuse forward hooks: what they keep would be shared by the threads."""
    if _global_forward_hooks or _global_forward_pre_hooks:
        raise NotBatchableError("there is a forward hook of all modules, which may keep things")
    for module in closures.held_modules(roots):
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if getattr(hook, "__module__", "").partition(".")[0] != "torch":
                name = type(module).__name__
                raise NotBatchableError(f"{name} has a forward hook, which may keep what it sees")


def _check_leaves(each: list[_Task]) -> None:
    """Refuse leaves from outside: those that steps make are marked, and differ between tasks."""
    seen: set[int] = set()
    for task in each:
        own = {id(leaf) for leaf in task.closed_over if hasattr(leaf, "_innerloop_made")}
        if len(own) < len(task.closed_over) or not seen.isdisjoint(own):
            raise NotBatchableError(
                "the loss uses a tensor requiring grad that the loop was not given"
            )
        seen |= own


def _join(each: list[_Task], count: int) -> Ended:
    """The results of all tasks, in the caller's graph; the backward runs in threads again."""
    inputs = {key: old for task in each for key, (old, _) in task.stand_ins.items()}
    values: Sequence[Tensor] = [t.detach() for task in each for t in task.outputs]

    def pull(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        keep = _autograd._get_current_graph_task_keep_graph()
        rest = iter(grads)
        given = [(task, [next(rest) for _ in task.outputs]) for task in each]
        sums: dict[int, Tensor] = {}
        for found in _parallel(count, given, lambda pair: pair[0].pull(pair[1], keep)):
            for key, grad in found.items():
                sums[key] = sums[key] + grad if key in sums else grad
        return [sums.get(key) for key in inputs]

    if inputs and values:
        values = attach(values, list(inputs.values()), pull, name="tasks in threads")
    rest = iter(values)

    def connect(leaf: Any) -> Any:
        return next(rest) if _requires_grad(leaf) else leaf

    return join([_tree.map(connect, task.found) for task in each])


def _parallel(count: int, items: Sequence[Any], function: Callable[[Any], T]) -> list[T]:
    """``function`` of each item, by several threads, one core for each."""

    def call(item: Any) -> T:
        # This mode also tells tasks inside a task that they are in a thread: see active_mode.
        with NoGenerators():
            return function(item)

    pool = _pool(count)
    with _one_core_each():
        # What the caller has set for itself by a ContextVar holds for the tasks too.
        running = [pool.submit(contextvars.copy_context().run, call, item) for item in items]
        try:
            return [future.result() for future in running]
        finally:
            # After an error: none of them goes on beside what follows.
            for future in running:
                future.cancel()
            concurrent.futures.wait(running)


@functools.cache
def _pool(count: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(
        count, "innerloop-tasks", initializer=torch.set_num_threads, initargs=(1,)
    )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # Threads stay behind.


@contextlib.contextmanager
def _one_core_each() -> Iterator[None]:
    """Have each thread compute alone; the setting of the calling thread comes back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
