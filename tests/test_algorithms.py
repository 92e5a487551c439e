"""The methods agree where they must, and only there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import innerloop as il
from innerloop import algorithms
from innerloop.errors import InnerLoopError

RATE, STEPS, POINTS = 0.1, 3, 6
Grads = list[Tensor]


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


def straight(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Without curvature, if the model is linear in its weights."""
    return (model(batch[0]) * batch[1]).mean()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(3)
    shapes = (POINTS, 2), (POINTS, 1)
    return [
        tuple(torch.randn(*s, generator=made, dtype=torch.float64) for s in shapes)  # type: ignore[misc]
        for _ in range(count)
    ]


*TRAIN, VAL = batches(STEPS + 1)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def line() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(2, 1)


def gradient(inner: il.InnerLoop, model: nn.Module, steps: int = STEPS) -> Grads:
    inner(TRAIN[:steps], VAL).backward()
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


def by(
    method: Callable[..., il.InnerLoop],
    build: Callable[[], nn.Module] = net,
    loss: Callable[..., Tensor] = loss,
    taken: int = STEPS,
    **options: Any,
) -> Callable[[], Grads]:
    """The meta-gradient of a method on a fresh model."""

    def found() -> Grads:
        model = build()
        return gradient(method(model, loss, lr=RATE, **options), model, taken)

    return found


# What they must agree with, written in another way. ----------------------------------------------


def unrolled_by_hand() -> Grads:
    """MAML with torch alone."""
    model = net()
    weights = dict(model.named_parameters())
    for batch in TRAIN:
        value = mse_loss(torch.func.functional_call(model, weights, (batch[0],)), batch[1])
        found = torch.autograd.grad(value, list(weights.values()), create_graph=True)
        weights = {n: w - RATE * g for (n, w), g in zip(weights.items(), found, strict=True)}
    value = mse_loss(torch.func.functional_call(model, weights, (VAL[0],)), VAL[1])
    return list(torch.autograd.grad(value, list(model.parameters())))


def trained(steps: int) -> tuple[nn.Module, nn.Module]:
    """A model, and the same after steps of ordinary training."""
    start = net()
    end = copy.deepcopy(start)
    optimizer = torch.optim.SGD(end.parameters(), lr=RATE)
    for batch in TRAIN[:steps]:
        optimizer.zero_grad()
        loss(end, batch).backward()
        optimizer.step()
    return start, end


def validation_gradient_at_the_end() -> Grads:
    _, end = trained(STEPS)
    return list(torch.autograd.grad(loss(end, VAL), list(end.parameters())))


def way_travelled() -> Grads:
    start, end = (list(m.parameters()) for m in trained(STEPS))
    return [(a - b).detach() for a, b in zip(start, end, strict=True)]


def one_scaled_gradient() -> Grads:
    model = net()
    found = torch.autograd.grad(loss(model, TRAIN[0]), list(model.parameters()))
    return [RATE * g for g in found]


def anil(model: nn.Sequential, loss: Any, **options: Any) -> il.InnerLoop:
    return algorithms.anil(model, loss, head=model[-1], **options)


def maml_with_a_frozen_body(model: nn.Sequential, loss: Any, **options: Any) -> il.InnerLoop:
    def head_only(grads: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: g if n.startswith("2.") else torch.zeros_like(g) for n, g in grads.items()}

    return algorithms.maml(model, loss, grad_transform=head_only, **options)


def implicit() -> Grads:
    model = line()
    inner = algorithms.imaml(model, loss, lr=0.3, proximal=0.5, stationary=1e-6)
    inner([TRAIN[0]] * 200, VAL).backward()
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


def through_the_solution() -> Grads:
    """The regularized least squares in closed form, differentiated by its start."""
    model = line()
    x, y = TRAIN[0]
    start = torch.cat([model.weight[0], model.bias])
    inputs = torch.cat([x, torch.ones(POINTS, 1)], dim=1)
    matrix = 2 * inputs.mT @ inputs / POINTS + 0.5 * torch.eye(3)
    end = torch.linalg.solve(matrix, 2 * inputs.mT @ y[:, 0] / POINTS + 0.5 * start)
    value = (VAL[0] @ end[:2] + end[2] - VAL[1][:, 0]).square().mean()
    return list(torch.autograd.grad(value, [model.weight, model.bias]))


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = torch.cat([x, context.expand(len(x), 3)], dim=1)
        return self.last(self.first(x).tanh())


class WithContext(nn.Module):
    """The same with a context of its own, for MAML."""

    def __init__(self, shared: Conditional) -> None:
        super().__init__()
        self.shared, self.context = shared, nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x, self.context)


def conditional() -> Conditional:
    torch.manual_seed(1)
    return Conditional()


def cavia() -> Grads:
    model = conditional()
    return gradient(algorithms.cavia(model, loss, context=3, lr=RATE), model)


def maml_of_the_context_alone() -> Grads:
    model = WithContext(conditional())
    optimizer = torch.optim.SGD([model.context], lr=RATE)
    return gradient(il.InnerLoop(model, optimizer, loss), model.shared)


AGREE = {
    "MAML, and the unrolled steps by hand": (by(algorithms.maml), unrolled_by_hand),
    "first-order MAML, and the validation gradient at the end": (
        by(algorithms.first_order_maml),
        validation_gradient_at_the_end,
    ),
    "first-order MAML, and MAML without curvature": (
        by(algorithms.first_order_maml, line, loss=straight, val_loss=loss),
        by(algorithms.maml, line, loss=straight, val_loss=loss),
    ),
    "Reptile, and the way travelled": (by(algorithms.reptile), way_travelled),
    "Reptile with one step, and the gradient": (
        by(algorithms.reptile, taken=1),
        one_scaled_gradient,
    ),
    "ANIL, and MAML with the body frozen in the inner loop": (
        by(anil),
        by(maml_with_a_frozen_body),
    ),
    "Meta-SGD with constant rates, and MAML": (by(algorithms.meta_sgd), by(algorithms.maml)),
    "MAML++ with constant rates, and MAML": (
        by(algorithms.maml_plus_plus, steps=STEPS),
        by(algorithms.maml),
    ),
    "iMAML at convergence, and the exact gradient": (implicit, through_the_solution),
    "CAVIA, and MAML that adapts a context alone": (cavia, maml_of_the_context_alone),
}
DIFFER = {
    "first-order MAML, and MAML with curvature": (
        by(algorithms.first_order_maml),
        by(algorithms.maml),
    ),
    "ANIL, and MAML": (by(anil), by(algorithms.maml)),
    "Reptile with more steps, and the gradient": (by(algorithms.reptile), one_scaled_gradient),
}


@pytest.mark.parametrize("pair", AGREE.values(), ids=AGREE)
def test_methods_agree_where_they_must(pair):
    for first, second in zip(*(side() for side in pair), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("pair", DIFFER.values(), ids=DIFFER)
def test_methods_differ_elsewhere(pair):
    for first, second in zip(*(side() for side in pair), strict=True):
        assert not torch.allclose(first, second, rtol=1e-3)


def test_rates_of_meta_sgd_and_maml_plus_plus_sum_to_that_of_one_rate():
    """The derivative by a rate that all share is the sum of those by each."""
    models = [net() for _ in range(3)]
    one = algorithms.maml(models[0], loss, RATE, learn=("init", "lr"))
    each = algorithms.meta_sgd(models[1], loss, RATE)
    steps = algorithms.maml_plus_plus(models[2], loss, STEPS, RATE)
    for inner, model in zip((one, each, steps), models, strict=True):
        gradient(inner, model)
    total = one.settings["lr"].grad.sum()
    torch.testing.assert_close(sum(p.grad.sum() for p in each.settings["lr"]), total)
    sizes = [p.numel() for p in models[1].parameters()]
    assert [p.numel() for p in each.settings["lr"]] == sizes
    assert steps.settings["lr"].shape == (STEPS, len(sizes))
    torch.testing.assert_close(steps.settings["lr"].grad.sum(), total)


@pytest.mark.parametrize("way", [il.tasks.loop(), il.tasks.vmap()], ids=str)
def test_reptile_with_tasks_is_the_mean_way(way):
    model = net()
    tasks = [tuple(torch.stack([b[i], -2 * b[i]]) for i in (0, 1)) for b in TRAIN]
    value = algorithms.reptile(model, loss, RATE)(tasks, None, tasks=way)
    value.mean().backward()
    assert value.shape == (2,)
    ways = []
    for task in range(2):
        alone = net()
        own = [(x[task], y[task]) for x, y in tasks]
        one = algorithms.reptile(alone, loss, RATE)(own, None)
        one.backward()
        torch.testing.assert_close(one, value[task])
        ways.append([p.grad for p in alone.parameters()])
    for p, first, second in zip(model.parameters(), *ways, strict=True):
        torch.testing.assert_close(p.grad, (first + second) / 2)


def test_the_value_of_reptile_is_half_the_squared_way():
    squares = sum(t.square().sum() for t in way_travelled())
    torch.testing.assert_close(algorithms.reptile(net(), loss, RATE)(TRAIN, None), squares / 2)


def test_multi_step_loss_is_that_of_every_number_of_steps():
    inner = algorithms.maml_plus_plus(net(), loss, STEPS, RATE)
    last = algorithms.multi_step_loss(inner, TRAIN, VAL, [0.0, 0.0, 1.0])
    torch.testing.assert_close(last, inner(TRAIN, VAL))
    mixed = algorithms.multi_step_loss(inner, TRAIN, VAL, [0.5, 0.2, 0.3])
    parts = [inner(TRAIN[:k], VAL) for k in (1, 2, 3)]
    torch.testing.assert_close(mixed, 0.5 * parts[0] + 0.2 * parts[1] + 0.3 * parts[2])


def test_cavia_learns_the_model_and_adapts_the_context():
    model = conditional()
    inner = algorithms.cavia(model, loss, context=3, lr=1.0)
    assert {id(p) for p in inner.parameters()} == {id(p) for p in model.parameters()}
    adapted = inner.adapt(TRAIN)
    assert list(adapted.params) == ["context"] and adapted.params["context"].any()
    x = VAL[0]
    torch.testing.assert_close(adapted(x), model(x, adapted.params["context"]))
    assert not inner.model.context.any()


def test_anil_adapts_parameters_that_are_named_too():
    model = net()
    found = []
    for head in (model[-1], list(model[-1].parameters())):
        model.zero_grad()
        inner = algorithms.anil(model, loss, head, RATE)
        found.append([g.clone() for g in gradient(inner, model)])
    torch.testing.assert_close(*found)
    adapted = inner.adapt(TRAIN)
    assert torch.equal(adapted.params["0.weight"], model[0].weight)
    assert not torch.equal(adapted.params["2.weight"], model[2].weight)


def test_imaml_says_that_training_has_not_converged():
    model = line()
    inner = algorithms.imaml(model, loss, lr=0.01, proximal=0.5)
    with pytest.warns(UserWarning, match="converged"):
        inner(TRAIN[:1], VAL)


# Copies, and losses of one's own. -----------------------------------------------------------------


def test_a_copy_of_reptile_is_about_the_copied_model() -> None:
    inner = algorithms.reptile(net(), loss, RATE)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(inner)))
    expected = copied(TRAIN, None)
    with torch.no_grad():
        for p in inner.model.parameters():
            p.add_(1.0)
    assert torch.equal(copied(TRAIN, None), expected)


def test_cavia_without_a_validation_loss_by_name() -> None:
    model = conditional()
    inner = algorithms.cavia(model, loss, context=3, lr=RATE, val_loss=None)
    torch.testing.assert_close(gradient(inner, model), cavia())


def test_cavia_is_judged_with_the_weights_that_the_loop_has() -> None:
    model = conditional()
    plain, own = (
        algorithms.cavia(model, loss, 3, **options) for options in ({}, {"val_loss": loss})
    )
    assert len(list(own.parameters())) == len(list(plain.parameters()))
    expected = torch.autograd.grad(plain(TRAIN, VAL), list(model.parameters()))
    for inner in (plain, own):
        inner(TRAIN, VAL).backward()
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=1e-12)
            p.grad = None
    values = [
        il.estimate.evolution(inner, samples=16, sigma=0.1, seed=0)(TRAIN, VAL)
        for inner in (plain, own)
    ]
    torch.testing.assert_close(*values, rtol=1e-12, atol=1e-12)


def multi_step(weights: list[float], **options: Any) -> Tensor:
    inner = algorithms.maml(net(), loss, **options)
    return algorithms.multi_step_loss(inner, TRAIN, VAL, weights)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: algorithms.cavia(nn.Tanh(), loss, context=2), "Tanh without weights"),
        (lambda: algorithms.cavia(net(), loss, context=2.5), r"context=2\.5.*whole number"),
        (lambda: algorithms.cavia(net(), loss, context=True), "context=True.*whole number"),
        (lambda: algorithms.cavia(net(), loss, context=0), "at least one number"),
        (lambda: algorithms.anil(net(), loss, head=[]), r"head=\[\]"),
        (lambda: algorithms.anil(net(), loss, head="head"), "head='head'"),
        (lambda: algorithms.anil(net(), loss, head=nn.Tanh()), "head=Tanh"),
        (lambda: multi_step([0.5, 0.5]), "2 weights for 3 steps"),
        (lambda: multi_step([0.0] * 3), "not 0"),
        (lambda: multi_step([1.0] * 3, backward=il.Truncated(5, carry=True)), "starts anew"),
    ],
)
def test_impossible_arguments_are_refused(build, message) -> None:
    with pytest.raises(InnerLoopError, match=f"{message}.*Write:"):
        build()


@pytest.mark.parametrize(
    ("method", "given"),
    [
        (algorithms.first_order_maml, {"first_order": False}),
        (algorithms.reptile, {"learn": ("init", "lr")}),  # no gradient would reach the rate
        (algorithms.reptile, {"val_loss": loss}),
        (algorithms.meta_sgd, {"learn": ("init",)}),
        (algorithms.maml_plus_plus, {"learn": (), "steps": 2}),
        (algorithms.imaml, {"backward": il.Remat()}),
        (algorithms.cavia, {"learn": (), "context": 2}),
    ],
)
def test_what_makes_a_method_is_not_chosen(method, given) -> None:
    with pytest.raises(InnerLoopError, match=f"{next(iter(given))} to {method.__name__}"):
        method(net(), loss, **given)


def test_an_adapted_context_leaves_running_statistics_alone():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.line = nn.BatchNorm1d(3), nn.Linear(3, 1)

        def forward(self, x, context):
            return self.line(self.norm(torch.cat([x, context.expand(len(x), 1)], 1)))

    model, x = Normed(), torch.randn(6, 2)
    inner = algorithms.cavia(model, lambda f, x: (f(x) - 1).square().mean(), context=1)
    adapted = inner.adapt([x] * 2)
    before = model.norm.running_mean.clone()
    adapted(x)
    assert torch.equal(model.norm.running_mean, before)
