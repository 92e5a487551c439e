"""Learning to learn by gradient descent by gradient descent (Andrychowicz et al. 2016).

An LSTM is trained to be an optimizer of random quadratics |Wθ - y|², and is then used as an
ordinary torch.optim.Optimizer in a loop that knows nothing of how it came to be.
"""

import torch
from torch import nn

import innerloop as il
from innerloop.learned import LSTMOptimizer


class Point(nn.Module):
    """The simplest model: its weights are what is to be found."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(10))


def loss(model, problem):
    matrix, target = problem
    return (matrix @ model.theta - target).square().sum()


def train_with(optimizer, model, problem, steps=100) -> float:
    """Anyone's training loop; the mean loss over its steps."""
    total = 0.0
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model, problem)
        value.backward()
        optimizer.step()
        total += value.item()
    return total / steps


def main(iterations: int = 50, problems: int = 10) -> float:
    torch.manual_seed(0)
    learned = LSTMOptimizer()
    # A run of 100 steps is differentiated 20 steps at a time, and goes on in between. The inner
    # gradients are taken as constants, as in the paper.
    backward = il.Truncated(20, carry=True)
    inner = il.InnerLoop(Point(), learned, loss, learn=(), backward=backward, first_order=True)
    meta = torch.optim.Adam(learned.parameters(), lr=0.01)
    for _ in range(iterations):
        inner.restart()
        many = torch.randn(64, 10, 10), torch.randn(64, 10)  # 64 quadratics at once
        for _ in range(5):
            meta.zero_grad()
            # What counts is the loss at every step, not at the last one alone.
            adapted = inner.adapt([many] * 20, tasks=il.tasks.vmap())
            adapted.losses.mean().backward()
            nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
            meta.step()

    by_lstm = by_adam = 0.0
    for _ in range(problems):  # that were not seen before
        problem = torch.randn(10, 10), torch.randn(10)
        model = Point()
        by_lstm += train_with(learned.as_torch_optimizer(model.parameters()), model, problem)
        model = Point()
        by_adam += train_with(torch.optim.Adam(model.parameters(), lr=0.18), model, problem)
    print(f"mean loss over 100 steps: {by_lstm / problems:.3f} with the learned optimizer,")
    print(f"{by_adam / problems:.3f} with Adam at a rate that was tuned for such problems")
    return by_lstm / problems


if __name__ == "__main__":
    main()
