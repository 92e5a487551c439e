"""The base class of the ways to run tasks."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from torch import Tensor

from innerloop.errors import InnerLoopError, four_part
from innerloop.tasks.axis import sliced


class Ended:
    """All tasks after training: the state and the outputs of each, and their losses. [tasks]"""

    def __init__(self, each: list[tuple[Any, Any]], losses: Tensor | None) -> None:
        self.each, self.losses = each, losses

    @property
    def weights(self) -> list[Tensor]:
        """The final weights of all tasks."""
        return [p for state, _ in self.each for p in state.params.values()]


class EndedTogether(Ended):
    """The same with a task axis; divided only if somebody asks for a single task."""

    def __init__(self, state: Any, outs: Any, losses: Tensor | None, count: int) -> None:
        self.state, self.outs, self.losses, self.count = state, outs, losses, count

    @functools.cached_property
    def each(self) -> list[tuple[Any, Any]]:  # type: ignore[override]
        return [(sliced(self.state, t), sliced(self.outs, t)) for t in range(self.count)]

    @property
    def weights(self) -> list[Tensor]:
        return list(self.state.params.values())


class Way:
    """A way to run the tasks of one call; see :mod:`innerloop.tasks`."""

    def run(self, tasks: Any) -> Ended:
        raise NotImplementedError


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


def warn_of_loop(way: Way, why: str) -> None:
    warnings.warn(
        f"innerloop.tasks.{way} cannot be used here, so the tasks run one after another, which is "
        f"exact. The reason is {why}. To avoid this warning: tasks=innerloop.tasks.loop().",
        stacklevel=2,
    )
