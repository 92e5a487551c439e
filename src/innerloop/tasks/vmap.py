"""All tasks in one batched computation."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch import nn

from innerloop.errors import InnerLoopError, NotBatchableError, four_part
from innerloop.guard.randomness import Draws
from innerloop.tasks.loop import loop
from innerloop.tasks.way import Ended, EndedTogether, Way, warn_of_loop


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
        self._refused: set[Any] = set()

    def run(self, tasks: Any) -> Ended:
        if tasks.mark not in self._refused:
            try:
                return self.run_batched(tasks)
            except NotBatchableError as error:
                ended = loop().run(self._frozen(tasks))  # An error of the loss's own comes again.
                self._refused.add(tasks.mark)
                warn_of_loop(self, str(error))
                return ended
        return loop().run(self._frozen(tasks))

    def run_batched(self, tasks: Any) -> Ended:
        """The same; raises :class:`NotBatchableError` where batching is impossible."""
        backward = tasks.prepared.backward
        if backward.each_task_alone:
            # As conjugate gradients, which would share their steps and their end.
            raise NotBatchableError(f"{type(backward).__name__} needs each task by itself")
        before = Draws()
        state, outs, losses = self._frozen(tasks).together()
        if before.undo():
            raise NotBatchableError("the loss or the model draws random numbers outside torch")
        return EndedTogether(state, outs, losses, tasks.count)

    def _frozen(self, tasks: Any) -> Any:
        if self.running_stats == "per-task":
            return tasks
        return tasks.without_writes(_statistics(tasks.prepared.step.model.source))


def _statistics(model: nn.Module) -> frozenset[str]:
    """The names of the running statistics of batch norms."""
    norms = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
    ]
    return frozenset(
        f"{name}.{buffer}" if name else buffer
        for name, module in norms
        for buffer, _ in module.named_buffers(recurse=False)
    )
