"""Budgets of a step of the eager interface: Python calls, files, and no reads on the host."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import innerloop as il

PACKAGE = str(Path(il.__file__).parent)
CALLS, FILES = 150, 12


def small_net(device="cpu"):
    return nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)


def one_step(fmodel, diffopt, x):
    diffopt.step(fmodel(x).square().mean())


def python_calls(function, *args):
    """How often each file's functions were called, by file."""
    counts = Counter()

    def profile(frame, event, _):
        if event == "call":
            counts[frame.f_code.co_filename] += 1

    sys.setprofile(profile)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return counts


@pytest.mark.parametrize("track", [True, False])
def test_python_calls_and_files_of_a_step(track):
    net, x = small_net(), torch.randn(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with il.innerloop_ctx(net, opt, copy_initial_weights=False, track_higher_grads=track) as (
        fmodel,
        diffopt,
    ):
        for _ in range(2):
            one_step(fmodel, diffopt, x)
        counts = python_calls(one_step, fmodel, diffopt, x)
    ours = [name for name in counts if name.startswith(PACKAGE)]
    assert counts.total() <= CALLS, counts
    assert len(ours) <= FILES, ours


class NoHostReads(TorchDispatchMode):
    """Raises where a value of a tensor is read: an accelerator's queue would be waited for."""

    READS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.nonzero.default,
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.READS:
            raise AssertionError(f"{func} was called inside a step")
        return func(*args, **(kwargs or {}))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "tensor_rate": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1, requires_grad=True)),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def test_the_mode_sees_host_reads():
    for read in (lambda t: t.item(), bool, lambda t: torch.equal(t, t)):
        with pytest.raises(AssertionError, match="inside a step"), NoHostReads():
            read(torch.ones(()))


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_value_is_read_on_the_host_in_a_step(name, track):
    """After the first step, which packs the optimizer's state."""
    net, x = small_net(), torch.randn(4, 1)
    opt = OPTIMIZERS[name](net.parameters())
    with il.innerloop_ctx(net, opt, copy_initial_weights=False, track_higher_grads=track) as (
        fmodel,
        diffopt,
    ):
        one_step(fmodel, diffopt, x)
        with NoHostReads():
            for _ in range(2):
                one_step(fmodel, diffopt, x)


@pytest.mark.parametrize("track", [True, False])
def test_an_inner_loop_runs_on_the_meta_device(track):
    """No value exists there, and a tensor made on another device raises."""
    net, x = small_net("meta"), torch.randn(4, 1, device="meta")
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with il.innerloop_ctx(net, opt, copy_initial_weights=False, track_higher_grads=track) as (
        fmodel,
        diffopt,
    ):
        for _ in range(3):
            one_step(fmodel, diffopt, x)
        fmodel(x).square().mean().backward()
    assert all((p.grad is not None) == track for p in net.parameters())
