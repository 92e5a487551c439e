"""One graph over all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from innerloop.backward.strategy import Backward, Step, fold, stacked


@dataclass(frozen=True)
class Tape(Backward):
    """Keep the graph of every step, as ordinary backpropagation does.

    Memory: J × the activations of a step.
    Time:   the least of all strategies while everything fits into memory.
    Exact:  yes. The only one whose result can be differentiated again (nested inner loops).
    """

    def run(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        state, outs = fold(step, state, meta, batches)
        return state, stacked(outs)
