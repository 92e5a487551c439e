"""The base class of the ways to run tasks, and the loop to which they fall back."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _autograd
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from innerloop.errors import InnerLoopError, NotBatchableError, four_part
from innerloop.guard.randomness import Draws, Randomness, devices_of


class Ended(NamedTuple):
    """All tasks after training."""

    losses: Tensor | None
    """[tasks]"""
    weights: list[Tensor]
    """The final weights of all tasks."""
    each: Callable[[], list[tuple[Any, Any]]]
    """The state and the outputs of each task; they are divided only if asked for."""


@dataclasses.dataclass
class Way:
    """A way to run the tasks of one call; see :mod:`innerloop.tasks`."""

    _refused: set[Any] = dataclasses.field(
        default_factory=set, init=False, repr=False, compare=False
    )

    def run(self, tasks: Any, warn: bool = True) -> Ended:
        """All tasks; one after another, with a warning, where this way cannot be used."""
        key = situation(tasks)
        if key in self._refused:
            return one_after_another(tasks)
        try:
            return self.attempt(tasks)
        except NotBatchableError as error:
            why = str(error)
        ended = one_after_another(tasks)  # an error of the loss's own comes again
        self._refused.add(key)
        if warn:
            warnings.warn(
                f"innerloop.tasks.{self} cannot be used here, so the tasks run one after another, "
                f"which is exact. The reason: {why}. To avoid this warning: "
                "tasks=innerloop.tasks.loop().",
                stacklevel=2,
            )
        return ended

    def attempt(self, tasks: Any) -> Ended:
        """All tasks; raises :class:`NotBatchableError` where only a loop can run them."""
        raise NotImplementedError


def one_after_another(tasks: Any) -> Ended:
    return join([tasks.one(t) for t in range(tasks.count)])


def join(each: list[tuple[Any, Any, Tensor | None]]) -> Ended:
    """The results of single tasks: the state, the outputs and the loss of each."""
    weights = [p for state, _, _ in each for p in state.params.values()]
    losses = [loss for _, _, loss in each if loss is not None]
    stacked = torch.stack(losses) if losses else None
    return Ended(stacked, weights, lambda: [(state, outs) for state, outs, _ in each])


def situation(tasks: Any) -> tuple[Any, ...]:
    """A key for what decides if tasks can be run in some way."""
    step = tasks.call.step
    model = step.model.source
    hooks = sum([len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()])
    return id(model), model.training, hooks, id(step.loss), active_mode()


def active_mode() -> str:
    """A mode of torch that is active in this thread and in no other, or ``""``."""
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    if modes:
        return type(modes[-1]).__name__
    return "saved_tensors_hooks" if saved_tensor_hooks() is not None else ""


def saved_tensor_hooks() -> Any:
    """The innermost hooks for saved tensors around this call, to pack and to unpack, or None."""
    return _autograd._top_saved_tensors_default_hooks(True)


@contextlib.contextmanager
def refuse_draws(tasks: Any, of_torch: bool) -> Iterator[None]:
    """Refuses random numbers outside torch, and torch's own; restores the state they had."""
    before, draws = Randomness(devices_of(tasks.call.state.params.values())), Draws()
    try:
        yield
        if draws.undo():
            raise NotBatchableError("the model or the loss draws random numbers outside torch")
        if of_torch and not before.is_now():
            raise NotBatchableError("the model or the loss draws random numbers, as dropout does")
    except NotBatchableError:
        draws.undo()
        before.set()
        raise


def check_way(tasks: Any) -> None:
    """Refuse anything but True, False or a way."""
    if not isinstance(tasks, bool | Way):
        shown = tasks.__name__ if isinstance(tasks, type) else repr(tasks)
        raise InnerLoopError(
            four_part(
                f"You gave tasks={shown}.",
                "True, False, or a way to run them.",
                "it says whether tensors have a task axis, and may say how tasks are run.",
                "tasks=True, or tasks=innerloop.tasks.loop(), .threads(), .vmap() or .auto().",
            )
        )
