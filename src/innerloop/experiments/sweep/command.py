"""Many runs of ``innerloop maml``: the grid of the paper's appendix, or any part of it.

``innerloop sweep --dataset omniglot --way 5 --model vgg resnet-4`` runs what is not finished yet,
each run in a folder of its own, as many side by side as there are cores, or with ``--engine ray``
on a cluster. Stop it at any time; the same command goes on. Flags of ``innerloop maml`` may follow
after ``--``.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from innerloop import data
from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.command_line import WRONG, Parser, parse, path, program
from innerloop.experiments.framework.experiment import STOPPED, with_data_folder
from innerloop.experiments.framework.run import RESULT, Run, stoppable
from innerloop.experiments.framework.settings import Choice, as_json, flag, from_json, refuse
from innerloop.experiments.maml.settings import Config
from innerloop.experiments.maml.training import Training, load_images
from innerloop.experiments.report.runs import decisive_settings, read_result
from innerloop.experiments.sweep import ray_engine

_GRID = {
    "dataset": ["omniglot", "mini-imagenet"],
    "way": [5, 20],
    "shot": [1, 5],
    "model": ["vgg", "resnet-4", "resnet-8", "resnet-12", "densenet-8"],
    "inner_optim": ["sgd", "adam"],
    "seed": [0, 1, 2],
}
_ENGINES = ("local", "ray")
_RAY = ray_engine.Cluster._field_defaults
_GLANCE = 0.2  # seconds between two looks at the runs


class Job(NamedTuple):
    """One run of a sweep."""

    folder: Path
    flags: list[str]
    preset: str = "quick"

    @property
    def started(self) -> bool:
        return Run(self.folder).exists

    @property
    def finished(self) -> bool:
        return (self.folder / RESULT).exists()

    @property
    def config(self) -> Config:
        return Config.configure(parse(Config, self.flags, Parser("innerloop sweep")), self.preset)

    @property
    def words(self) -> list[str]:
        """The arguments of ``innerloop maml``, which start or resume the run."""
        if self.started:
            return [*self.flags, "--resume", str(self.folder)]
        return [*self.flags, "--preset", self.preset, "--out", str(self.folder)]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "innerloop", "maml", *self.words]

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"


def jobs(out: Path, chosen: dict[str, list], preset: str, extra: Sequence[str]) -> list[Job]:
    """Every combination that the paper has: mini-ImageNet is 5-way only."""
    found = []
    for values in itertools.product(*map(dict.fromkeys, chosen.values())):  # each once
        one = dict(zip(chosen, values, strict=True))
        if one["dataset"] == "mini-imagenet" and one["way"] == 20 and len(chosen["way"]) > 1:
            continue
        name = "{dataset}-{way}w{shot}s-{model}-{inner_optim}-seed{seed}".format(**one)
        flags = [w for k, v in one.items() for w in (flag(k), str(v))]
        found.append(Job(out / name, [*flags, *extra], preset))
    return found


def _check_extra(extra: Sequence[str]) -> None:
    """Refuses what the sweep itself decides: a folder's name would not say what is in it."""
    parser = Parser("innerloop sweep")
    for name in ("preset", "resume"):
        parser.add_argument(flag(name))
    given = parse(Config, extra, parser)
    if given["resume"] is not None:
        refuse("resume", given["resume"], "left out", "a sweep goes on with what is in --out")
    for name in (*_GRID, "out", "preset"):
        if given.get(name) is not None:
            refuse(name, given[name], "written before --", "it is for all runs")


def _check(job: Job) -> None:
    """Refuses wrong settings before any run begins, and a run that was started with others."""
    config = job.config
    if not job.started:
        return
    started = from_json(Config, Run(job.folder).config())
    asked, found = (decisive_settings(as_json(with_data_folder(c))) for c in (config, started))
    different = [
        f"{flag(name)} {found.get(name)} (asked: {asked.get(name)})"
        for name in asked | found
        if asked.get(name) != found.get(name)
    ]
    if different:
        raise InnerLoopError(
            f"{job.folder} holds a run with other settings: {', '.join(different)}. Write the "
            "settings that it was started with, or name another folder with --out."
        )


def _check_possible(each: Sequence[Job]) -> None:
    """Refuses what every run would fail at: no data, too few classes, a model that cannot be."""
    alike = {"seed": 0, "device": "cpu", "out": Path()}
    kinds = dict.fromkeys(dataclasses.replace(job.config, **alike) for job in each)
    read: dict[str, data.Splits] = {}
    for config in kinds:
        if config.dataset not in read:
            read[config.dataset] = load_images(config)
        Training(config, read[config.dataset])


def outcomes(each: Sequence[Job], workers: int) -> Iterator[tuple[Job, str]]:
    """Runs some jobs at a time; yields each as it ends: finished, failed or stopped."""
    waiting = list(each)
    running: dict[subprocess.Popen, Job] = {}
    stopping = False
    with stoppable() as stop:
        try:
            while running or waiting:
                while waiting and len(running) < workers and not stop.asked:
                    job = waiting.pop(0)
                    running[_start(job, workers)] = job
                if stop.asked and not stopping:
                    stopping = True
                    for process in running:
                        process.terminate()
                    yield from ((job, "stopped") for job in waiting)
                    waiting = []
                time.sleep(_GLANCE)
                for process in [process for process in running if process.poll() is not None]:
                    code = process.returncode
                    if stopping and code == -signal.SIGTERM:  # it was still starting
                        code = STOPPED
                    yield running.pop(process), ray_engine.KINDS.get(code, "failed")
        finally:  # after an error, or asked for twice: the runs are interrupted
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


def _start(job: Job, workers: int) -> subprocess.Popen:
    """Starts a run. Several side by side show no bars, but write into logs."""
    # In a session of its own: Ctrl-C in the terminal reaches it through this process alone.
    if workers == 1:
        return subprocess.Popen(job.command, start_new_session=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    threads = {"OMP_NUM_THREADS": str(max(ray_engine.cores() // workers, 1))} | os.environ
    with open(job.log, "a") as log:
        return subprocess.Popen(
            job.command, start_new_session=True, stdout=log, stderr=log, env=threads
        )


def _describe(job: Job) -> str:
    """The accuracy of a finished run."""
    result = read_result(job.folder)
    if result is None:
        return ""
    flaws = f" (it {result.flaws})" if result.flaws else ""
    return f", {result}{flaws}"


def _last_line(job: Job) -> str:
    """The end of the log, which says what went wrong, where runs write one."""
    lines = job.log.read_text(errors="replace").split("\n") if job.log.exists() else []
    said = [line for line in lines if line.strip()]
    return f" ({job.log}: {said[-1].strip()})" if said else ""


def _refuse_torchrun() -> None:
    """Refuses torchrun: the runs would take each other for processes of one run."""
    if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise InnerLoopError(
            f"innerloop sweep was started {size} times, by torchrun (WORLD_SIZE is {size}). "
            "Needed is one process, which starts the runs itself, side by side; theirs would be "
            "mixed up. Start it without torchrun."
        )


def _parser() -> Parser:
    parser = Parser("innerloop sweep", description=__doc__)
    for name, default in _GRID.items():
        kind, shown = type(default[0]), " ".join(map(str, default))
        parser.add_argument(flag(name), nargs="+", type=kind, default=default, help=shown)
    parser.add_argument("--preset", default="quick", help="paper or quick (quick)")
    parser.add_argument("--out", type=path, default=Path("out/sweep"), help="folder of the runs")
    parser.add_argument("--list", action="store_true", help="show the runs and do nothing")
    parser.add_argument("--engine", default="local", help="local or ray (local)")
    parser.add_argument("--jobs", type=int, help="local: runs side by side (one for each core)")
    parser.add_argument("--address", help="ray: of a cluster (one on this machine)")
    parser.add_argument("--cpus-per-run", type=int, help="ray: cores of each run (1)")
    parser.add_argument("--gpus-per-run", type=float, help="ray: GPUs, or a part of one (0)")
    parser.add_argument("--retries", type=int, help="ray: when a worker of a run dies (10)")
    return parser


def _engine(args: dict[str, Any]) -> ray_engine.Cluster | int:
    """The cluster, or how many processes of this machine."""
    Choice(_ENGINES).check("engine", args["engine"])
    other = ["jobs"] if args["engine"] == "ray" else list(_RAY)
    for name in other:
        if args[name] is not None:
            refuse(name, args[name], f"left out with --engine {args['engine']}")
    if args["engine"] == "ray":
        cluster = ray_engine.Cluster(**{n: args[n] for n in _RAY if args[n] is not None})
        ray_engine.check(cluster)
        return cluster
    workers = ray_engine.cores() if args["jobs"] is None else args["jobs"]
    if not 1 <= workers <= (os.cpu_count() or 1) * 4:
        refuse("jobs", workers, "a few, at least 1")
    return workers


def _run_all(each: Sequence[Job], engine: ray_engine.Cluster | int) -> int:
    """Runs what is not finished; returns the exit code."""
    local = isinstance(engine, int)
    kinds = set()
    for job, kind in outcomes(each, engine) if local else ray_engine.outcomes(each, engine):
        kinds.add(kind)
        more = _last_line(job) if kind == "failed" else _describe(job)
        print(f"{job.folder.name}: {kind}{more}", flush=True)
    if "stopped" in kinds:
        return STOPPED
    return 1 if "failed" in kinds else 0


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    own, others = _parser().parse_known_args(words[:cut])
    args, extra = vars(own), [*others, *words[cut + 1 :]]
    try:
        _refuse_torchrun()
        engine = _engine(args)
        _check_extra(extra)
        each = jobs(args["out"], {name: args[name] for name in _GRID}, args["preset"], extra)
        for job in each:
            _check(job)
        unfinished = [job for job in each if not job.finished]
        print(f"{len(each)} runs, {len(each) - len(unfinished)} finished already.", flush=True)
        if args["list"]:
            for job in each:
                print(f"  {job.folder}{_describe(job)}")
            return 0
        if isinstance(engine, int):  # machines of a cluster have data of their own
            _check_possible(unfinished)
        code = _run_all(unfinished, engine) if unfinished else 0
    except InnerLoopError as error:
        print(error, file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("Stopped.")
        return STOPPED
    print(f"See them with: {program()} report {shlex.quote(str(args['out']))}")
    return code
