"""A fixed number of kept states, visited in binomial order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from innerloop.backward.orders import binomial
from innerloop.backward.strategy import Backward, check_count
from innerloop.backward.walk import walk
from innerloop.step.protocol import Step


@dataclass(frozen=True)
class Binomial(Backward):
    """Keep at most ``slots`` states and reach the others by taking steps again.

    The order is that of Griewank's *revolve*: no other one needs fewer steps. With C(slots + r, r)
    steps, none is taken more than r times.

    Memory: ``slots`` states and the working one, and the activations of one step, whatever J is.
    Time:   that of :class:`Remat`, and up to r - 1 further forwards and inner gradients per step.
    Exact:  yes.
    """

    slots: int = 8

    _ahead: bool = field(default=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("Binomial", "slots", self.slots)

    def for_tasks(self, count: int) -> Backward:
        # One step's graph ahead saves its recomputation, but would be held by every task at once.
        return replace(self, _ahead=count == 1)

    def run(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        order = functools.partial(binomial, len(batches), self.slots)
        return walk(step, state, meta, batches, order, self._ahead)
