"""Budgets of an inner step: Python calls, files, no value read on the host, no stray device."""

import contextlib
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import innerloop as il

PACKAGE = str(Path(il.__file__).parent)
CALLS, FILES, TASKS = 150, 12, 3

STRATEGIES = {
    "Tape": il.Tape(),
    "Remat": il.Remat(),
    "Remat(every=2)": il.Remat(every=2),
    "Binomial(2)": il.Binomial(2),
    "Forward": il.Forward(),
    "Truncated(2)": il.Truncated(2),
}
WAYS = {
    "alone": lambda: False,
    "loop": il.tasks.loop,
    "vmap": il.tasks.vmap,
    "threads": lambda: il.tasks.threads(2),
    "True": lambda: True,
}
# LBFGS is no row: its line search has to know values.
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
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.1),
}


def small_net(device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)


def squares(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def inner_loop(backward, optimizer="sgd", device="cpu"):
    net = small_net(device)
    made = OPTIMIZERS[optimizer](net.parameters())
    # A truncated gradient does not get back to the initial weights.
    learn = ("lr",) if isinstance(backward, il.Truncated) else ("init", "lr")
    return il.InnerLoop(net, made, squares, learn=learn, backward=backward)


def meta_gradient(inner, steps, tasks=False, device="cpu"):
    shape = (TASKS, 4, 1) if tasks else (4, 1)
    batch = torch.ones(shape, device=device), torch.zeros(shape, device=device)
    inner([batch] * steps, batch, tasks=tasks).sum().backward()


# Python calls and files. ----------------------------------------------------------------------


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


def calls_per_step(backward, tasks):
    """Python calls of one step, forward and backward, and the package's files that they are in."""
    inner = inner_loop(backward)
    meta_gradient(inner, 3, tasks)
    few, many = (python_calls(meta_gradient, inner, steps, tasks) for steps in (3, 13))
    many.subtract(few)
    ours = [name for name, count in many.items() if count and name.startswith(PACKAGE)]
    return many.total() / 10, ours


@pytest.mark.parametrize(
    ("backward", "tasks", "calls", "files"),
    [
        pytest.param(il.Tape(), False, CALLS, FILES, id="Tape"),
        # Two steps, and what Algorithm 1 does between them.
        pytest.param(il.Remat(), False, 450, 18, id="Remat"),
        # Most of these are torch's own, in vmap.
        pytest.param(il.Tape(), il.tasks.vmap(), 1150, 13, id="vmap"),
    ],
)
def test_python_calls_and_files_of_a_step(backward, tasks, calls, files):
    found, ours = calls_per_step(backward, tasks)
    print(f"{found:.0f} Python calls, {len(ours)} files")
    assert found <= calls
    assert len(ours) <= files, sorted(ours)


def eager_step(fmodel, diffopt, x):
    diffopt.step(fmodel(x).square().mean())


@contextlib.contextmanager
def eager_loop(optimizer, track, device="cpu"):
    net = small_net(device)
    opt = OPTIMIZERS[optimizer](net.parameters())
    with il.innerloop_ctx(net, opt, copy_initial_weights=False, track_higher_grads=track) as pair:
        yield net, *pair


@pytest.mark.parametrize("track", [True, False])
def test_python_calls_and_files_of_an_eager_step(track):
    x = torch.randn(4, 1)
    with eager_loop("sgd", track) as (_, fmodel, diffopt):
        for _ in range(2):
            eager_step(fmodel, diffopt, x)
        counts = python_calls(eager_step, fmodel, diffopt, x)
    ours = [name for name in counts if name.startswith(PACKAGE)]
    assert counts.total() <= CALLS, counts
    assert len(ours) <= FILES, ours


# Reads on the host. ---------------------------------------------------------------------------


class HostReads(TorchDispatchMode):
    """Counts where a value of a tensor is read: an accelerator's queue would be waited for."""

    READS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.item.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.nonzero.default,
    )

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.READS:
            self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def reads_in_threads(monkeypatch, counts):
    """Counts in the threads of tasks too; a mode holds for the thread that enters it."""
    module = sys.modules["innerloop.tasks.threads"]
    parallel = module._parallel

    def counted(count, items, function):
        def each(item):
            with HostReads(counts):
                return function(item)

        return parallel(count, items, each)

    monkeypatch.setattr(module, "_parallel", counted)


def reads_of(inner, steps, tasks, counts):
    counts.clear()
    if isinstance(tasks, il.tasks.threads):  # which do without threads under a mode
        meta_gradient(inner, steps, tasks)
    else:
        with HostReads(counts):
            meta_gradient(inner, steps, tasks)
    return dict(counts)


def test_the_mode_sees_host_reads():
    for read in (lambda t: t.item(), bool, lambda t: torch.equal(t, t), torch.nonzero):
        counts = Counter()
        with HostReads(counts):
            read(torch.ones(()))
        assert counts.total() > 0


@pytest.mark.parametrize("way", ["alone", "threads"])
def test_a_read_in_a_loss_is_counted(way, monkeypatch):
    inner, tasks, counts = inner_loop(il.Tape()), WAYS[way](), Counter()
    inner.loss = lambda model, batch: squares(model, batch) * float(batch[0].sum() > 0)
    reads_in_threads(monkeypatch, counts)
    few, many = (reads_of(inner, steps, tasks, counts) for steps in (3, 6))
    assert sum(many.values()) > sum(few.values()) > 0


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_step_reads_a_value_on_the_host(strategy, way, optimizer, monkeypatch):
    inner, tasks, counts = inner_loop(STRATEGIES[strategy], optimizer), WAYS[way](), Counter()
    reads_in_threads(monkeypatch, counts)
    meta_gradient(inner, 3, tasks)
    few, many = (reads_of(inner, steps, tasks, counts) for steps in (3, 6))
    assert many == few


@pytest.mark.parametrize("way", ["alone", "vmap"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_rule_reads_a_value_on_the_host(optimizer, way):
    inner, tasks, counts = inner_loop(il.Remat(), optimizer), WAYS[way](), Counter()
    few, many = (reads_of(inner, steps, tasks, counts) for steps in (3, 6))
    assert many == few


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "muon"])
def test_no_value_is_read_on_the_host_in_an_eager_step(name, track):
    """After the first step, which packs the optimizer's state."""
    x, counts = torch.randn(4, 1), Counter()
    with eager_loop(name, track) as (_, fmodel, diffopt):
        eager_step(fmodel, diffopt, x)
        with HostReads(counts):
            for _ in range(2):
                eager_step(fmodel, diffopt, x)
    assert not counts


# The meta device. -----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("way", ["alone", "vmap"])
@pytest.mark.parametrize("strategy", ["Tape", "Remat", "Binomial(2)", "Forward"])
def test_an_inner_loop_runs_on_the_meta_device(strategy, way, optimizer):
    """No value exists there, and a tensor made on another device raises."""
    inner = inner_loop(STRATEGIES[strategy], optimizer, "meta")
    meta_gradient(inner, 4, WAYS[way](), "meta")
    assert all(p.grad is not None and p.grad.is_meta for p in inner.parameters())


@pytest.mark.parametrize("track", [True, False])
def test_an_eager_loop_runs_on_the_meta_device(track):
    x = torch.randn(4, 1, device="meta")
    with eager_loop("momentum", track, "meta") as (net, fmodel, diffopt):
        for _ in range(3):
            eager_step(fmodel, diffopt, x)
        fmodel(x).square().mean().backward()
    assert all((p.grad is not None) == track for p in net.parameters())
