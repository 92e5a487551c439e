"""One graph over all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from innerloop.backward.strategy import Backward, run_plainly
from innerloop.step.protocol import Step


@dataclass(frozen=True)
class Tape(Backward):
    """Keep the graph of every step, as ordinary backpropagation does.

    Memory: J × the activations of a step.
    Time:   the least of all strategies while everything fits into memory.
    Exact:  yes.
    """

    def run(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        return run_plainly(step, state, meta, batches)
