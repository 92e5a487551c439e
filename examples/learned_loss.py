"""Learn a loss on sines, then train an ordinary net with it (ML³, Bechtle et al. 2020)."""

import math

import torch
from torch import nn
from torch.nn.functional import mse_loss

import innerloop as il
from innerloop.learned import LearnedLoss

STEPS, RATE = 10, 0.1


def sines(tasks):
    """Points of each sine to train on, and to evaluate on: (x, y), [tasks, 30, 1] each."""
    amplitude, phase = 0.1 + 4.9 * torch.rand(tasks, 1, 1), math.pi * torch.rand(tasks, 1, 1)
    x = 10 * torch.rand(2, tasks, 30, 1) - 5
    return list(zip(x, amplitude * torch.sin(x - phase), strict=True))


def new_net():
    return nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 1))


def task_loss(model, batch):
    """The loss of the task."""
    return mse_loss(model(batch[0]), batch[1])


def learn_loss(iterations):
    # It begins as the squared error. Its inputs are the place of each error and the step.
    net, criterion = new_net(), LearnedLoss(form="weighted", extras=1, steps=STEPS)
    sgd = torch.optim.SGD(net.parameters(), lr=RATE)
    # Only the loss is learned: the net starts from new weights every time.
    clip = il.clip_norm(3.0)
    inner = il.InnerLoop(net, sgd, criterion, learn=(), val_loss=task_loss, grad_transform=clip)
    meta = torch.optim.Adam(inner.parameters(), lr=0.02)
    for _ in range(iterations):
        net.load_state_dict(new_net().state_dict())
        (x, y), query = sines(32)
        meta.zero_grad()
        losses = inner([(x, y, x, step) for step in range(STEPS)], query, tasks=il.tasks.vmap())
        (losses + 0.05).log().mean().backward()  # tasks with large losses are not all
        nn.utils.clip_grad_norm_(inner.parameters(), 1.0)
        meta.step()
    return criterion


def train(problems, rate, loss):
    """The mean error of nets trained in anyone's loop: a learned loss is used like any other."""
    errors = []
    for (x, y), query, weights in problems:
        net = new_net()
        net.load_state_dict(weights)
        sgd = torch.optim.SGD(net.parameters(), lr=rate)
        for step in range(STEPS):
            sgd.zero_grad()
            loss(net(x), y, x, step).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 3.0)
            sgd.step()
        errors.append(task_loss(net, query).item() / len(problems))
    return sum(errors)


def main(iterations=100, nets=100):
    torch.manual_seed(0)
    criterion = learn_loss(iterations)
    problems = [(*sines(1), new_net().state_dict()) for _ in range(nets)]  # none was seen
    learned = train(problems, RATE, criterion)
    # The squared error gets the rate that is best for these very sines.
    plain = min(train(problems, 0.01 * 2**k, lambda p, y, *_: mse_loss(p, y)) for k in range(5))
    print(f"squared error after {STEPS} steps: {learned:.2f} with the learned loss,")
    print(f"{plain:.2f} with the squared error itself at its best rate")
    return learned


if __name__ == "__main__":
    main()
