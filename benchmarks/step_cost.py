"""CPU time of an inner step, as a ratio to plain torch: what the library adds around a step.

    python benchmarks/step_cost.py

The network is tiny, so that the Python around a step counts and its kernels do not. Every round
measures all variants one after the other; the printed ratio is the median over the rounds. A
variant over its budget makes the command fail.
"""

import argparse
import statistics
import sys
import time

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

import innerloop as il

STEPS, RATE = 10, 0.1
BUDGETS = {"Tape": 1.2, "eager": 1.2, "Remat": 2.0, "records": 1.05}
RECORDS = 60_000


def squares(model, batch):
    return mse_loss(model(batch[0]), batch[1])


class Trainer:
    """A loss that is a method of an object with a long history."""

    def __init__(self, records):
        self.log = [{"step": i, "loss": float(i)} for i in range(records)]

    def loss(self, model, batch):
        return squares(model, batch)


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def plain(net, batch):
    """The eight lines of torch that everything is compared to."""
    params = dict(net.named_parameters())
    for _ in range(STEPS):
        loss = mse_loss(functional_call(net, params, (batch[0],)), batch[1])
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        moved = zip(params.items(), grads, strict=True)
        params = {name: p - RATE * g for (name, p), g in moved}
    val = mse_loss(functional_call(net, params, (batch[0],)), batch[1])
    val.backward()


def algorithm1(net, batch):
    """Algorithm 1 written by hand, without any check: the least that ``Remat`` can take."""
    names = [name for name, _ in net.named_parameters()]

    def step(weights, create_graph):
        params = [p.detach().requires_grad_() for p in weights]
        given = dict(zip(names, params, strict=True))
        loss = mse_loss(functional_call(net, given, (batch[0],)), batch[1])
        grads = torch.autograd.grad(loss, params, create_graph=create_graph)
        return params, grads

    weights, kept = list(net.parameters()), []
    for _ in range(STEPS):
        kept.append(weights)
        _, grads = step(weights, create_graph=False)
        with torch.no_grad():
            weights = [p - RATE * g for p, g in zip(weights, grads, strict=True)]
    _, above = step(weights, create_graph=False)
    for weights in reversed(kept):
        params, grads = step(weights, create_graph=True)
        new = [p - RATE * g for p, g in zip(params, grads, strict=True)]
        above = torch.autograd.grad(new, params, above)
    for p, grad in zip(net.parameters(), above, strict=True):
        p.grad = grad


def eager(net, batch):
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    with il.innerloop_ctx(net, optimizer, copy_initial_weights=False) as (model, inner):
        for _ in range(STEPS):
            inner.step(squares(model, batch))
        squares(model, batch).backward()


def inner_loop(net, backward, loss=squares):
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    return il.InnerLoop(net, optimizer, loss, backward=backward)


def variants():
    """By name, a function of no arguments that computes one meta-gradient."""
    net = small_net()
    batch = torch.randn(16, 8), torch.randn(16, 1)
    tape, remat = inner_loop(net, il.Tape()), inner_loop(net, il.Remat())
    few, many = (inner_loop(net, il.Remat(), Trainer(n).loss) for n in (0, RECORDS))
    return {
        "plain": lambda: plain(net, batch),
        "by hand": lambda: algorithm1(net, batch),
        "Tape": lambda: tape([batch] * STEPS, batch).backward(),
        "Remat": lambda: remat([batch] * STEPS, batch).backward(),
        "eager": lambda: eager(net, batch),
        "no records": lambda: few([batch] * STEPS, batch).backward(),
        "records": lambda: many([batch] * STEPS, batch).backward(),
    }


def measure(rounds, repeats):
    """By name, the CPU seconds of each round."""
    runs = variants()
    seconds = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            began = time.process_time()
            for _ in range(repeats):
                run()
            if number:  # the first round warms up
                seconds[name].append(time.process_time() - began)
    return seconds


def ratio(seconds, name, base):
    pairs = zip(seconds[name], seconds[base], strict=True)
    return statistics.median(a / b for a, b in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="interleaved rounds")
    parser.add_argument("--repeats", type=int, default=5, help="meta-gradients in a round")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measure(given.rounds, given.repeats)
    per_step = statistics.median(seconds["plain"]) / given.repeats / STEPS
    print(f"plain torch: {1e6 * per_step:.0f} µs of CPU time per step, backward included")
    by_hand = ratio(seconds, "by hand", "plain")
    print(f"Algorithm 1 by hand / plain {by_hand:.2f}")
    over = False
    for name, budget in BUDGETS.items():
        base = "no records" if name == "records" else "plain"
        found = ratio(seconds, name, base)
        over |= found > budget
        print(f"{name:8} / {base:10} {found:5.2f}  (budget {budget})")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
