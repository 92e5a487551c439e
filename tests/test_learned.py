"""Learned optimizers: their meta-gradients, and that they are ordinary optimizers too."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

import innerloop as il
from innerloop.errors import InnerLoopError
from innerloop.estimate import evolution
from innerloop.learned import (
    LSLR,
    Coordinates,
    LearnedOptimizer,
    LSTMOptimizer,
    MetaSGD,
    MLPOptimizer,
)
from innerloop.learned.lstm import preprocess_grad

STEPS = 4


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def batches(count: int, *tasks: int):
    return [(torch.randn(*tasks, 6, 3), torch.randn(*tasks, 6, 1)) for _ in range(count)]


def spread_out(learned: LearnedOptimizer) -> LearnedOptimizer:
    """Parameters that are all different."""
    with torch.no_grad():
        for p in learned.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return learned


KINDS = {
    "lstm": lambda model: LSTMOptimizer(hidden=3),
    "lstm-one-layer": lambda model: LSTMOptimizer(hidden=4, layers=1, preprocess=4.0),
    "mlp": lambda model: MLPOptimizer(hidden=4, decays=(0.3, 0.8, 0.9, 0.99), scale=0.1),
    "meta-sgd": lambda model: MetaSGD(model, lr=0.1),
    "lslr": lambda model: LSLR(model, steps=STEPS, lr=0.1),
}


@pytest.fixture(params=KINDS)
def problem(request):
    model = net()
    return model, spread_out(KINDS[request.param](model))


def grads(learned) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in learned.parameters()])


def meta_gradient(model, learned, train, val, tasks=False, **how) -> torch.Tensor:
    learned.zero_grad()
    inner = il.InnerLoop(model, learned, loss, learn=(), **how)
    inner(train, val, tasks=tasks).sum().backward()
    return grads(learned)


# Meta-gradients. --------------------------------------------------------------------------------


def test_the_meta_gradient_is_that_of_finite_differences(problem):
    model, learned = problem
    train, val = batches(STEPS), batches(1)[0]
    inner = il.InnerLoop(model, learned, loss, learn=())
    found = meta_gradient(model, learned, train, val)

    def value(shift):
        moved = copy.deepcopy(learned)
        vector = nn.utils.parameters_to_vector(learned.parameters())
        nn.utils.vector_to_parameters(vector + shift, moved.parameters())
        with torch.no_grad():
            return il.InnerLoop(model, moved, loss, learn=())(train, val)

    assert inner(train, val) == value(0.0)
    for _ in range(5):
        direction = torch.randn_like(found)
        direction /= direction.norm()
        h = 1e-5
        # Fourth order: the error of the difference itself is then far below the tolerance.
        near = value(h * direction) - value(-h * direction)
        far = value(2 * h * direction) - value(-2 * h * direction)
        expected = (8 * near - far) / (12 * h)
        torch.testing.assert_close(found @ direction, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "backward",
    [il.Remat(), il.Binomial(2), il.Forward(), il.Truncated(20), il.Auto()],
    ids=lambda b: type(b).__name__,
)
def test_every_exact_strategy_has_the_gradient_of_the_tape(problem, backward):
    model, learned = problem
    train, val = batches(STEPS), batches(1)[0]
    expected = meta_gradient(model, learned, train, val)
    found = meta_gradient(model, learned, train, val, backward=backward)
    assert expected.abs().max() > 1e-6
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backward", [il.Tape(), il.Binomial(2)], ids=lambda b: type(b).__name__)
def test_tasks_at_once_are_tasks_one_by_one(problem, backward):
    model, learned = problem
    train, val = batches(STEPS, 3), batches(1, 3)[0]
    one_by_one = sum(
        meta_gradient(model, learned, [(x[t], y[t]) for x, y in train], [v[t] for v in val])
        for t in range(3)
    )
    for way in (il.tasks.loop(), il.tasks.vmap()):
        found = meta_gradient(model, learned, train, val, tasks=way, backward=backward)
        torch.testing.assert_close(found, one_by_one, rtol=1e-10, atol=1e-10)


def test_initial_weights_are_learned_along():
    model, learned = net(), LSTMOptimizer(hidden=4)
    inner = il.InnerLoop(model, learned, loss, learn=("init",), backward=il.Remat())
    inner(batches(2), batches(1)[0]).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    assert grads(learned).any()


# Meta-training. ---------------------------------------------------------------------------------


def quadratics(count: int):
    return torch.randn(count, 3, 3), torch.randn(count, 3)


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.at = nn.Parameter(torch.zeros(3))


def distance(model, problem):
    matrix, target = problem
    return (matrix @ model.at - target).square().sum()


@pytest.mark.parametrize("kind", ["lstm", "mlp", "meta-sgd", "lslr"])
def test_carried_truncation_learns(kind):
    """The run is cut into parts, and the parts are those of the run that was not cut."""
    model = Point()
    learned = KINDS[kind](model)
    tasks = quadratics(16)
    carried = il.Truncated(5, carry=True)
    inner = il.InnerLoop(model, learned, distance, learn=(), backward=carried, first_order=True)
    meta = torch.optim.Adam(learned.parameters(), lr=0.01)

    def episode() -> list[torch.Tensor]:
        inner.restart()
        found = []
        for _ in range(2):
            meta.zero_grad()
            found.append(inner.adapt([tasks] * 5, tasks=il.tasks.vmap()).losses)
            found[-1].mean().backward()
            meta.step()
        return found

    whole = il.InnerLoop(model, learned, distance, learn=())
    with torch.no_grad():
        before = whole.adapt([tasks] * 10, tasks=True).losses
    rate, meta.param_groups[0]["lr"] = meta.param_groups[0]["lr"], 0.0
    torch.testing.assert_close(torch.cat(episode(), dim=1), before)
    meta.param_groups[0]["lr"] = rate
    for _ in range(15):
        episode()
    with torch.no_grad():
        after = whole.adapt([tasks] * 10, tasks=True).losses
    assert after.mean() < 0.95 * before.mean()


def test_persistent_evolution_estimates_the_gradient():
    """The estimates of the parts of a run add up to the gradient of the sum of their losses."""
    model = Point()
    learned = MetaSGD(model, lr=0.05)
    problem = [part[0] for part in quadratics(1)]
    inner = il.InnerLoop(model, learned, distance, learn=())
    sum(inner([problem] * steps, problem) for steps in (1, 2)).backward()
    expected = learned.rates.grad.clone()
    learned.zero_grad()
    estimator = evolution(inner, samples=200, sigma=1e-3, persistent=True, seed=0)
    for _ in range(2):
        estimator([problem], problem).backward()
    # The squared error is about (d + 1) / n for d parameters and n pairs, twice that for two parts.
    assert 0 < (learned.rates.grad - expected).norm() / expected.norm() < 2 * (2 * 4 / 100) ** 0.5


# As an ordinary optimizer. ----------------------------------------------------------------------


def trained(model, optimizer, train):
    for batch in train:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_step_for_step_as_in_the_inner_loop(problem):
    model, learned = problem
    train = batches(6)
    ordinary = copy.deepcopy(model)
    optimizer = learned.as_torch_optimizer(ordinary.parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    with torch.no_grad():
        inner = il.InnerLoop(model, learned, loss, learn=())
        states = [inner.adapt(train[:k]).params for k in range(1, 7)]
    for batch, expected in zip(train, states, strict=True):
        assert_equal(trained(ordinary, optimizer, [batch]), expected.values())
    assert not torch.equal(ordinary[0].weight, model[0].weight)


@pytest.mark.parametrize("way", [None, il.tasks.loop(), il.tasks.vmap()], ids=str)
def test_an_inner_loop_is_gone_on_with_in_an_ordinary_one(problem, way):
    """With the memory it had: of a momentum, an LSTM, a number of steps."""
    model, learned = problem
    train = batches(6) if way is None else batches(6, 2)
    inner = il.InnerLoop(model, learned, loss, learn=())
    early, late = inner.adapt(train[:3], tasks=way), inner.adapt(train, tasks=way)
    if way is not None:
        early, late = early.each[1], late.each[1]
        train = [(x[1], y[1]) for x, y in train]
    ordinary = net()
    optimizer = learned.as_torch_optimizer(ordinary.parameters())
    early.write_to(ordinary, optimizer)
    assert_equal(trained(ordinary, optimizer, train[3:]), late.params.values())
    saved = copy.deepcopy(optimizer.state_dict())
    assert all(not v.requires_grad for own in saved["state"].values() for v in own.values())


def test_frozen_weights_need_no_place_in_the_ordinary_loop():
    model, train = net(), batches(4)
    model[0].weight.requires_grad_(False)
    learned = spread_out(LSTMOptimizer(hidden=3))
    inner = il.InnerLoop(model, learned, loss, learn=())
    early, late = inner.adapt(train[:2]), inner.adapt(train)
    optimizer = learned.as_torch_optimizer([p for p in model.parameters() if p.requires_grad])
    early.write_to(model, optimizer)
    assert_equal(trained(model, optimizer, train[2:]), late.params.values())


@pytest.mark.parametrize(
    "other",
    [
        lambda model: torch.optim.Adam(model.parameters()),
        lambda model: torch.optim.Adam,
        lambda model: MLPOptimizer(3).as_torch_optimizer(model.parameters()),
        lambda model: LSTMOptimizer(5).as_torch_optimizer(model.parameters()),
        lambda model: LSTMOptimizer(3).as_torch_optimizer(net().parameters()),
        lambda model: LSTMOptimizer(3).as_torch_optimizer(model[0].parameters()),
    ],
    ids=["torch", "class", "kind", "size", "model", "part"],
)
def test_a_memory_is_handed_over_to_its_own_kind_only(other):
    model = net()
    before = copy.deepcopy(model.state_dict())
    adapted = il.InnerLoop(model, LSTMOptimizer(3), loss, learn=()).adapt(batches(2))
    optimizer = other(model)
    with pytest.raises(InnerLoopError, match=r"state of LSTMOptimizer .* as_torch_optimizer"):
        adapted.write_to(model, optimizer)
    assert isinstance(optimizer, type) or not optimizer.state
    assert_equal(model.state_dict().values(), before.values())


def test_an_inner_loop_wants_what_is_learned_itself():
    model = net()
    optimizer = LSTMOptimizer(3).as_torch_optimizer(model.parameters())
    with pytest.raises(InnerLoopError, match=r"InnerLoop\(model, learned, loss\)"):
        il.InnerLoop(model, optimizer, loss)
    with pytest.raises(InnerLoopError, match=r"InnerLoop\(model, learned, loss\)"):
        il.get_diff_optim(optimizer, list(model.parameters()))


def test_saved_and_loaded(problem):
    model, learned = problem
    train = batches(6)
    optimizer = learned.as_torch_optimizer(model.parameters())
    trained(model, optimizer, train[:3])
    other = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    # What was learned comes from the file, and so do the settings.
    fresh = KINDS_OF[type(learned)](other, learned).as_torch_optimizer(other.parameters())
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_equal(trained(other, fresh, train[3:]), trained(model, optimizer, train[3:]))


KINDS_OF = {
    LSTMOptimizer: lambda model, like: LSTMOptimizer(like.hidden, like.layers, scale=3.0),
    MLPOptimizer: lambda model, like: MLPOptimizer(like.hidden, scale=3.0),
    MetaSGD: lambda model, like: MetaSGD(model),
    LSLR: lambda model, like: LSLR(model, steps=len(like.rates)),
}


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
def test_copied(problem, copied):
    model, learned = problem
    train = batches(6)
    optimizer = learned.as_torch_optimizer(model.parameters())
    trained(model, optimizer, train[:3])
    other, again = copied((model, optimizer))
    assert_equal(trained(other, again, train[3:]), trained(model, optimizer, train[3:]))


def test_it_keeps_what_was_learned_when_it_was_made(problem):
    model, learned = problem
    other = copy.deepcopy(model)
    train = batches(3)
    first = learned.as_torch_optimizer(model.parameters())
    second = learned.as_torch_optimizer(other.parameters())
    expected = trained(model, first, train)
    with torch.no_grad():
        for p in learned.parameters():
            p.mul_(3)
    assert_equal(trained(other, second, train), expected)
    assert all(not p.requires_grad for p in second.learned.parameters())
    assert all(p.requires_grad for p in learned.parameters())


def test_closures(problem):
    model, learned = problem
    other = copy.deepcopy(model)
    batch = batches(1)[0]
    optimizer = learned.as_torch_optimizer(other.parameters())

    def closure():
        optimizer.zero_grad()
        found = loss(other, batch)
        found.backward()
        return found

    for _ in range(2):
        before = loss(other, batch)
        assert optimizer.step(closure) == before
    expected = trained(model, learned.as_torch_optimizer(model.parameters()), [batch] * 2)
    assert_equal(list(other.parameters()), expected)


def test_groups_have_a_factor_of_their_own(problem):
    model, learned = problem
    batch = batches(1)[0]
    other = copy.deepcopy(model)
    named = list(other.named_parameters())
    optimizer = learned.as_torch_optimizer(
        [{"params": named[:2], "lr": 0.5}, {"params": named[2:]}]
    )
    before = [p.detach().clone() for p in model.parameters()]
    whole = trained(model, learned.as_torch_optimizer(model.parameters()), [batch])
    halves = trained(other, optimizer, [batch])
    for i, (start, full, found) in enumerate(zip(before, whole, halves, strict=True)):
        factor = 0.5 if i < 2 else 1.0
        torch.testing.assert_close(found, start + factor * (full - start), rtol=0, atol=1e-14)


def test_schedulers_vary_the_factor():
    model, learned = net(), LSTMOptimizer(hidden=3)
    optimizer = learned.as_torch_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    moved = trained(model, optimizer, batches(1))
    scheduler.step()
    assert_equal(trained(model, optimizer, batches(1)), moved)


class TwoHeads(nn.Module):
    """One head is used at a time."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def forward(self, batch):
        x, which = batch
        return self.heads[which](self.body(x).tanh())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [False, True], ids=["all", "frozen"])
def test_weights_without_a_gradient_wait(kind, frozen):
    """Frozen ones, and those that a step does not use: neither they nor their memory move."""
    model = TwoHeads()
    learned = spread_out(KINDS[kind](model))
    if frozen:
        model.body.bias.requires_grad_(False)
    train = [(torch.randn(5, 3), which) for which in (0, 1, 1, 0)]

    def squares(model, batch):
        return model(batch).square().mean()

    with torch.no_grad():
        adapted = il.InnerLoop(model, learned, squares, learn=()).adapt(train)
    ordinary = copy.deepcopy(model)
    optimizer = learned.as_torch_optimizer(ordinary.parameters())
    heads = []
    for batch in train:
        optimizer.zero_grad()
        squares(ordinary, batch).backward()
        optimizer.step()
        heads.append(copy.deepcopy(ordinary.heads))
    assert_equal(list(ordinary.parameters()), adapted.params.values())
    assert torch.equal(heads[0][1].weight, model.heads[1].weight)
    assert torch.equal(heads[1][0].weight, heads[0][0].weight)
    assert frozen == torch.equal(ordinary.body.bias, model.body.bias)
    assert [int(optimizer.state[p]["step"]) for p in ordinary.heads.parameters()] == [2] * 4


def test_a_step_without_any_gradient_does_nothing(problem):
    model, learned = problem
    before = copy.deepcopy(model)
    optimizer = learned.as_torch_optimizer(model.parameters())
    assert optimizer.step() is None
    assert_equal(list(model.parameters()), before.parameters())
    assert not optimizer.state


def test_its_precision_is_its_own_and_is_saved():
    """A model in bfloat16 is trained by an LSTM in float32, whose memory is not rounded."""
    model, learned = net().to(torch.bfloat16), LSTMOptimizer(hidden=3).float()
    optimizer = learned.as_torch_optimizer(model.parameters())
    train = [tuple(t.to(torch.bfloat16) for t in batch) for batch in batches(2)]
    trained(model, optimizer, train)
    first = next(model.parameters())
    hidden = optimizer.state[first]["hidden"]
    assert hidden.dtype is torch.float32
    again = learned.as_torch_optimizer(model.parameters())
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[first]["hidden"], hidden)
    assert again.state[first]["hidden"] is not hidden


# Details. ---------------------------------------------------------------------------------------


def test_gradients_are_read_as_in_the_paper():
    grad = torch.tensor([2.0, -3.0, 1e-6, 0.0], requires_grad=True)
    read = preprocess_grad(grad, 10.0)
    first, second = read.unbind(-1)
    e = torch.e
    torch.testing.assert_close(first, torch.tensor([0.0693147181, 0.1098612289, -1, -1]))
    torch.testing.assert_close(second, torch.tensor([1.0, -1, 1e-6 * e**10, 0]))
    read.sum().backward()
    torch.testing.assert_close(grad.grad, torch.tensor([0.05, -1 / 30, e**10, e**10]))


def test_an_lstm_is_torchs():
    """The same weights in torch's own cells give the same changes."""
    learned = LSTMOptimizer(hidden=4, layers=2)
    cells = [nn.LSTMCell(2, 4), nn.LSTMCell(4, 4)]
    for cell, gate in zip(cells, learned.gates, strict=True):
        width = cell.input_size
        cell.load_state_dict(
            {
                "weight_ih": gate.weight[:, :width],
                "weight_hh": gate.weight[:, width:],
                "bias_ih": gate.bias,
                "bias_hh": torch.zeros_like(gate.bias),
            }
        )
    memory, states = learned.memory(3), [None, None]
    for _ in range(3):
        grad = torch.randn(3)
        at = Coordinates(("w",), (3,), torch.zeros(3), grad, torch.zeros(1))
        change, memory = learned.change(at, memory)
        below = preprocess_grad(grad, 10.0)
        for i, cell in enumerate(cells):
            states[i] = cell(below, states[i])
            below = states[i][0]
        torch.testing.assert_close(change, 0.1 * learned.out(below).squeeze(-1))


def test_the_network_does_not_see_the_scale_of_a_tensor():
    """Each tensor is measured by itself: others have no influence, whatever their size."""
    learned = MLPOptimizer(hidden=8)
    small, large = torch.randn(3), 1e6 * torch.randn(4)
    grads = torch.randn(3), 1e6 * torch.randn(4)
    both, _ = learned.update(
        {"a": small, "b": large},
        dict(zip("ab", grads, strict=True)),
        learned.init({"a": small, "b": large}),
    )
    for name, p, g in zip("ab", (small, large), grads, strict=True):
        alone, _ = learned.update({name: p}, {name: g}, learned.init({name: p}))
        torch.testing.assert_close(both[name], alone[name])


def test_rates_of_tensors_and_steps():
    model = nn.Linear(2, 1)
    learned = LSLR(model, steps=2)
    with torch.no_grad():
        learned.rates.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    params = {"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}
    ones = {name: torch.ones_like(p) for name, p in params.items()}
    state = learned.init(params)
    found = []
    for _ in range(3):
        new, state = learned.update(params, ones, state)
        found.append((-new["weight"].mean().item(), -new["bias"].item()))
    # The third step has no rates of its own.
    assert found == [(1.0, 2.0), (3.0, 4.0), (3.0, 4.0)]


def test_rates_find_their_weights_by_name():
    model = net()
    learned = spread_out(MetaSGD(model))
    other = copy.deepcopy(model)
    batch = batches(1)[0]
    backwards = learned.as_torch_optimizer(reversed(list(other.named_parameters())))
    trained(other, backwards, [batch])
    expected = trained(model, learned.as_torch_optimizer(model.parameters()), [batch])
    assert_equal(list(other.parameters()), expected)


# Refusals. --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["meta-sgd", "lslr"])
def test_rates_refuse_weights_that_they_were_not_made_for(kind):
    model = net()
    learned = KINDS[kind](model)
    with pytest.raises(InnerLoopError, match="without names"):
        learned.as_torch_optimizer(list(model.parameters())[2:])
    with pytest.raises(InnerLoopError, match="names and shapes"):
        learned.as_torch_optimizer(nn.Linear(3, 4).named_parameters())
    stranger = nn.Linear(3, 1)
    with pytest.raises(InnerLoopError, match="names and shapes"):
        il.InnerLoop(stranger, learned, loss, learn=())(batches(1), batches(1)[0])


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    model = net()
    optimizer = MetaSGD(model).as_torch_optimizer(model.named_parameters())
    with pytest.raises(InnerLoopError):
        optimizer.add_param_group({"params": [("other", nn.Parameter(torch.zeros(2)))]})
    assert len(optimizer.param_groups) == 1


def as_optimizer(learned, **options):
    return learned.as_torch_optimizer(net().parameters(), **options)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: as_optimizer(LSTMOptimizer(3), lr=-1), "0 or more"),
        (lambda: as_optimizer(LSTMOptimizer(3), lr=math.nan), "0 or more"),
        (lambda: as_optimizer(LSTMOptimizer(3), lr=math.inf), "0 or more"),
        (lambda: LSTMOptimizer(0), "LSTMOptimizer"),
        (lambda: LSTMOptimizer(5, 0), "LSTMOptimizer"),
        (lambda: LSTMOptimizer(5, 2, 0.0), "LSTMOptimizer"),
        (lambda: MLPOptimizer(0), "MLPOptimizer"),
        (lambda: MLPOptimizer(4, (1.0,)), "MLPOptimizer"),
        (lambda: MLPOptimizer(4, (0.9, -0.1)), "MLPOptimizer"),
        (lambda: LSLR(net(), steps=0), "at least one step"),
        (
            lambda: as_optimizer(LSTMOptimizer()).load_state_dict(
                torch.optim.SGD(net().parameters(), lr=0.1).state_dict()
            ),
            "learned",
        ),
        (
            lambda: MetaSGD(nn.Linear(4, 2)).load_state_dict(MetaSGD(nn.Linear(1, 5)).state_dict()),
            "names and shapes",
        ),
    ],
)
def test_wrong_arguments_are_refused(build, message):
    with pytest.raises(InnerLoopError, match=message):
        build()


def test_complex_weights_and_sparse_gradients_are_refused():
    weight = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(InnerLoopError, match="complex"):
        LSTMOptimizer().as_torch_optimizer([weight])
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = LSTMOptimizer().as_torch_optimizer(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(InnerLoopError, match="sparse"):
        optimizer.step()


# What is saved. -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["meta-sgd", "lslr"])
def test_rates_of_the_same_weights_in_another_order_are_refused(kind):
    def model(*names: str) -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(2, 2) for name in names})

    saved = KINDS[kind](model("a", "b")).state_dict()
    KINDS[kind](model("a", "b")).load_state_dict(saved)
    other = KINDS[kind](model("b", "a"))
    nn.init.constant_(other.rates, 0.7)
    with pytest.raises(InnerLoopError, match=r"'a\.weight', .*'b\.weight', .* same order"):
        other.load_state_dict(saved)
    assert (other.rates == 0.7).all(), "what was refused is not taken over"


@pytest.mark.parametrize(
    ("one", "other"), list(itertools.permutations(("lstm", "mlp", "meta-sgd", "lslr"), 2))
)
def test_what_another_kind_has_learned_is_refused(one, other):
    model = net()
    first, second = (KINDS[kind](model) for kind in (one, other))
    # Rates of two kinds differ in their shape, which torch says.
    with pytest.raises((InnerLoopError, RuntimeError), match=r"each kind|size mismatch"):
        first.load_state_dict(second.state_dict())


class Wrong(LearnedOptimizer):
    def __init__(self, memory, change):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.1))
        self.made, self.done = memory, change

    def memory(self, count):
        return self.made(count)

    def change(self, at, memory):
        return self.done(at, memory)


@pytest.mark.parametrize(
    "memory, change",
    [
        (lambda n: {"mean": torch.zeros(3)}, lambda at, memory: (at.grad, memory)),
        (lambda n: {"mean": torch.zeros(())}, lambda at, memory: (at.grad, memory)),
        (lambda n: {"step": torch.zeros(n)}, lambda at, memory: (at.grad, memory)),
        (lambda n: {}, lambda at, memory: at.grad),
        (lambda n: {}, lambda at, memory: (at.grad.mean(), memory)),
    ],
)
def test_mistakes_in_an_optimizer_of_ones_own(memory, change):
    model, learned = net(), Wrong(memory, change)
    with pytest.raises(InnerLoopError, match="coordinate"):
        il.InnerLoop(model, learned, loss, learn=())(batches(1), batches(1)[0])
    optimizer = learned.as_torch_optimizer(model.parameters())
    loss(model, batches(1)[0]).backward()
    with pytest.raises(InnerLoopError, match="coordinate"):
        optimizer.step()


def test_an_optimizer_without_parameters_is_refused():
    learned = Wrong(lambda n: {}, lambda at, memory: (at.grad, memory))
    del learned.rate
    with pytest.raises(InnerLoopError, match="no parameters"):
        il.InnerLoop(net(), learned, loss)(batches(1), batches(1)[0])


def test_what_does_not_fit_leaves_the_optimizer_as_it_was():
    model = net()
    optimizer = LSTMOptimizer(3).as_torch_optimizer(model.parameters())
    other = LSTMOptimizer(5).as_torch_optimizer(net().parameters())
    with pytest.raises(RuntimeError, match="size mismatch"):
        optimizer.load_state_dict(other.state_dict())
    loss(model, batches(1)[0]).backward()
    optimizer.step()


def test_a_state_in_another_precision():
    model = net()
    saved = LSTMOptimizer(3).double().as_torch_optimizer(net().parameters()).state_dict()
    optimizer = LSTMOptimizer(3).float().as_torch_optimizer(model.parameters())
    optimizer.load_state_dict(saved)
    assert optimizer.learned.dtype == torch.float64
    loss(model, batches(1)[0]).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", ["mlp", "lslr"])
def test_coordinates_can_be_compiled(kind):
    model = net()
    inner = il.InnerLoop(model, KINDS[kind](model), loss)
    *train, val = batches(3)
    expected = inner(train, val)
    inner.compile(backend="eager")
    torch.testing.assert_close(inner(train, val), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [LSTMOptimizer, MLPOptimizer])
def test_updates_inside_autocast_are_those_outside(kind):
    def trained(inside):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = kind().as_torch_optimizer(model.parameters())
        x = torch.randn(8, 3)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                model(x).float().square().mean().backward()
                if inside:
                    optimizer.step()
            if not inside:
                optimizer.step()
        return model.weight.detach()

    assert torch.equal(trained(True), trained(False))
