"""The way that ``tasks=True`` means: chosen by a rule, so that equal calls give equal bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from innerloop import _tree
from innerloop.errors import NotBatchableError
from innerloop.tasks.loop import loop
from innerloop.tasks.threads import threads
from innerloop.tasks.vmap import vmap
from innerloop.tasks.way import Ended, Way

_FEW_WEIGHTS = 200_000
_FEW_NUMBERS = 8_000
_RANDOM = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.RNNBase,
)


class by_rule(Way):
    """Batched for small models and on accelerators, in threads for larger ones, or in a loop.

    A model is small with at most 200,000 weights and 8,000 numbers in a task's batch. The rule
    looks at the model, the sizes and the device, never at a clock. Where tasks cannot be batched or
    spread over threads, they run in a loop.
    """

    def __init__(self) -> None:
        self._refused: set[Any] = set()

    def run(self, tasks: Any) -> Ended:
        way = self.choose(tasks)
        key = type(way), tasks.mark
        if key not in self._refused:
            if isinstance(way, threads):
                ended, _ = way.run_parallel(tasks)
                if ended is not None:
                    return ended
                self._refused.add(key)
            elif isinstance(way, vmap):
                try:
                    return way.run_batched(tasks)
                except NotBatchableError:
                    ended = loop().run(tasks)  # an error of the loss's own comes again
                    self._refused.add(key)
                    return ended
        return loop().run(tasks)

    def choose(self, tasks: Any) -> Way:
        """The way for these tasks."""
        if tasks.count == 1:
            return loop()
        step, state = tasks.prepared.step, tasks.prepared.state
        if tasks.prepared.backward.each_task_alone or step.evaluates:
            return loop()
        weights = sum([p.numel() for p in _tree.tensors(state.params)])
        batch = tasks.batches[0] if len(tasks.batches) else tasks.val
        numbers = sum([t.numel() for t in _tree.tensors(batch)]) // tasks.count
        small = weights <= _FEW_WEIGHTS and numbers <= _FEW_NUMBERS
        if small or tasks.device.type != "cpu":
            return vmap()
        draws = any(isinstance(m, _RANDOM) and m.training for m in step.model.source.modules())
        return loop() if draws or torch.get_num_threads() == 1 else threads()
