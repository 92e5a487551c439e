"""Reptile (Nichol et al. 2018): walk towards the weights that training on a task ends with."""

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


def main(iterations: int = 1000) -> float:
    torch.manual_seed(0)
    tanh = nn.Tanh()
    model = nn.Sequential(nn.Linear(1, 40), tanh, nn.Linear(40, 40), tanh, nn.Linear(40, 1))
    inner = algorithms.reptile(model, loss, lr=0.02)
    # The gradient is the way back, so SGD with a rate of 1 would go all the way to the mean.
    meta = torch.optim.SGD(inner.parameters(), lr=0.3)
    for _ in range(iterations):
        points, more = sines(tasks=8)
        meta.zero_grad()
        # There is no validation set: all points are trained on.
        inner([points, more] * 5, None, tasks=True).mean().backward()
        meta.step()

    # Sine waves that were not seen before.
    support, query = sines(tasks=100)
    with torch.no_grad():
        before = loss(model, query).item()
        adapted = inner.adapt([support] * 10, tasks=True)
        after = loss(adapted, query).item()
    print(f"squared error on new sines: {before:.3f} before adaptation, {after:.3f} after it")
    return after


if __name__ == "__main__":
    main()
