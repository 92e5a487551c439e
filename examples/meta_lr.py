"""Somebody's training loop, and what makes its learning rates learn: the lines marked with `+`.

The loop begins with a rate that is much too small, and without these lines it stays there.
"""

import torch

import innerloop as il

torch.manual_seed(0)
x = torch.randn(1000, 20)
y = (x @ torch.randn(20, 4)).tanh().sum(1, keepdim=True)  # something to learn
batches = list(zip(x[:900].split(50), y[:900].split(50), strict=True))
held_out = (x[900:], y[900:])

model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
groups = [{"params": [p]} for p in model.parameters()]  # + a rate for each tensor
optimizer = torch.optim.SGD(groups, lr=1e-4, momentum=0.9)


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


rates = {"lr": il.Learn(transform="log")}  # + by their logarithm: no rate falls below 0
inner = il.InnerLoop(model, optimizer, loss, learn=rates, backward=il.Remat())  # +
meta = torch.optim.Adam(inner.parameters(), lr=0.5)  # +

for epoch in range(20):
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    il.meta_update(inner, batches[:15], held_out, meta)  # + touches neither model nor optimizer
    inner.write_to(optimizer)  # + from here on, train at the learned rates
    found = ", ".join(f"{group['lr']:.1e}" for group in optimizer.param_groups)
    print(f"epoch {epoch + 1}: held-out loss {loss(model, held_out).item():.3f}, rates {found}")
