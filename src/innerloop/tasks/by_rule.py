"""The way that ``tasks=True`` means: chosen by a rule, so that equal calls give equal bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from innerloop import _tree
from innerloop.tasks.loop import loop
from innerloop.tasks.threads import threads
from innerloop.tasks.vmap import vmap
from innerloop.tasks.way import Ended, Way

_FEW_WEIGHTS = 200_000
_FEW_NUMBERS = 8_000


@dataclasses.dataclass
class by_rule(Way):
    """Batched for small models and on accelerators, in threads for larger ones, or in a loop.

    A model is small with at most 200,000 weights and 8,000 numbers in a task's batch. The rule
    looks at the model, the sizes and the device, never at a clock. Where tasks cannot be batched or
    spread over threads, they run in a loop.
    """

    batched: Way = dataclasses.field(default_factory=vmap)
    spread: Way = dataclasses.field(default_factory=threads)
    plain: Way = dataclasses.field(default_factory=loop)

    def run(self, tasks: Any, warn: bool = False) -> Ended:
        return self.choose(tasks).run(tasks, warn)

    def choose(self, tasks: Any) -> Way:
        """The way for these tasks."""
        if tasks.count == 1:
            return self.plain
        weights = sum([p.numel() for p in _tree.tensors(tasks.call.state.params)])
        batch = tasks.batches[0] if tasks.batches else tasks.val
        numbers = sum([t.numel() for t in _tree.tensors(batch)]) // tasks.count
        small = weights <= _FEW_WEIGHTS and numbers <= _FEW_NUMBERS
        if small or tasks.device.type != "cpu":
            return self.batched
        return self.plain if torch.get_num_threads() == 1 else self.spread
