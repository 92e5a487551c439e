"""Many runs of ``innerloop maml``: the grid of the paper's appendix, or any part of it.

``innerloop sweep --dataset omniglot --way 5 --model vgg resnet-4`` runs what is not finished yet,
each run in a folder of its own. Stop it at any time; the same command goes on. Flags of
``innerloop maml`` may follow after ``--``.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from innerloop.errors import InnerLoopError
from innerloop.experiments import maml
from innerloop.experiments._command_line import Parser, parse
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


class Job(NamedTuple):
    """One run of a sweep."""

    folder: Path
    flags: list[str]

    @property
    def finished(self) -> bool:
        return (self.folder / RESULT).exists()

    @property
    def command(self) -> list[str]:
        if (self.folder / CONFIG).exists():
            how = ["--resume", str(self.folder)]
        else:
            how = [*self.flags, "--out", str(self.folder)]
        return [sys.executable, "-m", "innerloop", "maml", *how]


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


def run(each: Sequence[Job], workers: int) -> dict[str, list[Job]]:
    """Do what is not finished; which of them finished, failed, or were stopped."""
    done: dict[str, list[Job]] = {"finished": [], "failed": [], "stopped": []}
    lock = threading.Lock()
    with stoppable() as stop:

        def one(job: Job) -> None:
            if stop.asked:
                kind = "stopped"
            else:
                code = _call(job, alone=workers == 1)
                kind = {0: "finished", STOPPED: "stopped"}.get(code, "failed")
            with lock:
                done[kind].append(job)
                print(f"{job.folder.name}: {kind}{_shown(job)}", flush=True)

        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            list(pool.map(one, each))
    return done


def _call(job: Job, alone: bool) -> int:
    """A process of its own; several side by side show no bars, but write into a log."""
    if alone:
        return subprocess.run(job.command).returncode
    job.folder.mkdir(parents=True, exist_ok=True)
    with open(job.folder / "log.txt", "a") as log:
        return subprocess.run(job.command, stdout=log, stderr=log).returncode


def _shown(job: Job) -> str:
    try:
        found = json.loads((job.folder / RESULT).read_text())
        return f", {100 * found['accuracy']:.2f} % ± {100 * found['interval']:.2f}"
    except (OSError, ValueError, KeyError):
        return ""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    own, extra = words[:cut], words[cut + 1 :]
    parser = Parser("innerloop sweep", description=__doc__)
    for name, default in _GRID.items():
        kind = type(default[0])
        shown = " ".join(map(str, default))
        parser.add_argument(
            "--" + name.replace("_", "-"), nargs="+", type=kind, default=default, help=shown
        )
    parser.add_argument("--preset", default="quick", help="paper or quick (quick)")
    parser.add_argument("--out", type=Path, default=Path("out/sweep"), help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side (1)")
    parser.add_argument("--list", action="store_true", help="show the runs and do nothing")
    args = vars(parser.parse_args(own))
    try:
        each = jobs(args["out"], {k: args[k] for k in _GRID}, args["preset"], extra)
        _check(each)
    except InnerLoopError as error:
        print(error, file=sys.stderr)
        return 2
    if not 1 <= args["jobs"] <= (os.cpu_count() or 1) * 4:
        print(f"--jobs {args['jobs']} cannot be: it must be a few, at least 1.", file=sys.stderr)
        return 2
    open_ones = [job for job in each if not job.finished]
    print(f"{len(each)} runs, {len(each) - len(open_ones)} finished already.")
    if args["list"]:
        for job in each:
            print(f"  {job.folder}{_shown(job)}")
        return 0
    done = run(open_ones, args["jobs"])
    print(f"See them with: innerloop report {args['out']}")
    if done["stopped"]:
        return STOPPED
    return 1 if done["failed"] else 0
