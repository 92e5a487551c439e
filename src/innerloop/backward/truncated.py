"""Only the last steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.backward.strategy import Backward, check_count, check_visible, columns, cut
from innerloop.backward.tape import Tape
from innerloop.errors import InnerLoopError, four_part
from innerloop.step.protocol import Step, fold


@dataclass(frozen=True)
class Truncated(Backward):
    """Differentiate the last ``k`` steps and take what came before as given.

    ``within`` is the strategy for these steps. With ``carry=True`` an ``InnerLoop`` goes on, at
    each call, from where its last one ended, for online meta-learning along one long run.

    Memory: that of ``within`` for k steps.
    Time:   that of ``within`` for k steps, and a plain training step for each of the others.
    Exact:  no: what a meta-parameter did before the last k steps is left out.
    """

    k: int
    within: Backward = field(default_factory=Tape)
    carry: bool = False

    def __post_init__(self) -> None:
        check_count("Truncated", "k", self.k)
        if not isinstance(self.within, Backward) or isinstance(self.within, Truncated):
            raise InnerLoopError(
                four_part(
                    f"You wrote Truncated({self.k}, within={self.within!r}).",
                    "another strategy.",
                    "it decides how the last k steps are differentiated.",
                    "Truncated(20, within=innerloop.Remat()).",
                )
            )
        if getattr(self.within, "proximal", 0):
            raise InnerLoopError(
                four_part(
                    f"You wrote Truncated({self.k}, within={self.within!r}).",
                    "a strategy without a proximal term.",
                    "the term pulls towards the weights at the beginning, which the last k steps "
                    "do not know, and the steps before them would be trained without it.",
                    f"{self.within!r} by itself: its memory does not grow with the steps.",
                )
            )

    def for_tasks(self, count: int) -> Backward:
        return replace(self, within=self.within.for_tasks(count))

    def run(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        steps = range(len(batches))
        last = _Part(batches, steps[-self.k :])
        if len(steps) <= self.k:
            return self.within.run(step, state, meta, last)
        check_visible(_tree.leaves(state))
        with torch.no_grad():
            first = _Part(batches, steps[: -self.k], constant=True)
            state, outs = fold(step, _tree.map(_tree.detach, state), meta, first)
        check_visible(_tree.leaves(state))
        state, late = self.within.run(step, _tree.map(_tree.detach, state), meta, last)
        return state, _join(outs, late)


class _Part(Sequence[Any]):
    """The batches of some steps, fetched only when they are asked for."""

    def __init__(self, batches: Sequence[Any], steps: range, constant: bool = False) -> None:
        self.batches, self.steps, self.constant = batches, steps, constant

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, j: Any) -> Any:
        batch = self.batches[self.steps[j]]
        return _tree.map(cut, batch) if self.constant else batch


def _join(early: Sequence[Any], late: Any) -> Any:
    """The outputs of all steps: those of the first ones, and the stacked ones of the last."""
    spec = _tree.flatten(early[0])[1]
    pairs = zip(columns(early), spec.flatten_up_to(late), strict=True)
    return _tree.unflatten([_column(a, b) for a, b in pairs], spec)


def _column(early: Any, late: Any) -> Any:
    both = isinstance(early, Tensor) and isinstance(late, Tensor)
    if both and early.shape[1:] == late.shape[1:]:
        return torch.cat([early, late])
    return [*early, *late]
