"""Compare, time and weigh the ways of one case, each in processes of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy

import fresh
import timing
from peer_cases import REFERENCE, Case
from peer_process import Worker

TOLERANCE = 1e-8
_SECONDS = 60  # what the rounds of one case may take, roughly
_FEW, _MANY = 5, 25  # rounds


class Result(NamedTuple):
    """One way of one system. Without numbers, `note` says why. Bytes and seconds."""

    case: str
    system: str
    way: str
    note: str = ""
    differences: dict[str, float] | None = None  # of the gradients, relative, in float64
    first: float | None = None  # the first call, compilation included
    times: list[float] | None = None  # one per round
    remark: str = ""  # what it chose
    extra: float | None = None  # peak memory beyond what was there before

    @property
    def agrees(self) -> bool:
        found = self.differences
        return found is not None and all(d <= TOLERANCE for d in found.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    """How everything is measured."""

    pythons: dict[str, Path | str]  # by system; a string says why there is none
    folder: Path  # for data, gradients and caches
    threads: int
    limit: float  # seconds for one call
    rounds: int | None = None
    kept: dict[str, Worker] | None = None  # processes to use again; None: each is a new one
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def worker(
        self, case: Case, result: Result, dtype: str, malloc: dict[str, str] = fresh.DEFAULTS
    ) -> Iterator[Worker]:
        """A process with the case prepared."""
        name = f"{result.system} {result.way}"
        worker = (self.kept or {}).get(name)
        if worker is None or worker.closed:
            worker = self._started(result, f"{case.name} {name}", malloc)
        try:
            data = str(self.folder / f"{case.name}.npz")
            answer = worker.ask("prepare", case=dataclasses.asdict(case), data=data, dtype=dtype)
            self.versions.update(answer["versions"])
            yield worker
        finally:
            if self.kept is None:
                worker.close()
            else:
                self.kept[name] = worker

    def _started(self, result: Result, name: str, malloc: dict[str, str]) -> Worker:
        python = self.pythons[result.system]
        if isinstance(python, str):
            raise fresh.FailedError(python)
        # Compiled code of this way only, so that the first call is what a user's first call is.
        # No spaces: inductor splits the command of its C++ compiler at them.
        cache = self.folder / name.replace(" ", "-")
        own = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
        command = (python, result.system, result.way)
        return Worker(command, self.threads, own | malloc, self.folder / f"{name}.log")


# --- gradients --------------------------------------------------------------------------------


def _gradient(plan: Plan, case: Case, result: Result) -> dict[str, numpy.ndarray]:
    path = plan.folder / "gradient.npz"
    with plan.worker(case, result, "float64") as worker:
        worker.ask("gradient", plan.limit, path=str(path))
    return dict(numpy.load(path))


def _distances(
    ours: dict[str, numpy.ndarray], theirs: dict[str, numpy.ndarray]
) -> dict[str, float]:
    """||ours - theirs|| / ||theirs|| for each kind of meta-parameter; infinite if not finite."""
    found = {}
    for kind, wanted in theirs.items():
        norm = numpy.linalg.norm
        distance = float(norm(ours[kind] - wanted) / norm(wanted))
        found[kind] = distance if numpy.isfinite(distance) else float("inf")
    return found


def compare(plan: Plan, case: Case, systems: tuple[str, ...]) -> Iterator[Result]:
    """Every way's gradient against that of the plain loop, in float64."""
    reference = Result(case.name, REFERENCE, case.ways[REFERENCE][0])
    wanted = _gradient(plan, case, reference)
    for system in systems:
        for way in case.ways.get(system, ()):
            result = Result(case.name, system, way)
            try:
                found = wanted if result == reference else _gradient(plan, case, result)
                yield result._replace(differences=_distances(found, wanted))
            except fresh.FailedError as error:
                yield result._replace(note=str(error))


# --- time -------------------------------------------------------------------------------------


class _Running(NamedTuple):
    """A worker that is ready for its rounds."""

    result: Result
    clock: timing.Clock
    seconds: float  # of one call, roughly


def _start(plan: Plan, case: Case, result: Result, stack: contextlib.ExitStack) -> _Running:
    worker = stack.enter_context(plan.worker(case, result, "float32"))
    first = worker.ask("first", plan.limit)
    about = {"large": case.large}

    def clock(calls: int) -> float:
        return worker.ask("time", 2 * plan.limit, calls=calls, **about)["seconds"]

    def patient(calls: int) -> float:
        """What fails in its rounds must not end those of the others."""
        try:
            return clock(calls)
        except fresh.FailedError:
            return math.nan

    result = result._replace(first=first["seconds"], remark=first["remark"])
    return _Running(result, patient, timing.warm_up(clock))


def time(plan: Plan, case: Case, results: list[Result]) -> list[Result]:
    """Rounds in which every way that can runs once. Only one process works at a time."""
    with contextlib.ExitStack() as stack:
        running: dict[str, _Running] = {}
        done: dict[str, Result] = {}
        for result in results:
            name = f"{result.system} {result.way}"
            done[name] = result
            if not result.note:
                try:
                    running[name] = _start(plan, case, result, stack)
                except fresh.FailedError as error:
                    done[name] = result._replace(note=str(error))
        clocks = {name: one.clock for name, one in running.items()}
        counts = {name: timing.calls(one.seconds) for name, one in running.items()}
        total = sum(one.seconds * counts[name] for name, one in running.items())
        few = min(_MANY, max(_FEW, int(_SECONDS / total))) if running else 0
        times = timing.rounds(clocks, counts, plan.rounds or few)
    found = {name: _timed(one.result, times[name]) for name, one in running.items()}
    return list((done | found).values())


def _timed(result: Result, times: list[float]) -> Result:
    if any(map(math.isnan, times)):
        return result._replace(note="failed during the rounds")
    return result._replace(times=times)


# --- memory -----------------------------------------------------------------------------------


def weigh(plan: Plan, case: Case, result: Result) -> Result:
    """The extra peak memory of one meta-step, after one that warmed up."""
    if result.note:
        return result
    try:
        with plan.worker(case, result, "float32", fresh.OWN_MAPPINGS) as worker:
            answer = worker.ask("memory", 2 * plan.limit)
    except fresh.FailedError as error:
        return result._replace(note=f"memory: {error}")
    return result._replace(extra=answer["extra"])
