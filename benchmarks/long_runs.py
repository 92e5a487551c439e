"""A queue of long few-shot runs at the lowest priority, which survives the terminal and resumes.

    python benchmarks/long_runs.py start     start or continue the queue of long_runs.toml
    python benchmarks/long_runs.py status    what each run has reached; writes the results' JSON
    python benchmarks/long_runs.py pause     SIGSTOP, while something is timed
    python benchmarks/long_runs.py resume    SIGCONT
    python benchmarks/long_runs.py stop      end after a checkpoint; `start` continues

The queue is one process, leader of a session and of a process group of its own; the runs are its
children, one for each core. They use the sources of a clone at the plan's tag, in the folder that
LONG_RUNS names (`~/innerloop-long-runs`), and the environment `venv` there.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from long_runs_plan import (
    Folder,
    Plan,
    PlanError,
    Planned,
    command,
    reached,
    read_plan,
    replace_file,
)

REPOSITORY = Path(__file__).resolve().parent.parent
PLAN = REPOSITORY / "benchmarks/long_runs.toml"
RESULTS = REPOSITORY / "benchmarks/results/long_runs.json"
_ATTEMPTS = 3  # starts of a run that ends without a result, in one life of the queue
# One thread for each run, and a line of progress once a minute: the log of a day stays small.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TQDM_MININTERVAL": "60"}
_POLL = 5.0  # seconds between two looks at the runs
_PATIENCE = 60.0  # seconds for runs to write a checkpoint when they are asked to stop


# --- the queue's lock -------------------------------------------------------------------------


def take_lock(folder: Folder) -> int | None:
    """A handle that holds the lock, or `None` if the queue or one of its runs is alive.

    Runs inherit the handle: the lock is free only when the last of them has ended.
    """
    folder.root.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o644)
    for _ in range(5):  # another command may be looking at the lock at this moment
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        time.sleep(0.1)
    os.close(handle)
    return None


def queue_state(folder: Folder) -> str:
    """State of the queue: running, paused or stopped."""
    if not folder.lock.exists():
        return "stopped"
    handle = take_lock(folder)
    if handle is not None:
        os.close(handle)
        return "stopped"
    return "paused" if _process_state(_group(folder)) == "T" else "running"


def _group(folder: Folder) -> int:
    """Process group of the queue, which is its process id. Valid while the lock is held."""
    return int(folder.lock.read_text())


def _process_state(pid: int) -> str | None:
    """The kernel's letter for a process, T for one that is stopped; `None` for one that ended."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else fields[0]


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third, the state, on."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None


# --- commands ---------------------------------------------------------------------------------


def start(folder: Folder, cores: int) -> None:
    plan = read_plan(PLAN)
    data = data_folder()
    if not folder.python.exists():
        raise PlanError(
            f"The environment of the runs, {folder.root / 'venv'}, is missing. Runs need one that "
            "does not change with the work tree. Write: make long-runs"
        )
    make_clone(folder, plan.tag)
    aside = folder.plan.with_suffix(".new")
    shutil.copyfile(PLAN, aside)
    aside.replace(folder.plan)  # in one step: the queue may be reading it
    handle = take_lock(folder)
    if handle is None and _process_state(_group(folder)) is None:
        print("The queue died and left runs behind. Stopping these first.")
        stop(folder)
        handle = take_lock(folder)
    if handle is None:
        os.killpg(_group(folder), signal.SIGCONT)
        print("The queue is running. It takes new runs of the plan when a core is free.")
        return
    words = [sys.executable, __file__, "work", "--cores", str(cores), "--lock", str(handle)]
    with (folder.root / "queue.log").open("a") as log:
        queue = subprocess.Popen(
            words,
            cwd=folder.root,
            env=os.environ | {"LONG_RUNS": str(folder.root), "INNERLOOP_DATA": str(data)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[handle],
        )
    folder.lock.write_text(f"{queue.pid}\n")
    print(f"Started the queue in {folder.root}: {len(plan.runs)} runs, {cores} at a time.")


def data_folder() -> Path:
    """Folder of the datasets: INNERLOOP_DATA, or shared/data beside the work tree."""
    beside = REPOSITORY.parent / "shared/data"
    found = Path(os.environ.get("INNERLOOP_DATA") or beside).expanduser().absolute()
    if not found.is_dir():
        raise PlanError(
            f"The datasets are not in {found}. Needed is a folder with omniglot/ and "
            "mini-imagenet/. Name it: INNERLOOP_DATA=... make long-runs"
        )
    return found


def make_clone(folder: Folder, tag: str) -> None:
    """Clones the repository at the tag, unless the folder has that clone already."""
    source = folder.source(tag)
    if source.exists():
        return
    aside = source.with_name(f".{tag}")
    shutil.rmtree(aside, ignore_errors=True)  # an interrupted clone
    words = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", "--branch", tag]
    try:
        subprocess.run([*words, str(REPOSITORY), str(aside)], check=True)
    except subprocess.CalledProcessError as error:
        raise PlanError(
            f"{PLAN.name} has tag = {tag!r}, and {REPOSITORY} cannot be cloned at it. Needed is a "
            f"tag of this repository, so that all runs use the same sources. Write: git tag {tag}"
        ) from error
    aside.rename(source)


def stop(folder: Folder) -> None:
    if queue_state(folder) == "stopped":
        print("The queue is not running.")
        return
    group = _group(folder)
    if _process_state(group) is None:
        os.killpg(group, signal.SIGTERM)
    else:
        os.kill(group, signal.SIGTERM)  # the queue tells its runs
    os.killpg(group, signal.SIGCONT)
    deadline = time.monotonic() + _PATIENCE
    while queue_state(folder) != "stopped":
        if time.monotonic() > deadline:
            print("A run did not answer, as in a validation: it resumes from its last checkpoint.")
            os.killpg(group, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.2)
    print("Stopped. `make long-runs` continues.")


def signal_group(folder: Folder, number: signal.Signals) -> None:
    if queue_state(folder) == "stopped":
        print("The queue is not running.")
    else:
        os.killpg(_group(folder), number)


def status(folder: Folder) -> None:
    plan, queue = read_plan(PLAN), queue_state(folder)
    found = {run.name: reached(folder, run, queue) for run in plan.runs}
    print(f"Queue in {folder.root}: {queue}.")
    print(table(plan, found))
    collect([entry for entry in found.values() if entry and "curve" in entry])


def table(plan: Plan, found: dict[str, dict[str, Any] | None]) -> str:
    """One line for each run of the plan."""
    titles = ("run", "state", "tasks seen", "planned", "validation", "test", "core-hours", "budget")
    rows = [titles, *(_row(run, found[run.name]) for run in plan.runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _row(run: Planned, entry: dict[str, Any] | None) -> tuple[str, ...]:
    if entry is None or "curve" not in entry:
        state = entry["state"] if entry else "waiting"
        return (run.name, state, "", "", "", "", "", f"{run.budget:g}")
    validation, test = entry["val_accuracy"], ""
    if "accuracy" in entry:
        test = f"{100 * entry['accuracy']:.2f} ± {100 * entry['interval']:.2f} %"
    return (
        run.name,
        entry["state"],
        str(entry["tasks_seen"]),
        str(entry["tasks_planned"]),
        "" if validation is None else f"{100 * validation:.2f} %",
        test,
        f"{entry['core_hours']:.2f}",
        f"{run.budget:g}",
    )


def collect(entries: list[dict[str, Any]]) -> None:
    """Writes what was reached to the repository. A run that got further elsewhere stays."""
    if not entries:
        return
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    furthest = {entry["name"]: entry for entry in known}
    for entry in entries:
        before = furthest.get(entry["name"])
        if before is None or before["tasks_seen"] <= entry["tasks_seen"]:
            furthest[entry["name"]] = entry
    lines = [json.dumps(entry) for entry in furthest.values()]
    replace_file(RESULTS, "[\n" + ",\n".join(lines) + "\n]\n")  # a line for each run


# --- the queue's process ----------------------------------------------------------------------


class Child:
    """A run under way."""

    def __init__(self, folder: Folder, run: Planned, tag: str, lock: int) -> None:
        self.folder, self.name = folder, run.name
        notes = folder.notes(run.name)
        tag = notes.get("tag", tag)  # a run goes on with the sources it was started with
        self.before = notes.get("cpu_seconds", 0.0)
        source = folder.source(tag) / "src"
        log = folder.log(run.name)
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as output:
            self.process = subprocess.Popen(
                command(folder, run, data_folder()),
                cwd=folder.root,
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": str(source)},
                stdout=output,
                stderr=output,
                pass_fds=[lock],
            )
        self.notes = {"tag": tag, "pid": self.process.pid, "cpu_seconds": self.before}
        folder.write_notes(run.name, self.notes)

    def ended(self) -> bool:
        """Whether the run has ended. Keeps its notes up to date."""
        fields = _stat(self.process.pid)  # before poll(): afterwards the process is gone
        if fields is not None:
            ticks = int(fields[11]) + int(fields[12])
            self.notes["cpu_seconds"] = self.before + ticks / os.sysconf("SC_CLK_TCK")
        code = self.process.poll()
        if code is not None:
            self.notes |= {"pid": None, "exit": code}
        self.folder.write_notes(self.name, self.notes)
        return code is not None


def work(folder: Folder, cores: int, lock: int) -> None:
    """Keeps one run on each core until every run has its result."""
    be_idle()
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    children: list[Child] = []
    attempts: dict[str, int] = {}
    while True:
        children = [child for child in children if not child.ended()]
        if asked:
            break
        plan = read_plan(folder.plan)
        for run in waiting(folder, plan, {child.name for child in children}):
            if len(children) < cores and attempts.get(run.name, 0) < _ATTEMPTS:
                attempts[run.name] = attempts.get(run.name, 0) + 1
                children.append(Child(folder, run, plan.tag, lock))
        if not children:
            return
        _sleep(_POLL, asked)
    for child in children:
        child.process.terminate()
    while children:
        time.sleep(0.1)
        children = [child for child in children if not child.ended()]


def _sleep(seconds: float, asked: list[int]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not asked:
        time.sleep(0.5)  # a signal alone does not end time.sleep


def waiting(folder: Folder, plan: Plan, under_way: set[str]) -> list[Planned]:
    """Runs without a result that are not under way, in the order of the plan."""
    return [
        run
        for run in plan.runs
        if run.name not in under_way and not (folder.run(run.name) / "result.json").exists()
    ]


def be_idle() -> None:
    """Asks for the lowest priority the kernel has; children inherit it.

    Between sessions the kernel compares the nice values of their autogroups, not of processes.
    """
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # a kernel without autogroups
        Path("/proc/self/autogroup").write_text("19")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = ("start", "status", "pause", "resume", "stop", "work")
    parser.add_argument("command", choices=commands, metavar="{" + ",".join(commands[:-1]) + "}")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--cores", type=int, default=cores, help="runs at a time (all cores)")
    parser.add_argument("--lock", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    where = os.environ.get("LONG_RUNS") or "~/innerloop-long-runs"
    folder = Folder(Path(where).expanduser().absolute())
    try:
        if given.command == "start":
            start(folder, given.cores)
        elif given.command == "work":
            work(folder, given.cores, given.lock)
        elif given.command == "stop":
            stop(folder)
        elif given.command == "status":
            status(folder)
        else:
            stopping = given.command == "pause"
            signal_group(folder, signal.SIGSTOP if stopping else signal.SIGCONT)
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
