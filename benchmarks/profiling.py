"""Where the time of one workload goes, by Python function and by torch operation."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable

from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

_ROWS = 25
_CALLS = 3


def _by_function(run: Callable[[], object]) -> None:
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(_CALLS):
            run()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(_ROWS)


def _by_operation(run: Callable[[], object]) -> str:
    with torch_profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    events = profiler.key_averages()
    total = sum(event.count for event in events)
    table = events.table(sort_by="self_cpu_time_total", row_limit=_ROWS)
    return f"{total} operations in one call\n{table}"


def show(runs: dict[str, Callable[[], object]]) -> None:
    """Print the profile of each side, the side to look at last (it stays on the screen)."""
    for side, run in reversed(runs.items()):
        run()
        print(f"\n=== {side}: {_CALLS} calls, by Python function")
        _by_function(run)
        print(f"=== {side}: by torch operation, {_by_operation(run)}")
