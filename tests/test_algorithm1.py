r"""Algorithm 1 on two steps of a scalar, by hand.

The inner losses are ℓ_j(θ, φ) = ½ φ x_j θ² + ⅓ θ³, the optimizer is SGD with weight decay ω,
opt(θ, γ, G) = θ - γ (G + ω θ), and the outer loss is ½ θ₂². Its local derivatives are::

    G_j             = φ x_j θ_j + θ_j²          (line 5)
    ∇_θ G_j         = φ x_j + 2 θ_j             (the Hessian of line 14)
    ∇_φ G_j         = x_j θ_j                   (line 13)
    O_j             = -γ                        (line 11)
    ∇_γ opt         = -(G_j + ω θ_j)            (line 12, θ and G held fixed)
    ∇_θ opt         = 1 - γ ω                   (line 14, G held fixed)

so that, from B_2 = θ_2 down::

    A_opt  ← A_opt  - B_{j+1} (G_j + ω θ_j)
    A_loss ← A_loss - B_{j+1} γ x_j θ_j
    B_j    = B_{j+1} (1 - γ ω - γ (φ x_j + 2 θ_j))

With θ₀ = 1, φ = 2, γ = 0.1, x = (1, 3) these are the numbers below.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import innerloop as il
from strategies import ALL

PHI, LR, START, DATA = 2.0, 0.1, 1.0, (1.0, 3.0)


class ByHand(NamedTuple):
    """The numbers of one weight decay, in the order in which they are found."""

    decay: float
    theta: tuple[float, float, float]
    b: tuple[float, float, float]
    a_opt: float
    a_loss: float


WITHOUT_DECAY = ByHand(
    decay=0.0,
    # G_0 = 2·1·1 + 1 = 3, θ_1 = 1 - 0.3; G_1 = 2·3·0.7 + 0.49 = 4.69, θ_2 = 0.7 - 0.469.
    theta=(1.0, 0.7, 0.231),
    # B_1 = 0.231 (1 - 0.1 (6 + 1.4)) = 0.231 · 0.26; B_0 = 0.06006 (1 - 0.1 (2 + 2)).
    b=(0.036036, 0.06006, 0.231),
    # -0.231 · 4.69 - 0.06006 · 3
    a_opt=-1.08339 - 0.18018,
    # -0.231 · 0.1 · 3 · 0.7 - 0.06006 · 0.1 · 1 · 1
    a_loss=-0.04851 - 0.006006,
)
WITH_DECAY = ByHand(
    decay=0.5,
    # G_0 + ω θ_0 = 3.5, θ_1 = 0.65; G_1 = 3.9 + 0.4225 = 4.3225, with decay 4.6475.
    theta=(1.0, 0.65, 0.18525),
    # B_1 = 0.18525 (1 - 0.05 - 0.1 (6 + 1.3)) = 0.18525 · 0.22; B_0 = 0.040755 · (0.95 - 0.4).
    b=(0.02241525, 0.040755, 0.18525),
    # -0.18525 · 4.6475 - 0.040755 · 3.5
    a_opt=-0.860949375 - 0.1426425,
    # -0.18525 · 0.1 · 3 · 0.65 - 0.040755 · 0.1 · 1 · 1
    a_loss=-0.03612375 - 0.0040755,
)
both_decays = pytest.mark.parametrize(
    "numbers", [WITHOUT_DECAY, WITH_DECAY], ids=["without_decay", "with_decay"]
)
each_strategy = pytest.mark.parametrize("backward", ALL, ids=repr)


def inner_loss(theta: Tensor, x: Tensor, phi: Tensor) -> Tensor:
    return phi * x * theta**2 / 2 + theta**3 / 3


def walk(numbers: ByHand, first: int, backward: il.Tape) -> tuple[Tensor, list[float]]:
    """θ_2 and (B_first, A_opt, A_loss) of the steps from `first` on."""
    theta = torch.tensor(numbers.theta[first], requires_grad=True)
    lr, phi = (torch.tensor(value, requires_grad=True) for value in (LR, PHI))
    rule = il.optim.sgd(lr=7.0, weight_decay=numbers.decay)
    step = il.inner_step(lambda params, x, phi: inner_loss(params["theta"], x, phi["phi"]), rule)
    params = {"theta": theta}
    start = il.State(params, opt=rule.init(params))
    meta = il.Meta(opt={"lr": lr}, loss={"phi": phi})
    batches = [torch.tensor(x) for x in DATA[first:]]
    state, _ = il.unroll(step, start, meta, batches, backward=backward)
    last = state.params["theta"]
    return last, [g.item() for g in torch.autograd.grad(last**2 / 2, [theta, lr, phi])]


@both_decays
@each_strategy
def test_two_steps(numbers: ByHand, backward: il.Tape) -> None:
    last, (b0, a_opt, a_loss) = walk(numbers, 0, backward)
    assert last.item() == pytest.approx(numbers.theta[2], rel=1e-14)
    assert b0 == pytest.approx(numbers.b[0], rel=1e-13)
    assert a_opt == pytest.approx(numbers.a_opt, rel=1e-13)
    assert a_loss == pytest.approx(numbers.a_loss, rel=1e-13)


@both_decays
@each_strategy
def test_the_last_step_alone(numbers: ByHand, backward: il.Tape) -> None:
    """B_1, and what the accumulators hold after the first visit."""
    _, (b1, a_opt, a_loss) = walk(numbers, 1, backward)
    theta1, b2 = numbers.theta[1], numbers.b[2]
    gradient = PHI * DATA[1] * theta1 + theta1**2 + numbers.decay * theta1
    assert b1 == pytest.approx(numbers.b[1], rel=1e-13)
    assert a_opt == pytest.approx(-b2 * gradient, rel=1e-13)
    assert a_loss == pytest.approx(-b2 * LR * DATA[1] * theta1, rel=1e-13)


@both_decays
def test_the_numbers_are_those_of_the_recurrence(numbers: ByHand) -> None:
    """The walk of lines 9 to 15 in plain Python, so that no digit above is a slip of the pen."""
    b, a_opt, a_loss = numbers.theta[2], 0.0, 0.0
    for j in (1, 0):
        theta, x = numbers.theta[j], DATA[j]
        gradient = PHI * x * theta + theta**2
        moved = theta - LR * (gradient + numbers.decay * theta)
        assert moved == pytest.approx(numbers.theta[j + 1], rel=1e-14)
        assert b == pytest.approx(numbers.b[j + 1], rel=1e-13)
        a_opt -= b * (gradient + numbers.decay * theta)
        a_loss -= b * LR * x * theta
        b *= 1 - LR * numbers.decay - LR * (PHI * x + 2 * theta)
    assert b == pytest.approx(numbers.b[0], rel=1e-13)
    assert a_opt == pytest.approx(numbers.a_opt, rel=1e-13)
    assert a_loss == pytest.approx(numbers.a_loss, rel=1e-13)
