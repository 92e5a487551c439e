"""Algorithm 1 whole: meta-updates in the middle of an ordinary training run."""

import copy

import pytest
import torch
from torch import nn, optim

import innerloop as il
from innerloop.errors import DivergedError
from references import (
    Net,
    Sgd,
    assert_close,
    batches,
    by_hand,
    called,
    plain,
    squares,
)
from test_errors import refuses
from test_functional import assert_untouched, fingerprint

STEPS = 3


def normed():
    return nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))


def built(make_model=Net, make=None, warm=2, loss=squares, **options):
    """A model in the middle of its training."""
    model = make_model()
    make = make or (lambda params: optim.SGD(params, lr=0.1, momentum=0.8))
    optimizer = make(model.parameters())
    plain(model, optimizer, squares, batches(warm))
    inner = il.InnerLoop(model, optimizer, loss, **options)
    *train, val = batches(STEPS + 1)
    return inner, train, val


# What it computes. --------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", [0, 1, 3])
@pytest.mark.parametrize(
    "make", [lambda p: optim.SGD(p, lr=0.05), lambda p: optim.Adam(p, lr=0.01)], ids=["SGD", "Adam"]
)
@pytest.mark.parametrize("learn", ["lr", ("init", "lr"), ("momentum", "weight_decay")], ids=str)
def test_it_is_as_many_meta_steps_by_hand(learn, make, updates):
    inner, train, val = built(learn=learn)
    twin = copy.deepcopy(inner)
    meta = make(twin.parameters())
    expected = []
    for _ in range(updates):
        meta.zero_grad()
        value = twin(train, val)
        value.backward()
        meta.step()
        expected.append(value.detach())
    losses = il.meta_update(inner, train, val, make(inner.parameters()), updates=updates)
    assert len(losses) == updates
    assert not any(loss.requires_grad for loss in losses)
    assert_close(losses, expected)
    assert_close(inner.parameters(), twin.parameters())


def test_it_is_the_paper_by_hand():
    """Lines 1 to 17 without the library: from the optimizer's momentum on, a new rate each time."""
    inner, train, val = built(learn=("lr",))
    model = inner.model
    start = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    momentum = {
        name: inner.optimizer.state[p]["momentum_buffer"].clone()
        for name, p in model.named_parameters()
    }
    rate = 0.1
    for _ in range(3):
        lr = torch.tensor(rate, requires_grad=True)

        def rule(step, name, lr=lr):
            def update(param, grad, state):
                return Sgd(lr, 0.8)(param, grad, momentum[name] if step == 0 else state)

            return update

        final = by_hand(start, lambda own, b: squares(called(model, own), b), train, rule)
        (slope,) = torch.autograd.grad(squares(called(model, final), val), [lr])
        rate -= 0.02 * slope.item()
    il.meta_update(inner, train, val, optim.SGD(inner.parameters(), lr=0.02), updates=3)
    assert_close([inner.hyper["lr"]], [torch.tensor([rate])])
    assert abs(rate - 0.1) > 1e-3


def test_an_ordinary_run_with_meta_updates_in_it():
    """The paper's learning-rate experiment: train, learn the rate, write it back, train on."""
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    inner = il.InnerLoop(model, optimizer, squares, learn=("lr",))
    meta = optim.SGD(inner.parameters(), lr=0.02)
    whole, whole_optimizer = copy.deepcopy((model, optimizer))
    for _ in range(3):
        *train, val = batches(STEPS + 1)
        il.meta_update(inner, train, val, meta, updates=2)
        inner.write_to(optimizer)
        plain(model, optimizer, squares, train)

        for _ in range(2):
            lr = torch.tensor(whole_optimizer.param_groups[0]["lr"], requires_grad=True)
            twin, own = copy.deepcopy((whole, whole_optimizer))
            own.param_groups[0]["lr"] = lr
            value = il.InnerLoop(twin, own, squares, learn=())(train, val)
            (grad,) = torch.autograd.grad(value, [lr])
            whole_optimizer.param_groups[0]["lr"] -= 0.02 * grad.item()
        plain(whole, whole_optimizer, squares, train)
        assert_close(model.parameters(), whole.parameters())
    assert abs(optimizer.param_groups[0]["lr"] - 0.1) > 1e-3
    assert isinstance(optimizer.param_groups[0]["lr"], float)


@pytest.mark.parametrize("backward", [il.Remat(), il.Binomial(1), il.Forward()], ids=repr)
def test_other_strategies(backward):
    found = []
    for strategy in (il.Tape(), backward):
        torch.manual_seed(0)
        inner, train, val = built(learn=("init", "lr"), backward=strategy)
        il.meta_update(inner, train, val, optim.Adam(inner.parameters(), lr=0.01), updates=2)
        found.append(list(inner.parameters()))
    assert_close(found[1], found[0], 1e-9)


def test_several_tasks():
    inner, *_ = built(learn=("init", "lr"))
    *train, val = batches(STEPS + 1, 4)
    twin = copy.deepcopy(inner)
    twin(train, val, tasks=True).mean().backward()
    optim.SGD(twin.parameters(), lr=0.1).step()
    losses = il.meta_update(
        inner, train, val, optim.SGD(inner.parameters(), lr=0.1), updates=1, tasks=True
    )
    assert losses[0].shape == ()
    assert_close(inner.parameters(), twin.parameters())


# What it leaves alone. ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [None, lambda p: optim.Adam(p, lr=0.05)], ids=["SGD", "Adam"])
def test_model_optimizer_gradients_and_statistics_are_untouched(make):
    inner, train, val = built(normed, make, learn=("lr",))
    model, optimizer = inner.model, inner.optimizer
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    inner.settings["lr"].grad = torch.full((1,), 7.0)
    grads = [(p.grad, p.grad.clone()) for p in model.parameters()]
    before, prints = copy.deepcopy(optimizer.state_dict()), fingerprint(model)
    versions = [t._version for t in (*model.parameters(), *model.buffers())]
    il.meta_update(inner, train, val, optim.Adam(inner.parameters(), lr=0.01), updates=3)
    assert repr(optimizer.state_dict()) == repr(before)
    assert_untouched(model, prints)
    assert [t._version for t in (*model.parameters(), *model.buffers())] == versions
    for p, (grad, value) in zip(model.parameters(), grads, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, value)
    assert inner.settings["lr"].grad.tolist() == [7.0]
    assert inner.settings["lr"].item() != 0.1


def test_with_the_initial_weights_learned_only_they_change():
    inner, train, val = built(normed, learn=("init",))
    state = copy.deepcopy(inner.optimizer.state_dict())
    buffers = [b.clone() for b in inner.model.buffers()]
    weights = [p.detach().clone() for p in inner.model.parameters()]
    il.meta_update(inner, train, val, optim.SGD(inner.parameters(), lr=0.1), updates=2)
    assert repr(inner.optimizer.state_dict()) == repr(state)
    assert all(torch.equal(a, b) for a, b in zip(inner.model.buffers(), buffers, strict=True))
    assert not any(
        torch.equal(a, b) for a, b in zip(inner.model.parameters(), weights, strict=True)
    )
    assert all(p.grad is None for p in inner.model.parameters())


def test_gradients_come_back_when_the_meta_optimizer_fails():
    class Fails(optim.SGD):
        def step(self, closure=None):
            raise OSError("disk full")

    inner, train, val = built(learn=("lr",))
    kept = torch.full((1,), 7.0)
    inner.settings["lr"].grad = kept
    with pytest.raises(OSError, match="disk full"):
        il.meta_update(inner, train, val, Fails(inner.parameters(), lr=0.1))
    assert inner.settings["lr"].grad is kept


# Data. ------------------------------------------------------------------------------------------


def test_functions_give_new_data_for_every_update():
    inner, *_ = built(learn=("lr",))
    twin = copy.deepcopy(inner)
    data = [batches(STEPS + 1) for _ in range(3)]
    trains, vals = iter([d[:-1] for d in data]), iter([d[-1] for d in data])
    losses = il.meta_update(
        inner,
        lambda: (batch for batch in next(trains)),
        lambda: next(vals),
        optim.SGD(inner.parameters(), lr=0.02),
        updates=3,
    )
    assert next(trains, None) is None and next(vals, None) is None
    meta = optim.SGD(twin.parameters(), lr=0.02)
    for (*train, val), loss in zip(data, losses, strict=True):
        meta.zero_grad()
        value = twin(train, val)
        value.backward()
        meta.step()
        assert_close([loss], [value])
    assert_close(inner.parameters(), twin.parameters())


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_draws_none_of_the_random_numbers_of_the_run(shuffle):
    """But its order is another at every call."""
    inner, train, val = built(learn=("lr",))
    orders = []

    class Noted(list):
        def __getitem__(self, place):
            orders[-1].append(place)
            return super().__getitem__(place)

    loader = torch.utils.data.DataLoader(Noted(train * 4), batch_size=None, shuffle=shuffle)
    meta = optim.SGD(inner.parameters(), lr=0.02)
    before = torch.get_rng_state()
    for _ in range(3):
        orders.append([])
        il.meta_update(inner, loader, val, meta)
        assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(order) for order in orders}) == (3 if shuffle else 1)


@pytest.mark.parametrize(
    "once", [iter, lambda train: torch.utils.data.DataLoader(train, batch_size=None)]
)
def test_an_iterable_is_read_once_for_all_updates(once):
    """The second reading of a generator would be a loop of no steps, without a word."""
    inner, train, val = built(learn=("init", "lr"))
    twin = copy.deepcopy(inner)
    first, second = (
        il.meta_update(loop, given, val, optim.SGD(loop.parameters(), lr=0.02), updates=3)
        for loop, given in ((inner, once(train)), (twin, train))
    )
    assert_close(first, second)
    assert_close(inner.parameters(), twin.parameters())


# Meta-optimizers. ---------------------------------------------------------------------------------


def test_parameters_from_outside_are_updated_too():
    """A tensor that the loss closes over, in the same meta-optimizer."""
    weight = torch.tensor(0.5, requires_grad=True)
    inner, train, val = built(
        loss=lambda m, b: squares(m, b) + weight * m.head.weight.square().sum(),
        val_loss=squares,
        learn=("lr",),
    )
    meta = optim.SGD([*inner.parameters(), weight], lr=0.1)
    grads = torch.autograd.grad(inner(train, val), [*inner.parameters(), weight])
    il.meta_update(inner, train, val, meta)
    assert_close([weight], [0.5 - 0.1 * grads[1]])
    assert weight.grad is None


def test_a_part_of_the_meta_parameters():
    inner, train, val = built(learn=("init", "lr"))
    weights = [p.detach().clone() for p in inner.model.parameters()]
    il.meta_update(inner, train, val, optim.SGD([inner.settings["lr"]], lr=0.1))
    assert_close(inner.model.parameters(), weights)
    assert inner.settings["lr"].item() != 0.1


def test_a_scheduler_of_the_meta_optimizer():
    inner, train, val = built(learn=("lr",))
    twin = copy.deepcopy(inner)
    meta = optim.SGD(inner.parameters(), lr=0.02)
    scheduler = optim.lr_scheduler.ExponentialLR(meta, 0.5)
    for _ in range(2):
        il.meta_update(inner, train, val, meta)
        scheduler.step()
    for rate in (0.02, 0.01):
        il.meta_update(twin, train, val, optim.SGD(twin.parameters(), lr=rate))
    assert_close(inner.parameters(), twin.parameters())


def test_lbfgs_as_meta_optimizer_is_lbfgs_by_hand():
    inner, train, val = built(learn=("lr",))
    twin = copy.deepcopy(inner)
    meta = optim.LBFGS(twin.parameters(), lr=0.01, max_iter=3)
    expected = []

    def closure():
        meta.zero_grad()
        value = twin(train, val)
        value.backward()
        return value

    for _ in range(2):
        expected.append(meta.step(closure).detach())
    found = il.meta_update(
        inner, train, val, optim.LBFGS(inner.parameters(), lr=0.01, max_iter=3), updates=2
    )
    assert_close(found, expected)
    assert_close(inner.parameters(), twin.parameters())


def test_lbfgs_evaluates_an_update_from_the_same_state():
    inner, train, val = built(learn=("lr",), backward=il.Truncated(STEPS, carry=True))
    meta = optim.LBFGS(inner.parameters(), lr=1e-6, max_iter=4)
    il.meta_update(inner, train, val, meta, updates=2)
    assert [state.time for state in inner._carried.values()] == [2 * STEPS]


def test_lbfgs_evaluates_an_update_on_the_same_data_with_the_same_random_numbers():
    seen, drawn = [], []

    def judged(model, batch):
        seen.append(torch.rand(()).item())
        return squares(model, batch)

    inner, train, val = built(learn=("lr",), val_loss=judged)
    seen.clear()
    meta = optim.LBFGS(inner.parameters(), lr=1e-3, max_iter=4)
    il.meta_update(inner, lambda: drawn.append(1) or train, val, meta, updates=2)
    assert len(drawn) == len(set(seen)) == 2
    assert len(seen) > 2


def test_a_loop_over_tasks_is_updated_over_tasks():
    model = Net()
    sgd = optim.SGD(model.parameters(), lr=0.1)
    inner = il.InnerLoop(model, sgd, squares, learn=("init", "lr"), tasks=True)
    train, (val,) = batches(STEPS, 4), batches(1, 4)
    wanted = inner(train, val).mean().detach()
    losses = il.meta_update(inner, train, val, optim.SGD(inner.parameters(), lr=0.0))
    assert_close(losses, [wanted])


# Refusals. --------------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", [-1, 1.5, True, "2", None], ids=str)
def test_what_is_no_number_of_updates_is_refused(updates):
    inner, train, val = built(learn=("lr",))
    with refuses("updates=", model=inner.model, optimizer=inner.optimizer):
        il.meta_update(inner, train, val, optim.SGD(inner.parameters(), lr=0.1), updates=updates)


WRONG_META = {
    "over other parameters": lambda inner: optim.SGD(Net().parameters(), lr=0.1),
    "the inner optimizer": lambda inner: inner.optimizer,
    "a class": lambda inner: optim.SGD,
    "none": lambda inner: None,
    "parameters": lambda inner: list(inner.parameters()),
}


@pytest.mark.parametrize("case", WRONG_META)
def test_what_is_no_meta_optimizer_is_refused(case):
    inner, train, val = built(learn=("lr",))
    with refuses("meta-optimizer", model=inner.model, optimizer=inner.optimizer):
        il.meta_update(inner, train, val, WRONG_META[case](inner))


@pytest.mark.parametrize("wrong", [None, "inner", Net()], ids=["none", "text", "model"])
def test_what_is_no_inner_loop_is_refused(wrong):
    inner, train, val = built(learn=("lr",))
    with refuses("InnerLoop"):
        il.meta_update(wrong, train, val, optim.SGD(inner.parameters(), lr=0.1))


def test_meta_parameters_without_influence_are_refused():
    """Zero steps: the rate has no influence."""
    inner, _, val = built(learn=("lr",))
    with refuses(kind=il.RequirementError, model=inner.model):
        il.meta_update(inner, [], val, optim.SGD(inner.parameters(), lr=0.1))


def test_a_loss_that_becomes_nan_changes_nothing():
    inner, train, val = built(learn=("lr",))
    broken = [(x * float("nan"), y) for x, y in train]
    with refuses("NaN", kind=DivergedError, model=inner.model, optimizer=inner.optimizer):
        il.meta_update(inner, broken, val, optim.SGD(inner.parameters(), lr=0.1))
    assert inner.settings["lr"].item() == 0.1


def test_gradients_may_be_off():
    """Inside a `no_grad` block, as in the middle of a training script's evaluation."""
    inner, train, val = built(learn=("lr",))
    twin = copy.deepcopy(inner)
    il.meta_update(twin, train, val, optim.SGD(twin.parameters(), lr=0.1))
    with torch.no_grad():
        il.meta_update(inner, train, val, optim.SGD(inner.parameters(), lr=0.1))
    assert_close(inner.parameters(), twin.parameters())


@pytest.mark.parametrize("where", ["validation", "gradient"])
@pytest.mark.parametrize("meta", [optim.Adam, optim.LBFGS])
def test_no_step_is_taken_along_what_is_not_finite(where, meta):
    """The square root has a value at 0, and no gradient."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def judge(model, x):
        return model(x).square().sum().sqrt() if where == "gradient" else (model(x) * x).sum()

    inner = il.InnerLoop(
        model,
        optimizer,
        lambda model, x: (model(x) * 0).sum(),
        learn=("lr", "init"),
        val_loss=judge,
    )
    outer = meta(inner.parameters(), lr=0.1)
    before = [p.detach().clone() for p in inner.parameters()]
    x = torch.full((1, 1), torch.nan if where == "validation" else 1.0)
    with pytest.raises(DivergedError, match="none was taken") as raised:
        il.meta_update(inner, [torch.ones(1, 1)], x, outer)
    assert "model.weight" in str(raised.value)
    assert all(torch.equal(a, b) for a, b in zip(before, inner.parameters(), strict=True))
    assert all(p.grad is None for p in inner.parameters())
    assert not any(torch.is_tensor(v) for s in outer.state.values() for v in s.values())


def test_every_call_draws_random_numbers_of_its_own():
    seen = []

    def judge(model, batch):
        seen.append(torch.rand(()).item())
        return squares(model, batch)

    for _ in range(2):
        torch.manual_seed(0)
        inner, train, val = built(lambda: nn.Linear(2, 1), learn=("lr",), val_loss=judge)
        meta = optim.SGD(inner.parameters(), lr=1e-3)
        state = torch.get_rng_state()
        for _ in range(3):
            il.meta_update(inner, train, val, meta)
        assert torch.equal(torch.get_rng_state(), state)
        seen.append(torch.rand(()).item())  # the run's own
    assert len(set(seen[:4])) == 4
    assert seen[:4] == seen[4:]  # seeded alike, all is the same


def test_a_refused_update_carries_nothing_on():
    inner, train, val = built(
        lambda: nn.Linear(2, 1), learn=("lr",), backward=il.Truncated(2, carry=True)
    )
    meta = optim.SGD(inner.parameters(), lr=1e-3)
    il.meta_update(inner, train, val, meta)
    before = inner._carried
    with pytest.raises(DivergedError):
        il.meta_update(inner, train, [v * torch.nan for v in val], meta)
    assert inner._carried is before


@pytest.mark.parametrize("updates", [1, 3])
def test_an_ordinary_run_with_dropout_goes_on_with_its_random_numbers(updates):
    def dropping():
        return nn.Sequential(nn.Linear(2, 8), nn.Dropout(), nn.Linear(8, 1))

    found = []
    for count in (0, updates):
        torch.manual_seed(0)
        inner, train, val = built(dropping, learn=("lr",))
        meta = optim.SGD(inner.parameters(), lr=1e-9)
        losses = il.meta_update(inner, [train[0]] * 2, val, meta, count)
        assert len({loss.item() for loss in losses}) == count  # with numbers of their own each
        plain(inner.model, inner.optimizer, squares, train)
        found.append([p.detach().clone() for p in inner.model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
