"""Learn where nothing is differentiable: evolution strategies in the place of the backward pass."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import innerloop as il
from innerloop.estimate import evolution

STEPS = 15


def points(count):
    """Four clouds on a line, of which the outer two are one class: (x, y)."""
    cloud = torch.arange(count) % 4
    x = torch.randn(count, 1) * 0.5 + 2.0 * cloud[:, None] - 3
    return x, ((cloud == 0) | (cloud == 3)).long()


def mistakes(model, batch):
    """The share of wrong answers: it has no gradient at all."""
    return (model(batch[0]).argmax(1) != batch[1]).float().mean()


def main(iterations=80):
    torch.manual_seed(0)
    train, val, test = points(40), points(400), points(4000)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    def loss(model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    # Rates of each tensor, by their logarithm: a perturbation is a factor.
    learn = {"lr": il.Learn(per="parameter", transform="log")}
    inner = il.InnerLoop(model, sgd, loss, learn=learn, val_loss=mistakes)
    # It is called like the inner loop, and backward() leaves an estimate in .grad.
    evolved = evolution(inner, samples=16, sigma=0.3, seed=0)

    def error():
        with torch.no_grad():
            return mistakes(inner.adapt([train] * STEPS), test).item()

    before = error()
    meta = torch.optim.Adam(inner.parameters(), lr=0.1)
    for _ in range(iterations):
        meta.zero_grad()
        evolved([train] * STEPS, val).backward()
        meta.step()
    after = error()
    rates = ", ".join(f"{rate:.2f}" for rate in inner.hyper["lr"].tolist())
    print(f"learned rates: {rates}")
    print(f"wrong answers: {100 * before:.1f} % before, {100 * after:.1f} % after")
    return after


if __name__ == "__main__":
    main()
