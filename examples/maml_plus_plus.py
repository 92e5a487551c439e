"""MAML++ (Antoniou et al. 2019): MAML with its training made stable, and learned rates."""

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


STEPS = 5


def main(iterations: int = 1000) -> float:
    torch.manual_seed(0)
    tanh = nn.Tanh()
    model = nn.Sequential(nn.Linear(1, 40), tanh, nn.Linear(40, 40), tanh, nn.Linear(40, 1))
    # A rate for every tensor of the model and every step is learned with the initial weights.
    inner = algorithms.maml_plus_plus(model, loss, steps=STEPS, lr=0.02, tasks=True)
    meta = torch.optim.Adam(inner.parameters(), lr=2e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(meta, max(iterations, 1), eta_min=1e-5)
    for i in range(iterations):
        support, query = sines(tasks=8)
        early = i < iterations // 3
        # First-order gradients and the losses after all steps at first, in the end the real thing.
        inner.first_order = early
        weights = [1 / STEPS] * STEPS if early else [0.0] * (STEPS - 1) + [1.0]
        meta.zero_grad()
        algorithms.multi_step_loss(inner, [support] * STEPS, query, weights).mean().backward()
        meta.step()
        cosine.step()

    # Sine waves that were not seen before.
    support, query = sines(tasks=100)
    with torch.no_grad():
        before = loss(model, query).item()
        after = inner([support] * STEPS, query).mean().item()
    print(f"squared error on new sines: {before:.3f} before adaptation, {after:.3f} after it")
    return after


if __name__ == "__main__":
    main()
