"""Experiments of independent parts: in one process or several, stopped and gone on with."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commands import read, without_times
from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.experiment import carry_out
from innerloop.experiments.framework.parts import Part, Parts
from innerloop.experiments.framework.ranks import Ranks
from innerloop.experiments.framework.run import Run
from innerloop.experiments.framework.settings import Settings
from processes import leave_group

UNITS = (3, 5, 1, 4, 7)


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of the walks."""

    out: Path = Path("out")


class Walk(Part):
    """A sum of random numbers, told at every second unit."""

    def __init__(self, number: int) -> None:
        self.number, self.units = number, UNITS[number]
        self.generator = torch.Generator().manual_seed(number)
        self.sum = torch.zeros((), dtype=torch.float64)

    def advance(self, unit: int, records: list[dict[str, Any]]) -> dict[str, str]:
        self.sum += torch.randn((), generator=self.generator, dtype=torch.float64)
        if unit % 2 or unit + 1 == self.units:
            records.append({"part": self.number, "unit": unit, "sum": self.sum.item()})
        return {"part": str(self.number)}

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum = state["sum"].clone()
        self.generator.set_state(state["generator"])

    def outcome(self) -> dict[str, Any]:
        return {"end": self.sum.item()}


class Walks(Parts):
    """Some of them; one process may be asked to stop in a certain round."""

    def __init__(self, stop_in: int = 0) -> None:
        super().__init__(UNITS)
        self.stop_in = stop_in

    def make(self, number: int) -> Walk:
        return Walk(number)

    def advance(self) -> dict[str, str]:
        shown = super().advance()
        self.stop_in -= 1
        if self.stop_in == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return shown

    def result(self) -> dict[str, Any]:
        return {"ends": [outcome["end"] for outcome in self.outcomes]}

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        (folder / "drawn").touch()

    def describe(self, result: dict[str, Any]) -> str:
        return ""


def walk(rank: int, count: int, folder: str, name: str, stop_in: int, stopped: int) -> None:
    """As a process of a group; the ``stopped``-th is asked to stop."""
    ranks = Ranks(rank, count)
    if count > 1:
        store = f"file://{folder}/store-{name}-{stop_in}-{count}"
        dist.init_process_group("gloo", store, rank=rank, world_size=count)
    out = Path(folder) / name
    walks = Walks(stop_in if rank == stopped else 0)
    how = {"resume": out.exists(), "quiet": True, "ranks": ranks}
    found = carry_out(walks, Config(out=out), Run(out), **how)
    assert (found is None) == (stop_in > 0)
    if count > 1:
        leave_group()


def walked(folder: Path, name: str, count: int, *, stop_in: int = 0, stopped: int = 0) -> Any:
    given = (count, str(folder), name, stop_in, stopped)
    if count == 1:
        walk(0, *given)
    else:
        torch.multiprocessing.spawn(walk, given, nprocs=count)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    result = folder / name / "result.json"
    ends = json.loads(result.read_text())["ends"] if result.exists() else None
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records], ends


def test_each_part_is_done_once_and_in_order(tmp_path: Path) -> None:
    records, ends = walked(tmp_path, "one", 1)
    expected = [Walk(number) for number in range(len(UNITS))]
    for part in expected:
        for unit in range(part.units):
            part.advance(unit, [])
    assert ends == [part.sum.item() for part in expected]
    assert [r["iteration"] for r in records] == [2, 3, 5, 7, 8, 9, 11, 13, 15, 17, 19, 20]
    assert (tmp_path / "one" / "drawn").exists()


@pytest.mark.parametrize("count", [2, 3])
def test_any_number_of_processes_finds_the_same(count: int, tmp_path: Path) -> None:
    assert walked(tmp_path, "many", count) == walked(tmp_path, "one", 1)


def test_a_stopped_run_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    whole = walked(tmp_path, "whole", 1)
    first, nothing = walked(tmp_path, "cut", 2, stop_in=3, stopped=1)
    assert nothing is None and len(first) < len(whole[0])
    walked(tmp_path, "cut", 1, stop_in=4)
    walked(tmp_path, "cut", 3, stop_in=1, stopped=2)
    assert walked(tmp_path, "cut", 2) == whole


def test_more_processes_than_parts_are_refused() -> None:
    with pytest.raises(InnerLoopError, match="6 processes for 5 parts"):
        Walks().share(Ranks(0, 6))


EXPERIMENTS = {
    "sine": "--iterations 4 --tasks 3 --held-out 3",
    "meta-lr": "--growth 2 --depth 10 --epochs 1 --batch 10 --shapes 20 --val-part 0.2 --seeds 1 "
    "--meta-steps 2 --meta-batch 2 --val-batches 2",
    "hyperopt": "--train 20 --val 15 --width 6 --steps 3 --updates 1 --seeds 1",
    "estimate": "--characters 3 --common 8 --rare 4 --updates 2 --every 1 --seeds 1 --steps 2 "
    "--trained 1 --samples 2",
    "learned-loss": "--problem sines --seeds 2 --iterations 2 --tasks 2 --steps 2 --horizon 4 "
    "--held-out 2",
    "learned-optimizer": "--problem quadratics --seeds 2 --episodes 1 --horizon 4 --window 2 "
    "--longer 6 --tasks 2 --held-out 2",
    "maml-rl": "--seeds 2 --iterations 1 --tasks 2 --episodes 2 --horizon 3 --hidden 4 "
    "--test-tasks 2 --test-episodes 2",
}
QUICKEST = ("sine", "learned-optimizer")


@pytest.mark.parametrize(
    "name",
    [n if n in QUICKEST else pytest.param(n, marks=pytest.mark.slow) for n in EXPERIMENTS],
)
def test_every_experiment_can_be_shared(name: str, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    without_data = {k: v for k, v in os.environ.items() if k != "INNERLOOP_DATA"}
    for out, how in (("one", []), ("two", torchrun)):
        flags = [*EXPERIMENTS[name].split(), "--out", str(tmp_path / out)]
        subprocess.run(
            [sys.executable, *how, "-m", "innerloop", name, *flags],
            env=without_data | {"OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
            timeout=600,
        )
    results = [read(tmp_path / out) for out in ("one", "two")]
    if name == "sine":  # its tasks are shared, so sums are in another order
        ours, theirs = (r["mean_squared_error"]["MAML"]["mean"] for r in results)
        assert ours == pytest.approx(theirs, rel=1e-4)
    else:
        ours, theirs = map(without_times, results)
        assert ours == theirs
