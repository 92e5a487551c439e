"""Many runs of ``innerloop maml``: the grid of the paper's appendix, or any part of it.

``innerloop sweep --dataset omniglot --way 5 --model vgg resnet-4`` runs what is not finished yet,
each run in a folder of its own, as many side by side as there are cores, or with ``--engine ray``
on a cluster. Stop it at any time; the same command goes on. Flags of ``innerloop maml`` may follow
after ``--``.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from innerloop.errors import InnerLoopError
from innerloop.experiments import _ray_engine, maml
from innerloop.experiments._command_line import Parser, check_choice, flag, parse, refuse
from innerloop.experiments._experiment import STOPPED
from innerloop.experiments._run import CONFIG, RESULT, stoppable

_GRID = {
    "dataset": ["omniglot", "mini-imagenet"],
    "way": [5, 20],
    "shot": [1, 5],
    "model": ["vgg", "resnet-4", "resnet-8", "resnet-12", "densenet-8"],
    "inner_optim": ["sgd", "adam"],
    "seed": [0, 1, 2],
}
_ENGINES = ("local", "ray")
_RAY = _ray_engine.Cluster._field_defaults


class Job(NamedTuple):
    """One run of a sweep."""

    folder: Path
    flags: list[str]

    @property
    def finished(self) -> bool:
        return (self.folder / RESULT).exists()

    @property
    def words(self) -> list[str]:
        """What follows after ``innerloop maml``: a start, or going on."""
        if (self.folder / CONFIG).exists():
            return ["--resume", str(self.folder)]
        return [*self.flags, "--out", str(self.folder)]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "innerloop", "maml", *self.words]

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"


def jobs(out: Path, chosen: dict[str, list], preset: str, extra: Sequence[str]) -> list[Job]:
    """Every combination that the paper has: mini-ImageNet is 5-way only."""
    found = []
    for values in itertools.product(*chosen.values()):
        one = dict(zip(chosen, values, strict=True))
        if one["dataset"] == "mini-imagenet" and one["way"] == 20 and len(chosen["way"]) > 1:
            continue
        name = "{dataset}-{way}w{shot}s-{model}-{inner_optim}-seed{seed}".format(**one)
        flags = [w for k, v in one.items() for w in ("--" + k.replace("_", "-"), str(v))]
        found.append(Job(out / name, [*flags, "--preset", preset, *extra]))
    return found


def _check(each: Sequence[Job]) -> None:
    """Refuse wrong settings before any run begins."""
    for job in each:
        parser = Parser("innerloop sweep")
        parser.add_argument("--preset")
        given = parse(maml.Config, job.flags, parser)
        maml.configured({k: v for k, v in given.items() if k != "preset"}, given["preset"])


def outcomes(each: Sequence[Job], workers: int) -> Iterator[tuple[Job, str]]:
    """Each run as it ends: finished, failed or stopped. So many are under way at a time."""
    with stoppable() as stop, concurrent.futures.ThreadPoolExecutor(workers) as pool:

        def one(job: Job) -> tuple[Job, str]:
            code = STOPPED if stop.asked else _call(job, workers)
            return job, _ray_engine.KINDS.get(code, "failed")

        for ended in concurrent.futures.as_completed([pool.submit(one, job) for job in each]):
            yield ended.result()


def _call(job: Job, workers: int) -> int:
    """A process of its own; several side by side show no bars, but write into a log."""
    if workers == 1:
        return subprocess.run(job.command).returncode
    job.folder.mkdir(parents=True, exist_ok=True)
    threads = {"OMP_NUM_THREADS": str(max(_ray_engine.cores() // workers, 1))}
    with open(job.log, "a") as log:
        environment = threads | os.environ
        return subprocess.run(job.command, stdout=log, stderr=log, env=environment).returncode


def _shown(job: Job) -> str:
    try:
        found = json.loads((job.folder / RESULT).read_text())
        return f", {100 * found['accuracy']:.2f} % ± {100 * found['interval']:.2f}"
    except (OSError, ValueError, KeyError):
        return ""


def _parser() -> Parser:
    parser = Parser("innerloop sweep", description=__doc__)
    for name, default in _GRID.items():
        kind, shown = type(default[0]), " ".join(map(str, default))
        parser.add_argument(flag(name), nargs="+", type=kind, default=default, help=shown)
    parser.add_argument("--preset", default="quick", help="paper or quick (quick)")
    parser.add_argument("--out", type=Path, default=Path("out/sweep"), help="folder of the runs")
    parser.add_argument("--list", action="store_true", help="show the runs and do nothing")
    parser.add_argument("--engine", default="local", help="local or ray (local)")
    parser.add_argument("--jobs", type=int, help="local: runs side by side (one for each core)")
    parser.add_argument("--address", help="ray: of a cluster (one on this machine)")
    parser.add_argument("--cpus-per-run", type=int, help="ray: cores of each run (1)")
    parser.add_argument("--gpus-per-run", type=float, help="ray: GPUs, or a part of one (0)")
    parser.add_argument("--retries", type=int, help="ray: when a worker of a run dies (10)")
    return parser


def _engine(args: dict[str, Any]) -> _ray_engine.Cluster | int:
    """The cluster, or how many processes of this machine."""
    check_choice("engine", args["engine"], _ENGINES)
    other = ["jobs"] if args["engine"] == "ray" else list(_RAY)
    for name in other:
        if args[name] is not None:
            refuse(name, args[name], f"left out with --engine {args['engine']}")
    if args["engine"] == "ray":
        cluster = _ray_engine.Cluster(**{n: args[n] for n in _RAY if args[n] is not None})
        _ray_engine.check(cluster)
        return cluster
    workers = _ray_engine.cores() if args["jobs"] is None else args["jobs"]
    if not 1 <= workers <= (os.cpu_count() or 1) * 4:
        refuse("jobs", workers, "a few, at least 1")
    return workers


def _carried_out(each: Sequence[Job], engine: _ray_engine.Cluster | int) -> int:
    local = isinstance(engine, int)
    kinds = set()
    for job, kind in outcomes(each, engine) if local else _ray_engine.outcomes(each, engine):
        kinds.add(kind)
        print(f"{job.folder.name}: {kind}{_shown(job)}", flush=True)
    if "stopped" in kinds:
        return STOPPED
    return 1 if "failed" in kinds else 0


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    args = vars(_parser().parse_args(words[:cut]))
    try:
        engine = _engine(args)
        chosen = {name: args[name] for name in _GRID}
        each = jobs(args["out"], chosen, args["preset"], words[cut + 1 :])
        _check(each)
        open_ones = [job for job in each if not job.finished]
        print(f"{len(each)} runs, {len(each) - len(open_ones)} finished already.", flush=True)
        if args["list"]:
            for job in each:
                print(f"  {job.folder}{_shown(job)}")
            return 0
        code = _carried_out(open_ones, engine) if open_ones else 0
    except InnerLoopError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"See them with: innerloop report {args['out']}")
    return code
