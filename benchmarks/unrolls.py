"""One meta-step, by each library and strategy: J steps of SGD, then the gradient of the validation
loss with respect to the initial weights. `memory.py` measures it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import higher
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import innerloop as il
import models
from workloads import Case, Evidence

Batch = tuple[Tensor, Tensor]

_RATE = 0.01  # small: 200 steps on one batch must not diverge
_CLASSES = 5
_COMPILED = " compiled"  # after the name of a strategy


class Problem(NamedTuple):
    """A network and what it learns. A batch is made from a dtype and a seed."""

    about: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.dtype, int], Batch]


def _images(size: int) -> Callable[[torch.dtype, int], Batch]:
    def batch(dtype: torch.dtype, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(size, 1, 28, 28, generator=generator, dtype=dtype)
        return images, torch.arange(size) % _CLASSES

    return batch


def _text(size: int, length: int, vocabulary: int) -> Callable[[torch.dtype, int], Batch]:
    def batch(dtype: torch.dtype, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(vocabulary, (size, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return batch


def _tiny_gpt() -> nn.Module:
    return models.gpt(layers=2, width=32, heads=2, length=32, vocabulary=32)


PROBLEMS = {
    "conv": Problem("4 conv-64 blocks, 28x28, batch 32", models.conv4, _images(32)),
    "gpt": Problem("GPT, 4 layers, width 256, length 256, batch 4", models.gpt, _text(4, 256, 256)),
    "tiny-conv": Problem(
        "4 conv-8 blocks, 28x28, batch 8", lambda: models.conv4(channels=8), _images(8)
    ),
    "tiny-gpt": Problem("GPT, 2 layers, width 32, length 32, batch 2", _tiny_gpt, _text(2, 32, 32)),
}


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def strategy(side: str) -> Any:
    """What the name of a side says: `Remat`, `Binomial(8)`, `Auto(2GB)`; None for `higher`."""
    if side == "higher":
        return None
    name, _, argument = side.removesuffix(_COMPILED).removesuffix(")").partition("(")
    if name == "Auto":
        return il.Auto(memory=argument)
    return getattr(il, name)(*map(int, filter(None, [argument])))


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Any) -> il.InnerLoop:
    return il.InnerLoop(model, optimizer, _loss, learn=("init",), backward=backward)


_programs: dict[tuple[str, str, torch.dtype], il.InnerLoop] = {}
"""Compiled loops: what was compiled for the warm-up is there for what is measured."""


def _parts(
    problem: str, side: str, dtype: torch.dtype
) -> tuple[nn.Module, torch.optim.Optimizer, il.InnerLoop | None]:
    if (problem, side, dtype) in _programs:
        inner = _programs[problem, side, dtype]
        return inner.model, inner.optimizer, inner
    torch.manual_seed(0)
    model = PROBLEMS[problem].model().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    if not side.endswith(_COMPILED):
        return model, optimizer, None
    inner = _programs[problem, side, dtype] = _loop(model, optimizer, strategy(side))
    inner.compile("step")
    return model, optimizer, inner


class MetaStep(NamedTuple):
    """One side, built and ready. `run` takes the number of inner steps."""

    run: Callable[[int], None]
    model: nn.Module
    strategy: Any


def build(problem: str, side: str, dtype: torch.dtype = torch.float32) -> MetaStep:
    """The same weights, data and inner optimizer for every side."""
    model, optimizer, compiled = _parts(problem, side, dtype)
    train, val = (PROBLEMS[problem].batch(dtype, seed) for seed in (1, 2))
    backward = strategy(side)

    def by_higher(steps: int) -> None:
        model.zero_grad()
        ctx = higher.innerloop_ctx(model, optimizer, copy_initial_weights=False)
        with ctx as (fmodel, diffopt):
            for _ in range(steps):
                diffopt.step(_loss(fmodel, train))
            _loss(fmodel, val).backward()

    def by_innerloop(steps: int) -> None:
        model.zero_grad()
        inner = compiled or _loop(model, optimizer, backward)
        inner([train] * steps, val).backward()

    return MetaStep(by_higher if backward is None else by_innerloop, model, backward)


def case(problem: str, side: str, steps: int, dtype: torch.dtype = torch.float32) -> Case:
    """The same with the number of steps fixed, as the clock and the comparison want it."""
    run, model, _ = build(problem, side, dtype)

    def evidence() -> Evidence:
        run(steps)
        return {"weights": [p.grad.clone() for p in model.parameters() if p.grad is not None]}

    return Case(lambda: run(steps), evidence)
