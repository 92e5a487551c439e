"""Compiled meta-steps: nothing stale, nothing recorded anew without need, and what is not compiled.

What was recorded runs as it is here (``backend="eager"``); inductor has a file of its own.
"""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn, optim
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import innerloop as il
from innerloop.compiled._program import NotCompilableError, Recorded
from references import Net, assert_derivative, batches, squares
from test_errors import refuses
from test_tasks_threads import dropping
from ways import assert_same, gradients

TASKS = 3
UNITS = ["whole", "step"]
each_unit = pytest.mark.parametrize("unit", UNITS)


class Small(nn.Module):
    """As little to record as possible."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 1))
        self.register_buffer("shift", torch.tensor(0.25))
        self.scale = 1.0

    def forward(self, x):
        return torch.tanh(self.scale * x @ self.weight) + self.shift


def built(unit="whole", loss=squares, model=None, make=None, tasks=(TASKS,), steps=1, **options):
    model = Small() if model is None else model
    make = make or (lambda params: optim.SGD(params, lr=0.3))
    options.setdefault("learn", ("init", "lr"))
    inner = il.InnerLoop(model, make(model.parameters()), loss, **options)
    if unit is not None:
        inner.compile(unit, backend="eager")
    *train, val = batches(steps + 1, *tasks)
    return inner, train, val


def count(inner):
    return inner._compiler.programs.count


def result(inner, train, val, tasks=True):
    losses = inner(train, val, tasks=tasks)
    return [losses, *gradients(losses.sum(), inner)]


def uncompiled(inner, train, val, tasks=True):
    """The same loop without its compiler."""
    kept, inner._compiler = inner._compiler, None
    way = il.tasks.loop() if tasks else False
    found = result(inner, train, val, way)
    inner._compiler = kept
    return found


def assert_follows(inner, train, val, tasks=True, used=True):
    assert_same(result(inner, train, val, tasks), uncompiled(inner, train, val, tasks))
    assert inner._compiler.used is used


# What it computes. ------------------------------------------------------------------------------


@each_unit
@pytest.mark.parametrize("tasks", [True, False])
def test_a_call_with_and_without_tasks(unit, tasks):
    inner, train, val = built(unit, tasks=(TASKS,) if tasks else (), steps=2)
    assert_follows(inner, train, val, tasks)
    assert inner._compiler.chosen == unit
    assert repr(inner._compiler).startswith(f"compile('{unit}'): {unit}, ")


@each_unit
def test_by_differences(unit):
    inner, train, val = built(unit)
    inner(train, val, tasks=True)
    assert_derivative(lambda: inner(train, val, tasks=True).sum(), inner.parameters())


@each_unit
def test_any_weights_of_the_losses(unit):
    inner, train, val = built(unit)
    losses = inner(train, val, tasks=True)
    kept, inner._compiler = inner._compiler, None
    expected = inner(train, val, tasks=il.tasks.loop())
    inner._compiler = kept
    weights = torch.tensor([0.5, 0.0, -2.0])
    for measure in (
        lambda v: (v * weights).sum(),
        lambda v: v.mean(),
        lambda v: v[1],
        lambda v: v.max(),
        lambda v: v.square().sum(),
        lambda v: 0.0 * v.sum(),
        lambda v: v.flip(0).cumsum(0).prod(),
    ):
        found = gradients(measure(losses), inner, retain_graph=True)
        assert_same(found, gradients(measure(expected), inner, retain_graph=True))


@each_unit
def test_backward_twice_with_retain_graph(unit):
    inner, train, val = built(unit)
    losses = inner(train, val, tasks=True)
    first = gradients(losses.sum(), inner, retain_graph=True)
    assert_same(gradients(losses.sum(), inner, retain_graph=True), first)
    losses.sum().backward(retain_graph=True)
    losses.sum().backward()
    assert_same([p.grad for p in inner.parameters()], [2 * g for g in first])


@each_unit
def test_gradients_are_of_the_weights_of_the_call(unit):
    """A meta-step between the forward and the backward does not change them, or is refused."""
    inner, train, val = built(unit)
    weights = torch.tensor([0.5, 0.0, -2.0])
    expected = gradients((inner(train, val, tasks=True) * weights).sum(), inner)
    losses = (inner(train, val, tasks=True) * weights).sum()
    with torch.no_grad():
        kept = [p.clone() for p in inner.parameters()]
        for p in inner.parameters():
            p.add_(0.5)
    try:
        found = gradients(losses, inner)
    except (RuntimeError, il.InnerLoopError) as error:
        assert "in place" in str(error) or "inplace" in str(error)
        return
    with torch.no_grad():
        for p, value in zip(inner.parameters(), kept, strict=True):
            p.copy_(value)
    assert_same(found, expected)


@each_unit
def test_meta_training(unit):
    """The same weights after some meta-steps as without compilation, and one program."""
    found = []
    for each in (unit, None):
        torch.manual_seed(0)
        inner, train, val = built(each)
        meta = optim.Adam(inner.parameters(), lr=0.05)
        for _ in range(4):
            meta.zero_grad()
            inner(train, val, tasks=True if each else il.tasks.loop()).mean().backward()
            meta.step()
        found.append([p.detach() for p in inner.parameters()])
        if each:
            assert count(inner) <= 2
    assert_same(*found)


@each_unit
def test_learned_data_has_its_gradient(unit):
    inner, train, val = built(unit)
    leaf = train[0][0].requires_grad_()
    losses = inner(train, val, tasks=True)
    (found,) = torch.autograd.grad(losses.sum(), [leaf])
    assert inner._compiler.used
    inner._compiler = None
    losses = inner(train, val, tasks=il.tasks.loop())
    assert_same([found], torch.autograd.grad(losses.sum(), [leaf]))


@each_unit
def test_without_gradients(unit):
    inner, train, val = built(unit)
    with torch.no_grad():
        losses = inner(train, val, tasks=True)
    assert not losses.requires_grad
    assert_same([losses], [inner(train, val, tasks=True)])


@each_unit
def test_a_model_in_other_orders_of_memory(unit):
    inner, train, val = built(unit)
    expected = result(inner, train, val)
    turned = [tuple(p.transpose(0, 1).contiguous().transpose(0, 1) for p in b) for b in train]
    assert_same(result(inner, turned, val), expected)
    assert_same(result(inner, [[*b] for b in train], val), expected)


# Nothing stale. ---------------------------------------------------------------------------------

FACTOR = 1.0
NUMBERS = {"factor": 1.0}


class Held:
    factor = 1.0

    def __init__(self):
        self.factor = 1.0


def test_numbers_in_a_closure():
    factor = 1.0

    def loss(model, batch):
        return factor * squares(model, batch)

    inner, train, val = built(loss=loss)
    assert_follows(inner, train, val)
    factor = 2.0
    assert_follows(inner, train, val)
    assert count(inner) == 2


@each_unit
def test_numbers_among_globals(unit, monkeypatch):
    inner, train, val = built(unit, lambda m, b: FACTOR * squares(m, b))
    assert_follows(inner, train, val)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert_follows(inner, train, val)


def through_another(model, batch):
    return deeper(model, batch)


def deeper(model, batch):
    return NUMBERS["factor"] * squares(model, batch)


def test_numbers_in_a_global_container_behind_functions(monkeypatch):
    inner, train, val = built(loss=through_another)
    assert_follows(inner, train, val)
    monkeypatch.setitem(NUMBERS, "factor", 2.0)
    assert_follows(inner, train, val)


def test_numbers_of_an_object():
    held = Held()
    inner, train, val = built(loss=lambda m, b: held.factor * squares(m, b))
    assert_follows(inner, train, val)
    held.factor = 2.0
    assert_follows(inner, train, val)


GLOBAL_HELD = Held()


def test_numbers_of_a_global_object():
    inner, train, val = built(loss=lambda m, b: GLOBAL_HELD.factor * squares(m, b))
    assert_follows(inner, train, val)
    GLOBAL_HELD.factor = 2.0
    try:
        assert_follows(inner, train, val)
    finally:
        GLOBAL_HELD.factor = 1.0


def test_numbers_of_a_class(monkeypatch):
    class Settings:
        factor = 1.0

    inner, train, val = built(loss=lambda m, b: Settings.factor * squares(m, b))
    assert_follows(inner, train, val)
    Settings.factor = 2.0
    assert_follows(inner, train, val)


def test_numbers_of_a_method():
    class Loss:
        factor = 1.0

        def of(self, model, batch):
            return self.factor * squares(model, batch)

    loss = Loss()
    inner, train, val = built(loss=loss.of)
    assert_follows(inner, train, val)
    loss.factor = 2.0
    assert_follows(inner, train, val)
    Loss.factor = 3.0
    del loss.factor
    assert_follows(inner, train, val)


class Slotted:
    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 1.0


def test_numbers_in_slots():
    held = Slotted()
    inner, train, val = built(loss=lambda m, b: held.factor * squares(m, b))
    assert_follows(inner, train, val)
    held.factor = 2.0
    assert_follows(inner, train, val)


@each_unit
def test_numbers_of_the_model(unit):
    inner, train, val = built(unit)
    assert_follows(inner, train, val)
    inner.model.scale = 2.0
    assert_follows(inner, train, val)
    inner.model.scale = 1.0
    before = count(inner)
    assert_follows(inner, train, val)
    assert count(inner) == before


def test_numbers_deep_in_the_model():
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(Small()))))
    model.inner = {"list": [1.0]}
    inner, train, val = built(model=model, loss=lambda m, b: m.inner["list"][0] * squares(m, b))
    assert_follows(inner, train, val)
    model[0][0][0][0].scale = 2.0
    assert_follows(inner, train, val)
    model.inner["list"][0] = 3.0
    assert_follows(inner, train, val)


@each_unit
def test_frozen_running_statistics(unit):
    """Only the way that batches tasks knows of them."""

    def measured(model, batch):
        model.eval()
        return squares(model, batch)

    frozen = il.tasks.vmap(running_stats="frozen")
    found = []
    for compiled in (unit, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        inner, train, val = built(compiled, squares, model, val_loss=measured)
        if compiled:
            with pytest.warns(UserWarning, match="frozen"):
                found.append(result(inner, train, val, frozen))
        else:
            found.append(result(inner, train, val, frozen))
    assert_same(*found)


@each_unit
def test_functions_in_a_batch(unit):
    """What they read may change."""
    factor = [1.0]

    def scaled(value):
        return factor[0] * value

    def loss(model, batch):
        return batch[2](squares(model, batch[:2]))

    inner, train, val = built(unit, loss, tasks=())
    train, val = [(*batch, scaled) for batch in train], (*val, scaled)
    with pytest.warns(UserWarning, match="function among the batches"):
        assert_follows(inner, train, val, False, used=False)
    factor[0] = 2.0
    assert_follows(inner, train, val, False, used=False)


@each_unit
def test_settings_of_the_optimizer(unit):
    inner, train, val = built(
        unit,
        learn=("init",),
        make=lambda p: optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.1),
    )
    assert_follows(inner, train, val)
    inner.optimizer.param_groups[0]["lr"] /= 2
    assert_follows(inner, train, val)
    inner.optimizer.param_groups[0].update(momentum=0.5, weight_decay=0.2, nesterov=True)
    assert_follows(inner, train, val)


def test_tensors_that_are_closed_over():
    """Written in place or replaced."""
    factor = torch.tensor(1.0)

    def loss(model, batch):
        return factor * squares(model, batch)

    inner, train, val = built(loss=loss)
    assert_follows(inner, train, val)
    factor.fill_(2.0)
    assert_follows(inner, train, val)
    factor = torch.tensor(3.0)
    assert_follows(inner, train, val)


def test_buffers_of_the_model():
    inner, train, val = built()
    assert_follows(inner, train, val)
    inner.model.shift.fill_(0.5)
    assert_follows(inner, train, val)
    inner.model.shift = torch.tensor(0.75)
    assert_follows(inner, train, val)
    assert count(inner) <= 3


@each_unit
def test_weights_written_and_replaced(unit):
    inner, train, val = built(unit)
    assert_follows(inner, train, val)
    before = count(inner)
    with torch.no_grad():
        inner.model.weight.mul_(0.5)
    assert_follows(inner, train, val)
    inner.load_state_dict({n: 0.5 * v for n, v in inner.state_dict().items()})
    assert_follows(inner, train, val)
    inner.model.weight.data = torch.randn(2, 1)
    assert_follows(inner, train, val)
    assert count(inner) == before
    inner.model.weight = nn.Parameter(torch.randn(2, 1))
    with refuses("replaced"):
        inner(train, val, tasks=True)


def normed():
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 1))


def test_training_and_evaluation():
    inner, train, val = built("step", model=normed())
    inner.model[1].running_mean.normal_()
    assert_follows(inner, train, val)
    inner.eval()
    assert_follows(inner, train, val)
    before = count(inner)
    inner.train()
    assert_follows(inner, train, val)
    assert count(inner) == before
    inner.model[1].eps = 0.5
    assert_follows(inner, train, val)


@each_unit
def test_what_requires_grad(unit):
    inner, train, val = built(unit, model=Net())
    assert_follows(inner, train, val)
    inner.model.body.requires_grad_(False)
    assert_follows(inner, train, val)
    inner.model.body.requires_grad_(True)
    before = count(inner)
    assert_follows(inner, train, val)
    assert count(inner) == before


@each_unit
def test_a_warm_optimizer(unit):
    make = lambda params: optim.Adam(params, lr=0.1)  # noqa: E731
    inner, train, val = built(unit, make=make)
    assert_follows(inner, train, val)
    single = tuple(p[0] for p in val)
    for _ in range(2):
        inner.optimizer.zero_grad()
        squares(inner.model, single).backward()
        inner.optimizer.step()
        inner.optimizer.zero_grad()
        assert_follows(inner, train, val)
    inner.optimizer.state.clear()
    assert_follows(inner, train, val)


def test_hooks_added_later():
    inner, train, val = built()
    assert_follows(inner, train, val)
    handle = inner.model.register_forward_hook(lambda module, args, out: 2 * out)
    assert_follows(inner, train, val)
    handle.remove()
    assert_follows(inner, train, val)


@each_unit
def test_hooks_of_all_modules(unit):
    inner, train, val = built(unit)
    assert_follows(inner, train, val)
    every = nn.modules.module.register_module_forward_hook
    handle = every(lambda module, args, out: 2 * out)
    try:
        assert_follows(inner, train, val)
    finally:
        handle.remove()
    assert_follows(inner, train, val)


class Scaled(Small):
    factor = 1.0

    def forward(self, x):
        return FACTOR * self.factor * super().forward(x)


def test_numbers_read_in_forward(monkeypatch):
    """Globals, and attributes of the class."""
    inner, train, val = built(model=Scaled())
    assert_follows(inner, train, val)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert_follows(inner, train, val)
    monkeypatch.setattr(Scaled, "factor", 3.0)
    assert_follows(inner, train, val)


def test_parts_of_the_loop_replaced():
    inner, train, val = built()
    assert_follows(inner, train, val)
    inner.loss = lambda m, b: 2 * squares(m, b)
    assert_follows(inner, train, val)
    inner.val_loss = lambda m, b: 3 * squares(m, b)
    assert_follows(inner, train, val)
    inner.first_order = True
    assert_follows(inner, train, val)
    inner.grad_transform = il.clip_norm(0.01)
    assert_follows(inner, train, val)
    inner.grad_transform = il.clip_norm(0.02)
    assert_follows(inner, train, val)
    inner.schedule = lambda step: 0.5**step
    assert_follows(inner, train, val)


def test_numbers_of_a_batch():
    inner, train, val = built(loss=lambda m, b: b[2] * squares(m, b[:2]))
    for factor in (1.0, 2.0):
        given = [(*b, factor) for b in train]
        assert_follows(inner, given, (*val, factor))


def test_dtypes():
    inner, train, val = built()
    assert_follows(inner, train, val)
    inner.float()
    train, val = [tuple(p.float() for p in b) for b in train], tuple(p.float() for p in val)
    found, expected = result(inner, train, val), uncompiled(inner, train, val)
    assert found[0].dtype == torch.float32
    assert_same(found, expected, 1e-5)


def test_which_batch_is_repeated():
    inner, (first, second), val = built(steps=2)
    for train in ([first, first], [first, second], [second, second], [second, first]):
        assert_follows(inner, train, val)
    assert count(inner) == 2


# Recorded anew only where needed. ---------------------------------------------------------------


@each_unit
def test_another_shape_is_recorded_once(unit):
    inner, train, val = built(unit)
    result(inner, train, val)
    one = count(inner)
    fewer = [tuple(p[:2] for p in b) for b in train], tuple(p[:2] for p in val)
    assert_follows(inner, *fewer)
    two = count(inner)
    assert two > one
    smaller = [tuple(p[:, :4] for p in b) for b in train], tuple(p[:, :4] for p in val)
    assert_follows(inner, *smaller)
    three = count(inner)
    for given in ((train, val), fewer, smaller, (train, val)):
        assert_follows(inner, *given)
    assert count(inner) == three


@pytest.mark.parametrize("backward", [il.Tape(), il.Remat(), il.Binomial(1)], ids=repr)
def test_any_number_of_steps_is_one_program(backward):
    inner, train, val = built("step", backward=backward, steps=2)
    result(inner, train, val)
    before = count(inner)
    for steps in (1, 5):
        assert_follows(inner, [train[0]] * steps, val)
    assert count(inner) == before


def test_rates_of_steps_and_schedules_are_one_program():
    learn = {"init": True, "lr": il.Learn(per="step", steps=6)}
    inner, train, val = built("step", learn=learn, schedule=lambda step: 0.9**step, steps=2)
    result(inner, train, val)
    before = count(inner)
    assert_follows(inner, train * 3, val)
    assert count(inner) == before


@each_unit
def test_a_learned_rate_that_changes(unit):
    inner, train, val = built(unit)
    result(inner, train, val)
    before = count(inner)
    with torch.no_grad():
        inner.settings["lr"].mul_(0.5)
    assert_follows(inner, train, val)
    assert count(inner) == before


@each_unit
@pytest.mark.parametrize("make", [optim.SGD, optim.Adam])
def test_a_rate_of_each_parameter(unit, make):
    """Several tensors in one block, with a number each."""
    learn = {"lr": il.Learn(per="parameter")}
    inner, train, val = built(
        unit, model=Net(), make=lambda params: make(params, lr=0.1), steps=2, learn=learn
    )
    assert_follows(inner, train, val)


def test_a_scheduler_of_torch():
    model = Small()
    optimizer = optim.SGD(model.parameters(), lr=0.3)
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for unit in UNITS:
        inner = il.InnerLoop(model, optimizer, squares, ("init",), schedule=schedule)
        inner.compile(unit, backend="eager")
        *train, val = batches(2, TASKS)
        assert_follows(inner, train, val)


def test_many_settings_end_with_a_warning():
    """Not with a program for each number for ever."""
    inner, train, val = built(learn=("init",))
    inner._compiler.programs.limit = 3
    with pytest.warns(UserWarning, match="3 different") as found:
        for step in range(6):
            inner.optimizer.param_groups[0]["lr"] = 0.1 + step / 100
            assert_same(result(inner, train, val), uncompiled(inner, train, val))
    assert len(found) == 1


# What is not compiled. --------------------------------------------------------------------------


@each_unit
def test_a_closed_over_tensor_that_requires_grad(unit):
    scale = torch.tensor(1.5, requires_grad=True)
    inner, train, val = built(unit, lambda m, b: scale * squares(m, b))
    with pytest.warns(UserWarning, match="cannot be compiled: .* was not given") as found:
        losses = inner(train, val, tasks=True)
    assert len(found) == 1
    (grad,) = torch.autograd.grad(losses.sum(), [scale])
    inner(train, val, tasks=True)  # without a second warning
    inner._compiler = None
    losses = inner(train, val, tasks=il.tasks.loop())
    assert_same([grad], torch.autograd.grad(losses.sum(), [scale]))


@each_unit
def test_a_validation_loss_that_closes_over_a_tensor(unit):
    scale = torch.tensor(1.5, requires_grad=True)
    inner, train, val = built(unit, val_loss=lambda m, b: scale * squares(m, b))
    if unit == "whole":
        with pytest.warns(UserWarning, match="was not given"):
            losses = inner(train, val, tasks=True)
    else:
        losses = inner(train, val, tasks=True)
    (grad,) = torch.autograd.grad(losses.sum(), [scale])
    inner._compiler = None
    losses = inner(train, val, tasks=il.tasks.loop())
    assert_same([grad], torch.autograd.grad(losses.sum(), [scale]))


@each_unit
def test_a_closed_over_tensor_that_begins_to_require_grad(unit):
    scale = torch.tensor(1.5)
    inner, train, val = built(unit, lambda m, b: scale * squares(m, b))
    inner(train, val, tasks=True)
    scale.requires_grad_()
    with pytest.warns(UserWarning, match="was not given"):
        losses = inner(train, val, tasks=True)
    assert torch.autograd.grad(losses.sum(), [scale])[0] != 0


@each_unit
def test_dropout(unit):
    inner, train, val = built(unit, model=dropping())
    with pytest.warns(UserWarning, match="random numbers") as found:
        inner(train, val, tasks=True)
        inner(train, val, tasks=True)
    assert len(found) == 1
    torch.manual_seed(1)
    losses = inner(train, val, tasks=il.tasks.loop())
    inner._compiler = None
    torch.manual_seed(1)
    assert_same([losses], [inner(train, val, tasks=il.tasks.loop())])


@each_unit
def test_dropout_that_is_switched_off(unit):
    inner, train, val = built(unit, model=dropping())
    inner.eval()
    assert_follows(inner, train, val)


@each_unit
@pytest.mark.parametrize("tasks", [True, False])
def test_control_flow_that_looks_at_values(unit, tasks):
    def loss(model, batch):
        found = squares(model, batch)
        return found if found.item() < 100 else 2 * found

    inner, train, val = built(unit, loss, tasks=(TASKS,) if tasks else ())
    with pytest.warns(UserWarning, match="cannot be compiled") as found:
        actual = result(inner, train, val, tasks)
    assert len(found) == 1
    assert not inner._compiler.used
    assert_same(actual, uncompiled(inner, train, val, tasks))


READS = {
    "item": lambda t: t.item(),
    "float": float,
    "int": int,
    "bool": lambda t: 3.0 if t > 1 else 1.0,
    "index": lambda t: len(range(t.long())),
    "equal": lambda t: 3.0 if torch.equal(t, torch.ones(())) else 1.0,
    "computed": lambda t: (2 * t).item(),
}


@each_unit
@pytest.mark.parametrize("read", READS)
def test_values_read_of_a_tensor_from_outside(unit, read):
    """In a program they would be constants, and the tensor may be written to."""
    factor = torch.ones(())

    def loss(model, batch):
        return READS[read](factor) * squares(model, batch)

    inner, train, val = built(unit, loss)
    with pytest.warns(UserWarning, match="cannot be compiled"):
        assert_follows(inner, train, val, used=False)
    factor.fill_(2.0)
    assert_follows(inner, train, val, used=False)


@each_unit
def test_values_read_of_a_tensor_of_its_own(unit):
    """It is made anew, from numbers that are constants anyway."""

    def loss(model, batch):
        return torch.tensor(2.0).item() * squares(model, batch)

    inner, train, val = built(unit, loss)
    assert_follows(inner, train, val)


@each_unit
def test_a_branch_on_values(unit):
    def loss(model, batch):
        found = squares(model, batch)
        return found if found < 0.5 else 2 * found

    inner, train, val = built(unit, loss, tasks=())
    with pytest.warns(UserWarning, match="cannot be compiled"):
        actual = result(inner, train, val, False)
    assert_same(actual, uncompiled(inner, train, val, False))


@each_unit
def test_lbfgs(unit):
    inner, train, val = built(
        unit, make=lambda p: optim.LBFGS(p, lr=0.1, max_iter=2), learn=("init",), tasks=()
    )
    with pytest.warns(UserWarning, match="cannot be compiled"):
        actual = result(inner, [train[0]] * 2, val, False)
    assert_same(actual, uncompiled(inner, [train[0]] * 2, val, False))


@each_unit
def test_an_error_of_the_users_is_shown(unit):
    def loss(model, batch):
        raise KeyError("wrong here")

    inner, train, val = built(unit, loss)
    with pytest.warns(UserWarning, match="wrong here"), pytest.raises(KeyError, match="wrong"):
        inner(train, val, tasks=il.tasks.loop())


@each_unit
def test_a_loop_inside_another_one_is_refused_or_right(unit):
    """Differentiating twice is refused with a message."""
    inner, train, val = built(unit)
    losses = inner(train, val, tasks=True)
    with pytest.raises(il.RequirementError, match="do not compile"):
        gradients(losses.sum(), inner, create_graph=True)


def test_a_compiled_loop_as_the_loss_of_another():
    inner, train, val = built("whole", tasks=())

    def loss(model, batch):
        return squares(model, batch)

    outer_model = Small()
    outer = il.InnerLoop(outer_model, optim.SGD(outer_model.parameters(), lr=0.1), loss)
    outer.compile("whole", backend="eager")
    value = outer(train, val) + inner(train, val)
    value.backward()
    assert outer_model.weight.grad is not None


@each_unit
def test_a_run_that_goes_on(unit):
    outcomes = []
    for each in (unit, None):
        torch.manual_seed(3)
        inner, train, val = built(
            each, learn=("lr",), backward=il.Truncated(1, carry=True), steps=2
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may run uncompiled
            values = [inner(train, val, tasks=il.tasks.loop()) for _ in range(3)]
        outcomes.append([*values, *gradients(values[-1].sum(), inner)])
    assert_same(*outcomes)


def test_the_whole_unit_stays_the_whole_unit():
    """A call that needs another one does not change what later calls use."""
    inner, train, val = built("whole")
    inner(train, val, tasks=il.tasks.loop())
    inner(train, val, tasks=True)
    assert inner._compiler.chosen == "whole"


def test_large_programs_are_compiled_by_steps(monkeypatch):
    monkeypatch.setattr("innerloop.compiled._compiler._OPERATIONS", 10)
    inner, train, val = built("auto")
    assert_follows(inner, train, val)
    assert inner._compiler.chosen == "step"
    inner, train, val = built("auto", tasks=())
    assert_follows(inner, train, val, False)
    assert inner._compiler.chosen == "step"


def test_units_and_backends_that_do_not_exist():
    inner, *_ = built(None)
    with refuses("'part'"):
        inner.compile("part")
    with refuses("'tvm'"):
        inner.compile(backend="tvm")


def test_a_meta_parameter_without_influence_is_refused_compiled_too():
    inner, train, val = built(loss=lambda m, b: squares(m, b).detach(), tasks=())
    plain, *_ = built(None, loss=lambda m, b: squares(m, b).detach(), tasks=())
    with pytest.raises(il.RequirementError) as expected:
        plain(train, val)
    with pytest.warns(UserWarning), pytest.raises(il.RequirementError) as found:
        inner(train, val)
    assert str(found.value) == str(expected.value)


def test_a_validation_loss_without_a_gradient_is_refused_compiled_too():
    inner, train, val = built(val_loss=lambda m, b: squares(m, b).detach(), tasks=())
    plain, *_ = built(None, val_loss=lambda m, b: squares(m, b).detach(), tasks=())
    with pytest.raises(il.RequirementError):
        plain(train, val)
    with pytest.warns(UserWarning), pytest.raises(il.RequirementError):
        inner(train, val)


# A module. --------------------------------------------------------------------------------------


@each_unit
def test_copies_and_files(unit):
    torch.manual_seed(0)
    inner, train, val = built(unit)
    expected = result(inner, train, val)
    copied = copy.deepcopy(inner)
    assert count(copied) == 0
    assert_same(result(copied, train, val), expected)
    assert copied._compiler.used
    pickled = pickle.loads(pickle.dumps(inner))
    assert_same(result(pickled, train, val), expected)
    assert pickled._compiler.used
    file = io.BytesIO()
    torch.save(inner.state_dict(), file)
    file.seek(0)
    other, *_ = built(unit)
    other.load_state_dict(torch.load(file))
    assert_same(result(other, train, val), expected)


def test_the_model_stays_as_it_is():
    inner, train, val = built("step", model=normed())
    before = repr((inner.model.state_dict(), inner.optimizer.state_dict()))
    inner(train, val, tasks=True).sum().backward()
    inner.zero_grad()
    assert repr((inner.model.state_dict(), inner.optimizer.state_dict())) == before


def test_adapting_is_not_compiled_and_right():
    inner, train, _ = built()
    adapted = inner.adapt(train, tasks=True)
    inner._compiler = None
    assert_same([adapted.losses], [inner.adapt(train, tasks=il.tasks.loop()).losses])


@each_unit
def test_autocast(unit):
    torch.set_default_dtype(torch.float32)
    inner, train, val = built(unit, model=Net())
    plain = inner(train, val, tasks=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = result(inner, train, val)
        expected = uncompiled(inner, train, val)
    assert_same(found, expected, 2e-2)
    assert not torch.equal(plain, found[0])


@pytest.mark.parametrize("wrong", [lambda y: y * 1.01, lambda y: y * torch.nan, lambda y: y / 0])
def test_a_program_that_computes_something_else_is_not_used(wrong):
    recorded = Recorded(lambda x: [x.sin(), x.cos()], [torch.randn(5)])
    recorded._check(lambda x: [x.sin(), x.cos()])
    with pytest.raises(NotCompilableError, match="another result"):
        recorded._check(lambda x: [x.sin(), wrong(x.cos())])


def test_values_that_are_not_numbers_do_not_hide_others():
    recorded = Recorded(lambda x: [x.log()], [torch.tensor([-1.0, 2.0, 3.0])])
    recorded._check(lambda x: [x.log()])
    with pytest.raises(NotCompilableError, match="another result"):
        recorded._check(lambda x: [1.01 * x.log()])


@pytest.mark.parametrize("make", [optim.SGD, optim.Adam])
@pytest.mark.parametrize("kind", ["function", "cosine", "cycle"])
def test_a_schedule_is_one_program_for_all_steps(make, kind):
    model = Small()
    optimizer = make(model.parameters(), lr=0.1, **({"momentum": 0.5} if make is optim.SGD else {}))
    schedule = {
        "function": lambda: lambda step: 0.9**step,
        "cosine": lambda: optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        "cycle": lambda: optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=21),
    }[kind]()
    inner = il.InnerLoop(model, optimizer, squares, learn=("init",), schedule=schedule)
    inner.compile("step", backend="eager")
    *train, val = batches(21, TASKS)
    assert_follows(inner, train, val)
    assert count(inner) == 2


@pytest.mark.parametrize("way", [il.tasks.threads(2), il.tasks.loop()], ids=["threads", "loop"])
def test_steps_in_threads_are_compiled_once(way):
    inner, train, val = built("step", steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            found = result(inner, train, val, way)
    assert_same(found, uncompiled(inner, train, val))
    assert inner._compiler.used
    assert count(inner) == 2


@pytest.mark.filterwarnings("ignore:.torch.jit")
@each_unit
@pytest.mark.parametrize("way", [il.tasks.vmap(), il.tasks.threads(2)], ids=["vmap", "threads"])
def test_forward_mode_derivatives(unit, way):
    """Those by what is trained on are refused; those of the measurement alone are right."""
    inner, (train,), val = built(unit, loss=lambda m, b: (m(b[0]) - b[1]).square().mean())
    direction = torch.randn_like(val[0])

    def tangent(x, way):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, direction)
            given = [(dual, train[1])] if x is train[0] else [train]
            measured = (dual, val[1]) if x is val[0] else val
            return forward_ad.unpack_dual(inner(given, measured, tasks=way)).tangent

    with pytest.warns(UserWarning), pytest.raises(il.RequirementError, match="forward-mode"):
        tangent(train[0], way)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = tangent(val[0], way)
    inner._compiler = None
    assert_same([found], [tangent(val[0], il.tasks.loop())])
    x = val[0].requires_grad_()
    (expected,) = torch.autograd.grad(inner([train], val, tasks=il.tasks.loop()).sum(), x)
    assert_same([found.sum()], [(expected * direction).sum()])


READ_AS_NUMBERS = {
    "alpha": lambda x, w: torch.add(x, x, alpha=w),
    "value": lambda x, w: torch.addcmul(x, x, x, value=w),
    "delta": lambda x, w: nn.functional.huber_loss(x, torch.zeros_like(x), delta=w),
    "slope": lambda x, w: nn.functional.leaky_relu(x, w),
    "eps": lambda x, w: nn.functional.layer_norm(x, (1,), eps=w) * x,
    "full": lambda x, w: x * torch.full((1,), w),
    "full_like": lambda x, w: x * torch.full_like(x, w),
    "tensor": lambda x, w: x * torch.tensor([w, 1.0]),
    "as_tensor": lambda x, w: x * torch.as_tensor([1.0, [w][0]]),
    "new_tensor": lambda x, w: x * x.new_tensor([w]),
    "arange": lambda x, w: x * torch.arange(w).sum(),
}


@each_unit
@pytest.mark.parametrize("name", READ_AS_NUMBERS)
def test_numbers_that_torch_reads_from_a_tensor_outside(unit, name):
    """They would become constants of a program."""
    weight = torch.tensor(2.0)
    inner, train, val = built(
        unit, lambda m, b: READ_AS_NUMBERS[name](m(b[0]) - b[1], weight).square().mean(), tasks=()
    )
    with pytest.warns(UserWarning, match="outside|of values"):
        inner(train, val, tasks=False)
    weight.fill_(0.5)
    assert_follows(inner, train, val, tasks=False, used=False)


@each_unit
def test_numbers_that_the_loss_makes_itself(unit):
    def loss(model, batch):
        return squares(model, batch) * torch.full((), 0.5) + torch.tensor([1.0, 2.0]).sum()

    inner, train, val = built(unit, loss)
    assert_follows(inner, train, val)


@each_unit
def test_an_optimizer_over_a_part_of_the_weights_and_a_loss_that_asks(unit):
    def loss(model, batch):
        trained = [p for p in model.parameters() if p.requires_grad]
        return len(trained) * squares(model, batch) + sum(p.square().sum() for p in trained)

    net = Net()
    for learn in (("init", "lr"), ("lr",)):
        sgd = optim.SGD(net.head.parameters(), lr=0.05)
        inner = il.InnerLoop(net, sgd, loss, learn=learn)
        inner.compile(unit, backend="eager")
        *train, val = batches(4)
        assert_follows(inner, train, val, tasks=False)


@each_unit
def test_a_tensor_outside_that_gets_another_shape(unit):
    kept = torch.ones(2)
    inner, train, val = built(unit, lambda m, b: squares(m, b) * kept.sum())
    assert_follows(inner, train, val)
    kept.resize_(3).fill_(1.0)
    assert_follows(inner, train, val)


@each_unit
def test_a_method_of_a_container(unit):
    settings = {"weight": 1.0}
    get = settings.get
    inner, train, val = built(unit, lambda m, b: get("weight") * squares(m, b))
    assert_follows(inner, train, val)
    settings["weight"] = 2.0
    assert_follows(inner, train, val)


def test_a_method_of_a_list_as_schedule():
    rates = [1.0, 0.5]
    inner, train, val = built(steps=2, schedule=rates.__getitem__)
    assert_follows(inner, train, val)
    rates[1] = 2.0
    assert_follows(inner, train, val)


@each_unit
def test_a_view_of_a_dictionary(unit):
    settings = {"weight": 1.0}
    values = settings.values()
    inner, train, val = built(unit, lambda m, b: sum(values) * squares(m, b))
    assert_follows(inner, train, val)
    settings["weight"] = 2.0
    assert_follows(inner, train, val)


@each_unit
def test_an_attribute_of_a_tensor(unit):
    kept = torch.ones(2)
    kept.factor = 1.0
    inner, train, val = built(unit, lambda m, b: kept.factor * kept.sum() * squares(m, b))
    assert_follows(inner, train, val)
    kept.factor = 2.0
    assert_follows(inner, train, val)


@each_unit
def test_a_module_inside_a_function_of_torch(unit):
    elu = nn.ELU()
    inner, train, val = built(unit, lambda m, b: torch.vmap(elu)(m(b[0]) - b[1]).square().mean())
    assert_follows(inner, train, val)
    elu.alpha = 0.2
    assert_follows(inner, train, val)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return 2 * found if func is torch.tanh else found


@each_unit
def test_a_function_mode_around_the_call(unit):
    inner, train, val = built(unit, lambda m, b: torch.tanh(m(b[0]) - b[1]).square().mean())
    before = result(inner, train, val)
    with Doubling():
        assert_follows(inner, train, val)
    assert_same(result(inner, train, val), before)
