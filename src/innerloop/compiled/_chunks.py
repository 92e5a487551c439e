"""A long run of small steps, several by one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from innerloop.backward import Backward, Tape
from innerloop.backward.strategy import stacked

_LONG = 50  # steps: for fewer, a second program is not worth compiling
_OPERATIONS = 400  # of one program; its derivative has several times as many
_MOST = 10


@dataclasses.dataclass(frozen=True)
class Chunks(Backward):
    """A tape over compiled steps, which calls them in groups where calling costs the most."""

    def run(self, step: Any, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        if len(batches) < _LONG:
            return Tape().run(step, state, meta, batches)
        state, outs = step.many(state, meta, [batches[0]])
        size = max(1, min(_MOST, _OPERATIONS // step.size))
        done = 1
        while done < len(batches):
            length = size if done + size <= len(batches) else 1
            group = [batches[j] for j in range(done, done + length)]
            state, more = step.many(state, meta, group)
            outs, done = outs + more, done + length
        return state, stacked(outs)
