"""Learn by a metric that has no gradient: its expectation has one (REINFORCE, Williams 1992)."""

import torch
from torch import nn
from torch.distributions import Bernoulli
from torch.nn.functional import binary_cross_entropy_with_logits

import innerloop as il
from innerloop.estimate import reinforce

STEPS = 20


def examples(count):
    """One in ten is positive, and hard to tell from the others: (x, y)."""
    y = (torch.arange(count) % 10 == 0).float().unsqueeze(1)
    return torch.randn(count, 4) + y, y


def f1(predicted, y):
    """The F1 score of yes-or-no answers: counts, nothing to differentiate."""
    return 2 * (predicted * y).sum() / (predicted.sum() + y.sum()).clamp(min=1)


class Weighted(nn.Module):
    """The training loss; how much a positive example counts is learned."""

    def __init__(self):
        super().__init__()
        self.log_weight = nn.Parameter(torch.zeros(1))

    def forward(self, model, batch):
        x, y = batch
        weights = 1 + y * (self.log_weight.exp() - 1)
        return (weights * binary_cross_entropy_with_logits(model(x), y, reduction="none")).mean()


def val_loss(model, batch):
    """The validation loss: one minus the F1 score of answers drawn from the model."""
    x, y = batch
    law = Bernoulli(logits=model(x))
    return reinforce(law, lambda predicted: 1 - f1(predicted, y), samples=16)


def main(iterations=60):
    torch.manual_seed(0)
    train, val, test = examples(200), examples(300), examples(5000)
    model = nn.Linear(4, 1)
    loss = Weighted()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    inner = il.InnerLoop(model, sgd, loss, learn=("lr",), val_loss=val_loss)

    def score():
        with torch.no_grad():
            return f1((inner.adapt([train] * STEPS)(test[0]) > 0).float(), test[1]).item()

    before = score()
    meta = torch.optim.Adam(inner.parameters(), lr=0.05)
    for _ in range(iterations):
        il.meta_update(inner, [train] * STEPS, val, meta)
    after = score()
    print(f"a positive example counts {loss.log_weight.exp().item():.1f} times;")
    print(f"F1 on test examples: {before:.3f} before, {after:.3f} after")
    return after


if __name__ == "__main__":
    main()
