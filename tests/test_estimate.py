"""Estimators: right on average, at the rate that is expected, and without a trace."""

import copy
import io
import itertools
import math
import random
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

import innerloop as il
from innerloop import estimate

# A quadratic whose meta-gradient is known. ------------------------------------------------------

SIZE = 12
CURVATURES = [torch.linspace(0.5, 2.0, SIZE, dtype=torch.float64) * s for s in (1.0, 0.7)]
TARGET = torch.arange(SIZE, dtype=torch.float64).cos()
LR = 0.3


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(SIZE).sin())

    def forward(self) -> Tensor:
        return self.weight


def half_squares(model: nn.Module, curvature: Tensor) -> Tensor:
    return 0.5 * (curvature * (model() - TARGET) ** 2).sum()


def quadratic(**options) -> il.InnerLoop:
    model = Vector()
    return il.InnerLoop(model, torch.optim.SGD(model.parameters(), lr=LR), half_squares, **options)


def to_two(model: nn.Module, val: Tensor) -> Tensor:
    return (model() - 2).square().sum()


def true_meta_gradient() -> Tensor:
    """That of ``to_two`` after a step on each of the curvatures."""
    start = Vector().weight.detach()
    shrunk = math.prod([1 - LR * c for c in CURVATURES])
    return 2 * shrunk * (TARGET + shrunk * (start - TARGET) - 2)


def gradients(loss: Tensor, inner: nn.Module) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(inner.parameters()))])


def test_the_true_meta_gradient():
    inner = quadratic(val_loss=to_two)
    exact = gradients(inner(CURVATURES, TARGET), inner)
    torch.testing.assert_close(exact, true_meta_gradient())


# Evolution. -------------------------------------------------------------------------------------


def drawn(seed: int, pairs: int, *shape: int) -> Tensor:
    return torch.randn(pairs, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sigma", [1e-3, 1.0, 100.0])
def test_pairs_see_the_exact_slope_of_a_quadratic(sigma):
    """What is odd in ε is the gradient alone, however far the parameters are moved."""
    inner = quadratic(val_loss=to_two)
    found = gradients(
        estimate.evolution(inner, samples=6, sigma=sigma, seed=3)(CURVATURES, TARGET), inner
    )
    noise = drawn(3, 3, SIZE)
    expected = ((noise @ true_meta_gradient())[:, None] * noise).mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_the_bias_is_that_of_smoothing():
    """The gradient of E[(x + σε)³] is 3x² + 3σ²."""
    x = torch.tensor(1.0, requires_grad=True)
    for sigma in (0.1, 1.0):
        estimator = estimate.evolution(lambda x: x**3, x, samples=3000, sigma=sigma, seed=0)
        (found,) = torch.autograd.grad(estimator(), x)
        # The standard error, from the moments of the normal distribution.
        error = math.sqrt((2 * 9 + 8 * 9 * sigma**2 + 96 * sigma**4) / 1500)
        assert abs(found.item() - 3 - 3 * sigma**2) < 4 * error


def test_the_value_is_the_mean_of_the_evaluations():
    seen = []

    def noted(params: Tensor) -> float:
        seen.append(params.clone())
        return float(params.sum())

    w = torch.zeros(2, requires_grad=True)
    value = estimate.evolution(noted, w, samples=4, sigma=0.5, seed=1)()
    assert value.requires_grad and value.dtype == torch.float64
    torch.testing.assert_close(value.detach(), torch.stack(seen).sum(1).mean())
    noise = 0.5 * drawn(1, 2, 2)
    torch.testing.assert_close(
        torch.stack(seen), torch.stack([noise[0], -noise[0], noise[1], -noise[1]])
    )


@pytest.mark.parametrize("kind", [float, int, lambda value: value.round().long()])
def test_numbers_are_not_rounded_before_their_differences_are_taken(kind):
    """Also where torch makes float32 of numbers: the differences are small against the values."""
    w = torch.linspace(-1, 1, 5, requires_grad=True)
    scale, sigma = (1.0, 1e-4) if kind is float else (1e9, 1e-3)

    def value(params: Tensor) -> Tensor:
        return scale * (1e4 + (params**2).sum())

    def gradient(function) -> Tensor:
        estimator = estimate.evolution(function, params=w, samples=64, sigma=sigma, seed=0)
        return torch.autograd.grad(estimator(), w)[0]

    expected = gradient(value)
    torch.set_default_dtype(torch.float32)
    found = gradient(lambda params: kind(value(params)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * scale)


def test_nothing_has_to_be_differentiable():
    """A count, in Python numbers, of a model that rounds."""
    inner = quadratic(
        learn=("init", "lr"),
        val_loss=lambda model, val: torch.tensor(float((model() > val).sum())),
    )
    estimator = estimate.evolution(inner, samples=64, sigma=0.5, seed=0)
    estimator(CURVATURES, TARGET * 0.9).backward()
    grads = {name: p.grad for name, p in inner.named_parameters()}
    assert set(grads) == {"model.weight", "settings.lr"}
    assert all(g is not None and g.norm() > 0 for g in grads.values())


@pytest.mark.parametrize("way", [None, il.tasks.loop(), il.tasks.vmap(), il.tasks.auto()])
def test_a_validation_loss_may_be_a_number(way):
    train, val = CURVATURES, TARGET
    if way is not None:
        train, val = [torch.stack([c, c / 2]) for c in train], torch.stack([val, val])

    def gradient(kind) -> Tensor:
        inner = quadratic(val_loss=lambda model, val: kind(to_two(model, val)))
        estimator = estimate.evolution(inner, samples=4, sigma=0.1, seed=0)
        return gradients(estimator(train, val, tasks=way).sum(), inner)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tasks cannot be batched
        found = gradient(float)
    torch.testing.assert_close(found, gradient(lambda value: value))
    with pytest.raises(il.InnerLoopError, match="a real tensor with one value"):
        quadratic(val_loss=lambda model, val: to_two(model, val).item())(CURVATURES, TARGET)


def test_gradients_add_up_and_scale():
    inner = quadratic(val_loss=to_two)
    estimator = estimate.evolution(inner, samples=4, seed=0)
    estimator(CURVATURES, TARGET).backward()
    first = inner.model.weight.grad.clone()
    again = estimate.evolution(inner, samples=4, seed=0)
    (3 * again(CURVATURES, TARGET) + to_two(inner.model, TARGET)).backward()
    start = inner.model.weight.detach()
    torch.testing.assert_close(inner.model.weight.grad, 4 * first + 2 * (start - 2))


@pytest.mark.parametrize("way", [True, il.tasks.loop(), il.tasks.vmap()], ids=str)
def test_tasks_have_estimates_of_their_own(way):
    inner = quadratic(learn=("init", "lr"))
    train = [torch.rand(4, SIZE) + 0.5 for _ in range(2)]
    val = torch.rand(4, SIZE) + 0.5
    several = estimate.evolution(inner, samples=4, seed=0)(train, val, tasks=way)
    assert several.shape == (4,)
    for task in range(4):
        one = estimate.evolution(inner, samples=4, seed=0)([b[task] for b in train], val[task])
        torch.testing.assert_close(several[task], one)
        expected = gradients(one, inner)
        found = torch.autograd.grad(several[task], list(inner.parameters()), retain_graph=True)
        torch.testing.assert_close(torch.cat([g.flatten() for g in found]), expected)


class Weighted(nn.Module):
    """A learned loss, of a model with dropout and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.weight * F.cross_entropy(model(batch[0]), batch[1])


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)
    )


def errors_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    random.random()
    numpy.random.rand()
    return (model(batch[0]).argmax(-1) != batch[1]).double().mean()


def classified(**options) -> tuple[il.InnerLoop, list, tuple]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    inner = il.InnerLoop(model, optimizer, Weighted(), learn=("init", "lr"), **options)
    *train, val = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]
    return inner, train, val


def test_it_leaves_no_trace():
    """Weights, buffers, versions, the optimizer, and random numbers as after an ordinary call."""
    inner, train, val = classified(val_loss=errors_of)
    kept = {name: t.clone() for name, t in inner.state_dict().items()}
    versions = [p._version for p in inner.parameters()]
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    with torch.no_grad():
        inner(train, val)
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    numpy.random.set_state(before[2])
    estimate.evolution(inner, samples=6, seed=0)(train, val)
    assert torch.equal(torch.get_rng_state(), after[0])
    assert random.getstate() == after[1]
    assert (numpy.random.get_state()[1] == after[2][1]).all()
    assert numpy.random.get_state()[2] == after[2][2]
    assert all(torch.equal(t, kept[name]) for name, t in inner.state_dict().items())
    assert [p._version for p in inner.parameters()] == versions
    assert not inner.optimizer.state
    assert all(p.grad is None for p in inner.parameters())


def test_what_a_module_writes_stays_in_its_replicas():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("calls", torch.zeros(()))
            self.last = None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = x
            return (self.weight * x).sum() * self.calls

    module = Counting()
    value = estimate.evolution(module, samples=4, seed=0)(torch.ones(2))
    value.backward()
    assert module.calls == 0 and module.last is None
    assert module.weight.grad is not None


def test_all_evaluations_see_the_same_random_numbers():
    seen = []

    def noisy(w: Tensor) -> Tensor:
        seen.append(torch.rand(()).item())
        return w.sum()

    w = torch.zeros(2, requires_grad=True)
    estimator = estimate.evolution(noisy, w, samples=6, seed=0)
    estimator()
    assert len(set(seen)) == 1
    estimator()
    assert len(set(seen)) == 2


def test_the_seed_decides():
    inner = quadratic(val_loss=to_two)

    def found(estimator: estimate.evolution) -> Tensor:
        return gradients(estimator(CURVATURES, TARGET), inner)

    one, same, other = (estimate.evolution(inner, seed=s) for s in (1, 1, 2))
    first = found(one)
    assert torch.equal(first, found(same))
    assert not torch.equal(first, found(other))
    assert not torch.equal(first, found(one))
    torch.manual_seed(4)
    by_torch = found(estimate.evolution(inner))
    torch.manual_seed(4)
    assert torch.equal(by_torch, found(estimate.evolution(inner)))


def test_frozen_parameters_stay_as_they_are():
    inner, train, val = classified(val_loss=errors_of)
    inner.loss.requires_grad_(False)
    inner.model[0].weight.requires_grad_(False)
    estimate.evolution(inner, samples=2, seed=0)(train, val).backward()
    without = {name for name, p in inner.named_parameters() if p.grad is None}
    assert without == {"loss.weight", "model.0.weight"}


def test_a_function_may_train_by_itself():
    """Gradients are on inside it."""

    def trained(params: dict[str, Tensor], target: Tensor) -> float:
        w = torch.zeros(SIZE, requires_grad=True)
        for _ in range(3):
            (grad,) = torch.autograd.grad((w - target).square().sum(), w)
            w = (w - params["lr"] * grad).detach().requires_grad_()
        return (w - target).square().sum().item()

    lr = torch.tensor(0.1, requires_grad=True)
    estimator = estimate.evolution(trained, {"lr": lr}, samples=200, sigma=1e-3, seed=0)
    estimator(TARGET).backward()
    # w = (1 - (1 - 2 lr)³) target
    exact = -12 * (1 - 0.2) ** 5 * TARGET.square().sum()
    noise = drawn(0, 100)
    torch.testing.assert_close(lr.grad, exact * noise.square().mean(), rtol=1e-4, atol=0)


# Persistent evolution. --------------------------------------------------------------------------

DECAY, GOAL, PARTS = 0.9, 2.0, 6


def moved(theta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """One part of a long run: s ← 0.9 s + θ, measured by (s - 2)² / 2."""
    state = torch.zeros(()) if state is None else state
    state = DECAY * state + theta
    return 0.5 * (state - GOAL) ** 2, state


def whole_gradient(theta: float) -> tuple[float, float]:
    """Of the sum of all parts' losses; and what is left if every part takes its start as given."""
    t = torch.tensor(theta, requires_grad=True)
    state, total, cut = None, torch.zeros(()), torch.zeros(())
    for _ in range(PARTS):
        loss, state = moved(t, state)
        cut = cut + moved(t, (state.detach() - theta) / DECAY)[0]
        total = total + loss
    return (torch.autograd.grad(total, t)[0].item(), torch.autograd.grad(cut, t)[0].item())


def run_gradients(persistent: bool, runs: int, theta: float, samples: int = 30) -> Tensor:
    """The gradient that each of several runs adds up."""
    t = torch.tensor(theta, requires_grad=True)
    found = []
    if persistent:
        estimator = estimate.evolution(
            moved, t, samples=samples, sigma=0.3, persistent=True, seed=0
        )
    else:
        estimator = estimate.evolution(
            lambda t, state: moved(t, state)[0], t, samples=samples, sigma=0.3, seed=0
        )
    for _ in range(runs):
        t.grad, state = None, None
        for _ in range(PARTS):
            (estimator() if persistent else estimator(state)).backward()
            state = moved(t, state)[1].detach()
        if persistent:
            estimator.restart()
        found.append(t.grad)
    return torch.stack(found)


def test_persistent_evolution_has_no_bias_where_truncation_has():
    exact, truncated = whole_gradient(0.65)
    assert exact > 4 and truncated < 0
    for persistent, expected in ((True, exact), (False, truncated)):
        found = run_gradients(persistent, 40, 0.65)
        error = (found.std() / math.sqrt(len(found))).item()
        assert abs(found.mean().item() - expected) < 4 * error
        # So the one is not taken for the other.
        assert abs(exact - truncated) > 8 * error


class Towards(nn.Module):
    """A learned loss that pulls to a learned place."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.linspace(-1, 1, SIZE))

    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        return 0.5 * (batch * (model() - self.place) ** 2).sum()


@pytest.mark.parametrize("tasks", [False, True])
def test_a_persistent_inner_loop_is_what_the_formula_says(tasks):
    """Each sample's weights are followed by hand, through three parts of two steps."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    inner = il.InnerLoop(model, optimizer, Towards(), learn=(), val_loss=to_two)
    estimator = estimate.evolution(inner, samples=4, sigma=0.2, persistent=True, seed=5)
    generator = torch.Generator().manual_seed(5)
    axis = (2,) if tasks else ()
    place, total = inner.loss.place.detach(), torch.zeros(2, SIZE)
    weights = model.weight.detach().expand(4, *axis, SIZE)
    for _ in range(3):
        train = [torch.rand(*axis, SIZE) + 0.5 for _ in range(2)]
        noise = torch.randn(2, SIZE, generator=generator)
        total = total + noise
        pulled = place + 0.2 * torch.stack([noise, -noise], 1).flatten(0, 1)
        pulled = pulled[:, None] if tasks else pulled
        for curvature in train:
            weights = weights - LR * curvature * (weights - pulled)
        values = (weights - 2).square().sum(-1)
        value = estimator(train, torch.zeros(*axis, 1), tasks=tasks)
        torch.testing.assert_close(value.detach(), values.mean(0))
        slopes = (values[::2] - values[1::2]) / (2 * 0.2 * 2)
        slopes = slopes.sum(-1) if tasks else slopes
        (found,) = torch.autograd.grad(value.sum(), inner.loss.place)
        torch.testing.assert_close(found, slopes @ total)


def test_a_persistent_run_goes_on_after_its_state_is_loaded():
    def estimator() -> tuple[estimate.evolution, il.InnerLoop]:
        inner = quadratic(learn=("lr",))
        return estimate.evolution(inner, samples=4, persistent=True, seed=0), inner

    (whole, inner), (fresh, other) = estimator(), estimator()
    whole(CURVATURES, TARGET)
    fresh.load_state_dict(whole.state_dict())
    expected, found = (e(CURVATURES, TARGET) for e in (whole, fresh))
    assert torch.equal(expected, found)
    assert torch.equal(gradients(expected, inner), gradients(found, other))
    assert inner._carried is None


def test_a_failed_call_is_no_part_of_the_run():
    w = torch.tensor(1.0, requires_grad=True)
    broken = [False]

    def part(w: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        if broken[0]:
            raise RuntimeError("no data")
        return moved(w, state)

    estimator = estimate.evolution(part, w, samples=4, persistent=True, seed=0)
    estimator()
    states = estimator.state_dict()["states"]
    broken[0] = True
    with pytest.raises(RuntimeError, match="no data"):
        estimator()
    assert estimator.state_dict()["states"] == states


def after_saving(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_saved_state_stays_as_it_was_when_the_function_writes_in_place():
    w = torch.tensor([0.5], requires_grad=True)

    class Counter:
        def __init__(self):
            self.seen = torch.zeros(1)

    def part(w, state):
        total, counter = (torch.zeros(1), Counter()) if state is None else state
        counter.seen.add_(1)
        return total.add_(w * counter.seen).sum(), (total, counter)

    estimator = estimate.evolution(part, w, samples=2, persistent=True, seed=0)
    estimator()
    saved = estimator.state_dict()
    values = [estimator().item()]
    for _ in range(2):
        estimator.load_state_dict(saved)
        values.append(estimator().item())
    assert values[0] == values[1] == values[2]


@pytest.mark.parametrize("copied", [copy.deepcopy, after_saving])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_copy_belongs_to_the_copied_loop(copied, persistent):
    inner = quadratic(val_loss=to_two)
    estimator = estimate.evolution(inner, samples=4, persistent=persistent, seed=0)
    estimator(CURVATURES, TARGET)
    other, its = copied((inner, estimator))
    expected, found = (e(CURVATURES, TARGET) for e in (estimator, its))
    assert torch.equal(expected, found)
    found.backward()
    assert inner.model.weight.grad is None
    assert torch.equal(other.model.weight.grad, gradients(expected, inner))
    with torch.no_grad():
        other.model.weight.add_(1)
    estimator.restart()
    its.restart()
    assert not torch.equal(estimator(CURVATURES, TARGET), its(CURVATURES, TARGET))


def squares(params: dict[str, Tensor]) -> Tensor:
    return params["w"].square().sum()


@pytest.mark.parametrize("copied", [copy.deepcopy, after_saving])
def test_a_copy_belongs_to_the_copied_parameters(copied):
    params = {"w": torch.arange(3.0, requires_grad=True)}
    (other, its) = copied((params, estimate.evolution(squares, params, samples=4, seed=0)))
    its().backward()
    assert params["w"].grad is None and other["w"].grad.norm() > 0


# REINFORCE. -------------------------------------------------------------------------------------


class Given(Categorical):
    """A distribution whose draws are chosen by the test."""

    def __init__(self, logits: Tensor, draws: Tensor) -> None:
        super().__init__(logits=logits)
        self.draws = draws

    def sample(self, sample_shape: torch.Size) -> Tensor:  # type: ignore[override]
        assert self.draws.shape == (*sample_shape, *self.batch_shape)
        return self.draws


OUTCOMES = torch.tensor(list(itertools.product(range(3), repeat=2)))
COSTS = torch.tensor([[0.0, 3.0, 1.0], [5.0, -2.0, 0.5], [1.5, 4.0, -1.0]], dtype=torch.float64)


def cost(said: Tensor) -> Tensor:
    """Of two predictions together; no sum of a part for each."""
    return COSTS[said[0], said[1]]


def expected_cost(logits: Tensor) -> Tensor:
    p, q = logits.softmax(-1)
    return p @ COSTS @ q


def enumerated(logits: Tensor, samples: int, baseline: object, metric=cost) -> Tensor:
    """The mean over all that could be drawn, by their probabilities, which have no gradient."""
    law = Categorical(logits=logits.detach())
    total = torch.zeros(())
    for draws in itertools.product(OUTCOMES, repeat=samples):
        chosen = torch.stack(draws)
        weight = law.log_prob(chosen).sum().exp()
        given = Given(logits, chosen)
        found = estimate.reinforce(given, metric, samples=samples, baseline=baseline)
        total = total + weight * found
    return total


BASELINES = [(1, None), (1, 0.7), (2, "leave-one-out"), (2, None), (2, torch.tensor(1.3))]


@pytest.mark.parametrize(("samples", "baseline"), BASELINES, ids=str)
def test_every_outcome_counted_is_the_exact_gradient(samples, baseline):
    """Of the first and of the second order, to rounding."""
    logits = torch.randn(2, 3, requires_grad=True)
    found, exact = enumerated(logits, samples, baseline), expected_cost(logits)
    torch.testing.assert_close(found, exact)
    first, true_first = (
        torch.autograd.grad(v, logits, create_graph=True)[0] for v in (found, exact)
    )
    torch.testing.assert_close(first, true_first)
    direction = torch.randn(2, 3)
    second, true_second = (
        torch.autograd.grad((g * direction).sum(), logits)[0] for g in (first, true_first)
    )
    torch.testing.assert_close(second, true_second)


def test_a_metric_with_a_gradient_of_its_own_keeps_it():
    logits = torch.randn(2, 3, requires_grad=True)

    def metric(said: Tensor) -> Tensor:
        return cost(said) * logits.square().sum()

    found = enumerated(logits, 2, "leave-one-out", metric)
    exact = expected_cost(logits) * logits.square().sum()
    torch.testing.assert_close(
        torch.autograd.grad(found, logits), torch.autograd.grad(exact, logits)
    )


def variance(values: list[Tensor]) -> float:
    return torch.stack(values).var(0).sum().item()


def test_credit_and_baselines_lower_the_variance():
    """One value per example, and something to compare with: each is better than without."""
    logits = torch.randn(6, 3, requires_grad=True)
    labels = torch.randint(3, (6,))

    def spread(each: bool, baseline: object) -> float:
        def metric(said: Tensor) -> Tensor:
            wrong = (said != labels).double() + 2
            return wrong if each else wrong.mean()

        losses = (
            estimate.reinforce(logits, metric, samples=4, baseline=baseline) for _ in range(200)
        )
        return variance([torch.autograd.grad(loss, logits)[0] for loss in losses])

    best, blind, plain = (
        spread(True, "leave-one-out"),
        spread(True, None),
        spread(False, None),
    )
    assert 2 * best < blind and 2 * blind < plain


def test_parts_of_the_predictions_get_the_credit_for_their_metric():
    """Sentences of words: a value for each sentence, none for its words."""
    logits = torch.randn(2, 2, 3, requires_grad=True)
    draws = torch.randint(3, (4, 2, 2))
    values = torch.randn(4, 2)
    turn = iter(values)
    found = estimate.reinforce(Given(logits, draws), lambda _: next(turn), samples=4, baseline=None)
    scores = Categorical(logits=logits).log_prob(draws).sum(-1)
    expected = (values * scores).mean()
    torch.testing.assert_close(found.detach(), values.mean())
    torch.testing.assert_close(
        torch.autograd.grad(found, logits), torch.autograd.grad(expected, logits)
    )


def mistakes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return estimate.reinforce(model(batch[0]), lambda said: said != batch[1], samples=2000)


def chance_of_mistakes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """What that is on average, which for single mistakes is known."""
    right = model(batch[0]).softmax(-1).gather(-1, batch[1][:, None])
    return 1 - right.mean()


@pytest.mark.parametrize("way", [False, True, il.tasks.loop(), il.tasks.vmap()], ids=str)
def test_in_an_inner_loop_the_exact_gradient_goes_on(way):
    model = nn.Linear(4, 3)
    axis = () if way is False else (3,)
    *train, val = [(torch.randn(*axis, 8, 4), torch.randint(3, (*axis, 8))) for _ in range(3)]

    def found(val_loss: object) -> tuple[Tensor, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
        inner = il.InnerLoop(model, optimizer, loss, learn=("init", "lr"), val_loss=val_loss)
        value = inner(train, val, tasks=way)
        return value.detach(), gradients(value.sum(), inner)

    (value, grads), (exact, exact_grads) = found(mistakes), found(chance_of_mistakes)
    torch.testing.assert_close(value, exact, rtol=0, atol=0.02)
    assert (grads - exact_grads).norm() < 0.1 * exact_grads.norm()


def test_as_an_inner_loss_too():
    """Second derivatives, over recomputed steps, are those of the same draws on the tape."""
    model = nn.Linear(4, 3)
    *train, val = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]

    def found(strategy: object) -> Tensor:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        inner = il.InnerLoop(
            model, optimizer, mistakes, backward=strategy, val_loss=chance_of_mistakes
        )
        return gradients(inner(train, val), inner)

    torch.testing.assert_close(found(il.Tape()), found(il.Remat()))


def test_a_running_mean_changes_only_when_told():
    baseline = estimate.RunningMean(decay=0.75)
    logits = torch.zeros(4, 2, requires_grad=True)

    def loss() -> Tensor:
        return estimate.reinforce(logits, lambda said: said.double(), baseline=baseline)

    torch.manual_seed(1)
    first = torch.autograd.grad(loss(), logits)[0]
    torch.manual_seed(1)
    again = torch.autograd.grad(loss(), logits)[0]
    assert torch.equal(first, again) and baseline.value == 0
    baseline.update(torch.tensor([2.0, 4.0]))
    baseline.update(7)
    assert baseline.value == 4
    torch.manual_seed(1)
    assert not torch.equal(first, torch.autograd.grad(loss(), logits)[0])
    other = estimate.RunningMean(decay=0.75)
    other.load_state_dict(baseline.state_dict())
    other.update(8)
    assert other.value == 5


# Refusals. --------------------------------------------------------------------------------------

W = torch.ones(2, dtype=torch.float64, requires_grad=True)
WRAPPER = nn.parallel.DistributedDataParallel


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: estimate.evolution(quadratic(), samples=3), "even"),
        (lambda: estimate.evolution(quadratic(), samples=0), "2 or more"),
        (lambda: estimate.evolution(quadratic(), samples=2.0), "even"),
        (lambda: estimate.evolution(quadratic(), sigma=0), "above 0"),
        (lambda: estimate.evolution(quadratic(), sigma=math.nan), "above 0"),
        (lambda: estimate.evolution(quadratic(), seed="a"), "whole number"),
        (lambda: estimate.evolution(quadratic(), seed=2**70), "64 bits"),
        (lambda: estimate.evolution(quadratic(), params=W), "a module alone"),
        (lambda: estimate.evolution(3), "a module or a function"),
        (lambda: estimate.evolution(torch.sum), "params="),
        (lambda: estimate.evolution(torch.sum, [1.0]), "params="),
        (lambda: estimate.evolution(torch.sum, torch.ones(2)), "require grad"),
        (lambda: estimate.evolution(nn.Tanh())(W), "at least one parameter"),
        (lambda: estimate.evolution(lambda w: None, W)(), "NoneType"),
        (lambda: estimate.evolution(lambda w, s: w.sum(), W, persistent=True)(), "return value"),
        (
            lambda: estimate.evolution(
                quadratic(learn=("lr",), backward=il.Truncated(2, carry=True))
            )(CURVATURES, TARGET),
            "persistent=True",
        ),
        (
            lambda: estimate.evolution(
                quadratic(backward=il.Implicit(proximal=1.0)), persistent=True
            )(CURVATURES, CURVATURES[0]),
            "Implicit",
        ),
        (lambda: estimate.evolution(WRAPPER.__new__(WRAPPER), seed=0), "wrapper.module"),
        (
            lambda: estimate.evolution(quadratic(), samples=4).load_state_dict(
                estimate.evolution(quadratic(), samples=2).state_dict()
            ),
            "samples=2",
        ),
        (lambda: estimate.reinforce([1.0], torch.sum), "logits"),
        (lambda: estimate.reinforce(torch.ones(3, dtype=torch.int64), torch.sum), "int64"),
        (lambda: estimate.reinforce(torch.ones(3), 3), "function of one draw"),
        (lambda: estimate.reinforce(torch.ones(3), torch.sum, samples=0), "1 or more"),
        (lambda: estimate.reinforce(torch.ones(3), torch.sum, samples=1), "2 samples"),
        (lambda: estimate.reinforce(torch.ones(3), torch.sum, baseline="mean"), "leave-one-out"),
        (lambda: estimate.reinforce(torch.ones(3), torch.sum, baseline=W), "one like ()"),
        (
            lambda: estimate.reinforce(
                torch.ones(4, 2), lambda said: said.float(), baseline=torch.zeros(3)
            ),
            "one like (4,)",
        ),
        (lambda: estimate.reinforce(torch.ones(5, 3), lambda _: torch.ones(3)), "beginning"),
        (lambda: estimate.reinforce(torch.ones(5, 3), lambda _: None), "NoneType"),
        (lambda: estimate.RunningMean(decay=1), "without 1"),
    ],
)
def test_wrong_arguments_are_refused(wrong, said):
    with pytest.raises(il.InnerLoopError) as error:
        wrong()
    assert said in str(error.value)
    for part in ("Needed:", "Why:", "Write:"):
        assert part in str(error.value)


def test_changed_parameters_in_a_persistent_run_are_refused():
    inner, train, val = classified(val_loss=errors_of)
    estimator = estimate.evolution(inner, samples=2, persistent=True, seed=0)
    estimator(train, val)
    inner.loss.requires_grad_(False)
    with pytest.raises(il.InnerLoopError, match="restart"):
        estimator(train, val)
    estimator.restart()
    estimator(train, val)


@pytest.mark.parametrize("first", [False, True])
def test_changed_tasks_in_a_persistent_run_are_refused(first):
    inner = quadratic(learn=("lr",))
    estimator = estimate.evolution(inner, samples=2, persistent=True, seed=0)
    batch = torch.ones(2, SIZE)

    def call(tasks: bool) -> None:
        estimator([batch] if tasks else [batch[0]], batch if tasks else batch[0], tasks=tasks)

    call(first)
    with pytest.raises(il.InnerLoopError, match="restart"):
        call(not first)
    estimator.restart()
    call(not first)


# Where the estimate would go wrong in silence. ----------------------------------------------------


ROUNDED = {"bfloat16": (torch.bfloat16, 1.0, 0.002), "far from 0": (torch.float32, 1000.0, 1e-5)}


@pytest.mark.parametrize("case", ROUNDED)
def test_perturbations_that_rounding_takes_away_are_refused(case):
    dtype, at, sigma = ROUNDED[case]
    w = torch.full((), at, dtype=dtype, requires_grad=True)
    with pytest.raises(il.InnerLoopError, match="rounded away"):
        estimate.evolution(lambda p: 3.0 * p.double(), w, sigma=sigma, seed=0)()


def test_perturbations_just_above_the_resolution_are_enough():
    w = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    fit = estimate.evolution(lambda p: 3.0 * p.double(), w, samples=4000, sigma=0.008, seed=0)
    fit().backward()
    # 3 times the mean square of 2000 normal numbers: its deviation is 3 * sqrt(2 / 2000) = 0.095.
    assert w.grad.item() == pytest.approx(3.0, abs=0.4)


def test_sigma_may_change_in_a_persistent_run():
    """The loss of part t is t times w, for two parts: the gradient is 1 + 2."""
    w = torch.zeros((), requires_grad=True)

    def part(p, state):
        seen = (0.0 if state is None else state) + p
        return seen, seen

    found = []
    for seed in range(400):
        w.grad = None
        fit = estimate.evolution(part, w, samples=8, sigma=0.1, persistent=True, seed=seed)
        fit().backward()
        fit.sigma = 0.5
        fit().backward()
        found.append(w.grad.clone())
    mean, error = torch.stack(found).mean(), torch.stack(found).std() / math.sqrt(len(found))
    assert abs(mean - 3.0) < 4 * error
    assert error < 0.3
