"""Third derivatives of norms: right in nested loops, refused where torch's would be wrong."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import innerloop as il
from references import assert_derivative, batches, squares
from test_errors import refuses


class Normed(nn.Module):
    """2 -> 4 -> 1 with a norm between."""

    def __init__(self, norm):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(2, 4), norm(), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(torch.sin(self.body(x)))))


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Derived(nn.BatchNorm1d):
    """With torch's forward."""


class Instances(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, affine=True, **options)

    def forward(self, x):
        return self.norm(x.T[None])[0].T


RIGHT = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "subclass of BatchNorm1d": lambda: Derived(4, track_running_stats=False),
    "BatchNorm1d by statistics": lambda: nn.BatchNorm1d(4).eval(),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "RMSNorm": lambda: nn.RMSNorm(4),
}
WRONG = {
    "LayerNorm": lambda: nn.LayerNorm(4),
    "InstanceNorm1d": lambda: Instances(track_running_stats=True),
    "layer_norm": lambda: Called(lambda x: F.layer_norm(x, (4,))),
    "torch.layer_norm": lambda: Called(lambda x: torch.layer_norm(x, (4,), eps=1e-3)),
    "batch_norm": lambda: Called(lambda x: F.batch_norm(x, None, None, training=True)),
}
each = pytest.mark.parametrize("norm", [*RIGHT, *WRONG])


def loop(norm, loss=squares, **options):
    torch.manual_seed(3)
    model = Normed((RIGHT | WRONG)[norm])
    sgd = optim.SGD(model.parameters(), lr=0.1)
    return il.InnerLoop(model, sgd, loss, learn=("init",), **options)


def trained_inside(model, batch):
    """A loss after training of its own."""

    def loss(params, batch):
        return F.mse_loss(torch.func.functional_call(model, params, batch[0]), batch[1])

    start = il.State(dict(model.named_parameters()))
    step = il.inner_step(loss, il.optim.sgd(0.1))
    state, _ = il.unroll(step, start, il.Meta(), [tuple(t.roll(1) for t in batch)] * 2)
    return loss(state.params, batch)


@each
def test_nested_loops(norm):
    inner, (*train, val) = loop(norm, trained_inside), batches(3)
    assert_derivative(lambda: inner(train, val), inner.parameters())


@each
def test_nested_loops_with_tasks(norm):
    inner, (*train, val) = loop(norm, trained_inside), batches(2, 3)
    losses = inner(train, val, tasks=il.tasks.loop())
    each = [inner([tuple(t[i] for t in b) for b in train], [t[i] for t in val]) for i in range(3)]
    torch.testing.assert_close(losses, torch.stack(each))
    parameters = list(inner.parameters())
    found = torch.autograd.grad(losses.sum(), parameters)
    expected = torch.autograd.grad(sum(each), parameters)
    torch.testing.assert_close(found, expected)


@torch.enable_grad()
def penalized(model, batch):
    x = batch[0].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, batch[1]) + slope.square().mean()


@pytest.mark.parametrize("norm", RIGHT)
def test_a_penalty_on_gradients(norm):
    inner, (*train, val) = loop(norm, penalized), batches(3)
    assert_derivative(lambda: inner(train, val), inner.parameters())


@pytest.mark.parametrize("norm", WRONG)
@pytest.mark.parametrize("backward", [il.Tape(), il.Remat(), il.Forward()], ids=repr)
def test_a_penalty_that_torch_has_wrong(norm, backward):
    inner, (*train, val) = loop(norm, penalized, backward=backward), batches(3)
    with refuses("third derivative", kind=il.RequirementError):
        inner(train, val).backward()


@pytest.mark.parametrize("norm", WRONG)
def test_a_penalty_that_needs_second_derivatives_only(norm):
    inner, (*train, val) = loop(norm, val_loss=penalized), batches(3)
    assert_derivative(lambda: inner(train, val), inner.parameters())
    loop(norm, penalized, first_order=True)(train, val).backward()


@each
def test_a_derivative_of_the_meta_gradient(norm):
    inner, (*train, val) = loop(norm), batches(3)
    parameters = list(inner.parameters())

    @torch.enable_grad()
    def slope():
        found = torch.autograd.grad(inner(train, val), parameters, create_graph=True)
        return sum(g.square().sum() for g in found)

    if norm in RIGHT:
        assert_derivative(slope, parameters)
    else:
        with refuses("third derivative", kind=il.RequirementError):
            slope().backward()


@each
def test_a_graph_of_the_meta_gradient_that_nobody_uses(norm):
    inner, (*train, val) = loop(norm), batches(3)
    parameters = list(inner.parameters())
    found = [
        torch.autograd.grad(inner(train, val), parameters, create_graph=create)
        for create in (False, True)
    ]
    torch.testing.assert_close(*found)


def by_func(model, batch):
    slopes = torch.func.grad(lambda x: model(x).sum())(batch[0])
    return F.mse_loss(model(batch[0]), batch[1]) + slopes.square().mean()


def by_tangents(model, batch):
    _, slopes = torch.func.jvp(model, (batch[0],), (torch.ones_like(batch[0]),))
    return (model(batch[0]) - batch[1]).square().mean() + slopes.square().mean()


MODULES = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "subclass of BatchNorm1d": lambda: Derived(4, track_running_stats=False),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "InstanceNorm1d": lambda: Instances(),
}


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("norm", MODULES)
@pytest.mark.parametrize("loss", [by_func, by_tangents])
def test_norms_that_are_modules_under_torchs_transforms(norm, loss):
    torch.manual_seed(3)
    model = Normed(MODULES[norm])
    inner = il.InnerLoop(model, optim.SGD(model.parameters(), lr=0.1), loss, learn=("init",))
    *train, val = batches(3)
    assert_derivative(lambda: inner(train, val), inner.parameters())


def test_a_learned_loss_in_nested_loops():
    """Its weights were computed in the step before, with a norm that is not this step's."""
    torch.manual_seed(3)
    model, criterion = Normed(lambda: nn.LayerNorm(4)), nn.Linear(1, 1)

    def loss(held, batch):
        given = dict(held.named_parameters())

        def judged(params, batch):
            def inside(weights, batch):
                out = torch.func.functional_call(model, weights, batch[0])
                error = (out - batch[1]).square()
                return torch.func.functional_call(criterion, params, error).square().mean()

            step = il.inner_step(inside, il.optim.sgd(0.1))
            start = il.State({n: p.detach() for n, p in model.named_parameters()})
            state, _ = il.unroll(step, start, il.Meta(), [batch])
            out = torch.func.functional_call(model, state.params, batch[0])
            return F.mse_loss(out, batch[1])

        return judged(given, batch)

    inner = il.InnerLoop(
        criterion, optim.SGD(criterion.parameters(), lr=0.1), loss, learn=("init",)
    )
    *train, val = batches(4)
    assert_derivative(lambda: inner(train, val), inner.parameters())
