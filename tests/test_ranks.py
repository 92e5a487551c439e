"""Several processes: the same meta-gradient, the same curve, and nothing lost when one dies."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import innerloop as il
from commands import untimed
from innerloop.experiments.framework.ranks import ALONE, Ranks
from processes import leave_group

TASKS = 4
STRATEGIES = {
    "tape": il.Tape(),
    "remat": il.Remat(),
    "binomial": il.Binomial(2),
    "forward": il.Forward(),
    "truncated": il.Truncated(2),
    "implicit": il.Implicit(),
    "auto": il.Auto(),
}
WAYS: dict[str, Any] = {
    "loop": il.tasks.loop(),
    "vmap": il.tasks.vmap(),
    "threads": il.tasks.threads(2),
    "any": True,
}
CASES = [(name, way) for name in STRATEGIES for way in ("loop", "threads")]
CASES += [("tape", "vmap"), ("remat", "any")]


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class Decayed(nn.Module):
    """A loss with a learned decay, which has one minimum for a linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(0.5))

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squared(model, batch) + self.decay * sum(
            p.square().sum() for p in model.parameters()
        )


def learner(strategy: str) -> tuple[il.InnerLoop, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # also in processes that are new
    x = torch.randn(TASKS, 5, 2)
    batch = (x, x.sum(-1, keepdim=True).sin())
    if strategy == "implicit":
        linear = nn.Linear(2, 1)
        descent = torch.optim.SGD(linear.parameters(), lr=0.2)
        how: dict[str, Any] = {"learn": (), "val_loss": squared, "backward": STRATEGIES[strategy]}
        return il.InnerLoop(linear, descent, Decayed(), **how), batch
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    few = strategy in ("forward", "truncated")
    learn = ("lr", "momentum") if few else ("init", "lr", "momentum")
    inner = il.InnerLoop(model, optimizer, squared, learn=learn, backward=STRATEGIES[strategy])
    return inner, batch


def gradients(strategy: str, way: str, ranks: Ranks = ALONE) -> list[Tensor]:
    """Of the mean over this process's tasks, at the second call."""
    inner, batch = learner(strategy)
    own = ranks.share(TASKS)
    batch = (batch[0][own], batch[1][own])
    module: Any = DistributedDataParallel(inner) if ranks.size > 1 else inner
    fired: list[Tensor] = []
    for p in inner.parameters():
        p.register_post_accumulate_grad_hook(fired.append)
    for _ in range(2):  # a wrapper complains at the second if it missed something in the first
        fired.clear()
        inner.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The parameter .* has a hook")  # these are meant
            steps = 100 if strategy == "implicit" else 3  # to its minimum
            losses = module([batch] * steps, batch, tasks=WAYS[way])
        losses.mean().backward()
    assert len(fired) == len({id(p) for p in fired})  # each once
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in inner.parameters()]


def join(rank: int, count: int, store: str) -> Ranks:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=count)
    return Ranks(rank, count)


def by_wrapper(rank: int, count: int, store: str) -> None:
    ranks = join(rank, count, store)
    found = {case: gradients(*case, ranks) for case in CASES}
    torch.save(found, f"{store}.{rank}")
    leave_group()


def by_sum(rank: int, count: int, store: str) -> None:
    """Shares of different sizes, and a parameter that no or only one process has a gradient for."""
    ranks = join(rank, count, store)
    params = [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3), torch.zeros(1), torch.ones(1)]
    params[0].grad = torch.full_like(params[0], rank + 1.0)
    params[1].grad = torch.full_like(params[1], 10.0 * (rank + 1))
    if rank == 1:
        params[2].grad = torch.tensor([7.0])
    ranks.sum_gradients(params)
    own = torch.arange(5)[ranks.share(5)]
    found = {
        "sums": [p.grad for p in params],
        "assembled": ranks.assemble(own, 5),
        "broadcast": [ranks.broadcast(lambda: b"state"), ranks.broadcast(lambda: None)],
        "gathered": ranks.gather("x" * rank),
        "any": [*ranks.any(rank == count - 1), *ranks.any(False)],
    }
    try:
        ranks.broadcast(failing)
    except il.InnerLoopError as error:
        found["error"] = str(error)
    ranks.agree({"--tasks": 3})
    try:
        ranks.agree({"--way": 5, "--tasks": max(rank, 1)})
    except il.InnerLoopError as error:
        found["different"] = str(error)
    torch.save(found, f"{store}.{rank}")
    leave_group()


def by_leaving(rank: int, count: int, store: str) -> None:
    """The last one ends while the others wait for it."""
    ranks = join(rank, count, store)
    ranks.any(True)
    found = {}
    if rank < count - 1:
        try:
            ranks.sum_gradients([torch.ones(1)])
        except il.InnerLoopError as error:
            found["lost"] = str(error)
    torch.save(found, f"{store}.{rank}")
    os._exit(0)


def failing() -> None:
    raise il.InnerLoopError("of the first")


def sharded(what: str) -> il.InnerLoop:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(2, 1)
    if what == "model":
        fully_shard(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "learned optimizer":
        optimizer = il.learned.MLPOptimizer()
    learn = {"settings": ("lr",)}.get(what, ("init",))
    inner = il.InnerLoop(model, optimizer, squared, learn=learn)
    if what != "model":
        fully_shard(inner)
    return inner


SHARDED = ("model", "inner", "settings", "learned optimizer")


def by_shards(rank: int, count: int, store: str) -> None:
    join(rank, count, store)
    batch = (torch.ones(4, 2), torch.ones(4, 1))
    found = {}
    for what in SHARDED:
        inner = sharded(what)
        try:
            inner([batch], batch)
        except il.RequirementError as error:
            found[what] = str(error)
    torch.save(found, f"{store}.{rank}")
    leave_group()


def spawn(function: Any, count: int, folder: Path) -> list[Any]:
    store = str(folder / "store")
    torch.multiprocessing.spawn(function, (count, store), nprocs=count)
    return [torch.load(f"{store}.{rank}") for rank in range(count)]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_distributed_data_parallel_has_the_meta_gradient_of_one_process(
    count: int, tmp_path: Path
) -> None:
    alone = {case: gradients(*case) for case in CASES}
    for found in spawn(by_wrapper, count, tmp_path):
        for name, expected in alone.items():
            for ours, theirs in zip(found[name], expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_sharded_weights_are_refused(tmp_path: Path) -> None:
    for found in spawn(by_shards, 2, tmp_path):
        for what in SHARDED:
            assert "fully_shard" in found[what] and "DistributedDataParallel" in found[what]


def test_exchanges(tmp_path: Path) -> None:
    for found in spawn(by_sum, 3, tmp_path):
        a, b, c, d = found["sums"]
        assert (a == 6).all() and (b == 60).all() and c.item() == 7 and d is None
        assert found["assembled"].tolist() == [0, 1, 2, 3, 4]
        assert found["broadcast"] == [b"state", None]
        assert found["gathered"] == ["", "x", "xx"] and found["error"] == "of the first"
        assert found["any"] == [True, False]
        assert "Process 2 of 3 has other settings" in found["different"]
        assert "--tasks 2, not 1" in found["different"] and "--way" not in found["different"]


def test_a_process_that_is_left_alone_says_so(tmp_path: Path) -> None:
    left, _ = spawn(by_leaving, 2, tmp_path)
    assert "another one has ended" in left["lost"]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_shares_are_a_partition(count: int) -> None:
    for total in range(12):
        each = [range(total)[Ranks(rank, count).share(total)] for rank in range(count)]
        assert [task for share in each for task in share] == list(range(total))
        assert max(map(len, each)) - min(map(len, each)) <= 1


FLAGS = {
    "--model": "mlp",
    "--filters": "8",
    "--steps": "2",
    "--tasks": "4",
    "--query": "2",
    "--epoch": "2",
    "--val-tasks": "6",
    "--test-tasks": "8",
    "--ensemble": "2",
    "--tasks-by": "loop",
    "--precision": "float64",
}


def launch(count: int, out: Path, *more: str, restarts: int = 0) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    command += ["--standalone", "--max-restarts", str(restarts), "-m", "innerloop", "maml"]
    return subprocess.Popen(
        [*command, *(word for pair in FLAGS.items() for word in pair), "--out", str(out), *more],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return said


def test_two_processes_learn_as_one_does(tmp_path: Path) -> None:
    alone = launch(1, tmp_path / "1", "--iterations", "6")
    shared = launch(2, tmp_path / "2", "--iterations", "6")
    finish(alone)
    assert finish(shared).count("on 8 test tasks") == 1
    two, one = (json.loads(untimed(tmp_path / name))[:-1] for name in "21")
    for ours, theirs in zip(two, one, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-9)
        assert ours["val_accuracy"] == pytest.approx(theirs["val_accuracy"])
    assert len(list((tmp_path / "2").glob("events*"))) == 1


@pytest.mark.slow
def test_a_killed_process_is_started_again_and_nothing_is_lost(tmp_path: Path) -> None:
    more = ["--iterations", "120", "--epoch", "4"]
    finish(launch(2, tmp_path / "whole", *more))
    chance = random.Random(0)
    process = launch(2, tmp_path / "killed", *more, restarts=20)
    for _ in range(5):
        time.sleep(8 + 4 * chance.random())
        workers = _children(process.pid)
        if process.poll() is not None or not workers:
            break
        os.kill(chance.choice(workers), signal.SIGKILL)
    finish(process)
    assert untimed(tmp_path / "killed") == untimed(tmp_path / "whole")


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []
