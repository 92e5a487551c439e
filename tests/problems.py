"""What the tests share: finite differences, plain torch training as a reference, tiny nets."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import innerloop as il

Loss = Callable[[nn.Module], Tensor]
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def central_difference(f: Callable[[Tensor], Tensor], x: Tensor, eps: float = 1e-5) -> Tensor:
    """The gradient of the scalar function `f` at `x`, one element at a time, to fourth order.

    Adam-like updates bend sharply where a gradient is small: second order is too coarse for them.
    """
    grad = torch.zeros_like(x)
    for i in range(x.numel()):
        unit = torch.zeros_like(x)
        unit.view(-1)[i] = eps
        one, two = (f(x.detach() + k * unit) - f(x.detach() - k * unit) for k in (1, 2))
        grad.view(-1)[i] = (8 * one.item() - two.item()) / (12 * eps)
    return grad


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The distance over the norm of `expected`; not a number where both are zero."""
    return ((actual - expected).norm() / expected.norm()).item()


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def trainable(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def set_weights(model: nn.Module, vector: Tensor) -> None:
    """Copies the flat `vector` into the weights that require grad."""
    targets = trainable(model)
    with torch.no_grad():
        for p, value in zip(targets, vector.split([p.numel() for p in targets]), strict=True):
            p.copy_(value.view_as(p))


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Puts weights, buffers and `.grad` of the model back at the end of the block."""
    kept = [(t, t.detach().clone(), t.grad) for t in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value, grad in kept:
                tensor.copy_(value)
                tensor.grad = grad


def trained(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    loss: Loss,
    steps: int = 2,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain torch training from the flat weights `start`: the last loss and the last weights."""
    with restored(model):
        if start is not None:
            set_weights(model, start)
        optimizer = make_optimizer(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
        return loss(model).detach(), flat(model.parameters()).detach().clone()


def unrolled(
    model: nn.Module, make_optimizer: MakeOptimizer, loss: Loss, steps: int = 2, **settings
) -> tuple[Tensor, Tensor]:
    """The same training through `innerloop_ctx`, as a function of the model's own weights."""
    optimizer = make_optimizer(model.parameters())
    with il.innerloop_ctx(model, optimizer, copy_initial_weights=False, **settings) as (
        fmodel,
        diffopt,
    ):
        for _ in range(steps):
            diffopt.step(loss(fmodel))
        return loss(fmodel), flat(fmodel.parameters())


def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def assert_exact_unroll(
    model: nn.Module, loss: Loss, make_optimizer: MakeOptimizer = sgd, steps: int = 2
) -> None:
    """Weights as plain torch has them, meta-gradient as finite differences, model untouched."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    value, weights = unrolled(model, make_optimizer, loss, steps)
    grads = torch.autograd.grad(value, trainable(model), materialize_grads=True)
    for name, now in model.state_dict().items():
        assert torch.equal(now, before[name]), name

    expected_value, expected_weights = trained(model, make_optimizer, loss, steps)
    assert relative_error(value, expected_value) < 1e-12
    assert relative_error(weights, expected_weights) < 1e-12
    expected_grads = central_difference(
        lambda start: trained(model, make_optimizer, loss, steps, start)[0],
        flat(trainable(model)).detach(),
    )
    assert relative_error(flat(grads), expected_grads) < 1e-6


class Net(nn.Module):
    """2 -> 3 -> 1 with tanh, its two layers as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.last = nn.Linear(3, 1)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encode(x))


def regression(inputs: int = 2, count: int = 5) -> Loss:
    """Mean squared error of `model(x)` on fixed random data."""
    x, y = torch.randn(count, inputs), torch.randn(count, 1)
    return lambda model: ((model(x) - y) ** 2).mean()
