"""The ways in which public code uses `higher`, each run unchanged through the mirror."""

import copy
import importlib
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

import innerloop.compat.higher
from problems import (
    Net,
    central_difference,
    flat,
    regression,
    relative_error,
    set_weights,
    sgd,
    trained,
)


def forget_higher():
    names = [name for name in sys.modules if name.split(".")[0] == "higher"]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def higher():
    """`import higher` as user code does it, with no trace left afterwards."""
    kept = forget_higher()
    innerloop.compat.higher.install()
    yield importlib.import_module("higher")
    forget_higher()
    sys.modules.update(kept)


def sgd_by_hand(model, losses, rates):
    """SGD unrolled in plain torch; `losses` take a callable, `rates` are one per step.

    A tuple of rates has one for each parameter.
    """
    names, params = zip(*model.named_parameters(), strict=True)

    def call(x, params):
        return functional_call(model, dict(zip(names, params, strict=True)), (x,))

    for loss, rate in zip(losses, rates, strict=True):
        grads = torch.autograd.grad(loss(lambda x, p=params: call(x, p)), params, create_graph=True)
        of_each = rate if isinstance(rate, tuple) else (rate,) * len(params)
        params = [p - r * g for p, r, g in zip(params, of_each, grads, strict=True)]
    return params, lambda x: call(x, params)


# per-task MAML with backward() inside the context


def test_c_per_task_maml_with_backward_inside_the_context(higher):
    net = Net()
    tasks = [(regression(), regression()) for _ in range(3)]
    meta_opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    inner_opt = torch.optim.SGD(net.parameters(), lr=1e-1)
    meta_opt.zero_grad()
    query_losses = []
    for support, query in tasks:
        with higher.innerloop_ctx(net, inner_opt, copy_initial_weights=False) as (fnet, diffopt):
            for _ in range(5):
                diffopt.step(support(fnet))
            query_loss = query(fnet)
            query_losses.append(query_loss.detach())
            query_loss.backward()

    total = 0
    for (support, query), query_loss in zip(tasks, query_losses, strict=True):
        _, adapted = sgd_by_hand(net, [support] * 5, [0.1] * 5)
        assert relative_error(query_loss, query(adapted)) < 1e-12
        total = total + query(adapted)
    expected = torch.autograd.grad(total, list(net.parameters()))
    assert relative_error(flat(p.grad for p in net.parameters()), flat(expected)) < 1e-12
    before = flat(net.parameters()).detach().clone()
    meta_opt.step()
    assert not torch.equal(flat(net.parameters()), before)


def test_c_copied_initial_weights_get_no_gradient_at_the_model(higher):
    net, loss = Net(), regression()
    with higher.innerloop_ctx(net, sgd(net.parameters())) as (fnet, diffopt):
        diffopt.step(loss(fnet))
        loss(fnet).backward()
        grads = [p.grad for p in fnet.parameters(time=0)]
    assert all(p.grad is None for p in net.parameters())
    _, adapted = sgd_by_hand(net, [loss], [0.1])
    expected = torch.autograd.grad(loss(adapted), list(net.parameters()))
    assert relative_error(flat(grads), flat(expected)) < 1e-12


def test_c_per_task_maml_with_batch_norm(higher):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=1.0), nn.ReLU(), nn.Linear(3, 1)
            )

        def forward(self, x):
            return self.layers(x)

    net, support, query = Block().train(), regression(), regression()
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    for _ in range(2):
        with higher.innerloop_ctx(net, sgd(net.parameters()), copy_initial_weights=False) as (
            fnet,
            diffopt,
        ):
            for _ in range(3):
                diffopt.step(support(fnet))
            query(fnet).backward()
            assert fnet.layers[1].num_batches_tracked.item() == 4
    assert all(torch.equal(b, buffers[name]) for name, b in net.named_buffers())
    actual = flat(p.grad for p in net.parameters())
    twin = copy.deepcopy(net)
    twin.zero_grad()
    _, adapted = sgd_by_hand(twin, [support] * 3, [0.1] * 3)
    expected = torch.autograd.grad(2 * query(adapted), list(twin.parameters()))
    assert relative_error(actual, flat(expected)) < 1e-12


def test_c_step_returns_the_new_parameters(higher):
    net, loss = Net(), regression()
    with higher.innerloop_ctx(net, sgd(net.parameters())) as (fnet, diffopt):
        new = diffopt.step(loss(fnet))
        assert all(a is b for a, b in zip(new, fnet.fast_params, strict=True))
    assert relative_error(flat(new), trained(net, sgd, loss, 1)[1]) < 1e-12


def test_c_weights_of_examples_through_a_copy_of_the_model(higher):
    net, query = Net(), regression()
    x, y = torch.randn(6, 2), torch.randn(6, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    with higher.innerloop_ctx(net, opt) as (meta_net, meta_opt):
        weights = torch.zeros(6, requires_grad=True)
        meta_opt.step((weights * (meta_net(x) - y).square().squeeze(1)).sum())
        actual = torch.autograd.grad(query(meta_net), weights)[0]

    def outcome(weights):
        def weighted(model):
            return (weights * (model(x) - y).square().squeeze(1)).sum()

        plain = copy.deepcopy(net)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
        weighted(plain).backward()
        optimizer.step()
        return query(plain)

    assert relative_error(actual, central_difference(outcome, torch.zeros(6))) < 1e-6
    assert all(p.grad is None for p in net.parameters())


# positional arguments


def test_c_positional_arguments_and_test_mode(higher):
    net, loss = Net(), regression()
    with higher.innerloop_ctx(
        net, sgd(net.parameters()), torch.device("cpu"), True, None, False
    ) as (
        fnet,
        diffopt,
    ):
        for _ in range(3):
            diffopt.step(loss(fnet))
    assert relative_error(flat(fnet.parameters()), trained(net, sgd, loss, 3)[1]) < 1e-12
    assert all(p.is_leaf and p.requires_grad for p in fnet.parameters())
    assert all(p.grad is None for p in net.parameters())
    with pytest.raises(ValueError, match=r"(?i)track"):
        fnet.parameters(time=2)


def test_c_positional_arguments_of_the_other_functions(higher):
    net, loss = Net(), regression()
    device = torch.device("cpu")
    rate = torch.tensor(0.1, requires_grad=True)
    fnet = higher.monkeypatch(net, device, False, True)
    diffopt = higher.get_diff_optim(
        torch.optim.SGD(net.parameters(), lr=5.0), net.parameters(), fnet, device, {"lr": [rate]},
        True,
    )  # fmt: skip
    diffopt.step(loss(fnet))
    other = higher.create_diff_optim(
        torch.optim.SGD, {"lr": 5.0}, None, fnet, device, {"lr": [rate]}, True
    )
    other.step(loss(fnet))
    actual = torch.autograd.grad(loss(fnet), [rate, *net.parameters()])
    hand_rate = torch.tensor(0.1, requires_grad=True)
    _, adapted = sgd_by_hand(net, [loss] * 2, [hand_rate] * 2)
    expected = torch.autograd.grad(loss(adapted), [hand_rate, *net.parameters()])
    assert relative_error(flat(actual), flat(expected)) < 1e-12


# override


def two_groups(net, **options):
    return torch.optim.SGD(
        [{"params": net.first.parameters()}, {"params": net.last.parameters()}], **options
    )


def rates_by_hand(net, loss, rates, steps):
    """Loss after SGD with one rate for each layer of `net`; `rates` is [steps, 2] or [2]."""
    by_layer = [(first, first, last, last) for first, last in rates.expand(steps, 2)]
    return loss(sgd_by_hand(net, [loss] * steps, by_layer)[1])


def as_list(rates):
    return list(rates)


def as_bare_tensor(rates):
    return rates


def as_parameter_list(rates):
    return nn.ParameterList(nn.Parameter(r.detach().clone()) for r in rates)


@pytest.mark.parametrize("kind", [as_list, as_bare_tensor, as_parameter_list])
@pytest.mark.parametrize("moment", ["construction", "every_step", "first_step"])
def test_c_override_as_list_or_bare_tensor(higher, kind, moment):
    net, loss = Net(), regression()
    rates = torch.tensor([0.1, 0.3], requires_grad=True)
    override = {"lr": kind(rates)}
    at_construction = {"override": override} if moment == "construction" else {}
    optimizer = two_groups(net, lr=9.0)
    with higher.innerloop_ctx(net, optimizer, copy_initial_weights=False, **at_construction) as (
        fnet,
        diffopt,
    ):
        for k in range(3):
            given = moment == "every_step" or (moment == "first_step" and k == 0)
            diffopt.step(loss(fnet), **({"override": override} if given else {}))
        value = loss(fnet)
    targets = list(override["lr"]) if kind is as_parameter_list else [rates]
    actual = flat(torch.autograd.grad(value, targets, retain_graph=True))
    by_hand = rates_by_hand(net, loss, rates, 3)
    assert relative_error(value, by_hand) < 1e-12
    assert relative_error(actual, torch.autograd.grad(by_hand, rates)[0]) < 1e-12
    assert [g["lr"] for g in optimizer.param_groups] == [9.0, 9.0]


def test_c_override_per_step_persists_and_wins_over_the_one_at_construction(higher):
    net, loss = Net(), regression()
    early, late = (torch.tensor([r], requires_grad=True) for r in (0.1, 0.25))
    with higher.innerloop_ctx(net, two_groups(net, lr=9.0), override={"lr": early}) as (
        fnet,
        diffopt,
    ):
        diffopt.step(loss(fnet))
        diffopt.step(loss(fnet), override={"lr": [late[0]]})
        diffopt.step(loss(fnet))
        actual = torch.autograd.grad(loss(fnet), [early, late])
    schedule = torch.stack([early.expand(2), late.expand(2), late.expand(2)])
    expected = torch.autograd.grad(rates_by_hand(net, loss, schedule, 3), [early, late])
    assert relative_error(flat(actual), flat(expected)) < 1e-12


# one group per parameter with get_trainable_opt_params


def test_c_one_group_per_parameter_with_get_trainable_opt_params(higher):
    net, loss = Net(), regression()

    def make(rates):
        return torch.optim.SGD(
            [{"params": p, "lr": r} for p, r in zip(net.parameters(), rates, strict=True)],
            lr=0.1,
            momentum=0.9,
        )

    start = [0.1, 0.2, 0.3, 0.4]
    inner_opt = make(start)
    learned = higher.optim.get_trainable_opt_params(inner_opt)
    assert len(learned["lr"]) == len(learned["momentum"]) == 4
    override = {"lr": learned["lr"], "momentum": learned["momentum"]}
    with higher.innerloop_ctx(net, inner_opt, override=override) as (fnet, diffopt):
        for _ in range(3):
            diffopt.step(loss(fnet))
        actual = torch.stack(torch.autograd.grad(loss(fnet), learned["lr"]))
    expected = central_difference(
        lambda rates: trained(net, lambda _: make(rates.tolist()), loss, 3)[0], torch.tensor(start)
    )
    assert relative_error(actual, expected) < 1e-6

    with torch.no_grad():
        for rate in learned["lr"]:
            rate.mul_(2)
    higher.optim.apply_trainable_opt_params(inner_opt, {"lr": learned["lr"]})
    assert [g["lr"] for g in inner_opt.param_groups] == [0.2, 0.4, 0.6, 0.8]


# non-forward methods on the patched model


def test_c_non_forward_methods_on_the_patched_model(higher):
    class Classifier(Net):
        def loss(self, x, y):
            return F.mse_loss(self(x), y) + 0.1 * self.penalty()

        def penalty(self):
            return self.first.weight.square().sum() + self.last.weight.abs().sum()

    net = Classifier()
    x, y = torch.randn(5, 2), torch.randn(5, 1)
    with higher.innerloop_ctx(net, sgd(net.parameters()), copy_initial_weights=False) as (
        fnet,
        diffopt,
    ):
        for _ in range(3):
            diffopt.step(fnet.loss(x, y))
        features = fnet.encode(x)
        actual = torch.autograd.grad(fnet.loss(x, y), list(net.parameters()))
    _, weights = trained(net, sgd, lambda m: m.loss(x, y), 3)
    assert relative_error(flat(fnet.parameters()), weights) < 1e-12
    fresh = Classifier()
    set_weights(fresh, weights)
    assert relative_error(features, fresh.encode(x)) < 1e-12
    expected = central_difference(
        lambda start: trained(net, sgd, lambda m: m.loss(x, y), 3, start)[0],
        flat(net.parameters()).detach(),
    )
    assert relative_error(flat(actual), expected) < 1e-6


# the patched model used after the with block


def test_c_use_after_the_with_block(higher):
    net, loss, query = Net(), regression(), regression()
    losses = []
    for _ in range(2):
        with higher.innerloop_ctx(net, sgd(net.parameters()), copy_initial_weights=False) as (
            fnet,
            diffopt,
        ):
            diffopt.step(loss(fnet))
        diffopt.step(loss(fnet))
        losses.append(query(fnet))
    actual = torch.autograd.grad(sum(losses), list(net.parameters()))
    _, adapted = sgd_by_hand(net, [loss] * 2, [0.1] * 2)
    expected = torch.autograd.grad(2 * query(adapted), list(net.parameters()))
    assert relative_error(flat(actual), flat(expected)) < 1e-12


# a long-lived fmodel(x, params=...)


def test_c_long_lived_patched_model_with_params(higher):
    net, loss = Net(), regression()
    fnet = higher.monkeypatch(net, copy_initial_weights=False)
    for _ in range(3):
        fast = list(net.parameters())
        for _ in range(2):
            value = loss(lambda x, fast=fast: fnet(x, params=fast))
            grads = torch.autograd.grad(value, fast, create_graph=True)
            fast = [p - 0.1 * g for p, g in zip(fast, grads, strict=True)]
        value = loss(lambda x, fast=fast: fnet(x, params=fast))
        actual = torch.autograd.grad(value, list(net.parameters()))
        _, adapted = sgd_by_hand(net, [loss] * 2, [0.1] * 2)
        expected = torch.autograd.grad(loss(adapted), list(net.parameters()))
        assert relative_error(flat(actual), flat(expected)) < 1e-12
        with torch.no_grad():
            for p, g in zip(net.parameters(), actual, strict=True):
                p.sub_(0.5 * g)


def test_c_params_given_once_stay_the_latest(higher):
    net, x = Net(), torch.randn(3, 2)
    fnet = higher.monkeypatch(net)
    given = [torch.randn_like(p) for p in net.parameters()]
    output = fnet(x, params=given)
    assert torch.equal(fnet(x), output)
    assert all(a is b for a, b in zip(fnet.parameters(), given, strict=True))


# make_functional with track_higher_grads=False and _fast_params=[[]]


def test_c_make_functional_without_weights_of_its_own(higher):
    net, x = Net(), torch.randn(3, 2)
    fnet = higher.patch.make_functional(net)
    fnet.track_higher_grads = False
    fnet._fast_params = [[]]
    for _ in range(3):
        weights = [torch.randn_like(p).requires_grad_() for p in net.parameters()]
        output = fnet(x, params=weights)
        named = dict(zip(dict(net.named_parameters()), weights, strict=True))
        expected = functional_call(net, named, (x,))
        assert torch.equal(output, expected)
        actual = torch.autograd.grad(output.sum(), weights)
        expected = torch.autograd.grad(expected.sum(), weights)
        assert relative_error(flat(actual), flat(expected)) < 1e-12
        assert len(fnet._fast_params) == 1


def test_c_make_functional_asks_for_params(higher):
    fnet = higher.patch.make_functional(Net())
    with pytest.raises(ValueError, match="params"):
        fnet(torch.randn(3, 2))


def test_c_make_functional_with_an_encapsulator(higher):
    net, x, seen = Net(), torch.randn(3, 2), []

    def encapsulator(fmodule, module):
        seen.append((fmodule, module))
        fmodule.update_params([torch.ones_like(p) for p in module.parameters()])

    fnet = higher.patch.make_functional(net, encapsulator=encapsulator)
    assert seen == [(fnet, net)]
    expected = 3 * torch.tanh(x.sum(1, keepdim=True) + 1) + 1
    assert relative_error(fnet(x), expected) < 1e-12


# update_params with hand-made tensors


def test_c_update_params_with_hand_made_tensors(higher):
    net, loss = Net(), regression()
    fnet = higher.monkeypatch(net, copy_initial_weights=False)
    scale = torch.tensor(0.1, requires_grad=True)
    for _ in range(3):
        grads = torch.autograd.grad(loss(fnet), fnet.fast_params, create_graph=True)
        fnet.update_params(
            [p - scale * torch.tanh(g) for p, g in zip(fnet.parameters(), grads, strict=True)]
        )
    actual = torch.autograd.grad(loss(fnet), [scale, *net.parameters()])

    def outcome(x):
        plain = copy.deepcopy(net)
        set_weights(plain, x[1:])
        for _ in range(3):
            grads = torch.autograd.grad(loss(plain), list(plain.parameters()))
            with torch.no_grad():
                for p, g in zip(plain.parameters(), grads, strict=True):
                    p.sub_(x[0] * torch.tanh(g))
        return loss(plain)

    start = torch.cat([scale.detach().view(1), flat(net.parameters()).detach()])
    assert relative_error(flat(actual), central_difference(outcome, start)) < 1e-6


# optimizing bare tensors


def energy(x, y):
    return (torch.sin(y) * x).sum() + (y**2).sum()


@pytest.mark.parametrize("how", ["get_diff_optim", "create_diff_optim"])
def test_c_bare_tensors(higher, how):
    """The first of them, tanh(start), is no leaf."""
    start = torch.randn(4, requires_grad=True)
    x = torch.randn(4)
    y = torch.tanh(start)
    if how == "get_diff_optim":
        stand_in = y.detach().clone().requires_grad_()
        inner_opt = higher.get_diff_optim(torch.optim.Adam([stand_in], lr=0.1), [stand_in])
    else:
        inner_opt = higher.create_diff_optim(torch.optim.Adam, {"lr": 0.1}, params=[y])
    for _ in range(5):
        (y,) = inner_opt.step(energy(x, y), params=[y])
    actual = torch.autograd.grad(y.square().sum(), start)[0]

    def outcome(start):
        y = torch.tanh(start).requires_grad_()
        optimizer = torch.optim.Adam([y], lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            energy(x, y).backward()
            optimizer.step()
        return y.detach().square().sum()

    assert relative_error(y.square().sum(), outcome(start.detach())) < 1e-12
    assert relative_error(actual, central_difference(outcome, start.detach())) < 1e-6


def test_c_bare_tensors_need_params(higher):
    y = torch.zeros(2, requires_grad=True)
    inner_opt = higher.get_diff_optim(torch.optim.SGD([y], lr=0.1), [y])
    with pytest.raises(ValueError, match="params"):
        inner_opt.step(energy(torch.ones(2), y))


# grad_callback


def clipped(grads, limit):
    norm = torch.sqrt(sum(g.square().sum() for g in grads if g is not None))
    scale = limit / torch.clamp(norm, min=limit)
    return [None if g is None else g * scale for g in grads]


def partly_frozen():
    net = Net()
    net.first.bias.requires_grad_(False)
    return net


@pytest.mark.parametrize("moment", ["construction", "step"])
def test_c_grad_callback_that_clips(higher, moment):
    net, loss, limit = partly_frozen(), regression(), 0.2
    seen = []

    def callback(grads):
        seen.append(grads)
        return clipped(grads, limit)

    fnet = higher.monkeypatch(net, copy_initial_weights=False)
    keyword = {"grad_callback": callback}
    at_construction, at_step = (keyword, {}) if moment == "construction" else ({}, keyword)
    diffopt = higher.get_diff_optim(
        torch.optim.SGD(net.parameters(), lr=0.3), net.parameters(), fmodel=fnet, **at_construction
    )
    for _ in range(3):
        diffopt.step(loss(fnet), **at_step)
    assert len(seen) == 3
    for grads in seen:
        assert isinstance(grads, tuple)
        assert [g is None for g in grads] == [False, True, False, False]

    assert torch.equal(fnet.first.bias, net.first.bias)
    params, names = list(net.parameters()), list(dict(net.named_parameters()))
    for _ in range(3):
        weights = dict(zip(names, params, strict=True))
        value = loss(lambda x, weights=weights: functional_call(net, weights, (x,)))
        kept = [p for p in params if p.requires_grad]
        grads = clipped(torch.autograd.grad(value, kept, create_graph=True), limit)
        updates = iter(p - 0.3 * g for p, g in zip(kept, grads, strict=True))
        params = [next(updates) if p.requires_grad else p for p in params]
    assert relative_error(flat(fnet.parameters()), flat(params)) < 1e-12
    targets = [p for p in net.parameters() if p.requires_grad]
    actual = torch.autograd.grad(flat(fnet.parameters()).square().sum(), targets)
    expected = torch.autograd.grad(flat(params).square().sum(), targets)
    assert relative_error(flat(actual), flat(expected)) < 1e-12


def test_c_grad_callback_sees_partial_derivatives_of_all_parameters(higher):
    """Also of those that the optimizer does not move, and not along the path through the others."""
    net, loss, seen = Net(), regression(), []

    def halved(grads):
        seen.append(grads)
        return [g / 2 for g in grads]

    with higher.innerloop_ctx(net, sgd(net.last.parameters())) as (fnet, diffopt):
        for _ in range(3):
            weights = [p.detach().requires_grad_() for p in fnet.parameters()]
            named = dict(zip(dict(net.named_parameters()), weights, strict=True))
            value = loss(lambda x, named=named: functional_call(net, named, (x,)))
            expected = torch.autograd.grad(value, weights)
            diffopt.step(loss(fnet), grad_callback=halved)
            assert relative_error(flat(seen[-1]), flat(expected)) < 1e-12
            assert relative_error(fnet.last.weight, weights[2] - 0.05 * expected[2]) < 1e-12
    assert torch.equal(fnet.first.weight, net.first.weight)


def test_c_grad_callback_of_the_step_wins(higher):
    net, loss = Net(), regression()
    fnet = higher.monkeypatch(net)
    diffopt = higher.get_diff_optim(
        sgd(net.parameters()),
        net.parameters(),
        fmodel=fnet,
        grad_callback=lambda grads: [torch.ones_like(g) for g in grads],
    )
    diffopt.step(loss(fnet), grad_callback=lambda grads: [torch.zeros_like(g) for g in grads])
    assert torch.equal(flat(fnet.parameters()), flat(net.parameters()))
    diffopt.step(loss(fnet))
    expected = flat(net.parameters()) - 0.1
    assert relative_error(flat(fnet.parameters()), expected) < 1e-12


def test_c_grad_callback_that_replaces_gradients(higher):
    net, loss = partly_frozen(), regression()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    chosen = [torch.randn_like(p, requires_grad=True) for p in net.parameters()]
    with higher.innerloop_ctx(net, optimizer) as (fnet, diffopt):

        def replace(grads):
            return [None if i == 2 else g for i, g in enumerate(chosen)]

        diffopt.step(loss(fnet), grad_callback=replace)
    expected = [p - 0.5 * g for p, g in zip(net.parameters(), chosen, strict=True)]
    assert torch.equal(fnet.first.weight, expected[0])
    assert torch.equal(fnet.last.weight, net.last.weight)
    assert torch.equal(fnet.last.bias, expected[3])
    gradient = torch.autograd.grad(fnet.last.bias.sum(), chosen[3])[0]
    assert torch.equal(gradient, torch.full((1,), -0.5))


# parameters(time=k)


def test_c_parameters_of_any_time(higher):
    net, loss = Net(), regression()
    with higher.innerloop_ctx(net, sgd(net.parameters())) as (fnet, diffopt):
        for _ in range(3):
            diffopt.step(loss(fnet))
    for k in range(4):
        expected = trained(net, sgd, loss, k)[1]
        assert relative_error(flat(fnet.parameters(time=k)), expected) < 1e-12
    assert all(a is b for a, b in zip(fnet.init_fast_params, fnet.parameters(time=0), strict=True))
    assert all(a is b for a, b in zip(fnet.fast_params, fnet.parameters(), strict=True))
    assert all(a is b for a, b in zip(fnet.fast_params, fnet.parameters(time=-1), strict=True))


def test_c_parameters_of_time_for_imaml(higher):
    net, loss, query = Net(), regression(), regression()

    def proximal(value, now, anchor):
        pairs = zip(now, anchor, strict=True)
        return value + 0.5 * sum((a - b).square().sum() for a, b in pairs)

    with higher.innerloop_ctx(net, sgd(net.parameters()), copy_initial_weights=False) as (
        fnet,
        diffopt,
    ):
        for _ in range(4):
            diffopt.step(proximal(loss(fnet), fnet.parameters(), fnet.parameters(time=0)))
        actual = torch.autograd.grad(query(fnet), list(net.parameters()))

    def outcome(start):
        plain = copy.deepcopy(net)
        set_weights(plain, start)
        anchor = [p.detach().clone() for p in plain.parameters()]
        optimizer = sgd(plain.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            proximal(loss(plain), plain.parameters(), anchor).backward()
            optimizer.step()
        return query(plain)

    start = flat(net.parameters()).detach().clone()
    assert relative_error(query(fnet), outcome(start)) < 1e-12
    assert relative_error(flat(actual), central_difference(outcome, start)) < 1e-6


# branching from a warm Adam


def test_c_branching_from_a_warm_adam(higher):
    net, loss = Net(), regression()
    warm = torch.optim.Adam(net.parameters(), lr=0.05, amsgrad=True)
    for _ in range(4):
        warm.zero_grad()
        loss(net).backward()
        warm.step()
    weights, state = copy.deepcopy(net.state_dict()), copy.deepcopy(warm.state_dict())

    def continued(branch, start=None):
        plain = copy.deepcopy(net)
        if start is not None:
            set_weights(plain, start)
        optimizer = torch.optim.Adam(plain.parameters())
        optimizer.load_state_dict(copy.deepcopy(state))
        for _ in range(3):
            optimizer.zero_grad()
            branch(plain).backward()
            optimizer.step()
        return plain

    for branch in (loss, regression()):
        with higher.innerloop_ctx(net, warm, copy_initial_weights=False) as (fnet, diffopt):
            for _ in range(3):
                diffopt.step(branch(fnet))
            actual = torch.autograd.grad(branch(fnet), list(net.parameters()))
        expected = flat(continued(branch).parameters())
        assert relative_error(flat(fnet.parameters()), expected) < 1e-12
        differences = central_difference(
            lambda start, branch=branch: branch(continued(branch, start)),
            flat(net.parameters()).detach(),
        )
        assert relative_error(flat(actual), differences) < 1e-6

    for name, value in net.state_dict().items():
        assert torch.equal(value, weights[name])
    for index, entry in warm.state_dict()["state"].items():
        assert all(torch.equal(entry[name], state["state"][index][name]) for name in entry)


# register_optim with _update(grouped_grads)


def test_c_register_optim_with_update(higher):
    from higher.optim import DifferentiableOptimizer

    class Squashed(torch.optim.Optimizer):
        """p <- p - lr tanh(m), m <- decay m + g"""

        def __init__(self, params, lr, decay):
            super().__init__(params, {"lr": lr, "decay": decay})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    mean = self.state[p].get("mean", torch.zeros_like(p))
                    self.state[p]["mean"] = mean = group["decay"] * mean + p.grad
                    p.sub_(group["lr"] * torch.tanh(mean))

    class DifferentiableSquashed(DifferentiableOptimizer):
        def _update(self, grouped_grads, **kwargs):
            zipped = zip(self.param_groups, grouped_grads, strict=True)
            for group_idx, (group, grads) in enumerate(zipped):
                for p_idx, (p, g) in enumerate(zip(group["params"], grads, strict=True)):
                    if g is None:
                        continue
                    state = self.state[group_idx][p_idx]
                    if len(state) == 0:
                        state["mean"] = torch.zeros_like(p.data)
                    state["mean"] = mean = group["decay"] * state["mean"] + g
                    group["params"][p_idx] = p - group["lr"] * torch.tanh(mean)

    higher.register_optim(Squashed, DifferentiableSquashed)
    net, loss = Net(), regression()
    net.last.bias.requires_grad_(False)

    def make(params):
        first, *rest = list(params)
        return Squashed([{"params": [first], "lr": 0.2}, {"params": rest}], 0.1, 0.5)

    lr = torch.tensor([0.2, 0.1], requires_grad=True)
    with higher.innerloop_ctx(net, make(net.parameters()), override={"lr": lr}) as (fnet, diffopt):
        assert isinstance(diffopt, DifferentiableSquashed)
        for _ in range(3):
            diffopt.step(loss(fnet))
        actual = torch.autograd.grad(loss(fnet), lr)[0]
    assert relative_error(flat(fnet.parameters()), trained(net, make, loss, 3)[1]) < 1e-12

    def outcome(rates):
        def with_rates(params):
            optimizer = make(params)
            for group, rate in zip(optimizer.param_groups, rates.tolist(), strict=True):
                group["lr"] = rate
            return optimizer

        return trained(net, with_rates, loss, 3)[0]

    assert relative_error(actual, central_difference(outcome, lr.detach())) < 1e-6
    assert torch.equal(fnet.last.bias, net.last.bias)


# writing diffopt.param_groups[i][k], reading diffopt.state[g][i]


def test_c_writing_param_groups(higher):
    net, loss = Net(), regression()
    rates = torch.tensor([[0.1, 0.2], [0.3, 0.05]], requires_grad=True)
    optimizer = two_groups(net, lr=9.0)
    with higher.innerloop_ctx(net, optimizer) as (fnet, diffopt):
        for k in range(2):
            for i in range(2):
                diffopt.param_groups[i]["lr"] = rates[k, i]
            diffopt.step(loss(fnet))
        value = loss(fnet)
    actual = torch.autograd.grad(value, rates)[0]
    by_hand = rates_by_hand(net, loss, rates, 2)
    assert relative_error(actual, torch.autograd.grad(by_hand, rates)[0]) < 1e-12
    assert [g["lr"] for g in optimizer.param_groups] == [9.0, 9.0]


def test_c_reading_state(higher):
    net, loss = Net(), regression()
    optimizer = torch.optim.Adam(
        [{"params": net.first.parameters()}, {"params": net.last.parameters()}], lr=0.05
    )
    with higher.innerloop_ctx(net, optimizer) as (fnet, diffopt):
        for _ in range(3):
            diffopt.step(loss(fnet))
    for _ in range(3):
        optimizer.zero_grad()
        loss(net).backward()
        optimizer.step()
    for g, layer in enumerate((net.first, net.last)):
        for i, p in enumerate(layer.parameters()):
            state, expected = diffopt.state[g][i], optimizer.state[p]
            assert relative_error(state["exp_avg"], expected["exp_avg"]) < 1e-12
            assert relative_error(state["exp_avg_sq"], expected["exp_avg_sq"]) < 1e-12
            assert state["exp_avg"].requires_grad
            assert int(state["step"]) == 3


def test_c_writing_state(higher):
    net, loss = Net(), regression()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with higher.innerloop_ctx(net, optimizer) as (fnet, diffopt):
        diffopt.step(loss(fnet))
        for i in range(4):
            buffer = diffopt.state[0][i]["momentum_buffer"]
            diffopt.state[0][i]["momentum_buffer"] = torch.zeros_like(buffer)
        diffopt.step(loss(fnet))
    # With its momentum erased, the second step is one of plain SGD.
    assert relative_error(flat(fnet.parameters()), trained(net, sgd, loss, 2)[1]) < 1e-12


# hooks on the patched model


def test_c_hooks_on_the_patched_model(higher):
    net, x = Net(), torch.randn(4, 2)
    seen = []
    with higher.innerloop_ctx(net, sgd(net.parameters())) as (fnet, _):
        handles = [
            fnet.first.register_forward_hook(lambda module, args, output: seen.append(output)),
            fnet.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
            fnet.register_forward_hook(lambda module, args, output: output + 1),
        ]
        output = fnet(x)
        expected = net(2 * x) + 1
        assert relative_error(output, expected) < 1e-12
        assert len(seen) == 1
        assert relative_error(seen[0], net.first(2 * x)) < 1e-12
        assert len(seen) == 1, "the original has no hooks"
        for handle in handles:
            handle.remove()
        assert relative_error(fnet(x), net(x)) < 1e-12
        assert len(seen) == 1


# Hugging Face models with keyword arguments and .loss


class Float64(TorchFunctionMode):
    """These models go up to float32 in softmax, norms and loss; finite differences need float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def up(value):
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(up, args), **{name: up(v) for name, v in (kwargs or {}).items()})


def bert(transformers, attention):
    # No token 0: it is BERT's padding, whose embedding gets no gradient by intention.
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=4, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=5, max_position_embeddings=6, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation=attention,
    )  # fmt: skip
    batch = {
        "input_ids": torch.randint(1, 11, (2, 5)),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        "labels": torch.tensor([0, 2]),
    }
    return transformers.BertForSequenceClassification(config), batch


def gpt2(transformers, attention):
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=4, n_layer=1, n_head=2, n_positions=6, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        attn_implementation=attention,
    )  # fmt: skip
    tokens = torch.randint(1, 11, (2, 5))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def t5(transformers, attention):
    config = transformers.T5Config(
        vocab_size=11, d_model=4, d_kv=2, d_ff=5, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    batch = {"input_ids": torch.randint(1, 11, (2, 5)), "labels": torch.randint(1, 11, (2, 4))}
    return transformers.T5ForConditionalGeneration(config), batch


def vit(transformers, attention):
    config = transformers.ViTConfig(
        hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=5,
        image_size=4, patch_size=2, num_channels=1, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation=attention,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(2, 1, 4, 4), "labels": torch.tensor([0, 2])}
    return transformers.ViTForImageClassification(config), batch


@pytest.mark.parametrize("make", [bert, gpt2, t5, vit])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_c_hugging_face_models(higher, make, attention, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    model, batch = make(transformers, attention)
    model = model.double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))

    def loss(model):
        with Float64():
            return model(**batch).loss

    with higher.innerloop_ctx(model, sgd(model.parameters()), copy_initial_weights=False) as (
        fmodel,
        diffopt,
    ):
        for _ in range(2):
            diffopt.step(loss(fmodel))
        value = loss(fmodel)
        first_order = torch.autograd.grad(
            value, fmodel.fast_params, retain_graph=True, materialize_grads=True
        )
        grads = torch.autograd.grad(value, list(model.parameters()), materialize_grads=True)
    expected_value, expected_weights = trained(model, sgd, loss, 2)
    assert relative_error(value, expected_value) < 1e-12
    assert relative_error(flat(fmodel.parameters()), expected_weights) < 1e-12

    start = flat(model.parameters()).detach().clone()
    direction = torch.randn_like(start)
    direction /= direction.norm() / math.sqrt(direction.numel())
    slope = central_difference(
        lambda t: trained(model, sgd, loss, 2, start + t * direction)[0], torch.tensor(0.0)
    )
    assert relative_error(flat(grads) @ direction, slope) < 1e-6
    assert relative_error(flat(first_order) @ direction, slope) > 1e-3, "second order is visible"


# a loss that is NaN


def test_c_a_loss_that_is_nan_steps_on(higher):
    net, loss = Net(), regression()
    with higher.innerloop_ctx(net, sgd(net.parameters())) as (fnet, diffopt):
        diffopt.step(loss(fnet) * torch.nan)
        assert all(p.isnan().all() for p in fnet.parameters())
        diffopt.step(loss(fnet))
    assert len(fnet._fast_params) == 3


# parameters that the inner optimizer does not move


@pytest.mark.parametrize("track", [True, False])
def test_c_unmoved_parameters_get_their_grad_on_the_patched_model(higher, track):
    net, loss, query = Net(), regression(), regression()
    with higher.innerloop_ctx(net, sgd(net.last.parameters()), track_higher_grads=track) as (
        fnet,
        diffopt,
    ):
        body = list(fnet.first.parameters())
        for _ in range(3):
            diffopt.step(loss(fnet))
        query(fnet).backward()
        unmoved = list(fnet.first.parameters())
    assert all(p.grad is not None for p in unmoved)
    assert all(p is q for p, q in zip(unmoved, body, strict=True))

    start = [p.detach().clone().requires_grad_() for p in net.parameters()]
    head = start[2:]
    for _ in range(3):
        named = dict(zip(dict(net.named_parameters()), [*start[:2], *head], strict=True))
        value = loss(lambda x, named=named: functional_call(net, named, (x,)))
        grads = torch.autograd.grad(value, head, create_graph=track)
        head = [p - 0.1 * g for p, g in zip(head, grads, strict=True)]
        if not track:
            head = [p.detach().requires_grad_() for p in head]
    named = dict(zip(dict(net.named_parameters()), [*start[:2], *head], strict=True))
    value = query(lambda x: functional_call(net, named, (x,)))
    expected = torch.autograd.grad(value, start[:2])
    assert relative_error(flat(p.grad for p in unmoved), flat(expected)) < 1e-12


# test mode from the model's own weights


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(2, 1)
        self.unused = nn.Linear(2, 1)
        self.outside = nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x) + self.outside(x)


def test_c_test_mode_leaves_no_parameter_connected_to_the_model(higher):
    """Neither those that the loss does not use, nor those outside the optimizer."""
    net, x = TwoHeads(), torch.randn(4, 2)
    inner_opt = sgd([*net.used.parameters(), *net.unused.parameters()])
    with higher.innerloop_ctx(
        net, inner_opt, copy_initial_weights=False, track_higher_grads=False
    ) as (fnet, diffopt):
        for _ in range(2):
            diffopt.step(fnet(x).square().mean())
            assert all(p.is_leaf and p.requires_grad for p in fnet.parameters())
            assert all(p.is_leaf for p in diffopt.param_groups[0]["params"])
        (fnet(x).square().mean() + fnet.unused(x).square().mean()).backward()
    assert all(p.grad is None for p in net.parameters())
    assert all(p.grad is not None for p in fnet.parameters())


# the state, detached in place


@pytest.mark.parametrize("sizes", ["one_parameter", "several"])
def test_c_momentum_is_detached_in_place_after_every_step(higher, sizes):
    net = nn.Linear(2, 1, bias=sizes == "several")
    x = torch.randn(4, 2)
    inner_opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with higher.innerloop_ctx(net, inner_opt, copy_initial_weights=False) as (fnet, diffopt):
        for _ in range(3):
            diffopt.step(fnet(x).square().mean())
            for i in range(len(fnet.fast_params)):
                diffopt.state[0][i]["momentum_buffer"].detach_()
        actual = torch.autograd.grad(fnet(x).square().mean(), list(net.parameters()))

    params = dict(net.named_parameters())
    buffers = {name: 0.0 for name in params}
    for _ in range(3):
        value = functional_call(net, params, (x,)).square().mean()
        grads = torch.autograd.grad(value, list(params.values()), create_graph=True)
        buffers = {n: 0.9 * buffers[n] + g for n, g in zip(params, grads, strict=True)}
        params = {n: p - 0.1 * buffers[n] for n, p in params.items()}
        buffers = {n: b.detach() for n, b in buffers.items()}
    value = functional_call(net, params, (x,)).square().mean()
    expected = torch.autograd.grad(value, list(net.parameters()))
    assert relative_error(flat(actual), flat(expected)) < 1e-12


# model editors: monkeypatch(model, in_place=True)


def test_c_patching_in_place_edits_the_models_own_weights(higher):
    net, x = Net(), torch.randn(4, 2)
    before = [p.detach().clone() for p in net.parameters()]
    edited = higher.monkeypatch(net, in_place=True)
    assert all(p is q for p, q in zip(edited.parameters(), net.parameters(), strict=True))
    shift = torch.zeros(3, 2, requires_grad=True)
    edited.update_params(
        [p + shift if name == "first.weight" else p for name, p in edited.named_parameters()]
    )
    edited(x).square().mean().backward()
    expected = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
    assert relative_error(flat(p.grad for p in net.parameters()), flat(expected)) < 1e-12
    assert relative_error(shift.grad, expected[0]) < 1e-12
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


# settings that come back in their own type


def test_c_learned_settings_go_back_in_their_own_type(higher):
    net = Net()
    inner_opt = torch.optim.SGD(net.parameters(), lr=1, momentum=0, weight_decay=0.5)
    adam = torch.optim.Adam([{"params": [p]} for p in net.parameters()], betas=(0.9, 0.99))
    rprop = torch.optim.Rprop(net.parameters(), etas=[0.5, 1.2])
    for opt in (inner_opt, adam, rprop):
        before = [
            {key: value for key, value in group.items() if key != "params"}
            for group in opt.param_groups
        ]
        learned = higher.optim.get_trainable_opt_params(opt)
        higher.optim.apply_trainable_opt_params(opt, learned)
        for group, kept in zip(opt.param_groups, before, strict=True):
            for key, value in kept.items():
                assert group[key] == value
                assert type(group[key]) is type(value), key
                if isinstance(value, list | tuple):
                    assert [type(v) for v in group[key]] == [type(v) for v in value]


@pytest.mark.parametrize("value", [True, torch.tensor(1.0)])
def test_c_an_option_written_back_stays_a_boolean(higher, value):
    inner_opt = torch.optim.SGD(Net().parameters(), lr=0.1, nesterov=False)
    higher.optim.apply_trainable_opt_params(inner_opt, {"nesterov": [value], "lr": [1]})
    assert inner_opt.param_groups[0]["nesterov"] is True
    assert type(inner_opt.param_groups[0]["lr"]) is float


# an optimizer prepared by Accelerate


class Accelerated(torch.optim.Optimizer):
    """What Accelerate's wrapper is to us: an optimizer of its module with another one inside."""

    __module__ = "accelerate.optimizer"

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def step(self, closure=None):
        return self.optimizer.step(closure)


def by_accelerate(optimizer):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)


@pytest.mark.parametrize("wrap", [Accelerated, by_accelerate])
def test_c_an_optimizer_of_accelerate(higher, wrap):
    net, loss, query = Net(), regression(), regression()
    plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    wrapped = wrap(plain)
    assert type(wrapped) is not torch.optim.SGD
    values = []
    for inner_opt in (plain, wrapped):
        with higher.innerloop_ctx(net, inner_opt, copy_initial_weights=False) as (fnet, diffopt):
            for _ in range(3):
                diffopt.step(loss(fnet))
            values.append(flat(torch.autograd.grad(query(fnet), list(net.parameters()))))
    assert torch.equal(*values)
    learned = higher.optim.get_trainable_opt_params(wrapped)
    learned["lr"] = [torch.tensor(0.3)]
    higher.optim.apply_trainable_opt_params(wrapped, learned)
    assert plain.param_groups[0]["lr"] == pytest.approx(0.3)
    diffopt.write_to(wrapped)
    assert plain.state[net.first.weight]["momentum_buffer"].shape == (3, 2)
