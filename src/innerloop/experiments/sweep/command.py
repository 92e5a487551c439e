"""Many runs of ``innerloop maml``: the grid of the paper's appendix, or any part of it.

``innerloop sweep --dataset omniglot --way 5 --model vgg resnet-4`` runs what is not finished yet,
each run in a folder of its own, as many side by side as there are cores, or with ``--engine ray``
on a cluster. Stop it at any time; the same command goes on. Flags of ``innerloop maml`` may follow
after ``--``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from innerloop import data
from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.command_line import WRONG, Parser, parse, path, program
from innerloop.experiments.framework.experiment import STOPPED, absolute
from innerloop.experiments.framework.ranks import refuse_group
from innerloop.experiments.framework.run import Run, Stop, stoppable
from innerloop.experiments.framework.settings import Bounds, Choice, as_json, fields, flag, refuse
from innerloop.experiments.maml.settings import Config
from innerloop.experiments.maml.training import Training, load_images
from innerloop.experiments.report.runs import decisive, read_result
from innerloop.experiments.sweep import ray_engine

_GRID = {
    "dataset": ["omniglot", "mini-imagenet"],
    "way": [5, 20],
    "shot": [1, 5],
    "model": ["vgg", "resnet-4", "resnet-8", "resnet-12", "densenet-8"],
    "inner_optim": ["sgd", "adam"],
    "seed": [0, 1, 2],
}
_CHANGEABLE = ("data", "keep")
_ENGINES = ("local", "ray")
_RAY = ray_engine.Cluster._field_defaults
_GLANCE = 0.5  # seconds between two looks at whether a stop was asked for
_FIRST = concurrent.futures.FIRST_COMPLETED


class Job(NamedTuple):
    """One run of a sweep."""

    folder: Path
    flags: list[str]

    @property
    def started(self) -> bool:
        return Run(self.folder).known

    @property
    def finished(self) -> bool:
        return self.started and read_result(self.folder, []) is not None

    @property
    def words(self) -> list[str]:
        """The arguments of ``innerloop maml``, which start or resume the run."""
        if self.started:
            return ["--resume", str(self.folder), *self._changeable]
        return [*self.flags, "--out", str(self.folder)]

    @property
    def _changeable(self) -> list[str]:
        """The flags that may be others than at the start: data moves."""
        parser = Parser("innerloop sweep")
        for name in _CHANGEABLE:
            parser.add_argument(flag(name))
        named = vars(parser.parse_known_args(self.flags)[0])
        return [w for name in _CHANGEABLE if named[name] for w in (flag(name), named[name])]

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
        found.append(Job(out / name, [*flags, "--preset", preset, *extra]))
    return found


def _check_extra(extra: Sequence[str]) -> None:
    """Refuse what the sweep itself decides: a folder's name would not say what is in it."""
    parser = Parser("innerloop sweep")
    for name in ("preset", "resume"):
        parser.add_argument(flag(name))
    parser.add_argument("--keep", type=int)
    given = parse(Config, extra, parser)
    if given["keep"] is not None:
        Bounds(1).check("keep", given["keep"])
    if given["resume"] is not None:
        refuse("resume", given["resume"], "left out", "a sweep goes on with what is in --out")
    for name in (*_GRID, "out", "preset"):
        if given.get(name) is not None:
            refuse(name, given[name], "written before --", "it is for all runs")


def _check(each: Sequence[Job]) -> None:
    """Refuse wrong settings before any run begins, and runs that began with others."""
    for job in each:
        config = _config(job)
        if job.started:
            _check_begun(job, as_json(config))


def _config(job: Job) -> Config:
    parser = Parser("innerloop sweep")
    parser.add_argument("--preset")
    parser.add_argument("--keep")
    given = parse(Config, job.flags, parser)
    preset, _ = given.pop("preset"), given.pop("keep")
    return Config.configure(given, preset)


def _check_possible(each: Sequence[Job]) -> None:
    """Refuse what every run would fail at: no data, too few classes, a model that cannot be."""
    alike = {"seed": 0, "device": "cpu", "out": Path()}
    kinds = dict.fromkeys(dataclasses.replace(_config(job), **alike) for job in each)
    read: dict[str, data.Splits] = {}
    for config in kinds:
        if config.dataset not in read:
            read[config.dataset] = load_images(config)
        Training(config, read[config.dataset])


def _check_begun(job: Job, asked: dict[str, Any]) -> None:
    wanted, found = (
        decisive(_with_data_folder(settings))
        for settings in (asked, as_json(Config()) | Run(job.folder).config())
    )
    names = [name for name in wanted | found if wanted.get(name) != found.get(name)]
    if names:
        told = ", ".join(f"{flag(n)} {found.get(n)} (asked: {wanted.get(n)})" for n in names)
        raise InnerLoopError(
            f"{job.folder} holds a run with other settings: {told}. Write the settings that it "
            "was started with, or name another folder with --out."
        )


def _with_data_folder(settings: dict[str, Any]) -> dict[str, Any]:
    """With the folder of the data written out, as a run keeps it."""
    where = settings["data"] or os.environ.get("INNERLOOP_DATA")
    return settings | {"data": where and str(absolute(str(where)))}


def outcomes(each: Sequence[Job], workers: int) -> Iterator[tuple[Job, str]]:
    """Each run as it ends: finished, failed or stopped. So many are under way at a time."""
    running: set[subprocess.Popen] = set()
    asked: set[subprocess.Popen] = set()
    with _stoppable() as stop, concurrent.futures.ThreadPoolExecutor(workers) as pool:

        def one(job: Job) -> tuple[Job, str]:
            code = STOPPED if stop.asked else _call(job, workers, running)
            if stop.asked and code == -signal.SIGTERM:  # it was told while it was starting
                code = STOPPED
            return job, ray_engine.KINDS.get(code, "failed")

        waiting = {pool.submit(one, job) for job in each}
        try:
            while waiting:
                ended, waiting = concurrent.futures.wait(waiting, _GLANCE, _FIRST)
                if stop.asked:
                    _ask_to_stop(running, asked)
                for future in ended:
                    yield future.result()
        except KeyboardInterrupt:  # asked for twice: the runs are interrupted
            asked.clear()
            raise
        finally:
            stop.asked = True
            _ask_to_stop(running, asked)


@contextlib.contextmanager
def _stoppable() -> Iterator[Stop]:
    """A closed terminal stops the work, too: the runs, in sessions of their own, do not see it."""
    with stoppable() as stop:
        main_thread = threading.current_thread() is threading.main_thread()
        if not main_thread or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
            yield stop
            return
        signal.signal(signal.SIGHUP, lambda *_: setattr(stop, "asked", True))
        try:
            yield stop
        finally:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _ask_to_stop(running: set[subprocess.Popen], asked: set[subprocess.Popen]) -> None:
    """Ask each run to stop, once: a second time would interrupt its update."""
    for process in running - asked:
        asked.add(process)
        process.terminate()


def _call(job: Job, workers: int, running: set[subprocess.Popen]) -> int:
    """A process of its own; several side by side show no bars, but write into a log."""
    if workers == 1:
        return _wait_for(running, job.command)
    job.folder.mkdir(parents=True, exist_ok=True)
    threads = {"OMP_NUM_THREADS": str(max(ray_engine.cores() // workers, 1))}
    with open(job.log, "a") as log:
        return _wait_for(running, job.command, stdout=log, stderr=log, env=threads | os.environ)


def _wait_for(running: set[subprocess.Popen], command: list[str], **how: Any) -> int:
    """Its exit code. A terminal's Ctrl-C reaches its own session only by ``_ask_to_stop``."""
    process = subprocess.Popen(command, start_new_session=True, **how)
    running.add(process)
    try:
        return process.wait()
    finally:
        running.discard(process)


def _shown(job: Job) -> str:
    result = read_result(job.folder, [])
    if result is None:
        return ""
    interval = "" if result.interval is None else f" ± {100 * result.interval:.2f}"
    flaws = f" (it {result.flaws})" if result.flaws else ""
    return f", {100 * result.accuracy:.2f} %{interval}{flaws}"


def _why(job: Job) -> str:
    """The end of the log, which says what went wrong, where runs write one."""
    with contextlib.suppress(OSError):
        said = job.log.read_text(errors="replace").strip().splitlines()
        return f" ({job.log}: {said[-1]})" if said else ""
    return ""


class _SweepParser(Parser):
    """Says of a flag of ``innerloop maml`` where it stands."""

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        of_maml = {"--keep", *(flag(field.name) for field in fields(Config))}
        if found := [word for word in unknown if word.partition("=")[0] in of_maml]:
            self.exit(WRONG, f"{found[0]} is for every run. Write it at the end, after --.\n")
        super().error(message)


def _parser() -> Parser:
    parser = _SweepParser("innerloop sweep", description=__doc__)
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
    local = isinstance(engine, int)
    kinds = set()
    for job, kind in outcomes(each, engine) if local else ray_engine.outcomes(each, engine):
        kinds.add(kind)
        why = _why(job) if kind == "failed" else _shown(job)
        print(f"{job.folder.name}: {kind}{why}", flush=True)
    if "stopped" in kinds:
        return STOPPED
    return 1 if "failed" in kinds else 0


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    args = vars(_parser().parse_args(words[:cut]))
    try:
        refuse_group("sweep")
        engine = _engine(args)
        chosen = {name: args[name] for name in _GRID}
        extra = words[cut + 1 :]
        _check_extra(extra)
        each = jobs(args["out"], chosen, args["preset"], extra)
        _check(each)
        open_ones = [job for job in each if not job.finished]
        print(f"{len(each)} runs, {len(each) - len(open_ones)} finished already.", flush=True)
        if args["list"]:
            for job in each:
                print(f"  {job.folder}{_shown(job)}")
            return 0
        if isinstance(engine, int):  # machines of a cluster have data of their own
            _check_possible(open_ones)
        code = _run_all(open_ones, engine) if open_ones else 0
    except InnerLoopError as error:
        print(error, file=sys.stderr)
        return WRONG
    print(f"See them with: {program()} report {shlex.quote(str(args['out']))}")
    return code
