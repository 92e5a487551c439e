"""One meta-update of the paper's learning-rate experiment, by each library; and, as a program, its
memory and time in this process, which must be new. `meta_update.py` starts it for every number."""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import higher
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import innerloop as il
import unrolls
from innerloop.models import DenseNetBC
from memory_point import measured

Batch = tuple[Tensor, Tensor]


class Size(NamedTuple):
    """How large a meta-update is; by default as in the paper."""

    steps: int = 15
    batch: int = 16
    val_batches: int = 10
    depth: int = 100


class MetaUpdate(NamedTuple):
    """One side, built and ready; `run` gives the gradient of the rates. [tensors of the model]"""

    run: Callable[[], Tensor]
    model: DenseNetBC


def _batches(count: int, size: int, dtype: torch.dtype, seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, size, 3, 32, 32, generator=generator, dtype=dtype)
    labels = torch.randint(10, (count, size), generator=generator)
    return list(zip(images, labels, strict=True))


def _loss(model: Any, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def _mean_loss(model: Any, batches: list[Batch]) -> Tensor:
    return torch.stack([_loss(model, batch) for batch in batches]).mean()


def build(side: str, size: Size, dtype: torch.dtype = torch.float32) -> MetaUpdate:
    """The same weights, data and optimizer, with its momentum, for every side."""
    torch.manual_seed(0)
    model = DenseNetBC(growth=12, depth=size.depth).to(dtype)
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    _loss(model, _batches(1, size.batch, dtype, 3)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    train = _batches(size.steps, size.batch, dtype, 1)
    val = _batches(size.val_batches, size.batch, dtype, 2)

    def by_higher() -> Tensor:
        rates = [torch.tensor(0.1, dtype=dtype, requires_grad=True) for _ in groups]
        ctx = higher.innerloop_ctx(model, optimizer, override={"lr": rates})
        with ctx as (fmodel, diffopt):
            for batch in train:
                diffopt.step(_loss(fmodel, batch))
            value = _mean_loss(fmodel, val)
        return torch.stack(torch.autograd.grad(value, rates))

    def by_innerloop() -> Tensor:
        inner = il.InnerLoop(
            model,
            optimizer,
            _loss,
            learn=("lr",),
            backward=unrolls.strategy(side),
            val_loss=_mean_loss,
        )
        return torch.autograd.grad(inner(train, val), [inner.settings["lr"]])[0]

    return MetaUpdate(by_higher if side == "higher" else by_innerloop, model)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side")
    parser.add_argument("size", type=int, nargs=4, help="steps, batch, validation batches, depth")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--limit", type=int, required=True, help="bytes of data, then it fails")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    resource.setrlimit(resource.RLIMIT_DATA, (args.limit, args.limit))
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    size = Size(*args.size)
    build(args.side, size._replace(steps=1, val_batches=1)).run()
    run = build(args.side, size).run
    began = time.process_time()
    found = measured(run)
    # On a machine with other work, processor time says more than the clock.
    print(json.dumps(found | {"processor_seconds": time.process_time() - began}))


if __name__ == "__main__":
    main()
