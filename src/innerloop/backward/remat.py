"""Algorithm 1: keep states, compute steps again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from innerloop.backward._schedules import every
from innerloop.backward._strategy import Backward, Step, fold, stacked
from innerloop.backward._walk import walk
from innerloop.errors import InnerLoopError, four_part


@dataclass(frozen=True)
class Remat(Backward):
    """Keep the state before every step and compute the step again on the way back (Algorithm 1).

    With ``every=k`` the state before every k-th step is kept, and k steps are computed again
    together: fewer states, more activations.

    Memory: J / k × the state (weights and what the optimizer keeps), and k × the activations.
    Time:   that of :class:`Tape`, and one more forward and inner gradient for each step.
    Exact:  yes.
    """

    every: int = 1

    def __post_init__(self) -> None:
        check_count("Remat", "every", self.every)

    def run(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        if not len(batches) or not torch.is_grad_enabled():
            state, outs = fold(step, state, meta, batches)
            return state, stacked(outs)
        schedule = functools.partial(every, len(batches), self.every)
        return walk(step, state, meta, batches, schedule)


def check_count(owner: str, name: str, value: Any) -> None:
    """Refuse what is not a whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InnerLoopError(
            four_part(
                f"You wrote {owner}({name}={value!r}).",
                "a whole number, 1 or more.",
                f"{name!r} counts steps or states.",
                f"{owner}({name}=1).",
            )
        )
