"""Gradient transforms: torch's clipping in value, exact in derivative, with learned thresholds."""

import copy

import pytest
import torch
from torch import nn, optim

import innerloop as il
from references import (
    Net,
    Sgd,
    assert_close,
    assert_derivative,
    batches,
    by_hand,
    called,
    plain,
    squares,
)
from test_errors import refuses

STEPS = 3
REVERSE = [il.Tape(), il.Remat()]

CLIPS = {
    "norm": (il.clip_norm, nn.utils.clip_grad_norm_),
    "value": (il.clip_value, nn.utils.clip_grad_value_),
}
LIMITS = {"norm": [1e-3, 0.35, 0.8, 1e3], "value": [1e-3, 0.1, 0.4, 1e3]}
"""Below every gradient of the problem, between those of some steps and others, above all."""

EVERY = [(kind, limit) for kind, limits in LIMITS.items() for limit in limits]


def built(transform, optimizer="SGD", **options):
    torch.manual_seed(1)
    model = Net()
    make, settings = {
        "SGD": (optim.SGD, dict(lr=0.2, momentum=0.7)),
        "Adam": (optim.Adam, dict(lr=0.05, betas=(0.8, 0.9))),
    }[optimizer]
    inner = il.InnerLoop(
        model, make(model.parameters(), **settings), squares, grad_transform=transform, **options
    )
    *train, val = batches(STEPS + 1)
    return inner, train, val


def norms(inner, train):
    """The norm of the inner gradient at every step, seen by a transform that changes nothing."""
    seen = []

    def look(grads):
        seen.append(torch.cat([g.reshape(-1) for g in grads.values()]).norm().item())
        return grads

    twin = il.InnerLoop(inner.model, inner.optimizer, squares, grad_transform=look)
    with torch.no_grad():
        twin.adapt(train)
    return seen


# Values. ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e6])
@pytest.mark.parametrize(("kind", "limit"), EVERY)
def test_values_are_torchs(kind, limit, scale):
    ours, torchs = CLIPS[kind]
    shapes = {"a": (2, 3), "b": (4,), "c": ()}
    grads = {name: scale * torch.randn(shape) for name, shape in shapes.items()}
    params = [torch.zeros_like(g).requires_grad_() for g in grads.values()]
    for p, g in zip(params, grads.values(), strict=True):
        p.grad = g.clone()
    torchs(params, limit)
    before = {name: g.clone() for name, g in grads.items()}
    found = ours(limit)(grads)
    assert list(found) == list(grads)
    assert_close(found.values(), [p.grad for p in params], 1e-15)
    assert all(torch.equal(grads[name], before[name]) for name in grads)


def test_mixed_dtypes_and_complex_gradients_are_clipped_together():
    grads = {
        "single": torch.randn(3, dtype=torch.float32),
        "double": torch.randn(3, dtype=torch.float64),
        "complex": torch.randn(3, dtype=torch.complex128),
    }
    params = [torch.zeros_like(g).requires_grad_() for g in grads.values()]
    for p, g in zip(params, grads.values(), strict=True):
        p.grad = g.clone()
    nn.utils.clip_grad_norm_(params, 0.5)
    assert_close(il.clip_norm(0.5)(grads).values(), [p.grad for p in params], 1e-6)


def test_gradients_whose_squares_are_too_large_for_their_dtype():
    """The norm of half-precision gradients is a number even where its square is not."""
    grads = {"half": torch.tensor([300.0, 400.0], dtype=torch.float16)}
    found = il.clip_norm(1.0)(grads)["half"]
    assert_close([found], [torch.tensor([0.6, 0.8], dtype=torch.float16)], 1e-3)


@pytest.mark.parametrize(("kind", "limit"), EVERY)
def test_the_trajectory_is_that_of_plain_torch(kind, limit):
    ours, torchs = CLIPS[kind]
    inner, train, _ = built(ours(limit))
    model, twin = copy.deepcopy((inner.model, inner.optimizer))
    losses = plain(model, twin, squares, train, clip=lambda params: torchs(params, limit))
    adapted = inner.adapt(train)
    assert_close([adapted.losses], [torch.stack(losses)])
    assert_close(adapted.params.values(), model.parameters())


def test_the_limits_of_this_file_bind_at_some_steps_only():
    inner, train, _ = built(None)
    found = norms(inner, train)
    low, some, _, high = LIMITS["norm"]
    assert low < min(found) < max(found) < high
    assert any(norm > some for norm in found)


# Derivatives. -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize(("kind", "limit"), EVERY)
def test_derivatives_are_those_of_differences(kind, limit, optimizer):
    """Where the limit is below all of Adam's gradients, it divides the limit out again."""
    ours, _ = CLIPS[kind]
    inner, train, val = built(ours(limit), optimizer, learn=("init", "lr"))
    assert_derivative(lambda: inner(train, val), inner.parameters(), eps=1e-5, tolerance=1e-6)


@pytest.mark.parametrize("backward", REVERSE, ids=repr)
@pytest.mark.parametrize("kind", CLIPS)
def test_a_learned_threshold(kind, backward):
    """A tensor requiring grad, under every strategy that goes backward."""
    limit = torch.tensor(0.2 if kind == "norm" else 0.1, requires_grad=True)
    inner, train, val = built(CLIPS[kind][0](limit), learn=("init", "lr"), backward=backward)
    assert_derivative(
        lambda: inner(train, val), [limit, *inner.parameters()], eps=1e-5, tolerance=1e-6
    )
    (alone,) = torch.autograd.grad(inner(train, val), [limit])
    assert alone.abs() > 1e-3


class Warp(nn.Module):
    """A learned transform: a scale for each weight, and one threshold for all."""

    def __init__(self, names):
        super().__init__()
        self.log_scale = nn.ParameterDict({n.replace(".", "_"): torch.randn(()) for n in names})
        self.limit = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("floor", torch.tensor(0.01))

    def forward(self, grads):
        grads = {
            name: g * (self.floor + self.log_scale[name.replace(".", "_")].exp())
            for name, g in grads.items()
        }
        return il.clip_norm(self.limit)(grads)


@pytest.mark.parametrize("backward", REVERSE, ids=repr)
def test_a_module_as_the_transform_is_part_of_the_loop(backward):
    warp = Warp([name for name, _ in Net().named_parameters()])
    inner, train, val = built(warp, learn=("lr",), backward=backward)
    assert {id(p) for p in warp.parameters()} < {id(p) for p in inner.parameters()}
    assert "grad_transform.limit" in inner.state_dict()
    assert_derivative(lambda: inner(train, val), inner.parameters(), eps=1e-5, tolerance=1e-6)
    inner(train, val).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in warp.parameters())


def test_forward_names_a_threshold_that_it_cannot_follow():
    limit = torch.tensor(0.2, requires_grad=True)
    inner, train, val = built(il.clip_norm(limit), learn=("lr",), backward=il.Forward())
    with pytest.raises(il.RequirementError, match="max_norm"):
        inner(train, val)


# Zero gradients. --------------------------------------------------------------------------------


class Dead(nn.Module):
    """A gradient that is exactly zero, in a graph that is there all the same."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.other = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return torch.relu(-(self.weight**2)).sum() * x + 0 * self.other**2


@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("make", [optim.SGD, optim.Adam])
def test_zero_gradients_have_finite_derivatives(kind, make):
    def val_loss(model, val):
        return (model.weight**3).sum() * model.other

    model = Dead()
    grads = {}
    for transform in (None, CLIPS[kind][0](0.5)):
        inner = il.InnerLoop(
            model,
            make(model.parameters(), lr=0.1),
            lambda model, x: model(x),
            learn=("init", "lr"),
            val_loss=val_loss,
            grad_transform=transform,
        )
        value = inner([torch.tensor(1.0)] * 3, None)
        grads[transform] = torch.autograd.grad(
            value, list(inner.parameters()), materialize_grads=True
        )
    first, second = grads.values()
    assert all(g.isfinite().all() for g in second)
    assert first[0].count_nonzero() == 2
    assert_close(second, first)


def test_some_zero_gradients_among_others():
    """A weight whose gradient is zero does not spoil the joint norm."""

    class Half(Net):
        def __init__(self):
            super().__init__()
            self.dead = nn.Parameter(torch.randn(2))

        def forward(self, x):
            return super().forward(x) + torch.relu(-(self.dead**2)).sum()

    model = Half()
    *train, val = batches(3)
    inner = il.InnerLoop(
        model,
        optim.SGD(model.parameters(), lr=0.2),
        squares,
        learn=("init", "lr"),
        grad_transform=il.clip_norm(0.1),
    )
    grads = assert_derivative(lambda: inner(train, val), inner.parameters())
    assert all(g.isfinite().all() for g in grads)


# What a transform is given, and gives. ------------------------------------------------------------


def test_only_gradients_that_are_there_are_given():
    class Spare(Net):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))
            self.body.bias.requires_grad_(False)

    model = Spare()
    seen = []

    def look(grads):
        seen.append({name: tuple(g.shape) for name, g in grads.items()})
        return grads

    trained = [p for name, p in model.named_parameters() if name != "head.bias"]
    inner = il.InnerLoop(model, optim.SGD(trained, lr=0.1), squares, grad_transform=look)
    inner.adapt(batches(2))
    assert seen == [{"body.weight": (3, 2), "head.weight": (1, 3)}] * 2


@pytest.mark.parametrize("backward", REVERSE, ids=repr)
def test_a_gradient_of_none_leaves_its_weight(backward):
    def keep_biases(grads):
        return {name: None if "bias" in name else g for name, g in grads.items()}

    inner, train, val = built(keep_biases, learn=("init", "lr"), backward=backward)
    adapted = inner.adapt(train)
    assert torch.equal(adapted.params["body.bias"], inner.model.body.bias)
    weights = [p for name, p in inner.model.named_parameters() if "weight" in name]
    twin = il.InnerLoop(
        inner.model,
        optim.SGD(weights, lr=0.2, momentum=0.7),
        squares,
        learn=("init", "lr"),
    )
    assert_close(
        torch.autograd.grad(inner(train, val), list(inner.parameters())),
        torch.autograd.grad(twin(train, val), list(twin.parameters())),
        1e-11,
    )


@pytest.mark.parametrize("backward", [il.Tape(), il.Remat()], ids=repr)
def test_a_transform_that_writes_in_place(backward):
    def halve(grads):
        for grad in grads.values():
            grad.mul_(0.5)
        return grads

    inner, train, val = built(halve, learn=("init", "lr"), backward=backward)
    expected, *_ = built(lambda grads: {n: 0.5 * g for n, g in grads.items()}, learn=("init", "lr"))
    assert_close(
        torch.autograd.grad(inner(train, val), list(inner.parameters())),
        torch.autograd.grad(expected(train, val), list(expected.parameters())),
        1e-11,
    )


def test_first_order_and_clipping():
    """The inner gradient is a constant, its clipping included."""
    inner, train, val = built(il.clip_norm(0.35), learn=("init", "lr"), first_order=True)
    model, limit = inner.model, 0.35
    lr = torch.tensor([0.2], requires_grad=True)
    found: dict = {}

    def rule(step, name):
        def update(param, grad, state):
            total = found[step]
            grad = grad * min(limit / (total + 1e-6), 1.0)
            return Sgd(lr, 0.7)(param, grad, state)

        return update

    def loss(own, batch):
        value = squares(called(model, own), batch)
        grads = torch.autograd.grad(value, list(own.values()), retain_graph=True)
        found[len(found)] = sum(g.square().sum() for g in grads).sqrt().item()
        return value

    params = by_hand(dict(model.named_parameters()), loss, train, rule, first_order=True)
    leaves = [*model.parameters(), lr]
    expected = torch.autograd.grad(squares(called(model, params), val), leaves)
    assert_close(torch.autograd.grad(inner(train, val), list(inner.parameters())), expected, 1e-11)


# Refusals. --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [il.clip_norm, il.clip_value])
@pytest.mark.parametrize(
    "limit", [0, 0.0, -1.0, True, None, "1", [1.0], float("nan"), 1j, nn.ReLU], ids=str
)
def test_what_is_no_threshold_is_refused(make, limit):
    with refuses(make.__name__):
        make(limit)


def test_several_thresholds_for_one_norm_are_refused():
    """They would be broadcast over the gradients."""
    with refuses("clip_norm"):
        il.clip_norm(torch.ones(3))


@pytest.mark.parametrize("make", [il.clip_norm, il.clip_value])
def test_no_limit_at_all(make):
    inner, train, val = built(make(float("inf")))
    twin, *_ = built(None)
    assert_close([inner(train, val)], [twin(train, val)])


@pytest.mark.parametrize("wrong", [3, "clip", [il.clip_norm(1.0)]], ids=str)
def test_what_is_no_transform_is_refused(wrong):
    with refuses("grad_transform"):
        built(wrong)


def test_a_forgotten_threshold_is_refused():
    with refuses("clip_norm"):
        inner, train, val = built(il.clip_norm)
        inner(train, val)


@pytest.mark.parametrize(
    "transform",
    [
        lambda grads: None,
        lambda grads: list(grads.values()),
        lambda grads: {},
        lambda grads: {**grads, "more": torch.ones(1)},
        lambda grads: {name: g for name, g in grads.items() if "bias" not in name},
        lambda grads: {name: g.sum() for name, g in grads.items()},
        lambda grads: {name: g.tolist() for name, g in grads.items()},
    ],
    ids=["None", "list", "empty", "one more", "one less", "scalars", "numbers"],
)
def test_what_a_transform_may_not_return(transform):
    inner, train, val = built(transform)
    with refuses("gradient", model=inner.model, optimizer=inner.optimizer):
        inner(train, val)
