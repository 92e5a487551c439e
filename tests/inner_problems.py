"""The table of inner problems: a tiny model, its loss, batches to train on, one to measure with."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import innerloop as il
from modules import TiedHead
from problems import Net

Loss = Callable[[nn.Module, Any], Tensor]


class Built(NamedTuple):
    """What one inner loop needs, apart from the optimizer."""

    model: nn.Module
    loss: Loss
    train: list[Any]
    val: Any


class Problem(NamedTuple):
    """How to build it, which parameters no optimizer gets, and how to measure if not by the loss.

    Every number of it comes from torch's generator, so the same seed builds the same problem.
    """

    name: str
    build: Callable[[], Built]
    left_out: tuple[str, ...] = ()
    val_loss: Loss | None = None


STEPS = 3


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error, as people write it."""
    return F.mse_loss(model(batch[0]), batch[1])


def classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def pairs(inputs: Callable[[], Tensor], *outputs: int) -> tuple[list[Any], Any]:
    """Different batches for every step and one more to measure with, all with normal targets."""
    *train, val = [(inputs(), torch.randn(outputs)) for _ in range(STEPS + 1)]
    return train, val


# A quadratic, elementwise, of a matrix: its derivatives are written out in the tests. ------------


class Matrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))

    def forward(self) -> Tensor:
        return self.weight


def half_squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    curvature, target = batch
    return 0.5 * (curvature * (model() - target) ** 2).sum()


def quadratic() -> Built:
    *train, val = [(torch.rand(2, 2) + 0.5, torch.randn(2, 2)) for _ in range(STEPS + 1)]
    return Built(Matrix(), half_squares, train, val)


# Layers that a strategy could get wrong. --------------------------------------------------------


def mlp() -> Built:
    return Built(Net(), squares, *pairs(lambda: torch.randn(5, 2), 5, 1))


def convolution() -> Built:
    """Training-mode BatchNorm with both kinds of running statistics.

    No bias before a norm: its gradient is 0 up to rounding, which Adam would scale up to its rate.
    """
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2, bias=False),
        nn.BatchNorm2d(2),
        nn.GELU(),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(2, 2, bias=False),
        nn.BatchNorm1d(2, momentum=None),
        nn.Tanh(),
        nn.Linear(2, 1),
    )
    return Built(model, squares, *pairs(lambda: torch.randn(5, 1, 4, 4), 5, 1))


def dropout() -> Built:
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.4), nn.Linear(4, 1))
    return Built(model, squares, *pairs(lambda: torch.randn(6, 2), 6, 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 2, batch_first=True)
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def lstm() -> Built:
    return Built(Recurrent(), squares, *pairs(lambda: torch.randn(3, 3, 2), 3, 3, 1))


def transformer() -> Built:
    """No bias: that of the keys has a gradient of 0 up to rounding, as softmax ignores it."""
    model = nn.TransformerEncoderLayer(
        4, 2, 3, dropout=0.0, activation="gelu", batch_first=True, bias=False
    )
    return Built(model, squares, *pairs(lambda: torch.randn(2, 3, 4), 2, 3, 4))


def tied() -> Built:
    *train, val = [(torch.randint(4, (2, 4)), torch.randint(4, (2, 4))) for _ in range(STEPS + 1)]
    return Built(TiedHead(), classes, train, val)


class PartlyFrozen(nn.Module):
    """`first` is frozen, and in the optimizer; `scale` would move, but no optimizer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3).requires_grad_(False)
        self.middle = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.randn(3, 3))
        self.last = nn.Linear(3, 1)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))) @ self.scale))


def frozen() -> Built:
    return Built(PartlyFrozen(), squares, *pairs(lambda: torch.randn(5, 2), 5, 1))


# A loss that is learned. ------------------------------------------------------------------------


class LearnedLoss(nn.Module):
    """A small net sees prediction and target; its own weights are part of phi."""

    def __init__(self) -> None:
        super().__init__()
        self.compare = nn.Sequential(nn.Linear(2, 3), nn.Softplus(), nn.Linear(3, 1))
        self.penalty = nn.Parameter(torch.tensor(-1.0))

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        found = self.compare(torch.cat([model(x), y], -1)).mean()
        return found + self.penalty.exp() * sum(p.square().sum() for p in model.parameters())


def learned_loss() -> Built:
    train, val = pairs(lambda: torch.randn(5, 2), 5, 1)
    return Built(Net(), LearnedLoss(), train, val)


def normed(**options: Any) -> Callable[[], Built]:
    """A convolution with batch norm of one kind, and one on vectors."""

    def build() -> Built:
        model = nn.Sequential(
            nn.Conv2d(1, 2, 2, bias=False),
            nn.BatchNorm2d(2, **options),
            nn.GELU(),
            nn.AvgPool2d(3),
            nn.Flatten(),
            nn.Linear(2, 2, bias=False),
            nn.BatchNorm1d(2, **options),
            nn.Tanh(),
            nn.Linear(2, 1),
        )
        return Built(model, squares, *pairs(lambda: torch.randn(5, 1, 4, 4), 5, 1))

    return build


PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem("quadratic", quadratic),
        Problem("mlp", mlp),
        Problem("convolution", convolution),
        Problem("dropout", dropout),
        Problem("lstm", lstm),
        Problem("transformer", transformer),
        Problem("tied", tied),
        Problem("frozen", frozen, left_out=("scale",)),
        Problem("learned_loss", learned_loss, val_loss=squares),
    )
}

NORMS = {
    problem.name: problem
    for problem in (
        Problem("norm", normed()),
        Problem("norm_not_affine", normed(affine=False)),
        Problem("norm_untracked", normed(track_running_stats=False)),
        Problem("norm_bare", normed(affine=False, track_running_stats=False)),
    )
}
"""All kinds of batch norm, where tasks could meet in the statistics."""


# One of them in training, for tests of a single property. ---------------------------------------


class Training:
    """A model trained by SGD with momentum: its leaves, and the measured loss under a strategy."""

    def __init__(self, model: nn.Module, loss: Loss, **options: Any) -> None:
        self.model, self.loss = model, loss
        self.f = il.functional(model)
        self.params = {n: p.detach().clone().requires_grad_() for n, p in self.f.params.items()}
        self.lr = torch.tensor(0.1, requires_grad=True)
        rule = il.optim.sgd(lr=0.5, momentum=0.9)
        self.step = il.inner_step(loss, rule, model, **options)
        self.start = il.State(self.params, self.f.buffers, rule.init(self.params))
        self.meta = il.Meta(opt={"lr": self.lr})

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.params.values(), self.lr]

    def unrolled(self, batches: Any, backward: Any) -> tuple[il.State, Any]:
        return il.unroll(self.step, self.start, self.meta, batches, backward=backward)

    def measured(self, state: il.State, val: Any) -> Tensor:
        out = self.loss(self.f.bind(state.params, state.buffers), val)
        return out[0] if isinstance(out, tuple) else out

    def value(self, train: Any, val: Any, backward: Any) -> Tensor:
        return self.measured(self.unrolled(train, backward)[0], val)

    def grads(self, value: Tensor, *more: Tensor, **options: Any) -> list[Tensor]:
        found = torch.autograd.grad(value, [*self.leaves, *more], materialize_grads=True, **options)
        return list(found)


def training(name: str = "mlp", **options: Any) -> tuple[Training, list[Any], Any]:
    """A problem of the table in training, and its batches."""
    built = PROBLEMS[name].build()
    return Training(built.model, built.loss, **options), built.train, built.val
