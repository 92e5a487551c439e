"""Learn a weight for each training example, so that wrong labels count less (Ren et al. 2018)."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import innerloop as il

STEPS = 30


def points(count):
    """Two clouds in five dimensions: (x, y)."""
    y = torch.arange(count) % 2
    return torch.randn(count, 5) + 1.2 * (2.0 * y[:, None] - 1), y


class Weighted(nn.Module):
    """The training loss; its parameters are what is learned: one number for each example."""

    def __init__(self, count):
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(count))

    def forward(self, model, batch):
        x, y = batch
        return (self.raw.sigmoid() * cross_entropy(model(x), y, reduction="none")).mean()


def val_loss(model, batch):
    """The validation loss: all examples alike."""
    return cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).float().mean().item()


def main(iterations=60, count=100):
    torch.manual_seed(0)
    (x, y), clean, test = points(count), points(30), points(1000)
    wrong = torch.arange(count) < 2 * count // 5  # 40 % of the labels
    train = [(x, torch.where(wrong, 1 - y, y))] * STEPS

    model = nn.Linear(5, 2)
    loss = Weighted(count)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    inner = il.InnerLoop(model, sgd, loss, learn=(), val_loss=val_loss)
    with torch.no_grad():
        before = accuracy(inner.adapt(train), test)

    meta = torch.optim.Adam(inner.parameters(), lr=0.2)
    for _ in range(iterations):
        il.meta_update(inner, train, clean, meta)

    with torch.no_grad():
        after = accuracy(inner.adapt(train), test)
    weights = loss.raw.detach().sigmoid()
    print(f"weights: {weights[wrong].mean():.2f} of wrong labels, {weights[~wrong].mean():.2f} of")
    print(f"right ones; test accuracy {100 * before:.1f} % before, {100 * after:.1f} % after")
    return after


if __name__ == "__main__":
    main()
