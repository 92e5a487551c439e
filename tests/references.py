"""What `InnerLoop` is compared with: plain training, the paper's loop by hand, and differences."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = Any


class Net(nn.Module):
    """2 -> 3 -> 1 with tanh, its body and its head as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.head = nn.Linear(3, 1)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def batches(count: int, *lead: int, inputs: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Different regression batches; `lead` are axes before that of the examples."""
    return [(torch.randn(*lead, 5, inputs), torch.randn(*lead, 5, 1)) for _ in range(count)]


# Plain training. --------------------------------------------------------------------------------


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Any],
    train: Iterable[Batch],
    scheduler: Any = None,
    clip: Callable[[list[Tensor]], Any] | None = None,
) -> list[Tensor]:
    """What people write without this library; changes model, optimizer and scheduler."""
    losses = []
    for batch in train:
        optimizer.zero_grad()
        value = loss(model, batch)
        value = value[0] if isinstance(value, tuple) else value
        value.backward()
        if clip is not None:
            clip([p for p in model.parameters() if p.grad is not None])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(value.detach())
    optimizer.zero_grad()
    return losses


# The paper's loop by hand, with ``autograd.grad``. ------------------------------------------------


class Sgd(NamedTuple):
    """The rule of SGD for one parameter; settings may be numbers or tensors of its shape."""

    lr: Any
    momentum: Any = 0.0
    weight_decay: Any = 0.0

    def __call__(self, param: Tensor, grad: Tensor, state: Any) -> tuple[Tensor, Any]:
        grad = grad + self.weight_decay * param
        buffer = grad if state is None else self.momentum * state + grad
        return param - self.lr * buffer, buffer


class Adam(NamedTuple):
    """The rule of Adam for one parameter."""

    lr: Any
    betas: Any = (0.9, 0.999)
    eps: Any = 1e-8
    weight_decay: Any = 0.0

    def __call__(self, param: Tensor, grad: Tensor, state: Any) -> tuple[Tensor, Any]:
        grad = grad + self.weight_decay * param
        first, second, time = (0.0, 0.0, 0) if state is None else state
        (one, two), time = self.betas, time + 1
        first = one * first + (1 - one) * grad
        second = two * second + (1 - two) * grad**2
        root = (second / (1 - two**time)).sqrt()
        return param - self.lr * first / (1 - one**time) / (root + self.eps), (first, second, time)


def by_hand(
    params: dict[str, Tensor],
    loss: Callable[[dict[str, Tensor], Batch], Tensor],
    train: Sequence[Batch],
    rule: Callable[[int, str], Callable[[Tensor, Tensor, Any], tuple[Tensor, Any]]],
    *,
    trained: Iterable[str] | None = None,
    first_order: bool = False,
) -> dict[str, Tensor]:
    """Weights after one step per batch, with a graph; ``rule(step, name)`` updates one of them."""
    names = list(params if trained is None else trained)
    state: dict[str, Any] = dict.fromkeys(names)
    for step, batch in enumerate(train):
        # Copies: the gradient is the partial derivative by each weight.
        own = {name: value.clone() for name, value in params.items()}
        value = loss(own, batch)
        value = value[0] if isinstance(value, tuple) else value
        grads = torch.autograd.grad(
            value, [own[n] for n in names], create_graph=True, materialize_grads=True
        )
        params = dict(params)
        for name, grad in zip(names, grads, strict=True):
            grad = grad.detach() if first_order else grad
            params[name], state[name] = rule(step, name)(params[name], grad, state[name])
    return params


def called(model: nn.Module, params: dict[str, Tensor]) -> Callable[..., Any]:
    """The model as a function of its inputs, with these weights."""
    return lambda *args: torch.func.functional_call(model, params, args)


# Differences. -----------------------------------------------------------------------------------


def difference(
    value: Callable[[], Tensor],
    tensors: Sequence[Tensor],
    directions: Sequence[Tensor],
    eps: float = 1e-4,
) -> float:
    """The derivative of ``value()`` along a direction of ``tensors``, to fourth order."""
    found = {}
    kept = [t.detach().clone() for t in tensors]
    with torch.no_grad():
        for k in (-2, -1, 1, 2):
            for tensor, before, direction in zip(tensors, kept, directions, strict=True):
                tensor.copy_(before + k * eps * direction)
            found[k] = value().item()
        for tensor, before in zip(tensors, kept, strict=True):
            tensor.copy_(before)
    return (8 * (found[1] - found[-1]) - (found[2] - found[-2])) / (12 * eps)


def assert_derivative(
    value: Callable[[], Tensor],
    tensors: Iterable[Tensor],
    *,
    eps: float = 1e-4,
    tolerance: float = 1e-7,
    directions: int = 1,
    relative: bool = False,
) -> list[Tensor]:
    """Backward of ``value()`` agrees with differences along random directions of ``tensors``.

    ``relative`` scales each direction by the values, for tensors of very different sizes. Returns
    the gradients.
    """
    tensors = list(tensors)
    grads = torch.autograd.grad(value(), tensors, materialize_grads=True)
    for _ in range(directions):
        vectors = [torch.randn_like(t) * (t.detach() if relative else 1.0) for t in tensors]
        expected = difference(value, tensors, vectors, eps)
        pairs = zip(grads, vectors, strict=True)
        found = sum((g * v).sum() for g, v in pairs).item()  # type: ignore[union-attr]
        size = sum((g * v).norm() ** 2 for g, v in zip(grads, vectors, strict=True)) ** 0.5
        assert size > 0, "no gradient at all"
        assert abs(found - expected) <= tolerance * max(abs(expected), float(size)), (
            found,
            expected,
        )
    return list(grads)


def assert_close(
    actual: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float = 1e-12
) -> None:
    """Tensor by tensor, relative to the norm of the expected one; zeros are met by zeros."""
    for number, (a, e) in enumerate(itertools.zip_longest(actual, expected)):
        assert a is not None and e is not None, "not as many tensors"
        assert a.shape == e.shape, (number, a.shape, e.shape)
        assert a.dtype == e.dtype, (number, a.dtype, e.dtype)
        if not (e.is_floating_point() or e.is_complex()):
            assert torch.equal(a, e), (number, a, e)
            continue
        gap, size = (a.detach() - e.detach()).norm(), e.detach().norm()
        assert gap <= tolerance * size, (number, (gap / size).item(), a, e)
