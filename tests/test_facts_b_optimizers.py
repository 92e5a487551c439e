"""The defects of `higher` in differentiating optimizers, each shown right here."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR, StepLR

import innerloop as il
from problems import (
    Net,
    assert_exact_unroll,
    central_difference,
    flat,
    regression,
    relative_error,
    set_weights,
    trained,
    unrolled,
)


def setting(optimizer_type, name, value, **others):
    """Makes an optimizer with `name` set to `value`, also where torch would refuse it."""

    def make(params):
        optimizer = optimizer_type(params, **others)
        for group in optimizer.param_groups:
            group[name] = value
        return optimizer

    return make


def assert_exact_setting(optimizer_type, name, value, steps=4, difference=central_difference, **o):
    """d(last loss)/d(setting), given through `override`, equals finite differences."""
    model, loss = Net(), regression()
    learned = torch.tensor(value, requires_grad=True)
    as_setting = tuple if learned.dim() else (lambda t: t)
    make = setting(optimizer_type, name, as_setting(learned.tolist()), **o)
    result, weights = unrolled(model, make, loss, steps, override={name: [as_setting(learned)]})
    assert relative_error(weights, trained(model, make, loss, steps)[1]) < 1e-12
    actual = torch.autograd.grad(result, learned)[0]

    def outcome(values):
        return trained(
            model, setting(optimizer_type, name, as_setting(values.tolist()), **o), loss, steps
        )[0]

    assert relative_error(actual, difference(outcome, learned.detach())) < 1e-6


# B10: betas of Adam


@pytest.mark.parametrize("optimizer_type", [torch.optim.Adam, torch.optim.AdamW])
def test_b10_derivative_of_betas(optimizer_type):
    assert_exact_setting(optimizer_type, "betas", (0.8, 0.95), lr=0.1, amsgrad=True)


# B11: ASGD


ASGD_OPTIONS = {"lr": 0.2, "lambd": 0.3, "alpha": 0.6, "t0": 2.0, "weight_decay": 0.1}


@pytest.mark.parametrize("name", ["lr", "lambd", "alpha", "weight_decay"])
def test_b11_derivative_of_asgd_settings(name):
    assert_exact_setting(torch.optim.ASGD, name, ASGD_OPTIONS[name], steps=5, **ASGD_OPTIONS)


@pytest.mark.parametrize("steps", [1, 5])
def test_b11_asgd_averages_the_weights_after_the_update(steps):
    model, loss = Net(), regression()
    optimizer = torch.optim.ASGD(model.parameters(), **ASGD_OPTIONS)
    with il.innerloop_ctx(model, optimizer) as (fmodel, diffopt):
        for _ in range(steps):
            diffopt.step(loss(fmodel))
    averages = [diffopt.state[0][i]["ax"] for i in range(4)]
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    expected = [optimizer.state[p]["ax"] for p in model.parameters()]
    assert relative_error(flat(averages), flat(expected)) < 1e-12


# B12: maximize and decoupled weight decay


@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.Adam])
def test_b12_maximize(optimizer_type):
    def make(params):
        return optimizer_type(params, maximize=True, lr=0.01, weight_decay=0.1)

    model, loss = Net(), regression()
    assert trained(model, make, loss, 5)[0] > loss(model)
    assert_exact_unroll(model, loss, make, steps=5)


def test_b12_derivative_of_decoupled_weight_decay():
    assert_exact_setting(
        torch.optim.Adam, "weight_decay", 0.4, lr=0.05, decoupled_weight_decay=True
    )


# B13: settings that start at exactly zero


def forward_difference(f, x, eps=1e-5):
    """One-sided, to fourth order: torch has no update for a momentum below zero."""
    values = [f(x + k * eps) for k in range(5)]
    return sum(c * v for c, v in zip((-25, 48, -36, 16, -3), values, strict=True)) / (12 * eps)


ZEROS = [
    (torch.optim.SGD, "momentum", {"lr": 0.1}),
    (torch.optim.SGD, "weight_decay", {"lr": 0.1}),
    (torch.optim.SGD, "dampening", {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, "weight_decay", {"lr": 0.1}),
    (torch.optim.NAdam, "momentum_decay", {"lr": 0.1}),
    (torch.optim.Adagrad, "lr_decay", {"lr": 0.1}),
    (torch.optim.RMSprop, "momentum", {"lr": 0.1}),
    (torch.optim.ASGD, "lambd", {"lr": 0.1}),
]


@pytest.mark.parametrize(
    ("optimizer_type", "name", "options"),
    [pytest.param(*row, id=f"{row[0].__name__}-{row[1]}") for row in ZEROS],
)
def test_b13_a_setting_that_starts_at_zero_has_its_derivative(optimizer_type, name, options):
    assert_exact_setting(optimizer_type, name, 0.0, difference=forward_difference, **options)


def test_b13_a_momentum_at_zero_learns_also_from_a_warm_optimizer():
    model, loss = Net(), regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model).backward()
    optimizer.step()
    momentum = torch.tensor(0.0, requires_grad=True)
    with il.innerloop_ctx(model, optimizer, override={"momentum": [momentum]}) as (fmodel, diffopt):
        for _ in range(3):
            diffopt.step(loss(fmodel))
        actual = torch.autograd.grad(loss(fmodel), momentum)[0]

    def outcome(momentum):
        make = setting(torch.optim.SGD, "momentum", momentum.item(), lr=0.1)
        return trained(model, make, loss, 3)[0]

    assert relative_error(actual, forward_difference(outcome, momentum.detach())) < 1e-6


# B14: frozen parameters


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3), id="SGD"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3), id="AdamW"),
    ],
)
def test_b14_frozen_parameters_inside_the_optimizer_do_not_move(make, track):
    model, loss = Net(), regression()
    model.first.weight.requires_grad_(False)
    model.last.bias.requires_grad_(False)
    optimizer = make(list(model.parameters()))
    with il.innerloop_ctx(model, optimizer, track_higher_grads=track) as (fmodel, diffopt):
        for _ in range(3):
            diffopt.step(loss(fmodel))
    assert torch.equal(fmodel.first.weight, model.first.weight)
    assert torch.equal(fmodel.last.bias, model.last.bias)
    assert [p.requires_grad for p in fmodel.parameters()] == [False, True, True, False]
    expected = trained(model, lambda params: make(list(params)), loss, 3)[1]
    assert relative_error(flat(fmodel.parameters()), expected) < 1e-12


@pytest.mark.parametrize("track", [True, False])
def test_b14_parameters_that_the_loss_does_not_use_do_not_move(track):
    class Spare(Net):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

    model, loss = Spare(), regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.3)
    with il.innerloop_ctx(model, optimizer, track_higher_grads=track) as (fmodel, diffopt):
        for _ in range(3):
            diffopt.step(loss(fmodel))
    assert torch.equal(fmodel.spare.weight, model.spare.weight)
    assert not torch.equal(fmodel.first.weight, model.first.weight)


# B15: tensors inside the optimizer


@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("kind", ["leaf", "non_leaf"])
def test_b15_a_tensor_learning_rate_inside_the_optimizer_has_its_gradient(optimizer_type, kind):
    model, loss = Net(), regression()
    source = torch.tensor(-2.3, requires_grad=True) if kind == "non_leaf" else None
    rate = torch.tensor(0.1, requires_grad=True) if source is None else source.exp()
    target = rate if source is None else source
    value, weights = unrolled(model, setting(optimizer_type, "lr", rate), loss, 3)
    actual = torch.autograd.grad(value, target)[0]

    def outcome(x):
        number = x if source is None else x.exp()
        return trained(model, setting(optimizer_type, "lr", number.item()), loss, 3)[0]

    assert relative_error(actual, central_difference(outcome, target.detach())) < 1e-6
    expected = trained(model, setting(optimizer_type, "lr", rate.item()), loss, 3)[1]
    assert relative_error(weights, expected) < 1e-12


def test_b15_tensor_betas_and_weight_decay_inside_the_optimizer_have_their_gradients():
    model, loss = Net(), regression()
    beta1, beta2, decay = (torch.tensor(v, requires_grad=True) for v in (0.8, 0.95, 0.2))

    def make(params):
        return setting(torch.optim.AdamW, "betas", (beta1, beta2), lr=0.1, weight_decay=decay)(
            params
        )

    value, _ = unrolled(model, make, loss, 3)
    actual = torch.stack(torch.autograd.grad(value, (beta1, beta2, decay)))

    def outcome(x):
        one, two, decay = x.tolist()
        return trained(
            model,
            lambda p: torch.optim.AdamW(p, lr=0.1, betas=(one, two), weight_decay=decay),
            loss,
            3,
        )[0]

    assert (
        relative_error(actual, central_difference(outcome, torch.tensor([0.8, 0.95, 0.2]))) < 1e-6
    )


# B16: complex parameters, and zero gradients


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(2, 3, dtype=torch.complex128))
        self.last = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.randn(1))

    def forward(self, x):
        return torch.tanh((x + 0j) @ self.first) @ self.last + self.shift


COMPLEX = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
    (torch.optim.RMSprop, {"lr": 0.05, "centered": True}),
    (torch.optim.Rprop, {"lr": 0.05}),
    (torch.optim.ASGD, {"lr": 0.05, "lambd": 0.1}),
]


def as_real(tensor):
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def real(tensors):
    """One flat real vector, real and imaginary parts side by side."""
    return flat(map(as_real, tensors))


@pytest.mark.parametrize(
    ("optimizer_type", "options"),
    [pytest.param(t, o, id=f"{t.__name__}-{'-'.join(o)}") for t, o in COMPLEX],
)
def test_b16_complex_parameters(optimizer_type, options):
    model, x, y = Complex(), torch.randn(5, 2), torch.randn(5)

    def loss(model):
        return (model(x) - y).abs().square().mean()

    def make(params):
        return optimizer_type(params, **options)

    def outcome(start):
        plain = copy.deepcopy(model)
        parts = start.split([as_real(p).numel() for p in plain.parameters()])
        with torch.no_grad():
            for p, part in zip(plain.parameters(), parts, strict=True):
                as_real(p).view(-1).copy_(part)
        return trained(plain, make, loss, 4)[0]

    value, weights = unrolled(model, make, loss, 4)
    assert relative_error(weights, trained(model, make, loss, 4)[1]) < 1e-12
    grads = torch.autograd.grad(value, list(model.parameters()))
    differences = central_difference(outcome, real(model.parameters()).detach())
    assert relative_error(real(grads), differences) < 1e-6


ZERO_GRADIENT = [
    (torch.optim.RMSprop, {"lr": 0.05, "centered": True, "momentum": 0.5}),
    (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
    (torch.optim.Adagrad, {"lr": 0.05}),
    (torch.optim.Adamax, {"lr": 0.05}),
    (torch.optim.NAdam, {"lr": 0.05}),
    (torch.optim.RAdam, {"lr": 0.05}),
    (torch.optim.Adadelta, {"lr": 1.0}),
]


class DeadUnit(nn.Module):
    """Its second hidden unit is far below zero for all inputs, so its gradients are exactly 0."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.last = nn.Linear(2, 1)
        with torch.no_grad():
            self.first.bias.copy_(torch.tensor([0.5, -100.0]))

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


@pytest.mark.parametrize(
    ("optimizer_type", "options"),
    [pytest.param(t, o, id=f"{t.__name__}-{'-'.join(o)}") for t, o in ZERO_GRADIENT],
)
def test_b16_zero_gradients_leave_the_meta_gradient_exact(optimizer_type, options):
    def make(params):
        return optimizer_type(params, **options)

    assert_exact_unroll(DeadUnit(), regression(), make, steps=3)


# B17: get_trainable_opt_params, create_diff_optim


@pytest.mark.parametrize(
    ("optimizer_type", "names"),
    [
        (torch.optim.SGD, {"lr", "momentum", "dampening", "weight_decay"}),
        (torch.optim.Adam, {"lr", "betas", "eps", "weight_decay"}),
        (torch.optim.RMSprop, {"lr", "momentum", "alpha", "eps", "weight_decay"}),
        (torch.optim.Adadelta, {"lr", "rho", "eps", "weight_decay"}),
    ],
)
def test_b17_only_continuous_settings_are_trainable(optimizer_type, names):
    optimizer = optimizer_type(Net().parameters(), lr=0.1)
    override = il.get_trainable_opt_params(optimizer)
    assert set(override) == names
    for values in override.values():
        assert len(values) == 1
        for tensor in values[0] if isinstance(values[0], tuple) else values:
            assert tensor.requires_grad and tensor.is_leaf and tensor.is_floating_point()
    assert override["lr"][0].item() == 0.1


def test_b17_a_tensor_rate_is_trainable_too():
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(Net().parameters(), lr=rate)
    learned = il.get_trainable_opt_params(optimizer)["lr"][0]
    assert learned.requires_grad and learned.is_leaf and learned is not rate
    assert torch.equal(learned.detach(), rate)
    assert not rate.requires_grad


def test_b17_trainable_settings_give_exact_derivatives_and_go_back():
    model, loss = Net(), regression()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), betas=(0.8, 0.95))
    override = il.get_trainable_opt_params(optimizer)
    value, _ = unrolled(model, lambda _: optimizer, loss, 3, override=override)
    rate, betas = override["lr"][0], override["betas"][0]
    actual = torch.stack(torch.autograd.grad(value, [rate, *betas]))

    def outcome(x):
        lr, *betas = x.tolist()
        return trained(model, lambda p: torch.optim.Adam(p, lr=lr, betas=tuple(betas)), loss, 3)[0]

    expected = central_difference(outcome, torch.tensor([0.1, 0.8, 0.95]))
    assert relative_error(actual, expected) < 1e-6

    with torch.no_grad():
        rate.fill_(0.2)
        betas[1].fill_(0.97)
    il.apply_trainable_opt_params(optimizer, override)
    group = optimizer.param_groups[0]
    assert isinstance(group["lr"], torch.Tensor) and group["lr"].item() == 0.2
    assert group["betas"] == (0.8, 0.97)
    assert group["amsgrad"] is False and group["maximize"] is False


def test_b17_what_started_as_an_integer_goes_back_unrounded():
    optimizer = torch.optim.SGD(Net().parameters(), lr=1, momentum=0)
    override = il.get_trainable_opt_params(optimizer)
    with torch.no_grad():
        override["lr"][0].fill_(0.25)
        override["momentum"][0].fill_(0.5)
    il.apply_trainable_opt_params(optimizer, override)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_b17_create_diff_optim_with_group_dictionaries():
    model, loss = Net(), regression()
    fmodel = il.monkeypatch(model, copy_initial_weights=False)
    fast = fmodel.fast_params
    groups = [{"params": fast[:2], "lr": 0.3}, {"params": fast[2:]}]
    diffopt = il.create_diff_optim(
        torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, params=groups, fmodel=fmodel
    )
    for _ in range(3):
        diffopt.step(loss(fmodel))

    def make(_):
        return torch.optim.SGD(
            [{"params": model.first.parameters(), "lr": 0.3}, {"params": model.last.parameters()}],
            lr=0.1,
            momentum=0.9,
        )

    assert relative_error(flat(fmodel.parameters()), trained(model, make, loss, 3)[1]) < 1e-12
    assert [group["lr"] for group in diffopt.param_groups] == [0.3, 0.1]


def test_b17_create_diff_optim_with_a_single_tensor_as_a_group():
    y = torch.tensor([1.0, -2.0], requires_grad=True)
    diffopt = il.create_diff_optim(torch.optim.SGD, {"lr": 0.25}, params=[{"params": y}])
    (new,) = diffopt.step((y**2).sum(), params=[y])
    assert torch.equal(new, 0.5 * y)
    assert torch.equal(torch.autograd.grad(new.sum(), y)[0], torch.full((2,), 0.5))


# B18: subclasses and the classes that were missing


class Matrices(nn.Module):
    """Weights are matrices only, as Muon asks for."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3, bias=False)
        self.last = nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


MISSING = [
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.NAdam, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.RAdam, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.Adafactor, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.Muon, {"lr": 0.1, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(
    ("optimizer_type", "options"), [pytest.param(t, o, id=t.__name__) for t, o in MISSING]
)
def test_b18_missing_optimizers_unroll_exactly(optimizer_type, options):
    def make(params):
        return optimizer_type(params, **options)

    # Muon orthogonalizes in bfloat16, which finite differences cannot see through.
    if optimizer_type is torch.optim.Muon:
        model, loss = Matrices(), regression()
        _, weights = unrolled(model, make, loss, 6)
        assert relative_error(weights, trained(model, make, loss, 6)[1]) < 1e-12
    else:
        assert_exact_unroll(Matrices(), regression(), make, steps=6)


# B19: the optimizer as an optimizer


SCHEDULES = [
    pytest.param(lambda o: StepLR(o, step_size=2, gamma=0.5), id="StepLR"),
    pytest.param(lambda o: ExponentialLR(o, gamma=0.7), id="ExponentialLR"),
    pytest.param(lambda o: CosineAnnealingLR(o, T_max=5), id="CosineAnnealingLR"),
    pytest.param(lambda o: LambdaLR(o, lambda k: 1 / (k + 1)), id="LambdaLR"),
    pytest.param(lambda o: OneCycleLR(o, max_lr=0.3, total_steps=6), id="OneCycleLR"),
]


@pytest.mark.parametrize("make_schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.Adam])
def test_b19_torch_schedulers_drive_the_differentiable_optimizer(make_schedule, optimizer_type):
    model, loss = Net(), regression()
    options = {"momentum": 0.9} if optimizer_type is torch.optim.SGD else {}

    def scheduled(start):
        plain = copy.deepcopy(model)
        set_weights(plain, start)
        optimizer = optimizer_type(plain.parameters(), lr=0.1, **options)
        schedule = make_schedule(optimizer)
        for _ in range(5):
            optimizer.zero_grad()
            loss(plain).backward()
            optimizer.step()
            schedule.step()
        return plain

    start = flat(model.parameters()).detach()
    optimizer = optimizer_type(model.parameters(), lr=0.1, **options)
    with il.innerloop_ctx(model, optimizer, copy_initial_weights=False) as (fmodel, diffopt):
        schedule = make_schedule(diffopt)
        for _ in range(5):
            diffopt.step(loss(fmodel))
            schedule.step()
    expected = flat(scheduled(start).parameters())
    assert relative_error(flat(fmodel.parameters()), expected) < 1e-12
    assert optimizer.param_groups[0]["lr"] == 0.1
    grads = torch.autograd.grad(loss(fmodel), list(model.parameters()))
    differences = central_difference(lambda start: loss(scheduled(start)), start)
    assert relative_error(flat(grads), differences) < 1e-6


STATEFUL = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.Adafactor, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {"lr": 0.1}),
    (torch.optim.ASGD, {"lr": 0.1, "t0": 1.0}),
]
each_stateful = pytest.mark.parametrize(
    ("optimizer_type", "options"), [pytest.param(t, o, id=t.__name__) for t, o in STATEFUL]
)


def plain_steps(model, optimizer, loss, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


@each_stateful
def test_b19_state_dict_loads_into_torch(optimizer_type, options):
    model, loss = Net(), regression()
    optimizer = optimizer_type(model.parameters(), **options)
    with il.innerloop_ctx(model, optimizer) as (fmodel, diffopt):
        for _ in range(3):
            diffopt.step(loss(fmodel))
    plain = copy.deepcopy(model)
    set_weights(plain, flat(fmodel.parameters()))
    resumed = optimizer_type(plain.parameters(), **options)
    resumed.load_state_dict(diffopt.state_dict())
    plain_steps(plain, resumed, loss, 3)
    expected = trained(model, lambda p: optimizer_type(p, **options), loss, 6)[1]
    assert relative_error(flat(plain.parameters()), expected) < 1e-12


@each_stateful
def test_b19_state_dict_loads_from_torch(optimizer_type, options):
    model, loss = Net(), regression()
    plain = copy.deepcopy(model)
    optimizer = optimizer_type(plain.parameters(), **options)
    plain_steps(plain, optimizer, loss, 3)
    fresh = optimizer_type(plain.parameters(), **{**options, "lr": 0.7})
    kept = copy.deepcopy(fresh.state_dict())
    with il.innerloop_ctx(plain, fresh) as (fmodel, diffopt):
        diffopt.load_state_dict(optimizer.state_dict())
        for _ in range(3):
            diffopt.step(loss(fmodel))
    expected = trained(model, lambda p: optimizer_type(p, **options), loss, 6)[1]
    assert relative_error(flat(fmodel.parameters()), expected) < 1e-12
    torch.testing.assert_close(fresh.state_dict(), kept, rtol=0, atol=0)


def test_b19_state_dict_has_the_shape_of_torch():
    model, loss = Net(), regression()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with il.innerloop_ctx(model, optimizer) as (fmodel, diffopt):
        diffopt.step(loss(fmodel))
    plain_steps(model, optimizer, loss, 1)
    actual, expected = diffopt.state_dict(), optimizer.state_dict()
    assert actual.keys() == expected.keys()
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert actual["state"][index].keys() == state.keys()
        for name, value in state.items():
            assert torch.allclose(actual["state"][index][name], value, rtol=1e-12, atol=0)


@each_stateful
@pytest.mark.parametrize("track", [True, False])
def test_b19_write_to_brings_the_state_back(optimizer_type, options, track):
    model, loss = Net(), regression()
    expected = trained(model, lambda p: optimizer_type(p, **options), loss, 6)[1]
    optimizer = optimizer_type(model.parameters(), **options)
    with il.innerloop_ctx(model, optimizer, track_higher_grads=track) as (fmodel, diffopt):
        for _ in range(3):
            diffopt.step(loss(fmodel))
    diffopt.write_to(optimizer)
    set_weights(model, flat(fmodel.parameters()))
    plain_steps(model, optimizer, loss, 3)
    assert relative_error(flat(model.parameters()), expected) < 1e-12


def test_b19_write_to_brings_learned_settings_back():
    model, loss = Net(), regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rate = torch.tensor(0.3, requires_grad=True)
    with il.innerloop_ctx(model, optimizer, override={"lr": [rate]}) as (fmodel, diffopt):
        diffopt.step(loss(fmodel))
    diffopt.write_to(optimizer)
    assert float(optimizer.param_groups[0]["lr"]) == 0.3
    buffer = optimizer.state[model.first.weight]["momentum_buffer"]
    assert not buffer.requires_grad
    assert optimizer.param_groups[0]["params"][0] is model.first.weight


class Heavy(torch.optim.Optimizer):
    """p <- p - lr m, m <- m / 2 + g"""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].get("mean", torch.zeros_like(p))
                self.state[p]["mean"] = mean = mean / 2 + p.grad
                p.sub_(group["lr"] * mean)


class DifferentiableHeavy(il.DifferentiableOptimizer):
    def _update(self, grouped_grads, **kwargs):
        for g, (group, grads) in enumerate(zip(self.param_groups, grouped_grads, strict=True)):
            for i, grad in enumerate(grads):
                mean = self.state[g][i].get("mean", torch.zeros_like(grad))
                self.state[g][i]["mean"] = mean = mean / 2 + grad
                group["params"][i] = group["params"][i] - group["lr"] * mean


def test_b19_a_registered_optimizer_goes_back_and_forth_too():
    il.register_optim(Heavy, DifferentiableHeavy)
    model, loss = Net(), regression()
    expected = trained(model, lambda p: Heavy(p, 0.1), loss, 6)[1]
    optimizer = Heavy(model.parameters(), 0.1)
    with il.innerloop_ctx(model, optimizer) as (fmodel, diffopt):
        for _ in range(2):
            diffopt.step(loss(fmodel))
    diffopt.write_to(optimizer)
    set_weights(model, flat(fmodel.parameters()))
    plain_steps(model, optimizer, loss, 1)
    with il.innerloop_ctx(model, optimizer) as (fmodel, diffopt):
        diffopt.step(loss(fmodel))
    set_weights(model, flat(fmodel.parameters()))
    saved = diffopt.state_dict()
    with il.innerloop_ctx(model, Heavy(model.parameters(), 0.7)) as (fmodel, diffopt):
        diffopt.load_state_dict(saved)
        for _ in range(2):
            diffopt.step(loss(fmodel))
    assert relative_error(flat(fmodel.parameters()), expected) < 1e-12
