"""CAVIA (Zintgraf et al. 2019): a few numbers tell the model of its task, and only they adapt."""

import math

import torch
from torch import nn

from innerloop import algorithms


def sines(tasks: int, points: int = 10):
    """Points of random sine waves to adapt on, and points to evaluate on: (x, y) each."""
    amplitude, phase = 0.1 + 4.9 * torch.rand(tasks, 1, 1), math.pi * torch.rand(tasks, 1, 1)
    x = 10 * torch.rand(tasks, 2 * points, 1) - 5  # [tasks, points, 1]
    y = amplitude * torch.sin(x - phase)
    return (x[:, :points], y[:, :points]), (x[:, points:], y[:, points:])


def loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


CONTEXT = 5


class Conditional(nn.Module):
    """A net that gets the context beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1 + CONTEXT, 40), nn.Linear(40, 40)
        self.last = nn.Linear(40, 1)

    def forward(self, x, context):
        x = torch.cat([x, context.expand(*x.shape[:-1], CONTEXT)], dim=-1)
        return self.last(self.second(self.first(x).tanh()).tanh())


def main(iterations: int = 1000) -> float:
    torch.manual_seed(0)
    model = Conditional()
    # inner.parameters() are the weights of the model; a task's context starts at zero.
    inner = algorithms.cavia(model, loss, context=CONTEXT, lr=1.0)
    meta = torch.optim.Adam(inner.parameters(), lr=1e-3)
    for _ in range(iterations):
        support, query = sines(tasks=8)
        meta.zero_grad()
        inner([support] * 2, query, tasks=True).mean().backward()
        meta.step()

    # Sine waves that were not seen before.
    support, query = sines(tasks=100)
    with torch.no_grad():
        before = loss(inner.model, query).item()
        after = inner([support] * 2, query, tasks=True).mean().item()
    print(f"squared error on new sines: {before:.3f} before adaptation, {after:.3f} after it")
    return after


if __name__ == "__main__":
    main()
