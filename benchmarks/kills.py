"""Runs that are killed (SIGKILL) at random moments must end as if nothing had happened.

A tiny few-shot run in one process, which is started again after each kill; in two processes of
torchrun, of which a random one dies and the group is restarted; and as a worker of a Ray cluster on
this machine, which tries it again. The metrics of every epoch and the result must equal those of an
undisturbed run to the last digit. Needs an environment with
torch-innerloop[experiments,ray], and Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from innerloop.experiments.sweep.command import Job, jobs

_GRID = {"dataset": ["glyphs"], "way": [3], "shot": [1], "model": ["mlp"]}
_GRID |= {"inner_optim": ["sgd"], "seed": [0]}
_FLAGS = ["--filters", "8", "--steps", "2", "--tasks", "4", "--query", "2", "--epoch", "4"]
_FLAGS += ["--val-tasks", "6", "--test-tasks", "8", "--ensemble", "2", "--tasks-by", "loop"]
_FLAGS += ["--precision", "float64"]
_PER_RUN = 10  # kills, before a run is left to end and a new one begins
_ANY_MOMENT = 0.25  # of the kills, starting included; the others fall into training
_PAUSE = 1.5  # seconds, at most
_IN_VAIN = 3  # starts that end by themselves without a result
_PATIENCE = 900.0  # seconds for a process to start and get on
_AGAIN = "1000"  # as often as it takes


class Kind(NamedTuple):
    """A way to run a job, and which processes below it are its workers."""

    command: Callable[[Job], list[str]]
    workers: Callable[[int], list[int]]


def _by_torchrun(job: Job) -> list[str]:
    group = ["--standalone", "--nproc-per-node", "2", "--max-restarts", _AGAIN]
    start = [sys.executable, "-m", "torch.distributed.run", *group]
    return [*start, "-m", "innerloop", "maml", *job.words]


def _by_ray(job: Job) -> list[str]:
    chosen = [w for k, (v,) in _GRID.items() for w in ("--" + k.replace("_", "-"), str(v))]
    place = ["--engine", "ray", "--retries", _AGAIN, "--out", str(job.folder.parent)]
    extra = job.flags[job.flags.index("--filters") :]
    return [sys.executable, "-m", "innerloop", "sweep", *chosen, *place, "--", *extra]


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _ray_workers(pid: int) -> list[int]:
    found = []
    for child in _children(pid):
        try:
            title = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        found += [child] if title.startswith(b"ray::glyphs") else _ray_workers(child)
    return found


KINDS = {
    "single": Kind(lambda job: job.command, lambda pid: [pid]),
    "torchrun": Kind(_by_torchrun, _children),
    "ray": Kind(_by_ray, _ray_workers),
}


def _job(root: Path, iterations: int) -> Job:
    (job,) = jobs(root, _GRID, "quick", [*_FLAGS, "--iterations", str(iterations)])
    return job


def _start(kind: Kind, job: Job) -> subprocess.Popen:
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    with open(job.folder.parent / "said.txt", "a") as said:
        # Ray's workers give way to any other process if not told otherwise.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
        return subprocess.Popen(kind.command(job), stdout=said, stderr=said, env=environment)


def _finish(kind: Kind, job: Job) -> None:
    process = _start(kind, job)
    if process.wait() != 0:
        raise SystemExit((job.folder.parent / "said.txt").read_text())


def _records(job: Job) -> int:
    """How often metrics were written: a time, as a restart may write fewer."""
    path = job.folder / "metrics.jsonl"
    return path.stat().st_mtime_ns if path.exists() else 0


def _moment(process: subprocess.Popen, job: Job, chance: random.Random) -> bool:
    """Wait for it; whether it falls into training."""
    known, until = _records(job), time.monotonic() + _PATIENCE
    anywhen = chance.random() < _ANY_MOMENT
    while not anywhen and _records(job) == known and process.poll() is None:
        if time.monotonic() > until:
            raise SystemExit(f"{job.folder}: no progress in {_PATIENCE:.0f} seconds")
        time.sleep(0.02)
    time.sleep(_PAUSE * chance.random())
    return _records(job) != known


def _disturbed(kind: Kind, job: Job, kills: int, chance: random.Random) -> tuple[int, int]:
    """A run with so many kills, or fewer if it ends; and how many fell into training."""
    process, done, trained = _start(kind, job), 0, 0
    try:
        in_vain = 0
        while done < kills:
            training = _moment(process, job, chance)
            if process.poll() is not None:
                if job.finished:
                    break
                in_vain += 1
                if in_vain > _IN_VAIN:
                    raise SystemExit((job.folder.parent / "said.txt").read_text())
                process = _start(kind, job)
            elif workers := kind.workers(process.pid):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(chance.choice(workers), signal.SIGKILL)
                    done, trained, in_vain = done + 1, trained + training, 0
                if workers == [process.pid]:
                    process.wait()
        ended = process.wait()
    finally:
        process.terminate()
        process.wait()
    if ended != 0:
        _finish(kind, job)
    return done, trained


def _metrics(job: Job) -> list[dict]:
    lines = (job.folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in [*lines, (job.folder / "result.json").read_text()]]
    return [{k: v for k, v in record.items() if k != "seconds"} for record in found]


def _measured(name: str, kills: int, folder: Path, iterations: int) -> dict[str, int]:
    kind, chance = KINDS[name], random.Random(name)
    whole = _job(folder / f"{name}-whole", iterations)
    # Ray's undisturbed run is that of one process: the engine must make no difference.
    _finish(KINDS["single"] if name == "ray" else kind, whole)
    found = {"kills": 0, "in training": 0, "runs": 0, "equal": 0}
    while found["kills"] < kills:
        job = _job(folder / f"{name}-{found['runs']}", iterations)
        left = min(kills - found["kills"], _PER_RUN)
        done, trained = _disturbed(kind, job, left, chance)
        if done == 0:
            raise SystemExit("A run ended before it could be killed: more --iterations are needed.")
        equal = _metrics(job) == _metrics(whole)
        row = {"kills": done, "in training": trained, "runs": 1, "equal": int(equal)}
        found = {key: found[key] + row[key] for key in found}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="over all kinds (default: 50)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: single,torchrun,ray")
    parser.add_argument("--iterations", type=int, default=400, help="of a run (default: 400)")
    args = parser.parse_args()
    names = args.kinds.split(",")
    if wrong := [name for name in names if name not in KINDS]:
        parser.error(f"--kinds {wrong[0]}: it must be some of {', '.join(KINDS)}")
    if args.kills < len(names) or args.iterations < 1:
        parser.error("there must be a kill for each kind at least, and an iteration")
    if "ray" in names and importlib.util.find_spec("ray") is None:
        parser.error("--kinds ray needs Ray: pip install '.[ray]' in a clone, or leave it out")
    total = {"kills": 0, "in training": 0, "runs": 0, "equal": 0}
    print("kind      kills  in training  runs  runs equal")
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(names):
            kills = args.kills // len(names) + (i < args.kills % len(names))
            row = _measured(name, kills, Path(folder), args.iterations)
            total = {key: total[key] + row[key] for key in total}
            _print(name, row)
    _print("all", total)
    return int(total["equal"] != total["runs"])


def _print(name: str, row: dict[str, int]) -> None:
    kills, training, runs, equal = row.values()
    print(f"{name:8}  {kills:5}  {training:11}  {runs:4}  {equal:10}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
