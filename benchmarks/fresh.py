"""One measurement, one process: start it, or say why it was not started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_SCRIPT = Path(__file__).resolve().parent / "memory_point.py"

# With its defaults, glibc keeps freed tensors for later ones, which then fit into the gaps or do
# not: the peak of one and the same computation differs by a factor of two. Above a fixed threshold
# every tensor is a mapping of its own, gone from resident memory when it is freed. That costs time
# (page faults), so times are taken in another process, with the defaults.
OWN_MAPPINGS = {"MALLOC_MMAP_THRESHOLD_": "65536"}
DEFAULTS: dict[str, str] = {}
# What a step frees stays with the process, and the next step has it without page faults.
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}

_ONCE = 60  # seconds: a longer point is measured once, and its time is that of this run
_HEADROOM = 0.9  # of the available memory: a prediction is no promise
_START_UP = 60  # seconds to import torch and to warm up


class Point(NamedTuple):
    """One side after J inner steps. Without numbers, `note` says why; sizes are in bytes."""

    problem: str
    side: str
    steps: int
    extra: float | None = None
    extra_defaults: float | None = None  # with glibc's own settings
    seconds: float | None = None  # with glibc's own settings
    slow_seconds: float | None = None  # while `extra` was measured
    parameters: int = 0
    predicted: float | None = None  # what `extra` would have been
    note: str = ""
    auto: dict[str, Any] | None = None  # what Auto forecast and chose


class Limits(NamedTuple):
    """What a point may take."""

    seconds: float
    threads: int


class FailedError(Exception):
    """The process ended without a result."""


def available() -> int:
    """Bytes that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def environment(malloc: dict[str, str]) -> dict[str, str]:
    """That of this process, with other settings of glibc's allocator."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    return kept | malloc


def _run(point: Point, limits: Limits, malloc: dict[str, str]) -> dict[str, Any]:
    what = [point.problem, point.side, str(point.steps)]
    how = ["--threads", str(limits.threads), "--limit", str(available())]
    try:
        done = subprocess.run(
            [sys.executable, str(_SCRIPT), *what, *how],
            env=environment(malloc),
            capture_output=True,
            text=True,
            timeout=_START_UP + 2 * limits.seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"stopped after {error.timeout:.0f} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise FailedError(f"failed: {lines[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(problem: str, side: str, steps: int, limits: Limits) -> Point:
    """Memory and time of one point, each from its own process."""
    point = Point(problem, side, steps)
    try:
        memory = _run(point, limits, OWN_MAPPINGS)
        point = point._replace(
            extra=memory["extra"],
            slow_seconds=memory["seconds"],
            parameters=memory["parameters"],
            auto=memory["auto"],
        )
        if memory["seconds"] > _ONCE:
            return point._replace(seconds=memory["seconds"])
        timed = _run(point, limits, DEFAULTS)
        return point._replace(extra_defaults=timed["extra"], seconds=timed["seconds"])
    except FailedError as error:
        return point._replace(note=str(error))


def seconds(
    problem: str,
    side: str,
    steps: int,
    limits: Limits,
    malloc: dict[str, str],
    calls: int = 1,
) -> float:
    """Of one meta-step in a new process, warmed up by one of a single inner step."""
    found = [_run(Point(problem, side, steps), limits, malloc)["seconds"] for _ in range(calls)]
    return sum(found) / calls


def _predict(points: Sequence[Point], field: str, steps: int) -> float:
    """The line through the last two points that have a value, continued."""
    known = [p for p in points if getattr(p, field) is not None]
    (x0, y0), (x1, y1) = ((p.steps, getattr(p, field)) for p in known[-2:])
    return y1 + (y1 - y0) / (x1 - x0) * (steps - x1)


def _skipped(point: Point, before: Sequence[Point], limits: Limits) -> Point | None:
    """The point with the reason why it should not be run, if there is one."""
    known = [p for p in before if not p.note]
    if len(known) < 2 or known[1].extra_defaults is None:
        return None
    extra, defaults, seconds = (
        _predict(known, field, point.steps) for field in ("extra", "extra_defaults", "slow_seconds")
    )
    need, room = max(extra, defaults), _HEADROOM * available()
    if need > room:
        note = f"skipped: would need {need / 1e9:.1f} of {room / 1e9:.1f} GB"
    elif seconds > limits.seconds:
        note = f"skipped: would take {seconds:.0f} of {limits.seconds:.0f} s"
    else:
        return None
    return point._replace(predicted=extra, note=note)


def sweep(problem: str, side: str, steps: Sequence[int], limits: Limits) -> Iterator[Point]:
    """One point for each number of steps, from the smallest on."""
    before: list[Point] = []
    for count in sorted(steps):
        skipped = _skipped(Point(problem, side, count), before, limits)
        before.append(skipped or measure(problem, side, count, limits))
        yield before[-1]
