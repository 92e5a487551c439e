"""Ten thousand meta-steps of a small problem: memory, open files and threads must stay flat.

Also drops an inner loop again and again, with the garbage collector off: it must be freed at once.
"""

from __future__ import annotations

import argparse
import gc
import os
import threading
import weakref
from pathlib import Path

import torch
from torch import Tensor, nn

import innerloop as il

_PAGE = os.sysconf("SC_PAGE_SIZE")


def _now() -> dict[str, float]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / 1e6
    threads = len(list(Path("/proc/self/task").iterdir()))
    files = len(list(Path("/proc/self/fd").iterdir()))
    return {"MB": resident, "files": files, "threads": threads, "python": threading.active_count()}


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def _made(backward: object) -> il.InnerLoop:
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return il.InnerLoop(model, optimizer, _loss, learn=("init", "lr"), backward=backward)  # type: ignore[arg-type]


def _slope(values: list[float], every: int) -> float:
    """Per thousand meta-steps, by least squares over the second half."""
    y = torch.tensor(values[len(values) // 2 :], dtype=torch.float64)
    x = torch.arange(len(y), dtype=torch.float64) * every / 1000
    x, y = x - x.mean(), y - y.mean()
    return ((x * y).sum() / x.square().sum()).item()


def _soak(name: str, backward: object, way: object, steps: int, every: int) -> None:
    inner = _made(backward)
    meta = torch.optim.Adam(inner.parameters(), lr=1e-4)
    seen: dict[str, list[float]] = {}
    for step in range(steps):
        x = torch.rand(4, 10, 1) * 10 - 5
        batch = (x, x.sin())
        meta.zero_grad()
        inner([batch] * 3, batch, tasks=way).mean().backward()  # type: ignore[arg-type]
        meta.step()
        if step % every == every - 1:
            for key, value in _now().items():
                seen.setdefault(key, []).append(value)
    last = {key: values[-1] for key, values in seen.items()}
    slopes = ", ".join(f"{key} {_slope(values, every):+.3f}" for key, values in seen.items())
    print(f"{name}: {steps} meta-steps; at the end {last}; per 1000 meta-steps: {slopes}")


def _dropped(count: int) -> int:
    """How many of the loops were still alive after they were dropped."""
    gc.disable()
    alive = 0
    for _ in range(count):
        inner = _made(il.Remat())
        x = torch.ones(4, 1)
        inner([(x, x)] * 3, (x, x)).backward()
        gone = weakref.ref(inner)
        del inner
        alive += gone() is not None
    gc.enable()
    return alive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="meta-steps (default: 10000)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    every = max(args.steps // 100, 1)
    for name, backward, way in [
        ("Remat, vmap", il.Remat(), il.tasks.vmap()),
        ("Tape, threads", il.Tape(), il.tasks.threads(2)),
    ]:
        _soak(name, backward, way, args.steps, every)
    print(f"dropped 100 inner loops without garbage collection; still alive: {_dropped(100)}")


if __name__ == "__main__":
    main()
