"""Forward on very long runs: constant memory, and the gradient of the walk back."""

import contextlib
import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import innerloop as il
from inner_problems import Training, squares, training
from strategies import assert_same

STATM = Path("/proc/self/statm")
PAGE = 4096


def resident() -> int:
    """Bytes of memory that the process holds now."""
    return int(STATM.read_text().split()[1]) * PAGE


class Watched:
    """A loss that notes how much memory there is at some of its calls."""

    def __init__(self, *calls: int) -> None:
        self.calls, self.count = calls, 0
        self.memory: list[int] = []

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.count in self.calls:
            self.memory.append(resident())
        self.count += 1
        return (model(batch[0]) - batch[1]).square().mean()


def slope(steps: int, backward: Any, loss: Any) -> tuple[Tensor, Tensor]:
    """The loss of a small net after so many steps of SGD, and its derivative by the rate."""
    torch.manual_seed(0)
    layers = [nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]
    model = nn.Sequential(*layers)
    x = torch.linspace(-2, 2, 32)[:, None]
    batch = (x, torch.sin(2 * x))
    f, rule = il.functional(model), il.optim.sgd(lr=0.5)
    params = {name: p.detach() for name, p in f.params.items()}
    lr = torch.tensor(0.05, requires_grad=True)
    step = il.inner_step(loss, rule, model)
    start = il.State(params, {}, rule.init(params))
    meta = il.Meta(opt={"lr": lr})
    state, _ = il.unroll(step, start, meta, [batch] * steps, backward=backward)
    value = (f(state.params, x + 0.05) - batch[1]).square().mean()
    return value.detach(), torch.autograd.grad(value, lr)[0]


def plain(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


EARLY = 100
GROWTH = 2_000_000
"""Bytes by which a run may grow after its first steps, however long it is.

A graph over all steps grows by 80 kB in each.
"""


def growth(steps: int, backward: Any) -> int:
    # What earlier tests have freed would be used again, and no growth be seen.
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    loss = Watched(EARLY, steps - 1)
    value, grad = slope(steps, backward, loss)
    assert loss.count == steps
    assert value.isfinite() and grad.isfinite() and grad != 0
    early, late = loss.memory
    return late - early


needs_proc = pytest.mark.skipif(not STATM.exists(), reason="reads the memory in use from /proc")


@needs_proc
def test_a_long_run_in_constant_memory() -> None:
    assert growth(300, il.Forward()) < GROWTH


@needs_proc
def test_the_measure_notices_a_graph_over_all_steps() -> None:
    assert growth(300, il.Tape()) > 5 * GROWTH


@needs_proc
@pytest.mark.slow
def test_ten_thousand_steps_in_constant_memory() -> None:
    assert growth(10_000, il.Forward()) < GROWTH


def test_the_first_200_steps_are_those_of_binomial() -> None:
    assert_same(slope(200, il.Forward(), plain), slope(200, il.Binomial(8), plain))


# First order. -----------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def by_a_function_differentiable_once(model: nn.Module, batch: Any) -> Tensor:
    return Square.apply(model(batch[0]) - batch[1]).mean()


def by_a_distance(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    found = model(batch[0])
    return torch.cdist(found, batch[1]).mean(), found


@pytest.mark.parametrize("loss", [by_a_function_differentiable_once, by_a_distance])
def test_first_order_needs_no_second_derivatives(loss: Any) -> None:
    found = []
    for backward in (il.Forward(), il.Tape()):
        torch.manual_seed(0)
        plain, train, val = training()
        loop = Training(plain.model, loss, first_order=True)
        state, outs = loop.unrolled(train, backward)
        total = sum(out.sum() for out in (outs if isinstance(outs, tuple) else [outs]))
        found.append(loop.grads(squares(loop.f.bind(state.params), val) + total))
    assert_same(*found)


# Transforms that write in place. ----------------------------------------------------------------


def clamped(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    for grad in grads.values():
        grad.clamp_(-0.05, 0.05)
    return grads


def clamped_without_a_graph(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        return clamped(grads)


@pytest.mark.parametrize("transform", [clamped, clamped_without_a_graph])
def test_a_transform_that_writes_in_place(transform: Any) -> None:
    found = []
    for backward in (il.Forward(), il.Tape()):
        torch.manual_seed(0)
        loop, train, val = training(grad_transform=transform)
        found.append(loop.grads(loop.value(train, val, backward)))
    assert_same(*found)
