"""Learn a loss on sines, then train an ordinary net with it (ML³, Bechtle et al. 2020)."""

import math

import torch
from torch import nn
from torch.nn.functional import mse_loss

import innerloop as il
from innerloop.learned import LearnedLoss

STEPS = 10


def sines(tasks):
    """Ten points of each sine to train on, ten to be judged by: (x, y), [tasks, 10, 1] each."""
    amplitude, phase = 0.1 + 4.9 * torch.rand(tasks, 1, 1), math.pi * torch.rand(tasks, 1, 1)
    x = 10 * torch.rand(2, tasks, 10, 1) - 5
    return list(zip(x, amplitude * torch.sin(x - phase), strict=True))


def new_net():
    return nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 1))


def judge(model, batch):
    """What a net is wanted for: a small squared error."""
    return mse_loss(model(batch[0]), batch[1])


def learn_loss(iterations):
    net, criterion = new_net(), LearnedLoss()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    # Only the loss is learned: the net starts from new weights every time.
    inner = il.InnerLoop(net, sgd, criterion, learn=(), val_loss=judge, tasks=il.tasks.vmap())
    meta = torch.optim.Adam(inner.parameters(), lr=0.01)
    for _ in range(iterations):
        net.load_state_dict(new_net().state_dict())
        support, query = sines(32)
        meta.zero_grad()
        inner([support] * STEPS, query, tasks=True).mean().backward()
        nn.utils.clip_grad_norm_(inner.parameters(), 10.0)
        meta.step()
    return criterion


def train(criterion, problems, rate):
    """The mean error of nets trained in anyone's loop: a learned loss is used like any other."""
    errors = []
    for (x, y), query, weights in problems:
        net = new_net()
        net.load_state_dict(weights)
        sgd = torch.optim.SGD(net.parameters(), lr=rate)
        for _ in range(STEPS):
            sgd.zero_grad()
            criterion(net(x), y).backward()
            sgd.step()
        errors.append(judge(net, query).item())
    return sum(errors) / len(errors)


def main(iterations=100, nets=100):
    torch.manual_seed(0)
    criterion = learn_loss(iterations)
    # Sines that were not seen, and new weights for each.
    problems = [(*sines(1), new_net().state_dict()) for _ in range(nets)]
    learned = train(criterion, problems, 0.1)
    # The squared error gets the rate that is best for these very sines; with 0.03 it diverges.
    plain = min(train(mse_loss, problems, rate) for rate in (0.002, 0.005, 0.01, 0.02))
    print(f"squared error after {STEPS} steps: {learned:.2f} with the learned loss,")
    print(f"{plain:.2f} with the squared error itself at its best rate")
    return learned


if __name__ == "__main__":
    main()
