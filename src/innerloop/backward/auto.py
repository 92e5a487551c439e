"""Measures one step, forecasts every strategy, and takes the fastest exact one that fits."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop import _tree
from innerloop._tree import differentiable
from innerloop.backward import memory
from innerloop.backward.binomial import Binomial
from innerloop.backward.forward import Forward
from innerloop.backward.orders import advances
from innerloop.backward.remat import Remat
from innerloop.backward.segment import Segment, StandIns
from innerloop.backward.strategy import Backward, check_visible, cut, run_plainly
from innerloop.backward.tape import Tape
from innerloop.errors import InnerLoopError, four_part
from innerloop.guard.randomness import devices_of, restore_randomness
from innerloop.step.protocol import Step, as_step


class Cost(NamedTuple):
    """The cost of one step, in bytes and seconds."""

    state: int
    """Keeping one more state."""
    tape: int
    """Keeping the graph of one step, its state included."""
    peak: int
    """Taking one step with a graph and pulling a gradient back."""
    plain_seconds: float
    pull_seconds: float
    inputs: int
    """The number of scalars to differentiate by."""
    margin: float
    """The factor of all forecasts."""


class Row(NamedTuple):
    """The forecast for one strategy."""

    strategy: Backward
    peak_bytes: int
    seconds: float
    exact: bool = True


@dataclass(frozen=True)
class Forecast:
    """The memory and time of each strategy; ``str`` makes a table of it."""

    steps: int
    rows: tuple[Row, ...]
    cost: Cost
    budget: int | None = None
    chosen: Backward | None = None

    def __str__(self) -> str:
        head = f"{self.steps} steps"
        if self.budget is not None:
            head += f", budget {memory.readable(self.budget)}"
        lines = [head, f"{'strategy':<22}{'peak memory':>12}{'time':>8}  exact"]
        least = min(row.seconds for row in self.rows)
        for row in self.rows:
            size, time = memory.readable(row.peak_bytes), row.seconds / least
            mark = "    <- chosen" if row.strategy == self.chosen else ""
            lines.append(f"{row.strategy!s:<22}{size:>12}{time:>7.2f}x  yes{mark}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Auto(Backward):
    """Take the fastest exact strategy whose forecast memory fits.

    ``memory`` is a size (``"2GB"``, bytes) or a fraction of what is free when it is first used. The
    first call measures one step; calls with the same shapes reuse what was measured. The budget is
    for what the inner loop adds to what is there before. ``forecast`` has the last forecast, which
    prints as a table.

    The two steps that are measured leave the batch, the state and torch's random numbers as they
    were; what a loss does elsewhere, to a counter or a ``torch.Generator`` of its own, stays done.

    Memory: at most the budget, by a forecast with a margin (twice what is counted on a CPU).
    Time:   that of the strategy it takes; the first call takes two more steps.
    Exact:  yes.
    """

    memory: Any = 0.5
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        memory.parse_size(self.memory)

    @property
    def forecast(self) -> Forecast | None:
        """The forecast of the last call."""
        return self._memo.get("last")

    def for_tasks(self, count: int) -> Backward:
        size = memory.parse_size(self.memory)
        share = max(size // count, 2) if isinstance(size, int) else size / count
        return dataclasses.replace(self, memory=share)

    def run(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        if not torch.is_grad_enabled() or not len(batches):
            return run_plainly(step, state, meta, batches)
        return self._choose(step, state, meta, batches).run(step, state, meta, batches)

    def _choose(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> Backward:
        batch = _largest(batches)
        tensors = _tree.tensors((state, meta, batch))
        shapes = tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in tensors)
        key = (step.identity, shapes)
        if key not in self._memo:
            # With the step: its identity consists of ids, which must not become those of others.
            self._memo[key] = measure(step, state, meta, batch), step
        budget = self._budget(tensors)
        found = _forecast(self._memo[key][0], len(batches), budget)
        fitting = [row for row in found.rows if row.peak_bytes <= budget]
        if not fitting:
            raise self._nothing_fits(found, budget)
        chosen = min(fitting, key=lambda row: (row.seconds, row.peak_bytes)).strategy
        self._memo["last"] = dataclasses.replace(found, chosen=chosen)
        return chosen

    def _budget(self, tensors: Sequence[Tensor]) -> int:
        size = memory.parse_size(self.memory)
        if isinstance(size, int):
            return size
        if "free" not in self._memo:
            self._memo["free"] = memory.available(tensors[0].device)
        return int(size * self._memo["free"])

    def _nothing_fits(self, found: Forecast, budget: int) -> InnerLoopError:
        return InnerLoopError(
            four_part(
                f"You gave {self}, and no strategy fits into {memory.readable(budget)}:\n{found}\n",
                f"at least {memory.readable(min(r.peak_bytes for r in found.rows))}.",
                "the forecast includes a margin, and one step's activations are needed by all.",
                "a larger memory=, smaller batches, or a smaller model.",
            )
        )


_MARGIN = 2.0
"""Forecasts are this much above what was counted. Operations allocate inside, and allocators keep
what is freed: the CPU's was measured to take up to 1.9 times of what was needed."""
_MARGIN_ELSEWHERE = 1.25


def forecast(step: Any, state: Any, meta: Any, batch: Any, steps: int) -> Forecast:
    """The memory and time of every exact strategy for some steps like this one."""
    return _forecast(measure(as_step(step), state, meta, batch), steps)


def _forecast(cost: Cost, steps: int, budget: int | None = None) -> Forecast:
    room = 0
    if budget is not None and cost.state:
        room = int((budget / cost.margin - cost.peak) // cost.state)
    rows = [
        row._replace(peak_bytes=int(cost.margin * row.peak_bytes))
        for row in _rows(cost, steps, room)
    ]
    return Forecast(steps, tuple(rows), cost, budget)


def _rows(cost: Cost, steps: int, room: int) -> Iterator[Row]:
    """The forecasts without their margin; ``room`` is the number of states that fit the budget."""
    state, plain, pull = cost.state, cost.plain_seconds, cost.pull_seconds
    working = cost.peak - cost.tape
    yield Row(Tape(), steps * cost.tape + working, steps * pull)
    best = round(math.sqrt(steps * state / max(cost.tape, 1)))
    for every in sorted({1, max(1, min(steps, best))}):
        kept = math.ceil(steps / every) * state + every * cost.tape
        yield Row(Remat(every), kept + working, steps * (plain + pull))
    for slots in sorted({2, 4, 8, room - 2}):
        if 1 <= slots < steps:
            seconds = (advances(steps, slots) + 1) * plain + steps * pull
            yield Row(Binomial(slots), (slots + 2) * state + cost.peak, seconds)
    if 0 < cost.inputs <= 8:
        size = (cost.inputs + 2) * state + 2 * cost.peak
        yield Row(Forward(), size, steps * pull * (1 + cost.inputs))


def _largest(batches: Sequence[Any]) -> Any:
    """The batch with the most bytes, by which the costliest step is judged.

    Of a sequence that loads its batches when they are asked for, the first.
    """
    if not isinstance(batches, list | tuple):
        return batches[0]
    return max(batches, key=lambda batch: sum(t.nbytes for t in _tree.tensors(batch)))


def measure(step: Step, state: Any, meta: Any, batch: Any) -> Cost:
    """The cost of a step, by taking it once without and once with a graph."""
    leaves = _tree.leaves(state)
    check_visible(leaves)
    devices = devices_of(leaves)
    with restore_randomness(devices), torch.no_grad():
        began = time.perf_counter()
        plain, plain_meta = _tree.map(_tree.detach, (state, meta))
        new, out = step(plain, plain_meta, _tree.map(cut, batch))
        plain_seconds = time.perf_counter() - began
    check_visible(_tree.leaves((new, out)))
    state_size = memory.size_of(_tree.leaves(new), leaves)
    del new, out, plain
    with restore_randomness(devices), memory.Meter() as meter:
        began = time.perf_counter()
        segment = Segment(step, state, [batch], StandIns({}, meta))
        tape = meter.now
        is_closed = any(segment.find_closures())
        segment.pull(_ones(segment.leaves), [_ones(segment.outs)], lambda tensor, grad: None)
        pull_seconds = time.perf_counter() - began
    inputs = 0
    learned_batch = segment.given.keys() - segment.stand_ins.pairs.keys()
    if not is_closed and not learned_batch:  # Forward follows neither of these
        learned = [t for t in _tree.tensors((state, meta)) if t.requires_grad]
        inputs = sum(t.numel() for t in {id(t): t for t in learned}.values())
    margin = _MARGIN_ELSEWHERE if devices else _MARGIN
    return Cost(state_size, tape, meter.peak, plain_seconds, pull_seconds, inputs, margin)


def _ones(tree: Any) -> list[Tensor | None]:
    return [torch.ones_like(t) if differentiable(t) else None for t in _tree.leaves(tree)]
