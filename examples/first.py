"""MAML, and a learned learning rate, on lines in the plane: the first example of the README."""

import torch

import innerloop as il

x = torch.randn(8, 20, 2)  # [tasks, points, 2]
y = (x @ torch.randn(8, 2, 1) > 0).long().squeeze(-1)  # [tasks, points]
support, query = (x[:, :10], y[:, :10]), (x[:, 10:], y[:, 10:])  # to train on, to evaluate on
model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))


def loss(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)


inner = il.InnerLoop(
    model,
    torch.optim.SGD(model.parameters(), lr=0.4),
    loss,
    learn=("init", "lr"),
    backward=il.Remat(),
)
meta = torch.optim.Adam(inner.parameters(), lr=1e-3)

meta_loss = inner([support] * 5, query, tasks=True).mean()  # one loss per task
meta_loss.backward()
meta.step()

support = x[0, :10], y[0, :10]  # one task: no task axis
adapted = inner.adapt([support] * 5)  # test time: a model with the final weights
print(
    f"loss of one task: {loss(model, support):.3f}, after five steps {loss(adapted, support):.3f}"
)
