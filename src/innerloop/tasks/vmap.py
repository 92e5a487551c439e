"""All tasks in one batched computation."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch import nn

from innerloop.errors import InnerLoopError, NotBatchableError, four_part
from innerloop.tasks.axis import slice_task
from innerloop.tasks.way import Ended, Way, refuse_draws


@dataclasses.dataclass
class vmap(Way):
    """All tasks as one batched computation: far fewer operations, the way for small models.

    Each task has weights, buffers and random numbers of its own. A model that cannot be batched
    runs in a loop instead, with a warning that names the layer.

    Args:
        running_stats: what batch norms do with their running statistics: ``"per-task"`` gives each
            task its own copy, as a loop does; ``"frozen"`` leaves them as they are. What the layer
            computes is the same.
    """

    running_stats: Literal["per-task", "frozen"] = "per-task"

    def __post_init__(self) -> None:
        if self.running_stats not in ("per-task", "frozen"):
            raise InnerLoopError(
                four_part(
                    f"You gave running_stats={self.running_stats!r}.",
                    "'per-task' or 'frozen'.",
                    "tasks that run at once cannot write to the same statistics.",
                    "innerloop.tasks.vmap(running_stats='per-task').",
                )
            )

    def run(self, tasks: Any, warn: bool = True) -> Ended:
        if self.running_stats == "frozen":
            tasks = tasks.without_writes(_statistics(tasks.call.step.model.source))
        return super().run(tasks, warn)

    def attempt(self, tasks: Any) -> Ended:
        backward = tasks.call.backward
        if backward.each_task_alone:
            # As conjugate gradients, which would share their steps and their end.
            raise NotBatchableError(f"{type(backward).__name__} needs each task by itself")
        with refuse_draws(tasks, of_torch=False):
            state, outs, losses = tasks.together()

        def each() -> list[tuple[Any, Any]]:
            return [(slice_task(state, t), slice_task(outs, t)) for t in range(tasks.count)]

        return Ended(losses, list(state.params.values()), each)


def _statistics(model: nn.Module) -> frozenset[str]:
    """The names of the running statistics of batch norms."""
    return frozenset(
        f"{name}.{buffer}" if name else buffer
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for buffer, _ in module.named_buffers(recurse=False)
    )
