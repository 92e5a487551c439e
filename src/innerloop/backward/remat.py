"""Algorithm 1: keep states, compute steps again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from innerloop.backward.orders import every
from innerloop.backward.strategy import Backward, check_count
from innerloop.backward.walk import walk
from innerloop.step.protocol import Step


@dataclass(frozen=True)
class Remat(Backward):
    """Keep the state before every step and compute the step again on the way back (Algorithm 1).

    With ``every=k`` the state before every k-th step is kept, and k steps are computed again
    together: fewer states, more activations.

    Memory: J / k × the state (weights and what the optimizer keeps), and k × the activations.
    Time:   that of :class:`Tape`, and one more forward and inner gradient for each step.
    Exact:  yes. Where the gradient is differentiated again, a graph over all steps is kept.
    """

    every: int = 1

    _ahead: bool = field(default=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("Remat", "every", self.every)

    def for_tasks(self, count: int) -> Backward:
        # One step's graph ahead saves its recomputation, but would be held by every task at once.
        return replace(self, _ahead=count == 1)

    def run(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        order = functools.partial(every, len(batches), self.every)
        return walk(step, state, meta, batches, order, self._ahead)
