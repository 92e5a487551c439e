"""Interleaved timing: every round runs each side once, so that slow phases of a shared machine
fall on all sides alike, and the ratio is taken within the round."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

_MIN_SECONDS = 0.05  # a shorter measurement is repeated until it takes this long


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


def _measure(run: Callable[[], object], calls: int) -> float:
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


def _warm_up(run: Callable[[], object]) -> float:
    """Seconds per call, roughly: only short runs need more than the first one to tell."""
    first = _measure(run, 1)
    if first > 20 * _MIN_SECONDS:
        return first
    return min(_measure(run, 1), _measure(run, 1))


def interleaved(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds per call of each side, one entry per round. The side that starts rotates."""
    calls = max(1, round(_MIN_SECONDS / min(_warm_up(run) for run in runs.values())))
    times: dict[str, list[float]] = {side: [] for side in runs}
    order = list(runs)
    for _ in range(repeats):
        for side in order:
            times[side].append(_measure(runs[side], calls))
        order = order[1:] + order[:1]
    return times
