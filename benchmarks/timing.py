"""Interleaved timing: every round runs each side once, so that slow phases of a shared machine
fall on all sides alike, and the ratio is taken within the round."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

_MIN_SECONDS = 0.05  # a shorter measurement is repeated until it takes this long


Times = dict[str, list[float]]


class Spread(NamedTuple):
    """The median and the quartiles around it."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Quartiles by linear interpolation; all three are equal if there is one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratio(times: Sequence[float], reference: Sequence[float]) -> Spread:
    """Spread of the per-round ratios."""
    return spread([t / r for t, r in zip(times, reference, strict=True)])


Clock = Callable[[int], float]  # from a number of calls to seconds per call


def measure(run: Callable[[], object], calls: int) -> float:
    """Seconds per call. The garbage of one side must not be collected on another's time."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls
    finally:
        gc.enable()


def warm_up(clock: Clock) -> float:
    """Seconds per call, roughly: only short runs need more than the first one to tell."""
    first = clock(1)
    if first > 20 * _MIN_SECONDS:
        return first
    return min(clock(1), clock(1))


def calls(seconds: float) -> int:
    """How often to call what takes so long, so that a measurement is long enough."""
    return max(1, round(_MIN_SECONDS / seconds))


def rounds(clocks: Mapping[str, Clock], counts: Mapping[str, int], repeats: int) -> Times:
    """Seconds per call of each side, one entry per round. The side that starts rotates."""
    times: Times = {side: [] for side in clocks}
    order = list(clocks)
    for _ in range(repeats):
        for side in order:
            times[side].append(clocks[side](counts[side]))
        order = order[1:] + order[:1]
    return times


def interleaved(runs: Mapping[str, Callable[[], object]], repeats: int) -> Times:
    """The same for functions of this process, warmed up."""
    clocks: dict[str, Clock] = {side: partial(measure, run) for side, run in runs.items()}
    return rounds(clocks, {side: calls(warm_up(c)) for side, c in clocks.items()}, repeats)
