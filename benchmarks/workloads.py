"""What is timed: one `Workload` per row of the table, each with the target that it is held to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models

Evidence = dict[str, list[Tensor]]


class Case(NamedTuple):
    """One side of a workload, built and ready."""

    run: Callable[[], object]  # what the clock sees
    evidence: Callable[[], Evidence]  # what must be equal on all sides before the clock starts


@dataclass(frozen=True)
class Workload:
    """`sides[-1]` is what the time of every other side is divided by."""

    name: str
    about: str
    sides: tuple[str, ...]
    target: float  # innerloop's time must be at most this many times that of `sides[-1]`
    repeats: int
    build: Callable[[ModuleType | None, torch.dtype], Case]


def _data(dtype: torch.dtype, *shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _seeded(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return build().to(dtype)


def _collect(tensors: list[Tensor] | list[nn.Parameter]) -> list[Tensor]:
    """The gradients, copied: the next backward pass would otherwise add to them."""
    return [t.grad.clone() for t in tensors if t.grad is not None]


# --- enter ------------------------------------------------------------------------------------


def _enter(copy_initial_weights: bool) -> Callable[[ModuleType | None, torch.dtype], Case]:
    def build(lib: ModuleType | None, dtype: torch.dtype) -> Case:
        assert lib is not None
        model = _seeded(models.deep_mlp, dtype)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        x = _data(dtype, 4, 32)

        def run() -> None:
            with lib.innerloop_ctx(model, opt, copy_initial_weights=copy_initial_weights):
                pass

        def evidence() -> Evidence:
            ctx = lib.innerloop_ctx(model, opt, copy_initial_weights=copy_initial_weights)
            with ctx as (fmodel, _):
                out = fmodel(x)
                grads = torch.autograd.grad(out.square().sum(), list(fmodel.parameters()))
            return {"output": [out.detach()], "gradient": list(grads)}

        return Case(run, evidence)

    return build


# --- forward ----------------------------------------------------------------------------------


def _forward(
    network: Callable[[], nn.Module], shape: tuple[int, ...]
) -> Callable[[ModuleType | None, torch.dtype], Case]:
    def build(lib: ModuleType | None, dtype: torch.dtype) -> Case:
        model = _seeded(network, dtype)
        x = _data(dtype, *shape)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        if lib is None:
            model(x).square().mean().backward()
            opt.step()
            forward = model
        else:
            # One step first: the weights of an inner loop are results, not leaves. The patched
            # model outlives the block, as users of the eager interface expect.
            with lib.innerloop_ctx(model, opt) as (fmodel, diffopt):
                diffopt.step(fmodel(x).square().mean())
            forward = fmodel
        return Case(lambda: forward(x), lambda: {"output": [forward(x).detach()]})

    return build


# --- maml -------------------------------------------------------------------------------------

_WAY, _SHOT, _QUERY, _TASKS, _STEPS = 5, 1, 5, 8, 5


def _maml(lib: ModuleType | None, dtype: torch.dtype) -> Case:
    assert lib is not None
    model = _seeded(models.conv4, dtype)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    support = _data(dtype, _TASKS, _WAY * _SHOT, 1, 28, 28, seed=1)
    query = _data(dtype, _TASKS, _WAY * _QUERY, 1, 28, 28, seed=2)
    support_label = torch.arange(_WAY).repeat(_SHOT)
    query_label = torch.arange(_WAY).repeat(_QUERY)

    def run() -> None:
        model.zero_grad()
        for task in range(_TASKS):
            with lib.innerloop_ctx(model, opt, copy_initial_weights=False) as (fmodel, diffopt):
                for _ in range(_STEPS):
                    diffopt.step(F.cross_entropy(fmodel(support[task]), support_label))
                F.cross_entropy(fmodel(query[task]), query_label).backward()

    def evidence() -> Evidence:
        run()
        return {"weights": _collect(list(model.parameters()))}

    return Case(run, evidence)


# --- densenet-adam ----------------------------------------------------------------------------

_BETAS, _ADAM_STEPS = (0.9, 0.999), 3

# Larger than torch's 1e-8, for the comparison's sake: the meta-gradient contains
# eps / (|g| + eps)**2, which magnifies the rounding of the smallest g by up to 1 / eps. A change
# of 1e-15 in the images moved the float64 result by 6e-10 with eps=1e-8, by 2e-12 with 1e-4.
_EPS = 1e-4


def _wheel_eps(step: int) -> float:
    """The eps that makes Adam of the `higher` wheel follow torch at this step (counted from 1).

    torch divides by sqrt(v) / c + eps with c = sqrt(1 - beta2**step); the wheel multiplies the
    rate by c and divides by sqrt(v) + eps. They are equal when the wheel is handed c * eps.
    """
    return _EPS * math.sqrt(1 - _BETAS[1] ** step)


def _trainable_rates(lib: ModuleType, opt: torch.optim.Optimizer) -> list[Tensor]:
    """One rate per group. Only rates: the wheel's derivative with respect to beta2 is wrong.

    The wheel makes them float32 always; all sides get that value, in the dtype of the weights.
    """
    home = lib.optim if lib.__name__ == "higher" else lib
    dtype = opt.param_groups[0]["params"][0].dtype
    rates: list[Tensor] = home.get_trainable_opt_params(opt)["lr"]
    return [rate.detach().float().to(dtype).requires_grad_() for rate in rates]


def _densenet_adam(learn_lr: bool) -> Callable[[ModuleType | None, torch.dtype], Case]:
    def build(lib: ModuleType | None, dtype: torch.dtype) -> Case:
        assert lib is not None
        model = _seeded(models.paper_densenet, dtype)
        groups = [{"params": [p]} for p in model.parameters()]
        opt = torch.optim.Adam(groups, lr=1e-3, betas=_BETAS, eps=_EPS)
        images = _data(dtype, _ADAM_STEPS + 1, 4, 3, 32, 32)
        label = torch.arange(4)
        rates = _trainable_rates(lib, opt) if learn_lr else []

        def unroll(wheel_eps: bool = False) -> None:
            for tensor in [*model.parameters(), *rates]:
                tensor.grad = None
            override = {"lr": rates} if learn_lr else None
            ctx = lib.innerloop_ctx(model, opt, copy_initial_weights=False, override=override)
            with ctx as (fmodel, diffopt):
                for step in range(_ADAM_STEPS):
                    loss = F.cross_entropy(fmodel(images[step]), label)
                    changed = {"eps": [_wheel_eps(step + 1)]} if wheel_eps else None
                    diffopt.step(loss, override=changed)
                F.cross_entropy(fmodel(images[-1]), label).backward()

        def evidence() -> Evidence:
            unroll(wheel_eps=lib.__name__ == "higher")
            found = {"weights": _collect(list(model.parameters()))}
            return found | {"lr": _collect(rates)} if learn_lr else found

        return Case(unroll, evidence)

    return build


# --- the table --------------------------------------------------------------------------------

_PEERS = ("innerloop", "higher")
_WITH_PLAIN = ("innerloop", "higher", "plain")

WORKLOADS = (
    Workload("enter", "enter the context, 120 layers", _PEERS, 0.2, 31, _enter(True)),
    Workload("enter-shared", "same, without copying weights", _PEERS, 0.2, 31, _enter(False)),
    Workload(
        "forward-deep",
        "one forward, 120 layers",
        _WITH_PLAIN,
        1.05,
        31,
        _forward(models.deep_mlp, (4, 32)),
    ),
    Workload(
        "forward-mlp",
        "one forward, MLP 4x256, batch 64",
        _WITH_PLAIN,
        1.05,
        31,
        _forward(models.wide_mlp, (64, 256)),
    ),
    Workload("maml", "MAML, 4 conv-64, 8 tasks x 5 SGD steps", _PEERS, 1.0, 9, _maml),
    Workload(
        "densenet-adam",
        "DenseNet-BC(12, 100), 3 Adam steps, 299 groups",
        _PEERS,
        0.8,
        7,
        _densenet_adam(False),
    ),
    Workload(
        "densenet-adam-lr",
        "same, with a learned rate per tensor",
        _PEERS,
        0.8,
        7,
        _densenet_adam(True),
    ),
)
