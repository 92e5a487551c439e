"""Learn how much each task's loss counts when a model trains on several tasks at once."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

import innerloop as il

STEPS = 40
TASKS = ("the one that counts", "a related one", "one that misleads")


def examples(count):
    """Inputs, and a target for each task: (x, targets), [count, 8] and [tasks, count, 1]."""
    x = torch.randn(count, 8)
    target = x[:, :4].sum(1, keepdim=True)
    related = target + 0.1 * torch.randn(count, 1)
    return x, torch.stack([target + torch.randn(count, 1), related, x[:, 4:].sum(1, keepdim=True)])


class Weighted(nn.Module):
    """The training loss: a weight for each task is learned, by its logarithm."""

    def __init__(self):
        super().__init__()
        self.log_weights = nn.Parameter(torch.zeros(len(TASKS)))

    def forward(self, model, batch):
        x, targets = batch
        weights = self.log_weights.softmax(0)
        return sum(w * mse_loss(model(x), t) for w, t in zip(weights, targets, strict=True))


def main_loss(model, batch):
    """The validation loss: only the first task counts."""
    x, targets = batch
    return mse_loss(model(x), targets[0])


def main(iterations=60):
    torch.manual_seed(0)
    train, val, test = examples(20), examples(50), examples(1000)
    model = nn.Linear(8, 1)
    loss = Weighted()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = il.InnerLoop(model, sgd, loss, learn=(), val_loss=main_loss)
    with torch.no_grad():
        before = main_loss(inner.adapt([train] * STEPS), test).item()

    meta = torch.optim.Adam(inner.parameters(), lr=0.1)
    for _ in range(iterations):
        il.meta_update(inner, [train] * STEPS, val, meta)

    with torch.no_grad():
        after = main_loss(inner.adapt([train] * STEPS), test).item()
    for task, weight in zip(TASKS, loss.log_weights.softmax(0).tolist(), strict=True):
        print(f"{task:20} counts {weight:.2f}")
    print(f"test error {before:.3f} with equal weights, {after:.3f} with the learned ones")
    return after


if __name__ == "__main__":
    main()
