"""Programs that inductor has compiled: the uncompiled gradient, and no compilation too many.

Few and small, since each takes seconds; everything else about compilation is tested on what was
recorded.
"""

import pytest
import torch
from torch import nn, optim

import innerloop as il
from references import Net, assert_derivative, batches, squares
from ways import assert_same, gradients

TASKS = 3

# torch's own, as inductor is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def adam(model):
    return optim.Adam(model.parameters(), lr=0.05, betas=(0.8, 0.9))


def built(model=None, make=adam, learn=("init", "lr", "betas"), steps=2, **options):
    model = Net() if model is None else model
    inner = il.InnerLoop(model, make(model), squares, learn=learn, **options)
    *train, val = batches(steps + 1, TASKS)
    return inner, train, val


def result(inner, train, val, tasks=True):
    losses = inner(train, val, tasks=tasks)
    weights = torch.linspace(0.5, 1.5, TASKS)
    return [losses, *gradients((losses * weights).sum(), getattr(inner, "_orig_mod", inner))]


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 1, 2)),
        nn.Conv2d(1, 3, (1, 2), bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3, 1),
    )


def test_a_whole_meta_step_with_adam():
    """Equal and unequal weights of the losses."""
    inner, train, val = built()
    expected = result(inner, train, val, il.tasks.loop())
    inner.compile("whole")
    assert_same(result(inner, train, val), expected)
    assert inner._compiler.used
    losses = inner(train, val, tasks=True)
    inner._compiler, kept = None, inner._compiler
    plain = inner(train, val, tasks=il.tasks.loop())
    inner._compiler = kept
    assert_same(gradients(losses.mean(), inner), gradients(plain.mean(), inner))


@pytest.mark.slow
def test_another_number_of_tasks_compiles_once_and_going_back_never():
    inner, train, val = built()
    expected = result(inner, train, val, il.tasks.loop())
    inner.compile("whole")
    assert_same(result(inner, train, val), expected)
    one = inner._compiler.programs.count
    fewer = [tuple(p[:2] for p in b) for b in train], tuple(p[:2] for p in val)
    found = inner(*fewer, tasks=True)
    assert_same([found], [expected[0][:2]])
    assert inner._compiler.programs.count == one + 1
    assert_same(result(inner, train, val), expected)
    assert_same([inner(*fewer, tasks=True)], [expected[0][:2]])
    assert inner._compiler.programs.count == one + 1


@pytest.mark.parametrize("tasks", [pytest.param("vmap", marks=pytest.mark.slow), "loop"])
def test_a_step_with_convolution_and_batch_norm(tasks):
    way = getattr(il.tasks, tasks)
    make = lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    inner, train, val = built(convolutional(), make, ("init", "lr", "momentum"))
    expected = result(inner, train, val, il.tasks.loop())
    longer = result(inner, train * 3, val, il.tasks.loop())
    inner.compile("step")
    assert_same(result(inner, train, val, way()), expected)
    assert inner._compiler.used
    count = inner._compiler.programs.count
    assert_same(result(inner, train * 3, val, way()), longer)
    assert inner._compiler.programs.count == count


def test_torch_compile():
    inner, train, val = built(make=lambda m: optim.SGD(m.parameters(), lr=0.1), learn=("init",))
    expected = result(inner, train, val, il.tasks.loop())
    for fullgraph in (False, True):
        compiled = torch.compile(inner, fullgraph=fullgraph)
        assert_same(result(compiled, train, val), expected)
        assert inner._compiler.used
        count = inner._compiler.programs.count
        assert_same(result(compiled, train, val), expected)
        assert inner._compiler.programs.count == count
    single = [tuple(p[0] for p in b) for b in train], tuple(p[0] for p in val)
    value = compiled(*single)
    assert_same([value], [expected[0][0]])
    with torch.no_grad():
        assert_same([torch.compile(inner)(train, val, tasks=True)], [expected[0]])


@pytest.mark.slow
def test_by_differences():
    inner, train, val = built(make=lambda m: optim.RMSprop(m.parameters()), learn=("init", "lr"))
    inner.compile()
    assert_derivative(lambda: inner(train, val, tasks=True).sum(), inner.parameters())
    assert inner._compiler.used


def with_alpha(model, batch):
    """Sums with a factor, of what inductor fuses with a product of matrices."""
    x, y = batch
    body, head = model.body.weight, model.head.weight
    found = torch.add(y, torch.tanh(x @ body.T) @ head.T, alpha=-0.5)
    found.add_(x @ body.T @ head.T, alpha=0.25)
    return torch.sub(found, x @ body.T @ head.T, alpha=0.5).square().mean()


@pytest.mark.parametrize("unit", [pytest.param("whole", marks=pytest.mark.slow), "step"])
def test_factors_of_sums_are_kept(unit):
    """Of a rate that is not learned, too: inductor of torch 2.13 loses them beside a product."""
    model = Net()
    inner = il.InnerLoop(model, optim.SGD(model.parameters(), lr=0.1), with_alpha)
    *train, val = batches(2)
    value = inner(train, val)
    expected = [value, *gradients(value, inner)]
    inner.compile(unit)
    value = inner(train, val)
    assert_same([value, *gradients(value, inner)], expected)
    assert inner._compiler.used


@pytest.mark.slow
def test_modes_of_torch():
    inner, train, val = built(make=lambda m: optim.SGD(m.parameters(), lr=0.1), learn=("init",))
    expected = result(inner, train, val, il.tasks.loop())
    inner.compile(mode="reduce-overhead")
    assert_same(result(inner, train, val), expected)
    assert inner._compiler.used


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["whole", "step"])
@pytest.mark.parametrize(
    "kind", [optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta]
)
def test_other_optimizers(kind, unit):
    inner, train, val = built(make=lambda m: kind(m.parameters(), lr=0.1), learn=("init", "lr"))
    expected = result(inner, train, val, il.tasks.loop())
    inner.compile(unit)
    assert_same(result(inner, train, val), expected)
    assert inner._compiler.used


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["whole", "step"])
def test_a_transformer(unit):
    model = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True, bias=False)
    inner, *_ = built(model, learn=("init", "lr"))
    *train, val = [(torch.randn(TASKS, 2, 3, 4), torch.randn(TASKS, 2, 3, 4)) for _ in range(3)]
    expected = result(inner, train, val, il.tasks.loop())
    inner.compile(unit)
    assert_same(result(inner, train, val), expected)
