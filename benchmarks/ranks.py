"""Processes that share a meta-batch: how far their meta-gradient is from that of one, and how fast.

Needs an environment with torch-innerloop[experiments]; every process has one thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from innerloop import data, models
from innerloop.experiments.framework.ranks import Ranks
from innerloop.experiments.maml.learner import FewShot
from innerloop.experiments.maml.settings import Config

_WARM, _TIMED = 2, 10


def _learner(dtype: torch.dtype, filters: int) -> FewShot:
    torch.manual_seed(0)
    model = models.build("vgg", in_channels=1, classes=5, filters=filters).to(dtype)
    return FewShot(model, Config())


def _gradient(episode: data.Episode, ranks: Ranks) -> torch.Tensor:
    learner = _learner(torch.float64, 16)
    learner.outer.ranks = ranks
    learner.update(episode, [0.0] * 4 + [1.0], first_order=False)
    grads = [p.grad for p in learner.inner.parameters() if p.grad is not None]
    return torch.cat([g.flatten() for g in grads])


def _seconds(episode: data.Episode, ranks: Ranks) -> float:
    """The median of some updates."""
    learner = _learner(torch.float32, 64)
    learner.outer.ranks = ranks
    found = []
    for _ in range(_WARM + _TIMED):
        ranks.any(True)  # all begin together
        began = time.perf_counter()
        learner.update(episode, [0.0] * 4 + [1.0], first_order=False)
        found.append(time.perf_counter() - began)
    return statistics.median(found[_WARM:])


def _process(rank: int, count: int, tasks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{count}"
    dist.init_process_group("gloo", store, rank=rank, world_size=count)
    ranks = Ranks(rank, count)
    images = data.glyphs(train=40, val=5, test=5).train
    episode = data.Sampler(images, way=5, shot=1, query=5, tasks=tasks, seed=0).sample()
    found: dict[str, Any] = {"gradient": _gradient(episode, ranks)}
    found["seconds"] = _seconds(episode, ranks)
    if rank == 0:
        torch.save(found, f"{folder}/{count}.pt")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,4", help="default: 1,2,4")
    parser.add_argument("--tasks", type=int, default=8, help="of a meta-batch (default: 8)")
    args = parser.parse_args()
    counts = [int(word) for word in args.ranks.split(",")]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in dict.fromkeys([1, *counts]):
            torch.multiprocessing.spawn(_process, (count, args.tasks, folder), nprocs=count)
            found[count] = torch.load(Path(folder) / f"{count}.pt")
    one = found[1]
    print("MAML++, vgg with 64 filters, 5-way 1-shot, 5 steps, one thread for each process")
    print("ranks  gradient difference (float64, 16 filters)  seconds an update  speed-up")
    for count in counts:
        own = found[count]
        scale = one["gradient"].abs().max()
        difference = ((own["gradient"] - one["gradient"]).abs().max() / scale).item()
        speed = one["seconds"] / own["seconds"]
        print(f"{count:5}  {difference:41.1e}  {own['seconds']:17.3f}  {speed:8.2f}")


if __name__ == "__main__":
    main()
