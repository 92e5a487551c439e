"""Compiled loops: results of the eager ones, new programs when something changes, and refusals.

What Dynamo traced runs as it is (``backend="eager"``), in the table after AOTAutograd.
"""

import copy
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn, optim

import innerloop as il
from inner_problems import PROBLEMS
from references import assert_derivative, batches, squares
from test_errors import refuses
from ways import assert_same, gradients

TASKS = 3
each_unit = pytest.mark.parametrize("unit", ["whole", "step"])


class Small(nn.Module):
    """As little to trace as possible."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 1))
        self.register_buffer("shift", torch.tensor(0.25))
        self.scale = 1.0

    def forward(self, x):
        return torch.tanh(self.scale * x @ self.weight) + self.shift


def built(unit="whole", loss=squares, model=None, make=None, tasks=(), steps=2, **options):
    torch._dynamo.reset()
    model = Small() if model is None else model
    make = make or (lambda params: optim.SGD(params, lr=0.3))
    options.setdefault("learn", ("init", "lr"))
    inner = il.InnerLoop(model, make(model.parameters()), loss, **options)
    inner.compile(unit, backend="eager")
    *train, val = batches(steps + 1, *tasks)
    return inner, train, val


def result(inner, train, val, tasks=False):
    losses = inner(train, val, tasks=tasks)
    weights = torch.linspace(0.5, 1.5, TASKS) if losses.dim() else torch.tensor(2.0)
    return [losses, *gradients((losses * weights).sum(), inner)]


def uncompiled(inner, train, val, tasks=False):
    """The same loop without its compiler."""
    kept, inner._compiler = inner._compiler, None
    try:
        return result(inner, train, val, il.tasks.loop() if tasks else False)
    finally:
        inner._compiler = kept


def assert_follows(inner, train, val, tasks=False, programs=None):
    """Twice: the call that makes a program gives the eager result."""
    expected = uncompiled(inner, train, val, tasks)
    assert_same(result(inner, train, val, tasks), expected)
    assert_same(result(inner, train, val, tasks), expected)
    assert inner.compiler.refused is None
    assert inner.compiler.programs > 0
    if programs is not None:
        assert inner.compiler.programs == programs


# Optimizers, problems, tasks. -------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": (lambda p: optim.SGD(p, lr=0.1), ("lr",)),
    "momentum": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), ("lr", "momentum")),
    "Adam": (lambda p: optim.Adam(p, lr=0.05, betas=(0.8, 0.9)), ("lr", "betas")),
    "RMSprop": (lambda p: optim.RMSprop(p, lr=0.02, alpha=0.8), ("lr", "alpha")),
}
ROWS = [
    *[("mlp", name) for name in OPTIMIZERS],
    ("convolution", "SGD"),
    ("convolution", "Adam"),
    ("learned_loss", "momentum"),
    ("transformer", "SGD"),
    ("tied", "SGD"),
    ("frozen", "SGD"),
]
QUICK = [("mlp", "Adam", False, "whole"), ("convolution", "SGD", True, "step")]


def table():
    """Tracing takes seconds: most rows are left to slow runs."""
    found = []
    for (problem, optimizer), tasks, unit in itertools.product(
        ROWS, (False, True), ("whole", "step")
    ):
        if (problem, tasks, unit) == ("frozen", True, "step"):
            continue  # a weight that no step moves has a graph: that of one copy for each task
        row = (problem, optimizer, tasks, unit)
        found.append(pytest.param(*row, marks=() if row in QUICK else (pytest.mark.slow,)))
    return found


@pytest.mark.parametrize(("problem", "optimizer", "tasks", "unit"), table())
def test_problems_and_optimizers(problem, optimizer, tasks, unit):
    torch._dynamo.reset()
    make, settings = OPTIMIZERS[optimizer]
    given = PROBLEMS[problem]
    model, loss, train, val = given.build()
    if tasks:
        more = [given.build() for _ in range(TASKS - 1)]
        train = [_stacked(parts) for parts in zip(train, *(m.train for m in more), strict=True)]
        val = _stacked([val, *(m.val for m in more)])
    params = [p for n, p in model.named_parameters() if n not in given.left_out]
    learn = ("init", *settings)
    inner = il.InnerLoop(model, make(params), loss, learn=learn, val_loss=given.val_loss)
    inner.compile(unit, backend="aot_eager")
    assert_follows(inner, train[:2], val, tasks)


def _stacked(parts):
    return tuple(torch.stack(column) for column in zip(*parts, strict=True))


PER_STEP = il.Learn(per=("group", "step"), steps=2)


@pytest.mark.parametrize(
    ("unit", "learn"),
    [("whole", ("init",)), ("step", ("lr",)), ("step", {"lr": PER_STEP})],
    ids=str,
)
def test_whatever_is_learned(unit, learn):
    assert_follows(*built(unit, learn=learn))


def test_by_differences():
    inner, train, val = built(tasks=(TASKS,))
    inner(train, val, tasks=True)
    assert_derivative(lambda: inner(train, val, tasks=True).sum(), inner.parameters())


@pytest.mark.parametrize("backward", [il.Remat(), il.Binomial(1), il.Truncated(1)], ids=repr)
def test_steps_with_a_strategy(backward):
    inner, train, val = built("step", backward=backward, steps=3, learn=("lr",))
    assert_follows(inner, train, val)


def test_one_program_for_all_steps():
    inner, train, val = built("step", steps=6, schedule=lambda step: 0.5 ** (step / 3))
    assert_follows(inner, train, val)
    made = inner.compiler.programs
    longer = [*train, *train]
    assert_follows(inner, longer, val, programs=made)


def test_steps_that_carry_on():
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        inner, train, val = built("step", backward=il.Truncated(5, carry=True), learn=("lr",))
        if not compiled:
            inner._compiler = None
        found.append([part for _ in range(3) for part in result(inner, train, val)])
    assert_same(*found)


def test_auto_compiles_few_steps_as_a_whole_and_many_one_by_one():
    inner, train, val = built("auto", steps=2)
    assert_follows(inner, train, val, programs=1)
    longer = train * 60
    assert_follows(inner, longer, val)
    made = inner.compiler.programs
    assert_follows(inner, longer[1:], val, programs=made)


# Any use of the result. -------------------------------------------------------------------------


def test_any_weights_of_the_losses():
    inner, train, val = built(tasks=(TASKS,))
    inner(train, val, tasks=True)
    losses = inner(train, val, tasks=True)
    kept, inner._compiler = inner._compiler, None
    expected = inner(train, val, tasks=il.tasks.loop())
    inner._compiler = kept
    for measure in (
        lambda v: v.mean(),
        lambda v: v[1],
        lambda v: v.square().sum(),
        lambda v: 0.0 * v.sum(),
        lambda v: v.flip(0).cumsum(0).prod(),
    ):
        found = gradients(measure(losses), inner, retain_graph=True)
        assert_same(found, gradients(measure(expected), inner, retain_graph=True))


def test_meta_training():
    """The same weights after some meta-steps as without compilation."""
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        inner, train, val = built(tasks=(TASKS,))
        if not compiled:
            inner._compiler = None
        meta = optim.Adam(inner.parameters(), lr=0.05)
        for _ in range(4):
            meta.zero_grad()
            inner(train, val, tasks=True).mean().backward()
            meta.step()
        found.append([p.detach() for p in inner.parameters()])
        assert not compiled or inner.compiler.refused is None
    assert_same(*found)


@each_unit
def test_learned_data_and_closed_over_tensors_have_their_gradients(unit):
    weight = torch.tensor(0.7, requires_grad=True)
    inner, train, val = built(unit, lambda model, batch: weight * squares(model, batch))
    leaf = train[0][0].requires_grad_()
    inner(train, val)
    found = torch.autograd.grad(inner(train, val), [leaf, weight])
    assert inner.compiler.refused is None
    inner._compiler = None
    assert_same(found, torch.autograd.grad(inner(train, val), [leaf, weight]))


def test_without_gradients():
    inner, train, val = built()
    with torch.no_grad():
        losses = inner(train, val)
    assert not losses.requires_grad
    assert inner.compiler.programs == 0
    assert_same([losses], [inner(train, val)])


def test_copies_are_compiled_too():
    inner, train, val = built()
    expected = result(inner, train, val)
    for again in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        assert_same(result(again, train, val), expected)
        assert again.compiler.programs == 1


# Nothing stale. ---------------------------------------------------------------------------------

NUMBERS = {"factor": 1.0}


def test_numbers_in_closures_globals_and_attributes(monkeypatch):
    factor = 1.0

    def loss(model, batch):
        return factor * NUMBERS["factor"] * squares(model, batch)

    inner, train, val = built(loss=loss)
    assert_follows(inner, train, val)
    factor = 2.0
    assert_follows(inner, train, val)
    monkeypatch.setitem(NUMBERS, "factor", 3.0)
    assert_follows(inner, train, val)
    inner.model.scale = 2.0
    assert_follows(inner, train, val)


def test_tensors_in_closures_and_buffers():
    factor = torch.tensor(1.0)
    inner, train, val = built("step", lambda model, batch: factor * squares(model, batch))
    assert_follows(inner, train, val)
    made = inner.compiler.programs
    factor.fill_(2.0)
    inner.model.shift.fill_(-0.5)
    assert_follows(inner, train, val, programs=made)
    factor = torch.tensor(3.0)
    assert_follows(inner, train, val)


def test_settings_of_the_optimizer_modes_and_frozen_weights():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    inner, train, val = built(model=model, learn=("init",))
    assert_follows(inner, train, val)
    inner.optimizer.param_groups[0]["lr"] /= 2
    assert_follows(inner, train, val)
    inner.optimizer.param_groups[0].update(momentum=0.5, weight_decay=0.2)
    assert_follows(inner, train, val)
    model.eval()
    assert_follows(inner, train, val)
    model[0].requires_grad_(False)
    assert_follows(inner, train, val)


def test_other_shapes_make_another_program_once():
    inner, train, val = built()
    assert_follows(inner, train, val, programs=1)
    shorter = [(x[:3], y[:3]) for x, y in train]
    assert_follows(inner, shorter, val, programs=2)
    assert_follows(inner, train, val, programs=2)


# What runs eagerly. -----------------------------------------------------------------------------


def reads_a_value(model, batch):
    found = squares(model, batch)
    return found if found.item() > 0 else -found


def asks_what_is_trained(model, batch):
    trained = [p for p in model.parameters() if p.requires_grad]
    return squares(model, batch) + sum(p.square().sum() for p in trained)


def nests(model, batch):
    other = il.InnerLoop(Small(), optim.SGD(model.parameters(), lr=0.1), squares)
    return other([batch], batch)


def dropping():
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1))


def decaying(params):
    return optim.SGD(params, lr=0.3, weight_decay=0.1)


IMPLICIT = il.Implicit(iterations=1, stationary=9.0)
EAGER = {
    "dropout": ("random numbers", {"model": dropping}),
    "value": ("reads_a_value", {"loss": reads_a_value}),
    "LBFGS": ("", {"make": lambda p: optim.LBFGS(p, lr=0.1, max_iter=2), "learn": ("init",)}),
    "Forward": ("Forward", {"backward": il.Forward()}),
    "Implicit": (
        "Implicit",
        {"backward": IMPLICIT, "learn": ("weight_decay",), "make": decaying},
    ),
}


@each_unit
def test_closed_over_tensors_with_a_graph_run_eagerly(unit):
    leaf = torch.tensor(0.7, requires_grad=True)
    weight = leaf.exp()
    inner, train, val = built(unit, lambda model, batch: weight * squares(model, batch))
    with pytest.warns(UserWarning, match="external grad_fn.*loss.__closure__"):
        losses = inner(train, val)
    (found,) = torch.autograd.grad(losses, [leaf], retain_graph=True)
    inner._compiler = None
    assert_same([found], torch.autograd.grad(inner(train, val), [leaf]))


@pytest.mark.parametrize("name", EAGER)
def test_what_cannot_be_compiled_runs_eagerly_with_one_warning(name):
    reason, options = EAGER[name]
    if "model" in options:
        options = {**options, "model": options["model"]()}
    inner, train, val = built(**options)
    torch.manual_seed(1)
    expected = uncompiled(inner, train, val)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=f"cannot be compiled.*{reason}") as found:
        assert_same(result(inner, train, val), expected)
    assert len(found) == 1
    torch.manual_seed(1)
    assert_same(result(inner, train, val), expected)
    assert inner.compiler.programs == 0


def test_a_program_that_differs_is_not_used():
    """Under ``vmap`` Dynamo says of no weight that it requires grad."""
    inner, train, val = built(loss=asks_what_is_trained, tasks=(TASKS,))
    expected = uncompiled(inner, train, val, True)
    with pytest.warns(UserWarning, match="are off by"):
        assert_same(result(inner, train, val, True), expected)
    assert_same(result(inner, train, val, True), expected)


def test_a_whole_leaves_truncation_to_steps():
    inner, train, val = built(backward=il.Truncated(1), learn=("lr",))
    with pytest.warns(UserWarning, match=r"Truncated.*compile\('step'\)"):
        found = result(inner, train, val)
    assert_same(found, uncompiled(inner, train, val))


def test_errors_of_the_loss_are_its_own():
    def loss(model, batch):
        raise ValueError("no such thing")

    inner, train, val = built(loss=loss)
    with warnings.catch_warnings(), pytest.raises(ValueError, match="no such thing"):
        warnings.simplefilter("error")
        inner(train, val)


def test_no_other_unit():
    inner = built()[0]
    with refuses("compile('all')", "'whole'"):
        inner.compile("all")


@pytest.mark.slow
def test_inductor():
    """The sine net: losses and gradients in float64."""
    model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU())
    model.append(nn.Linear(40, 1))
    inner = il.InnerLoop(model, optim.SGD(model.parameters(), lr=0.01), squares)
    inner.compile()
    *train, val = batches(6, TASKS, inputs=1)
    assert_follows(inner, train, val, True, programs=1)


@pytest.mark.slow
def test_inductor_keeps_the_rate_of_a_matrix_product():
    """It loses alpha when it fuses ``add(a, b @ c, alpha=...)``, an update of a layer's weights."""
    model = nn.Sequential(nn.Linear(1, 16, bias=False), nn.Tanh(), nn.Linear(16, 1))
    inner = il.InnerLoop(model, optim.SGD(model.parameters(), lr=0.1), squares, backward=il.Remat())
    inner.compile("step")
    *train, val = batches(4, inputs=1)
    assert_follows(inner, train, val, False, programs=1)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_torch_compile_of_a_loop_is_its_own_compilation(fullgraph):
    inner, train, val = built()
    outside = torch.compile(inner, fullgraph=fullgraph, backend="eager")
    expected = uncompiled(inner, train, val)
    losses = outside(train, val)
    assert inner.compiler.programs == 1
    assert_same([losses, *gradients(losses * 2, inner)], expected)


def test_torch_compile_makes_the_compiler():
    torch._dynamo.reset()
    model = Small()
    inner = il.InnerLoop(
        model, optim.SGD(model.parameters(), lr=0.3), squares, backward=il.Forward()
    )
    *train, val = batches(3)
    with pytest.warns(UserWarning, match="Forward"):
        value = torch.compile(inner, backend="eager")(train, val)
    assert inner.compiler is not None
    assert_same([value], [inner(train, val)])
