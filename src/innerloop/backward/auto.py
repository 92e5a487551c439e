"""Measures one step, forecasts every strategy, and takes the fastest exact one that fits."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
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
from innerloop.backward.strategy import Backward, check_visible, cut, run_plainly
from innerloop.backward.tape import Tape
from innerloop.errors import InnerLoopError, four_part
from innerloop.guard import closures, graph
from innerloop.guard.randomness import devices_of, preserved
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
    relative_time: float
    """The time as a multiple of the least."""
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
        for row in self.rows:
            mark = "  <- chosen" if row.strategy == self.chosen else ""
            exact = "yes" if row.exact else "no"
            size = memory.readable(row.peak_bytes)
            lines.append(
                f"{row.strategy!s:<22}{size:>12}{row.relative_time:>7.2f}x  {exact:<5}{mark}"
            )
        return "\n".join(line.rstrip() for line in lines)


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
        memory.parsed(self.memory)

    @property
    def forecast(self) -> Forecast | None:
        """The forecast of the last call."""
        return self._memo.get("last")

    def for_tasks(self, count: int) -> Backward:
        size = memory.parsed(self.memory)
        share = max(size // count, 2) if isinstance(size, int) else size / count
        return dataclasses.replace(self, memory=share)

    def run(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        if not torch.is_grad_enabled() or not len(batches):
            return run_plainly(step, state, meta, batches)
        return self._choice(step, state, meta, batches).run(step, state, meta, batches)

    def _choice(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> Backward:
        largest = _largest(batches)
        leaves = _tree.leaves((state, meta, largest))
        shapes = tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in leaves if _is(t))
        key = (step.identity, shapes)
        if key not in self._memo:
            self._memo.setdefault("steps", []).append(step)  # whose ids are in the key
            self._memo[key] = measure(step, state, meta, largest)
        budget = self._budget(leaves)
        found = forecast(step, state, meta, largest, len(batches), self._memo[key], budget)
        fitting = [row for row in found.rows if row.peak_bytes <= budget and row.exact]
        if not fitting:
            raise InnerLoopError(
                four_part(
                    f"You gave {self}, and no strategy fits into "
                    f"{memory.readable(budget)}:\n{found}\n",
                    f"at least {memory.readable(min(r.peak_bytes for r in found.rows))}.",
                    "the forecast includes a margin, and one step's activations are needed by all.",
                    "a larger memory=, smaller batches, or a smaller model.",
                )
            )
        chosen = min(fitting, key=lambda row: (row.seconds, row.peak_bytes)).strategy
        self._memo["last"] = dataclasses.replace(found, chosen=chosen)
        return chosen

    def _budget(self, leaves: Sequence[Any]) -> int:
        size = memory.parsed(self.memory)
        if isinstance(size, int):
            return size
        if "free" not in self._memo:
            device = next((t.device for t in leaves if _is(t)), torch.device("cpu"))
            self._memo["free"] = memory.available(device)
        return int(size * self._memo["free"])


MARGIN = {"cpu": 2.0}
"""Forecasts are this much above what was counted. Operations allocate inside, and allocators keep
what is freed: the CPU's was measured to take up to 1.9 times of what was needed."""
_MARGIN_ELSEWHERE = 1.25


def forecast(
    step: Any,
    state: Any,
    meta: Any,
    batch: Any,
    steps: int,
    cost: Cost | None = None,
    budget: int | None = None,
) -> Forecast:
    """The memory and time of every exact strategy for some steps like this one."""
    cost = measure(as_step(step), state, meta, batch) if cost is None else cost
    rows = [_row(strategy, steps, cost) for strategy in _candidates(steps, cost, budget)]
    least = min(row.seconds for row in rows)
    shown = tuple(row._replace(relative_time=row.seconds / least) for row in rows)
    return Forecast(steps, shown, cost, budget)


def _candidates(steps: int, cost: Cost, budget: int | None) -> list[Backward]:
    found: list[Backward] = [Tape(), Remat()]
    best = max(1, min(steps, round(math.sqrt(steps * cost.state / max(cost.tape, 1)))))
    if best > 1:
        found.append(Remat(every=best))
    slots = {2, 4, 8}
    if budget is not None and cost.state:
        slots.add(int((budget / cost.margin - cost.peak) // cost.state) - 2)
    found += [Binomial(s) for s in sorted(slots) if 1 <= s < steps]
    if 0 < cost.inputs <= 8:
        found.append(Forward())
    return found


def _row(strategy: Backward, steps: int, cost: Cost) -> Row:
    plain, pull = cost.plain_seconds, cost.pull_seconds
    working = cost.peak - cost.tape
    if isinstance(strategy, Tape):
        size, seconds = steps * cost.tape + working, steps * pull
    elif isinstance(strategy, Remat):
        kept = math.ceil(steps / strategy.every)
        size = kept * cost.state + strategy.every * cost.tape + working
        seconds = steps * (plain + pull)
    elif isinstance(strategy, Binomial):
        size = (strategy.slots + 2) * cost.state + cost.peak
        seconds = (advances(steps, strategy.slots) + 1) * plain + steps * pull
    else:
        size = (cost.inputs + 2) * cost.state + 2 * cost.peak
        seconds = steps * pull * (1 + cost.inputs)
    return Row(strategy, int(cost.margin * size), seconds, 1.0)


def _largest(batches: Sequence[Any]) -> Any:
    """The batch with the most bytes, by which the costliest step is judged.

    Of a sequence that loads its batches when they are asked for, the first.
    """
    if not isinstance(batches, list | tuple):
        return batches[0]
    distinct = {id(b): b for b in (batches[j] for j in range(len(batches)))}
    return max(distinct.values(), key=lambda b: memory.size_of(_tree.leaves(b)))


def measure(step: Step, state: Any, meta: Any, batch: Any) -> Cost:
    """Take one step without and one with a graph, and count."""
    leaves, spec = _tree.flatten(state)
    constants = {id(t) for t in step.constants(state)}
    start = _tree.unflatten([t if id(t) in constants else _leaf(t) for t in leaves], spec)
    meta_leaves, meta_spec = _tree.flatten(meta)
    given = [t for t in (*leaves, *meta_leaves) if _is(t) and t.requires_grad]
    local = [t.detach().requires_grad_() if _is(t) and t.requires_grad else t for t in meta_leaves]
    check_visible(leaves)
    with preserved(devices_of(leaves)):
        began = time.perf_counter()
        with torch.no_grad():
            plain, plain_meta = _tree.map(_tree.detach, (state, meta))
            new, out = step(plain, plain_meta, _hand_over(batch))
        plain_seconds = time.perf_counter() - began
        check_visible(_tree.leaves((new, out)))
        state_size = memory.size_of(_tree.leaves(new), leaves)
        del new, out, plain, plain_meta
    with preserved(devices_of(leaves)), memory.metered() as meter:
        began, since = time.perf_counter(), graph.now()
        with torch.enable_grad():
            after, out = step(start, _tree.unflatten(local, meta_spec), _hand_over(batch))
        tape = meter.now
        outputs = [t for t in _tree.leaves((after, out)) if _is(t) and t.requires_grad]
        targets = [t for t in (*_tree.leaves(start), *local) if _is(t) and t.requires_grad]
        closed = any(closures.closed_over(outputs, targets, since))
        if outputs:
            torch.autograd.grad(
                outputs, targets, _ones(outputs), retain_graph=closed, allow_unused=True
            )
        pull_seconds = time.perf_counter() - began
        peak = meter.peak
    # Forward does not follow what is closed over.
    inputs = 0 if closed else sum(t.numel() for t in {id(t): t for t in given}.values())
    kinds = {t.device.type for t in leaves if _is(t)}
    margin = max((MARGIN.get(kind, _MARGIN_ELSEWHERE) for kind in kinds), default=2.0)
    return Cost(state_size, tape, peak, plain_seconds, pull_seconds, inputs, margin)


def _hand_over(batch: Any) -> Any:
    """A batch for a step whose effects on it are to be of no consequence."""
    return _tree.map(lambda v: v if _is(v) and v.requires_grad else cut(v), batch)


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_() if differentiable(value) else value


def _ones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(t) for t in tensors]


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)
