"""`InnerLoop` as its users see it: what a call computes, what it reads, what it is as a module.

Values are held to plain torch training, gradients to the paper's loop by hand and to differences.
"""

import copy
import dataclasses
import io
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.utils import parametrizations

import innerloop as il
from references import (
    Adam,
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
ONE_OF_EACH = [il.Tape(), il.Remat(every=2), il.Binomial(1)]
each_reverse = pytest.mark.parametrize("backward", ONE_OF_EACH, ids=repr)
each_strategy = pytest.mark.parametrize("backward", [*ONE_OF_EACH, il.Forward()], ids=repr)


def momentum(params):
    return optim.SGD(params, lr=0.1, momentum=0.8, weight_decay=0.01)


def adam(params):
    return optim.Adam(params, lr=0.05, betas=(0.8, 0.9))


MAKERS = [momentum, adam]


def built(model=None, make=momentum, loss=squares, learn=("init", "lr"), **options):
    """A loop over a small model, batches to train on and one to measure with."""
    model = Net() if model is None else model
    inner = il.InnerLoop(model, make(model.parameters()), loss, learn=learn, **options)
    *train, val = batches(STEPS + 1)
    return inner, train, val


def gradients(value, inner):
    return torch.autograd.grad(value, list(inner.parameters()), materialize_grads=True)


def trained_plainly(inner, train, loss=squares):
    """Copies of the loop's model and optimizer after plain training."""
    model, optimizer = copy.deepcopy((inner.model, inner.optimizer))
    plain(model, optimizer, loss, train)
    return model, optimizer


# What a call computes. ----------------------------------------------------------------------------


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("make", MAKERS)
def test_a_call_is_the_papers_loop(make, first_order):
    inner, train, val = built(make=make, first_order=first_order)
    model, lr = inner.model, torch.tensor([0.1 if make is momentum else 0.05], requires_grad=True)
    rule = Sgd(lr, 0.8, 0.01) if make is momentum else Adam(lr, (0.8, 0.9))
    found = by_hand(
        dict(model.named_parameters()),
        lambda own, batch: squares(called(model, own), batch),
        train,
        lambda step, name: rule,
        first_order=first_order,
    )
    expected = squares(called(model, found), val)
    value = inner(train, val)
    assert value.shape == ()
    assert_close([value], [expected])
    assert_close(
        gradients(value, inner),
        torch.autograd.grad(expected, [*model.parameters(), lr]),
        1e-11,
    )
    if not first_order:
        assert_derivative(lambda: inner(train, val), inner.parameters(), directions=2)


def test_a_validation_loss_of_its_own():
    def absolute(model, val):
        x, y = val
        return (model.features(x).sum(1, keepdim=True) - y).abs().mean(), "aux"

    inner, train, val = built(val_loss=absolute)
    model, _ = trained_plainly(inner, train)
    assert_close([inner(train, val)], [absolute(model, val)[0]])
    assert_derivative(lambda: inner(train, val), inner.parameters())


def test_val_is_handed_over_as_it_is():
    seen = []

    def look(model, val):
        seen.append(val)
        return model.head.weight.sum()

    inner, train, _ = built(val_loss=look)
    for val in (None, 3, "word", {"a": [1]}, object()):
        inner(train, val)
        assert seen[-1] is val


class Lazy(Sequence):
    """Batches that are made when they are asked for."""

    def __init__(self, batches):
        self.batches = batches
        self.asked = []

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.batches[index]


@each_reverse
def test_any_sequence_of_batches(backward):
    inner, train, val = built(backward=backward)
    value = inner(train, val)
    expected = gradients(value, inner)
    for given in (
        tuple(train),
        iter(train),
        (batch for batch in train),
        torch.utils.data.DataLoader(train, batch_size=None),
        Lazy(train),
        dict(enumerate(train)).values(),
    ):
        found = inner(given, val)
        assert_close([found], [value], 1e-15)
        assert_close(gradients(found, inner), expected, 1e-13)


def test_a_data_loader_that_batches_and_shuffles():
    """Read once per call: what is computed again sees the same batches."""
    data = torch.utils.data.TensorDataset(torch.randn(12, 2), torch.randn(12, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    found = []
    for backward in ONE_OF_EACH:
        torch.manual_seed(4)
        inner, _, val = built(backward=backward)
        torch.manual_seed(5)
        found.append(gradients(inner(loader, val), inner))
    assert_close(found[1], found[0], 1e-11)
    assert_close(found[2], found[0], 1e-11)


@pytest.mark.parametrize("backward", [il.Remat(), il.Truncated(2), il.Forward()], ids=repr)
def test_zero_steps(backward):
    inner, _, val = built(backward=backward)
    expected = torch.autograd.grad(squares(inner.model, val), list(inner.model.parameters()))
    for empty in ([], (), iter(())):
        value = inner(empty, val)
        assert_close([value], [squares(inner.model, val)])
        *grads, rate = gradients(value, inner)
        assert_close(grads, expected)
        assert rate.item() == 0
    adapted = inner.adapt([])
    assert adapted.losses.shape == (0,)
    assert adapted.aux is None


def test_zero_steps_without_initial_weights_to_learn():
    """There is a value, and nothing that it could be differentiated by."""
    inner, _, val = built(learn=("lr",))
    with torch.no_grad():
        assert_close([inner([], val)], [squares(inner.model, val)])
    with refuses("No meta-parameter", kind=il.RequirementError):
        inner([], val)


def test_nothing_is_learned():
    inner, train, val = built(learn=())
    value = inner(train, val)
    assert not value.requires_grad
    assert list(inner.parameters()) == []
    assert_close([value], [squares(trained_plainly(inner, train)[0], val)])


def test_two_calls_do_not_know_of_each_other():
    inner, train, val = built()
    first, second = inner(train, val), inner(train[::-1], train[0])
    late = gradients(first, inner), gradients(second, inner)
    early = gradients(inner(train, val), inner), gradients(inner(train[::-1], train[0]), inner)
    assert_close([*late[0], *late[1]], [*early[0], *early[1]], 1e-14)


@each_strategy
def test_nothing_of_the_users_is_changed(backward):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Linear(3, 1))
    optimizer = adam(model.parameters())
    plain(model, optimizer, squares, batches(2))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    inner = il.InnerLoop(model, optimizer, squares, learn=("lr",), backward=backward)
    *train, val = batches(STEPS + 1)
    before = repr((model.state_dict(), optimizer.state_dict()))
    data = repr((train, val))
    inner(train, val).backward()
    inner.adapt(train)
    assert repr((model.state_dict(), optimizer.state_dict())) == before
    assert repr((train, val)) == data
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert model.training


def test_several_threads_use_one_loop():
    inner, *_ = built()
    data = [batches(STEPS + 1) for _ in range(8)]
    expected = [gradients(inner(train, val), inner) for *train, val in data]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda d: gradients(inner(d[:-1], d[-1]), inner), data))
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, 1e-14)


# What a call reads. -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS)
def test_the_loop_starts_from_the_optimizers_state(make):
    inner, train, val = built(make=make)
    inner(train, val)
    plain(inner.model, inner.optimizer, squares, batches(3))
    model, _ = trained_plainly(inner, train)
    assert_close([inner(train, val)], [squares(model, val)])
    cold = il.InnerLoop(inner.model, make(inner.model.parameters()), squares)
    assert abs(cold(train, val) - inner(train, val)) > 1e-6
    assert_derivative(lambda: inner(train, val), inner.parameters())


@pytest.mark.parametrize("setting", ["lr", "momentum", "weight_decay"])
def test_settings_changed_between_calls_are_seen(setting):
    inner, train, val = built(learn="init")
    inner(train, val)
    inner.optimizer.param_groups[0][setting] = 0.37
    model, _ = trained_plainly(inner, train)
    assert_close([inner(train, val)], [squares(model, val)])


def test_weights_and_modes_changed_between_calls_are_seen():
    inner, train, val = built(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    with torch.no_grad():
        for p in inner.model.parameters():
            p.mul_(0.5)
    inner.eval()
    model, _ = trained_plainly(inner, train)
    assert_close([inner(train, val)], [squares(model, val)])


def test_a_group_added_later_is_refused():
    model = Net()
    optimizer = optim.SGD(model.head.parameters(), lr=0.1)
    inner = il.InnerLoop(model, optimizer, squares)
    *train, val = batches(STEPS + 1)
    optimizer.add_param_group({"params": model.body.parameters(), "lr": 0.3})
    with refuses("the optimizer's groups", "new InnerLoop", model=model, optimizer=optimizer):
        inner(train, val)


@each_strategy
def test_a_rate_requiring_grad_in_the_optimizer_gets_its_gradient(backward):
    """Though it is not in `learn`; one group has it, another one has a number."""
    rate = torch.tensor(0.1, requires_grad=True)

    def make(params):
        first, *rest = params
        return optim.SGD([{"params": [first], "lr": rate}, {"params": rest}], lr=0.2, momentum=0.5)

    inner, train, val = built(make=make, learn=("init", "momentum"), backward=backward)
    assert not any(p is rate for p in inner.parameters())
    assert_derivative(lambda: inner(train, val), [rate, *inner.parameters()])
    assert inner.optimizer.param_groups[0]["lr"] is rate
    alone = il.InnerLoop(inner.model, inner.optimizer, squares, learn=(), backward=backward)
    assert_derivative(lambda: alone(train, val), [rate])


def test_a_rate_that_is_a_tensor_without_gradient():
    inner, train, val = built(learn="init")
    expected = gradients(inner(train, val), inner)
    inner.optimizer.param_groups[0]["lr"] = torch.tensor(inner.optimizer.param_groups[0]["lr"])
    assert_close(gradients(inner(train, val), inner), expected)
    learned, *_ = built(inner.model, lambda p: inner.optimizer, learn="lr")
    assert_close([learned(train, val)], [inner(train, val)])


EVERY_OPTIMIZER = {
    "SGD": dict(lr=0.1, momentum=0.8, dampening=0.1, weight_decay=0.01),
    "Adam": dict(lr=0.05, amsgrad=True, weight_decay=0.01),
    "AdamW": dict(lr=0.05),
    "Adamax": dict(lr=0.05, weight_decay=0.01, betas=(0.7, 0.6)),
    "NAdam": dict(lr=0.05, weight_decay=0.01),
    "RAdam": dict(lr=0.05, betas=(0.8, 0.9), weight_decay=0.01),
    "Adagrad": dict(lr=0.1, lr_decay=0.1, weight_decay=0.01),
    "Adadelta": dict(lr=0.5, eps=0.01, weight_decay=0.01),
    "RMSprop": dict(lr=0.02, centered=True, momentum=0.5, weight_decay=0.01),
    "Rprop": dict(lr=0.03),
    "ASGD": dict(lr=0.1, lambd=0.1, t0=1.5, weight_decay=0.01),
    "Adafactor": dict(lr=0.1, eps=(1e-4, 1e-3), d=1.1, weight_decay=0.01),
    "LBFGS": dict(lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_every_continuous_setting_of_every_optimizer_is_learned_by_its_name(name):
    model = Net()
    optimizer = getattr(optim, name)(model.parameters(), **EVERY_OPTIMIZER[name])
    names = il.optim.from_torch(optimizer).family.settings
    inner = il.InnerLoop(model, optimizer, squares, learn=("init", *names))
    assert list(inner.hyper) == list(names)
    *train, val = batches(STEPS + 1)
    fixed = il.InnerLoop(model, optimizer, squares)
    assert_close([inner(train, val)], [fixed(train, val)])
    assert_derivative(lambda: inner(train, val), inner.parameters(), relative=True, tolerance=1e-6)
    inner.write_to()
    assert_close([fixed(train, val)], [inner(train, val)])


def test_an_optimizer_over_named_parameters():
    """Torch then keeps the names in the groups, beside whatever else a user puts there."""
    model = Net()
    optimizer = optim.SGD(
        [
            {"params": model.body.named_parameters(), "role": "body"},
            {"params": model.head.named_parameters(), "lr": 0.3, "role": object()},
        ],
        lr=0.1,
    )
    inner = il.InnerLoop(model, optimizer, squares, learn=("init", "lr"))
    *train, val = batches(STEPS + 1)
    assert_derivative(lambda: inner(train, val), inner.parameters())
    inner.write_to()
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    plain(model, optimizer, squares, train)


def test_a_subclass_of_an_optimizer():
    class Mine(optim.Adam):
        pass

    inner, train, val = built(make=lambda p: Mine(p, lr=0.05))
    model, _ = trained_plainly(inner, train)
    assert_close([inner(train, val)], [squares(model, val)])


# Settings back into the optimizer. ----------------------------------------------------------------


def grouped(model, make=optim.Adam, **settings):
    return make(
        [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": 0.03}],
        **{"lr": 0.01, **settings},
    )


def test_writing_settings_and_starting_from_them():
    model = Net()
    optimizer = grouped(model, betas=(0.8, 0.9))
    learn = {"lr": il.Learn(transform="log"), "betas": il.Learn(transform="logit")}
    inner = il.InnerLoop(model, optimizer, squares, learn=learn)
    with torch.no_grad():
        for p in inner.parameters():
            p.add_(0.3 * torch.rand_like(p))
    other = grouped(copy.deepcopy(model))
    untouched = copy.deepcopy(other.param_groups[0]["eps"])
    inner.write_to(other)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    inner.write_to()
    for target in (optimizer, other):
        for g, group in enumerate(target.param_groups):
            assert type(group["lr"]) is float
            assert group["lr"] == inner.hyper["lr"][g].item()
            assert group["betas"] == tuple(inner.hyper["betas"][g].tolist())
            assert group["eps"] == untouched
    *train, val = batches(STEPS + 1)
    fresh = il.InnerLoop(model, optimizer, squares, learn=learn)
    assert_close(fresh.parameters(), inner.parameters(), 1e-9)
    expected, _ = trained_plainly(inner, train)
    assert_close([inner(train, val), fresh(train, val)], [squares(expected, val)] * 2)


def test_writing_to_a_rate_that_is_a_tensor_keeps_the_tensor():
    model = Net()
    rate = torch.tensor(0.1)
    optimizer = optim.SGD(model.parameters(), lr=rate)
    inner = il.InnerLoop(model, optimizer, squares, learn="lr")
    with torch.no_grad():
        inner.settings["lr"].fill_(0.4)
    inner.write_to()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.4


@pytest.mark.parametrize("name", ["lr", "betas"])
def test_writing_a_value_per_parameter_to_one_group_per_parameter(name):
    model = Net()
    optimizer = optim.Adam([{"params": [p]} for p in model.parameters()], lr=0.1)
    inner = il.InnerLoop(model, optimizer, squares, learn={name: il.Learn("parameter")})
    with torch.no_grad():
        inner.settings[name].mul_(1 - 0.1 * torch.rand_like(inner.settings[name]))
    inner.write_to()
    found = torch.tensor([group[name] for group in optimizer.param_groups])
    assert_close([found], [inner.hyper[name]])


@pytest.mark.parametrize("per", ["parameter", "element"])
@pytest.mark.parametrize("name", ["lr", "betas"])
def test_a_value_per_parameter_does_not_fit_a_group_of_two(name, per):
    """Two parameters and two betas: not to be taken for each other."""
    model = nn.Linear(2, 1)
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    inner = il.InnerLoop(model, optimizer, squares, learn={name: il.Learn(per)})
    with refuses(name, "one number per group", optimizer=optimizer):
        inner.write_to(optimizer)


def test_a_value_per_step_does_not_fit_an_optimizer():
    inner, *_ = built(learn={"lr": il.Learn("step", steps=2)})
    with refuses("'lr'", "per step", "inner.hyper", optimizer=inner.optimizer):
        inner.write_to()


WRONG_TARGETS = {
    "a number": lambda model: 3,
    "a class": lambda model: optim.SGD,
    "another kind": lambda model: optim.Adam(model.parameters(), lr=0.1),
    "more groups": lambda model: optim.SGD(
        [{"params": [p]} for p in model.parameters()], lr=0.5, momentum=0.8
    ),
}


@pytest.mark.parametrize("case", WRONG_TARGETS)
def test_what_settings_cannot_be_written_to(case):
    model = Net()
    inner = il.InnerLoop(model, grouped(model, optim.SGD), squares, learn=("momentum", "lr"))
    target = WRONG_TARGETS[case](model)
    known = isinstance(target, optim.Optimizer)
    with refuses("settings", optimizer=target if known else None):
        inner.write_to(target)


# Learned losses. ----------------------------------------------------------------------------------


class LossNet(nn.Module):
    """A learned loss with submodules, a buffer, dropout and a norm with statistics."""

    def __init__(self, drop=0.4):
        super().__init__()
        self.compare = nn.Sequential(nn.Linear(2, 4), nn.Dropout(drop), nn.Softplus())
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)
        self.decay = nn.Parameter(torch.tensor(-2.0))
        self.register_buffer("scale", torch.tensor(1.7))

    def forward(self, model, batch):
        x, y = batch
        hidden = self.norm(self.compare(torch.cat([model(x), y], -1)))
        value = F.softplus(self.last(hidden)).mean() * self.scale
        penalty = sum(p.square().sum() for p in model.parameters())
        return value + self.decay.exp() * penalty, hidden.mean()


def learned_loss(backward=None, **options):
    inner, train, val = built(
        loss=LossNet(), val_loss=squares, learn=("init", "lr"), backward=backward, **options
    )

    def value():
        torch.manual_seed(11)
        return inner(train, val)

    return inner, value


@each_reverse
def test_a_learned_loss(backward):
    inner, value = learned_loss(backward)
    names = [name for name, _ in inner.named_parameters()]
    assert [n for n in names if n.startswith("loss.")] == [
        f"loss.{n}" for n, _ in inner.loss.named_parameters()
    ]
    state = copy.deepcopy(inner.loss.state_dict())
    assert_derivative(value, inner.parameters())
    value().backward()
    assert all(p.grad is not None for p in inner.parameters())
    assert all(torch.equal(state[name], now) for name, now in inner.loss.state_dict().items())


def test_a_learned_loss_by_hand():
    """Its own weights in every step, its buffer and its mode as they are."""
    inner, train, val = built(loss=LossNet(), val_loss=squares, learn=("init",))
    inner.eval()
    model, loss = inner.model, inner.loss
    found = by_hand(
        dict(model.named_parameters()),
        lambda own, batch: loss(Shown(model, own), batch),
        train,
        lambda step, name: Sgd(0.1, 0.8, 0.01),
    )
    leaves = list(inner.parameters())
    expected = torch.autograd.grad(squares(called(model, found), val), leaves)
    assert_close(gradients(inner(train, val), inner), expected, 1e-11)


class Shown:
    """A model with given weights, for a loss that calls it and asks for its parameters."""

    def __init__(self, model, params):
        self.call, self.params = called(model, params), params

    def __call__(self, x):
        return self.call(x)

    def parameters(self):
        return self.params.values()


def test_dropout_of_a_learned_loss_follows_its_mode():
    inner, train, val = built(loss=LossNet(0.5), val_loss=squares)

    def value(seed):
        torch.manual_seed(seed)
        with torch.no_grad():
            return inner(train, val).item()

    assert value(0) == value(0) != value(1)
    inner.eval()
    assert value(0) == value(1)


class Annealed(nn.Module):
    """A loss that counts its calls in a buffer, as schedules of a temperature do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0.0))
        self.rate = nn.Parameter(torch.tensor(0.5))

    def forward(self, model, batch):
        self.count += 1
        return squares(model, batch) * (-self.rate * self.count).exp()


@pytest.mark.parametrize("val_loss", [squares, None], ids=["own measure", "the loss"])
@each_reverse
def test_a_loss_whose_buffers_change_is_as_in_plain_training(backward, val_loss):
    """Never silently at its first value in all steps; and the user's own does not change."""
    inner, train, val = built(loss=Annealed(), val_loss=val_loss, backward=backward)
    model, optimizer, loss = copy.deepcopy((inner.model, inner.optimizer, inner.loss))
    plain(model, optimizer, loss, train)
    value = inner(train, val)
    assert inner.loss.count.item() == 0
    assert_close([value], [(val_loss or loss)(model, val)])
    assert_derivative(lambda: inner(train, val), inner.parameters())


def test_a_measure_that_is_a_module_goes_along():
    """Not part of phi, but of what is moved, copied and set to a mode."""

    class Measure(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, model, val):
            return (self.norm(model(val[0])) - val[1]).square().mean()

    inner, train, val = built(val_loss=Measure(), learn="lr")
    assert [name for name, _ in inner.named_parameters()] == ["settings.lr"]
    assert_derivative(lambda: inner(train, val), inner.parameters())
    inner.float().eval()
    assert inner.val_loss.norm.weight.dtype == torch.float32
    assert not inner.val_loss.norm.training
    twin = copy.deepcopy(inner)
    assert twin.val_loss is not inner.val_loss
    assert_close(
        [twin(single(train), single([val])[0])], [inner(single(train), single([val])[0])], 1e-7
    )


class Proximal(nn.Module):
    """A loss that has the model in it: a pull towards the weights where training started."""

    def __init__(self, model):
        super().__init__()
        self.start = model
        self.strength = nn.Parameter(torch.tensor(0.3))

    def forward(self, model, batch):
        pairs = zip(model.parameters(), self.start.parameters(), strict=True)
        return squares(model, batch) + self.strength * sum((p - s).square().sum() for p, s in pairs)


@each_strategy
def test_a_loss_that_shares_weights_with_the_model(backward):
    model = Net()
    inner, train, val = built(model, loss=Proximal(model), val_loss=squares, backward=backward)
    start = dict(model.named_parameters())

    def loss(own, batch):
        pull = sum((own[n] - p).square().sum() for n, p in start.items())
        return squares(called(model, own), batch) + inner.loss.strength * pull

    found = by_hand(start, loss, train, lambda step, name: Sgd(inner.settings["lr"], 0.8, 0.01))
    leaves = list(inner.parameters())
    assert len(leaves) == 6
    expected = torch.autograd.grad(squares(called(model, found), val), leaves)
    assert_close(gradients(inner(train, val), inner), expected, 1e-10)
    assert_derivative(lambda: inner(train, val), leaves)


def test_a_loss_that_is_a_method_or_a_partial():
    class Task:
        def __init__(self, weight):
            self.weight = weight

        def loss(self, model, batch):
            return self.weight * squares(model, batch)

    inner, train, val = built(loss=Task(1.0).loss)
    expected, *_ = built(inner.model)
    assert_close([inner(train, val)], [expected(train, val)])


# Learned optimizers. ------------------------------------------------------------------------------


class LearnedRule(nn.Module):
    """A small net sees gradient and momentum of each element; the momentum is the state."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(0.7))
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        self.register_buffer("scale", torch.tensor(0.1))

    def init(self, params):
        return {name: torch.zeros_like(p) for name, p in params.items()}

    def update(self, params, grads, state):
        new = {n: self.decay * state[n] + (0 if g is None else g) for n, g in grads.items()}
        seen = {
            n: torch.stack([0 * m if grads[n] is None else grads[n], m], -1) for n, m in new.items()
        }
        return {n: p - self.scale * self.net(seen[n]).squeeze(-1) for n, p in params.items()}, new


@each_strategy
def test_a_learned_optimizer(backward):
    model = Net()
    rule = LearnedRule()
    inner = il.InnerLoop(model, rule, squares, learn="init", backward=backward)
    own = [f"optimizer.{name}" for name, _ in rule.named_parameters()]
    names = [name for name, _ in inner.named_parameters()]
    assert names == [*(f"model.{n}" for n, _ in model.named_parameters()), *own]
    *train, val = batches(STEPS + 1)
    assert_derivative(lambda: inner(train, val), inner.parameters())


def test_a_learned_optimizer_by_hand():
    model, rule = Net(), LearnedRule()
    inner = il.InnerLoop(model, rule, squares)
    *train, val = batches(STEPS + 1)
    params = dict(model.named_parameters())
    state = rule.init(params)
    for batch in train:
        value = squares(called(model, params), batch)
        grads = torch.autograd.grad(value, list(params.values()), create_graph=True)
        params, state = rule.update(params, dict(zip(params, grads, strict=True)), state)
    expected = squares(called(model, params), val)
    value = inner(train, val)
    assert_close([value], [expected])
    leaves = list(inner.parameters())
    assert_close(gradients(value, inner), torch.autograd.grad(expected, leaves), 1e-11)
    adapted = inner.adapt(train)
    assert_close(adapted.params.values(), params.values())
    assert_close(adapted.opt_state.values(), state.values())
    target = Net()
    adapted.write_to(target)
    assert_close(target.parameters(), params.values())


class Counting(LearnedRule):
    """A learned optimizer that counts its steps in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0.0))

    def update(self, params, grads, state):
        self.count += 1
        new, state = super().update(params, grads, state)
        return {n: p + (new[n] - p) / self.count for n, p in params.items()}, state


@each_reverse
def test_a_learned_optimizer_whose_buffers_change(backward):
    model, rule = Net(), Counting()
    inner = il.InnerLoop(model, rule, squares, backward=backward)
    *train, val = batches(STEPS + 1)
    own = copy.deepcopy(rule)
    params = dict(model.named_parameters())
    state = own.init(params)
    for batch in train:
        value = squares(called(model, params), batch)
        grads = torch.autograd.grad(value, list(params.values()))
        params, state = own.update(params, dict(zip(params, grads, strict=True)), state)
        params = {n: p.detach().requires_grad_() for n, p in params.items()}
    assert_close([inner(train, val)], [squares(called(model, params), val)])
    assert rule.count.item() == 0
    assert_derivative(lambda: inner(train, val), inner.parameters())


def test_a_learned_optimizer_leaves_frozen_weights_alone():
    model = Net()
    model.body.requires_grad_(False)
    inner = il.InnerLoop(model, LearnedRule(), squares, learn=())
    adapted = inner.adapt(batches(2))
    assert torch.equal(adapted.params["body.weight"], model.body.weight)
    assert not torch.equal(adapted.params["head.weight"], model.head.weight)


def test_a_learned_optimizer_has_no_settings():
    model, rule = Net(), LearnedRule()
    with refuses("learn=('lr',)", "learned optimizer", model=model):
        il.InnerLoop(model, rule, squares, learn=("lr",))
    with refuses("schedule", "learned optimizer", model=model):
        il.InnerLoop(model, rule, squares, schedule=lambda step: 1.0)
    inner = il.InnerLoop(model, rule, squares)
    with refuses("learned optimizer"):
        inner.write_to(rule)
    adapted = inner.adapt(batches(1))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with refuses("LearnedRule", model=model, optimizer=optimizer):
        adapted.write_to(model, optimizer)


BROKEN_RULES = {
    "one value": lambda self, p, g, s: p,
    "nothing": lambda self, p, g, s: None,
    "a list": lambda self, p, g, s: (list(p.values()), s),
    "fewer weights": lambda self, p, g, s: (dict(list(p.items())[1:]), s),
    "another shape": lambda self, p, g, s: ({n: v.sum() for n, v in p.items()}, s),
}


@pytest.mark.parametrize("case", BROKEN_RULES)
def test_what_a_learned_optimizer_may_not_return(case):
    kind = type("Broken", (LearnedRule,), {"update": BROKEN_RULES[case]})
    model = Net()
    inner = il.InnerLoop(model, kind(), squares)
    with refuses("update", model=model):
        inner(batches(2), batches(1)[0])


# A module like others. ----------------------------------------------------------------------------

PARTS = {
    "settings": lambda: built(learn={"init": True, "lr": il.Learn("element", transform="log")})[0],
    "settings only": lambda: built(learn=("lr", "momentum"))[0],
    "adam": lambda: built(make=adam, learn={"betas": il.Learn(("parameter", "step"), 3)})[0],
    "learned loss": lambda: built(loss=LossNet(0.0), val_loss=squares, learn="lr")[0],
    "learned optimizer": lambda: il.InnerLoop(Net(), LearnedRule(), squares),
    "schedule and clipping": lambda: built(schedule=halving, grad_transform=il.clip_norm(0.5))[0],
}


def halving(step):
    return 0.5**step


def warmed(inner):
    """The loop after some plain training of its model, and with moved meta-parameters."""
    if isinstance(inner.optimizer, optim.Optimizer):
        plain(inner.model, inner.optimizer, squares, batches(2))
    with torch.no_grad():
        for p in inner.parameters():
            p.mul_(0.9)
    return inner


@pytest.mark.parametrize("case", PARTS)
def test_the_state_goes_into_a_fresh_loop(case):
    inner = PARTS[case]()
    with torch.no_grad():
        for p in inner.parameters():
            p.mul_(0.9)
    *train, val = batches(STEPS + 1)
    state = inner.state_dict()
    assert [n for n in state if n in dict(inner.named_parameters())] == [
        n for n, _ in inner.named_parameters()
    ]
    torch.manual_seed(1)
    fresh = PARTS[case]()
    found = fresh.load_state_dict(state, strict=True)
    assert not found.missing_keys and not found.unexpected_keys
    if not inner.learn_init:
        fresh.model.load_state_dict(inner.model.state_dict())
    assert_close([fresh(train, val)], [inner(train, val)])
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert list(torch.load(buffer)) == list(state)


def through_a_file(inner):
    buffer = io.BytesIO()
    torch.save(inner, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "torch.save": through_a_file,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("case", PARTS)
def test_a_copy_computes_the_same_and_is_independent(case, way):
    inner = warmed(PARTS[case]())
    *train, val = batches(STEPS + 1)
    value = inner(train, val)
    expected = gradients(value, inner)
    twin = COPIES[way](inner)
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in inner.named_parameters()]
    mine = {id(t) for t in (*inner.parameters(), *inner.model.parameters())}
    assert not mine & {id(t) for t in (*twin.parameters(), *twin.model.parameters())}
    assert_close([twin(train, val)], [value], 1e-15)
    assert_close(gradients(twin(train, val), twin), expected, 1e-13)
    with torch.no_grad():
        for p in (*inner.parameters(), *inner.model.parameters()):
            p.zero_()
    assert_close([twin(train, val)], [value], 1e-15)
    if isinstance(twin.optimizer, optim.Optimizer):
        held = [p for group in twin.optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in held} <= {id(p) for p in twin.model.parameters()}
        plain(twin.model, twin.optimizer, squares, train)
        assert abs(twin(train, val) - value) > 1e-9


def test_repr_names_the_parts():
    text = repr(PARTS["learned optimizer"]())
    for part in ("InnerLoop(", "LearnedRule", "Tape()", "learn="):
        assert part in text


def test_names_do_not_change():
    inner, train, val = built()
    names = list(inner.state_dict())
    identity = [id(p) for p in inner.parameters()]
    inner(train, val).backward()
    inner.eval().train().double().requires_grad_(True).zero_grad()
    inner.load_state_dict(inner.state_dict())
    assert list(inner.state_dict()) == names
    assert [id(p) for p in inner.parameters()] == identity


def test_meta_parameters_that_require_no_gradient():
    inner, train, val = built(learn=("lr", "momentum"))
    expected = inner(train, val)
    inner.settings["momentum"].requires_grad_(False)
    inner(train, val).backward()
    assert inner.settings["momentum"].grad is None
    assert inner.settings["lr"].grad is not None
    inner.requires_grad_(False)
    value = inner(train, val)
    assert not value.requires_grad
    assert_close([value], [expected])
    assert all(p.requires_grad for p in inner.model.parameters())


@pytest.mark.parametrize("learn", ["init", "lr"])
def test_modes_reach_the_model_and_the_loss(learn):
    inner, *_ = built(nn.Sequential(nn.Linear(2, 1), nn.Dropout()), loss=LossNet(), learn=learn)
    inner.eval()
    assert not any(m.training for m in (inner.model, inner.model[1], inner.loss, inner.loss.norm))
    inner.train()
    assert all(m.training for m in (inner.model, inner.model[1], inner.loss, inner.loss.norm))
    inner.train(False)
    assert not inner.model[1].training


# Dtypes. ------------------------------------------------------------------------------------------


def single(data):
    return [tuple(part.float() for part in batch) for batch in data]


@pytest.mark.parametrize(
    ("warm", "make", "learn"), [(0, momentum, "init"), (0, adam, "lr"), (2, adam, ("init", "lr"))]
)
def test_to_another_dtype_and_back(warm, make, learn):
    inner, train, val = built(make=make, learn=learn)
    plain(inner.model, inner.optimizer, squares, batches(warm))
    value = inner(train, val)
    expected = gradients(value, inner)
    identity = [id(p) for p in inner.model.parameters()]
    inner.float()
    assert {p.dtype for p in (*inner.parameters(), *inner.model.parameters())} == {torch.float32}
    assert [id(p) for p in inner.model.parameters()] == identity
    low = inner(single(train), single([val])[0])
    assert low.dtype == torch.float32
    assert_close([low.double()], [value], 1e-5)
    assert_close([g.double() for g in gradients(low, inner)], expected, 1e-4)
    assert {p.dtype for p in inner.adapt(single(train)).params.values()} == {torch.float32}
    inner.to(torch.float64)
    assert_close([inner(train, val)], [value], 1e-5)


class Mixed(nn.Module):
    """Weights in two dtypes, the shorter one first."""

    def __init__(self):
        super().__init__()
        self.low = nn.Linear(2, 3, dtype=torch.float32)
        self.high = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x):
        return self.high(torch.tanh(self.low(x.float())).double())


@pytest.mark.parametrize("per", ["group", "parameter", "element"])
def test_a_learned_rate_is_as_exact_as_the_widest_weights(per):
    model = Mixed()
    inner, train, _ = built(model, learn={"lr": il.Learn(per)})
    expected, _ = trained_plainly(inner, train[:1])
    found = inner.adapt(train[:1]).params
    assert_close([found["high.weight"]], [expected.high.weight], 1e-14)
    assert_close([found["low.weight"]], [expected.low.weight], 1e-6)


def test_weights_in_half_precision():
    model = Net().to(torch.bfloat16)
    inner, train, val = built(model)
    assert inner.settings["lr"].dtype == torch.float32
    train, (val,) = ([tuple(p.bfloat16() for p in b) for b in d] for d in (train, [val]))
    expected, _ = trained_plainly(inner, train)
    value = inner(train, val)
    assert_close([value.float()], [squares(expected, val).float()], 2e-2)
    assert all(g.isfinite().all() for g in gradients(value, inner))


def test_an_expected_state_goes_along_to_another_dtype():
    """The state that is carried from call to call."""
    inner, train, val = built(learn="lr", backward=il.Truncated(3, carry=True))
    inner(train, val)
    inner.float()
    value = inner(single(train), single([val])[0])
    assert value.dtype == torch.float32
    other, *_ = built(copy.deepcopy(inner.model).double(), learn="lr")
    assert_close([value.double()], [other([*train, *train], val)], 1e-5)


# Meta-optimizers. ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LBFGS", "Muon"])
def test_any_optimizer_of_torch_takes_meta_steps(name):
    inner, train, val = built()
    params = [p for p in inner.parameters() if name != "Muon" or p.dim() == 2]
    before = [p.detach().clone() for p in params]
    meta = getattr(optim, name)(params, lr=0.01)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(meta, 4)

    def closure():
        meta.zero_grad()
        value = inner(train, val)
        value.backward()
        return value

    first = inner(train, val).item()
    for _ in range(3):
        meta.step(closure)
        scheduler.step()
    assert not any(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert inner(train, val).item() < first


# Models of all kinds. -----------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(2, 2)
        self.two = nn.Linear(2, 2)
        self.two.weight = self.one.weight
        self.last = nn.Linear(2, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Hooked(Net):
    """Hooks that change what is computed, one of them with weights of the model."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.body.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        self.body.register_forward_hook(self.scaled)

    def scaled(self, module, args, output):
        return self.gain * output


def with_weight_norm():
    model = Net()
    parametrizations.weight_norm(model.body)
    return model


def with_spectral_norm():
    """In evaluation, since torch takes its power iteration as a constant, which it is not."""
    model = Net()
    parametrizations.spectral_norm(model.body)
    return model.eval()


MODELS = {
    "wrapped": lambda: nn.DataParallel(Net()),
    "wrapped inside": lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 3)), nn.Linear(3, 1)),
    "tied": Tied,
    "hooked": Hooked,
    "weight norm": with_weight_norm,
    "spectral norm": with_spectral_norm,
    "in a list": lambda: nn.Sequential(*nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1)])),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_of_all_kinds(case):
    model = MODELS[case]()
    inner, train, val = built(model, backward=il.Remat())
    twin = MODELS[case]()
    twin.load_state_dict(model.state_dict())
    plain(twin, momentum(twin.parameters()), squares, train)
    adapted = inner.adapt(train)
    assert_close(adapted.params.values(), twin.parameters(), 1e-11)
    assert_close(adapted.buffers.values(), twin.buffers(), 1e-11)
    assert_close([inner(train, val)], [squares(twin, val)], 1e-11)
    assert_derivative(lambda: inner(train, val), inner.parameters(), tolerance=1e-6)
    adapted.write_to(model, inner.optimizer)
    assert_close(model.parameters(), adapted.params.values())


@each_strategy
def test_torchs_functional_call_of_the_loop(backward):
    """The meta-parameters as arguments, for code that wants to own them."""
    inner, train, val = built(backward=backward)
    value = inner(train, val)
    given = {n: p.detach().clone().requires_grad_() for n, p in inner.named_parameters()}
    found = torch.func.functional_call(inner, given, (train, val))
    assert_close([found], [value], 1e-15)
    grads = torch.autograd.grad(found, list(given.values()))
    assert_close(grads, gradients(value, inner), 1e-13)
    moved = {n: 1.1 * p for n, p in given.items()}
    found = torch.func.functional_call(inner, moved, (train, val))
    grads = torch.autograd.grad(found, list(given.values()))
    with torch.no_grad():
        for p in inner.parameters():
            p.mul_(1.1)
    assert_close([found], [inner(train, val)], 1e-13)
    assert_close(grads, [1.1 * g for g in gradients(inner(train, val), inner)], 1e-12)


def test_inside_another_module_and_averaged():
    inner, train, val = built()
    whole = nn.ModuleDict({"meta": inner, "other": nn.Linear(1, 1)})
    assert list(whole.state_dict())[:1] == ["meta.model.body.weight"]
    average = optim.swa_utils.AveragedModel(inner)
    value = inner(train, val).item()
    average.update_parameters(inner)
    with torch.no_grad():
        for p in inner.parameters():
            p.mul_(2.0)
    assert_close([average(train, val)], [torch.tensor(value)], 1e-13)


# One loop inside another. -------------------------------------------------------------------------


def nested(inside=None, outside=None, learn=("init", "lr"), outer_learn=("init", "lr"), **options):
    model = Net()
    inner = il.InnerLoop(model, momentum(model.parameters()), squares, learn, inside)
    outer = il.InnerLoop(
        inner,
        optim.SGD(inner.parameters(), lr=0.05, momentum=0.5),
        lambda inner, batch: inner(*batch),
        outer_learn,
        outside,
        **options,
    )
    tasks = [(batches(2), batches(1)[0]) for _ in range(3)]
    return outer, tasks[:2], tasks[2]


@pytest.mark.parametrize(
    ("outer_learn", "learn"),
    [(("init", "lr"), ("init", "lr")), (("lr", "momentum"), ("lr",)), (("init",), ("init",))],
)
def test_a_loop_that_trains_a_loop(outer_learn, learn):
    outer, train, val = nested(learn=learn, outer_learn=outer_learn)
    assert_derivative(lambda: outer(train, val), outer.parameters(), tolerance=1e-6)


def test_a_loop_that_trains_a_loop_is_plain_meta_training():
    outer, train, val = nested(learn={"init": True, "lr": il.Learn(transform="log")})
    inner = outer.model
    before = copy.deepcopy(inner.state_dict())
    value = outer(train, val)
    assert all(torch.equal(before[n], now) for n, now in inner.state_dict().items())
    adapted = outer.adapt(train)
    meta = optim.SGD(inner.parameters(), lr=0.05, momentum=0.5)
    for batch in train:
        meta.zero_grad()
        inner(*batch).backward()
        meta.step()
    assert_close(adapted.params.values(), inner.parameters())
    assert_close([value], [inner(*val)])
    assert isinstance(adapted.module, il.InnerLoop)


@pytest.mark.parametrize(
    "inside", [il.Forward(), il.Implicit(iterations=2, proximal=1.0, stationary=1e9)], ids=repr
)
def test_the_inner_one_of_two_must_have_a_graph(inside):
    outer, train, val = nested(inside, il.Remat(), learn=("init",))
    with refuses("Tape()", kind=il.RequirementError, model=outer.model.model):
        outer(train, val).backward()


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize(
    ("inside", "outside"),
    [(il.Tape(), il.Remat()), (il.Remat(2), il.Tape()), (il.Binomial(1), il.Remat())],
    ids=repr,
)
def test_recomputation_in_either_of_two_loops(inside, outside, first_order):
    found = []
    for strategies in ((inside, outside), (il.Tape(), il.Tape())):
        torch.manual_seed(3)
        outer, train, val = nested(*strategies, learn=("init",), first_order=first_order)
        found.append(gradients(outer(train, val), outer))
    assert_close(*found, 1e-10)


# One long run, a piece at each call. --------------------------------------------------------------


def test_one_long_run_of_each_task():
    inner, *_ = built(learn="lr", backward=il.Truncated(2, carry=True))
    single, *_ = built(inner.model, learn="lr", backward=il.Truncated(2, carry=True))
    data = [batches(3, 2) for _ in range(3)]
    together = [inner(train, val, tasks=True) for *train, val in data]
    for t in range(2):
        single.restart()
        for (*train, val), both in zip(data, together, strict=True):
            value = single([(x[t], y[t]) for x, y in train], (val[0][t], val[1][t]))
            assert_close([value], [both[t]], 1e-13)


def test_a_schedule_goes_on_along_the_run():
    inner, *_ = built(learn="lr", backward=il.Truncated(2, carry=True), schedule=halving)
    data = batches(4)
    inner.adapt(data[:2])
    adapted = inner.adapt(data[2:])
    model, optimizer = copy.deepcopy((inner.model, inner.optimizer))
    plain(model, optimizer, squares, data, optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    assert_close(adapted.params.values(), model.parameters())


def test_values_per_step_go_on_along_the_run():
    learn = {"lr": il.Learn("step", steps=4)}
    inner, *_ = built(learn=learn, backward=il.Truncated(2, carry=True))
    with torch.no_grad():
        inner.settings["lr"].copy_(torch.tensor([[0.1], [0.2], [0.05], [0.3]]))
    data = batches(5)
    whole, *_ = built(inner.model, learn=learn)
    whole.settings["lr"].data.copy_(inner.settings["lr"])
    inner(data[:2], data[4]).backward()
    assert inner.settings["lr"].grad.count_nonzero(1).tolist() == [1, 1, 0, 0]
    inner.zero_grad()
    value = inner(data[2:4], data[4])
    value.backward()
    assert inner.settings["lr"].grad.count_nonzero(1).tolist() == [0, 0, 1, 1]
    assert_close([value], [whole(data[:4], data[4])])
    inner.loss = never
    with refuses("'lr'", "4 steps"):
        inner(data[:2], data[4])


def test_a_copy_in_the_middle_of_a_run_goes_on_by_itself():
    inner, train, val = built(learn="lr", backward=il.Truncated(3, carry=True))
    inner(train, val)
    twin = copy.deepcopy(inner)
    first = inner(train, val)
    inner(train, val)
    assert_close([twin(train, val)], [first], 1e-15)
    restored = pickle.loads(pickle.dumps(twin))
    assert_close([restored(train, val)], [twin(train, val)], 1e-15)


def test_initial_weights_cannot_be_learned_from_the_middle_of_a_run():
    """They have their gradient at the first call; after it there is none, and that is said."""
    inner, train, val = built(learn=("init", "lr"), backward=il.Truncated(5, carry=True))
    inner(train, val).backward()
    with refuses("init", kind=il.RequirementError):
        inner(train, val)
    with refuses("init", "Truncated(", kind=il.RequirementError):
        built(learn="init", backward=il.Truncated(2))[0](train, val)


# Refusals. ----------------------------------------------------------------------------------------


def never(model, batch):
    raise AssertionError("work was done before the refusal")


WRONG_PARTS = {
    "model": ("torch.nn.Module", [None, 3, Net, squares, {"w": torch.ones(1)}, [Net()]]),
    "optimizer": (
        "torch.optim.SGD(model.parameters()",
        [None, "SGD", 0.1, optim.SGD, il.optim.sgd(0.1), nn.Linear(1, 1), LearnedRule],
    ),
    "loss": ("loss(model, batch)", [None, "mse", 3, torch.tensor(1.0), LossNet, nn.MSELoss]),
    "val_loss": ("val_loss", ["mse", 3, torch.tensor(1.0)]),
    "backward": ("backward=", [il.Remat, "remat", 3, True, [il.Tape()]]),
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [(name, wrong) for name, (_, values) in WRONG_PARTS.items() for wrong in values],
    ids=lambda v: str(v)[:20],
)
def test_what_is_no_part_of_a_loop(name, wrong):
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    parts = {"model": model, "optimizer": optimizer, "loss": never, name: wrong}
    with refuses(name, WRONG_PARTS[name][0], model=model, optimizer=optimizer):
        il.InnerLoop(**parts)


def test_the_optimizer_of_another_model():
    model, other = Net(), Net()
    for params in (other.parameters(), [*model.parameters(), torch.ones(2, requires_grad=True)]):
        optimizer = optim.SGD(params, lr=0.1)
        with refuses("optimizer", "model", model=model, optimizer=optimizer):
            il.InnerLoop(model, optimizer, never)


def test_an_optimizer_nobody_can_differentiate():
    class Mine(optim.SGD):
        def step(self, closure=None):
            pass

    model = Net()
    with refuses("Mine", model=model):
        il.InnerLoop(model, Mine(model.parameters(), lr=0.1), never)


@pytest.mark.parametrize(
    "train",
    [None, 3, "word", torch.randn(3, 2), {"x": torch.randn(2)}, Net()],
    ids=lambda t: str(t)[:8],
)
@pytest.mark.parametrize("tasks", [False, True])
def test_what_is_nothing_to_train_on(train, tasks):
    inner, _, val = built(loss=never)
    with refuses("one batch for each step", "[batch] * 5", model=inner.model):
        inner(train, val, tasks=tasks)
    with refuses("one batch for each step", model=inner.model):
        inner.adapt(train, tasks=tasks)


def outside(model, batch):
    """The mistake of a loss that calls another model than the one it is handed."""
    return squares(Net(), batch)


BROKEN_LOSSES = {
    "a model from outside": (outside, il.RequirementError),
    "no weights at all": (lambda m, b: (b[0] ** 2).mean(), il.RequirementError),
    "cut": (lambda m, b: squares(m, b).detach(), il.RequirementError),
    "a number": (lambda m, b: squares(m, b).item(), il.InnerLoopError),
    "no value": (lambda m, b: None, il.InnerLoopError),
    "an empty tuple": (lambda m, b: (), il.InnerLoopError),
    "a tuple the wrong way round": (lambda m, b: ("aux", squares(m, b)), il.InnerLoopError),
    "one per example": (lambda m, b: (m(b[0]) - b[1]) ** 2, il.InnerLoopError),
    "no example": (lambda m, b: m(b[0])[:0], il.InnerLoopError),
    "complex": (lambda m, b: squares(m, b) * 1j, il.InnerLoopError),
    "argmax": (lambda m, b: m(b[0]).argmax(), il.RequirementError),
}


@pytest.mark.parametrize("backward", [il.Remat(), il.Forward()], ids=repr)
@pytest.mark.parametrize("case", BROKEN_LOSSES)
def test_what_a_loss_may_not_return(case, backward):
    loss, kind = BROKEN_LOSSES[case]
    inner, train, val = built(loss=loss, val_loss=squares, backward=backward)
    with refuses("loss", kind=kind, model=inner.model, optimizer=inner.optimizer):
        inner(train, val)


def test_a_loss_under_no_grad():
    def loss(model, batch):
        with torch.no_grad():
            return squares(model, batch)

    inner, train, val = built(loss=loss)
    with refuses("no_grad", kind=il.RequirementError, model=inner.model):
        inner(train, val)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss()], ids=repr)
def test_a_loss_of_torch_that_takes_no_model(loss):
    """They take predictions and targets; the mistake is explained where it is made."""
    model = Net()
    with refuses(type(loss).__name__, "loss(model, batch)", "lambda model, batch", model=model):
        il.InnerLoop(model, momentum(model.parameters()), loss)


BROKEN_MEASURES = {
    "cut": (lambda m, v: squares(m, v).detach(), il.RequirementError),
    "a metric": (lambda m, v: (m(v[0]).argmax(1) == 0).double().mean(), il.RequirementError),
    "a number": (lambda m, v: squares(m, v).item(), il.InnerLoopError),
    "no value": (lambda m, v: None, il.InnerLoopError),
    "an empty tuple": (lambda m, v: (), il.InnerLoopError),
    "one per example": (lambda m, v: (m(v[0]) - v[1]) ** 2, il.InnerLoopError),
    "complex": (lambda m, v: squares(m, v) * 1j, il.InnerLoopError),
    "a model from outside": (outside, il.RequirementError),
}


@pytest.mark.parametrize("tasks", [False, True])
@pytest.mark.parametrize("case", BROKEN_MEASURES)
def test_what_a_validation_loss_may_not_return(case, tasks):
    measure, kind = BROKEN_MEASURES[case]
    inner, train, val = built(val_loss=measure)
    if tasks:
        *train, val = batches(3, 2)
    with refuses("alidation loss", kind=kind, model=inner.model, optimizer=inner.optimizer):
        inner(train, val, tasks=tasks)


def test_an_error_of_the_users_own_says_at_which_step():
    def loss(model, batch):
        if batch[0].shape[0] == 2:
            raise KeyError("my own mistake")
        return squares(model, batch)

    inner, train, val = built(loss=loss)
    train[1] = tuple(part[:2] for part in train[1])
    with pytest.raises(KeyError, match="my own mistake") as info:
        inner(train, val)
    assert any("step 1" in note for note in getattr(info.value, "__notes__", ["step 1"]))


def test_a_diverging_run_goes_on_as_in_torch():
    inner, train, val = built(make=lambda p: optim.SGD(p, lr=1e200))
    value = inner([*train, *train], val)
    assert value.isnan()
    assert all(g.isnan().any() for g in gradients(value, inner))


@pytest.mark.parametrize("make", [optim.Adam, lambda p: optim.SGD(p, lr=0.1, momentum=0.9)])
def test_a_warm_optimizer_follows_to_another_precision(make):
    model = nn.Linear(3, 1, dtype=torch.float32)
    optimizer = make(model.parameters())
    batch = torch.randn(8, 3), torch.randn(8, 1)
    narrow = tuple(t.float() for t in batch)
    for _ in range(2):
        optimizer.zero_grad()
        (model(narrow[0]) - narrow[1]).square().mean().backward()
        optimizer.step()
    wide, wide_optimizer = copy.deepcopy((model, optimizer))
    optimizer_state = copy.deepcopy(optimizer.state_dict())
    inner = il.InnerLoop(model, optimizer, lambda m, b: (m(b[0]) - b[1]).square().mean()).double()
    slots = [v for s in optimizer.state.values() for n, v in s.items() if n != "step"]
    assert {slot.dtype for slot in slots} == {torch.float64}
    # torch casts a state to the weights it is loaded for.
    wide.double()
    wide_optimizer.load_state_dict(optimizer_state)
    with torch.no_grad():
        adapted = inner.adapt([batch] * 3)
    for _ in range(3):
        wide_optimizer.zero_grad()
        (wide(batch[0]) - batch[1]).square().mean().backward()
        wide_optimizer.step()
    for name, p in wide.named_parameters():
        assert torch.allclose(adapted.params[name], p, rtol=1e-13, atol=1e-14)
    adapted.write_to(model, optimizer)
    optimizer.step()


def test_batches_that_are_dataclasses_work_in_inference_mode():
    @dataclasses.dataclass(frozen=True)
    class Pair:
        x: torch.Tensor
        y: torch.Tensor

    model = nn.Linear(3, 1)
    loss = lambda m, b: (m(b.x) - b.y).square().mean()  # noqa: E731
    inner = il.InnerLoop(model, optim.SGD(model.parameters(), lr=0.1), loss)
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    wanted = inner([Pair(x, y)] * 2, Pair(x, y)).item()
    with torch.inference_mode():
        pair = Pair(x.clone(), y.clone())
        assert inner([pair] * 2, pair).item() == wanted
        assert inner.adapt([pair] * 2).losses.shape == (2,)


def test_writing_settings_of_a_learned_optimizer_says_so():
    model = nn.Linear(3, 1)
    inner = il.InnerLoop(model, il.learned.MLPOptimizer(), squares, learn=())
    with pytest.raises(il.InnerLoopError, match="inner loop with MLPOptimizer"):
        inner.write_to(optim.SGD(model.parameters(), lr=0.1))


# What a loss asks of the weights. ---------------------------------------------------------------


def asking(model, batch):
    trained = [p for p in model.parameters() if p.requires_grad]
    return len(trained) * squares(model, batch) + sum(p.square().sum() for p in trained)


@pytest.mark.parametrize("backward", [il.Tape(), il.Remat(), il.Forward()], ids=repr)
@pytest.mark.parametrize("learn", [("lr",), ("init", "lr")], ids=str)
@pytest.mark.parametrize("part", [False, True])
def test_weights_say_that_they_require_grad_as_the_models_do(part, learn, backward):
    model = Net()
    model.body.bias.requires_grad_(False)
    params = model.head.parameters() if part else model.parameters()
    inner = il.InnerLoop(model, optim.SGD(params, lr=0.05), asking, learn=learn, backward=backward)
    *train, val = batches(4)
    twin = copy.deepcopy(model)
    sgd = optim.SGD(twin.head.parameters() if part else twin.parameters(), lr=0.05)
    plain(twin, sgd, asking, train)
    value = inner(train, val)
    assert_close([value], [asking(twin, val)])
    with torch.no_grad():
        assert_close([inner(train, val)], [value])
    learned = [p for p in inner.parameters() if p.requires_grad]
    assert_derivative(lambda: inner(train, val), learned)


def test_a_checkpoint_after_settings_were_written_beside_a_scheduler():
    def made():
        torch.manual_seed(0)
        model = Net()
        sgd = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        cosine = optim.lr_scheduler.CosineAnnealingLR(sgd, 50)
        learn = {"lr": il.Learn(transform="log")}
        inner = il.InnerLoop(model, sgd, squares, learn=learn, schedule=cosine)
        return model, sgd, cosine, inner, optim.SGD(inner.parameters(), lr=0.5)

    model, sgd, cosine, inner, meta = first = made()
    *train, val = batches(4)
    for _ in range(3):
        plain(model, sgd, squares, train[:1], cosine)
        il.meta_update(inner, train, val, meta)
        inner.write_to()
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    again = made()
    for part, state in zip(again, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert_close([again[3](train, val)], [inner(train, val)], 0)
    # One from before they were written, too.
    again[3].load_state_dict(made()[3].state_dict())
    assert "_base" not in again[3].state_dict()
