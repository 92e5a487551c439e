"""The eager interface beyond what `higher` has: switches, precision, several optimizers, memory."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.func import functional_call

import innerloop as il
from problems import (
    Net,
    assert_exact_unroll,
    central_difference,
    flat,
    regression,
    relative_error,
    set_weights,
    sgd,
    trained,
    unrolled,
)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params):
    return torch.optim.Adam(params, lr=0.05)


OPTIMIZERS = [sgd, momentum, adam]


def reversed_gradient(value, model):
    return flat(torch.autograd.grad(value, list(model.parameters())))


# first_order= ------------------------------------------------------------------------------------


def test_first_order_equals_detached_gradients():
    """With decay, momentum and a learned rate: all paths but those through inner gradients."""
    model, loss = Net(), regression()
    rate = torch.tensor(0.1, requires_grad=True)
    decay = torch.tensor(0.2, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.2)
    override = {"lr": [rate], "weight_decay": [decay]}
    inputs = [*model.parameters(), rate, decay]

    with il.innerloop_ctx(
        model, optimizer, copy_initial_weights=False, override=override, first_order=True
    ) as (fmodel, diffopt):
        for _ in range(3):
            diffopt.step(loss(fmodel))
        grads = torch.autograd.grad(loss(fmodel), inputs)

    weights, buffers = dict(model.named_parameters()), {}
    for _ in range(3):
        value = loss(lambda x, weights=weights: functional_call(model, weights, (x,)))
        inner = torch.autograd.grad(value, list(weights.values()), retain_graph=True)
        for (name, w), g in zip(list(weights.items()), inner, strict=True):
            g = g.detach() + decay * w
            buffers[name] = 0.9 * buffers[name] + g if name in buffers else g
            weights[name] = w - rate * buffers[name]
    expected = torch.autograd.grad(loss(lambda x: functional_call(model, weights, (x,))), inputs)
    assert relative_error(flat(grads), flat(expected)) < 1e-12
    exact = torch.autograd.grad(unrolled_with(model, loss, optimizer, override), inputs)
    assert relative_error(flat(grads), flat(exact)) > 1e-3


def unrolled_with(model, loss, optimizer, override):
    with il.innerloop_ctx(model, optimizer, copy_initial_weights=False, override=override) as (
        fmodel,
        diffopt,
    ):
        for _ in range(3):
            diffopt.step(loss(fmodel))
        return loss(fmodel)


def test_first_order_by_the_other_two_ways():
    model, loss = Net(), regression()
    fmodel = il.monkeypatch(model, copy_initial_weights=False)
    diffopt = il.get_diff_optim(
        sgd(model.parameters()), model.parameters(), fmodel=fmodel, first_order=True
    )
    created = il.create_diff_optim(
        torch.optim.SGD, {"lr": 0.1}, params=list(model.parameters()), first_order=True
    )
    weights = [p.clone() for p in model.parameters()]
    for _ in range(2):
        diffopt.step(loss(fmodel))
        named = dict(zip(dict(model.named_parameters()), weights, strict=True))
        value = loss(lambda x, named=named: functional_call(model, named, (x,)))
        weights = created.step(value, params=weights)
    expected, expected_weights = unrolled(model, sgd, loss, 2, first_order=True)
    assert relative_error(flat(weights), expected_weights) < 1e-12
    assert relative_error(flat(fmodel.parameters()), expected_weights) < 1e-12
    grads = reversed_gradient(loss(fmodel), model)
    assert relative_error(grads, reversed_gradient(expected, model)) < 1e-12


# retain_graph= -----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"track_higher_grads": False}, {"first_order": True}])
def test_retain_graph_keeps_the_graph_of_the_loss(settings):
    model, loss = Net(), regression()
    fmodel = il.monkeypatch(model, track_higher_grads=settings.get("track_higher_grads", True))
    diffopt = il.get_diff_optim(
        sgd(model.parameters()), model.parameters(), fmodel=fmodel, **settings
    )
    weights = fmodel.fast_params
    value = loss(fmodel)
    diffopt.step(value, retain_graph=True)
    expected = torch.autograd.grad(loss(model), list(model.parameters()))
    assert relative_error(flat(torch.autograd.grad(value, weights)), flat(expected)) < 1e-12
    value = loss(fmodel)
    diffopt.step(value)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        value.backward()


# Two optimizers in turn. ------------------------------------------------------------------------


def two_optimizers(model):
    return momentum(model.first.parameters()), adam(model.last.parameters())


def both_diffopts(model, fmodel, **settings):
    return [
        il.get_diff_optim(optimizer, model.parameters(), fmodel=fmodel, **settings)
        for optimizer in two_optimizers(model)
    ]


def sharing(model, loss, steps, start):
    """Both optimizers step by the gradient of one loss."""
    plain = copy.deepcopy(model)
    set_weights(plain, start)
    optimizers = two_optimizers(plain)
    for _ in range(steps):
        plain.zero_grad()
        loss(plain).backward()
        for optimizer in optimizers:
            optimizer.step()
    return plain


@pytest.mark.parametrize(
    "settings", [{}, {"first_order": True}, {"track_higher_grads": False}], ids=str
)
def test_two_optimizers_share_one_loss(settings):
    model, loss = Net(), regression()
    track = settings.get("track_higher_grads", True)
    fmodel = il.monkeypatch(model, copy_initial_weights=not track, track_higher_grads=track)
    first, last = both_diffopts(model, fmodel, **settings)
    for _ in range(3):
        value = loss(fmodel)
        first.step(value, retain_graph=True)
        last.step(value)
    start = flat(model.parameters()).detach()
    expected = flat(sharing(model, loss, 3, start).parameters())
    assert relative_error(flat(fmodel.parameters()), expected) < 1e-12
    if not track:
        assert all(p.is_leaf and p.requires_grad for p in fmodel.parameters())
        return
    grads = reversed_gradient(loss(fmodel), model)
    differences = central_difference(lambda w: loss(sharing(model, loss, 3, w)), start)
    assert (relative_error(grads, differences) < 1e-6) != settings.get("first_order", False)


def alternating_training(model, losses, rounds, start):
    plain = copy.deepcopy(model)
    set_weights(plain, start)
    optimizers = two_optimizers(plain)
    for _ in range(rounds):
        for optimizer, loss in zip(optimizers, losses, strict=True):
            plain.zero_grad()
            loss(plain).backward()
            optimizer.step()
    return plain


@pytest.mark.parametrize("rounds", [1, 3])
def test_two_optimizers_in_turn_each_with_a_new_loss(rounds):
    """Each inner gradient is the partial derivative by the weights as they are then."""
    model, losses = Net(), (regression(), regression())
    fmodel = il.monkeypatch(model, copy_initial_weights=False)
    diffopts = both_diffopts(model, fmodel)
    for _ in range(rounds):
        for diffopt, loss in zip(diffopts, losses, strict=True):
            diffopt.step(loss(fmodel))
    start = flat(model.parameters()).detach()
    expected = alternating_training(model, losses, rounds, start)
    assert relative_error(flat(fmodel.parameters()), flat(expected.parameters())) < 1e-12
    differences = central_difference(
        lambda w: losses[0](alternating_training(model, losses, rounds, w)), start
    )
    grads = reversed_gradient(losses[0](fmodel), model)
    assert relative_error(grads, differences) < 1e-6


def test_a_game_of_two_models():
    """Each player has its own patched model and optimizer; both losses see both, and both move."""
    players = Net(), Net()
    x = torch.randn(4, 2)

    def losses(one, other):
        return (one(x) * other(x)).mean() + one(x).square().mean(), (
            other(x).square() - one(x) * other(x)
        ).mean()

    def play(start, rounds=2):
        plain = [copy.deepcopy(player) for player in players]
        both = nn.ModuleList(plain)
        set_weights(both, start)
        optimizers = [momentum(p.parameters()) for p in plain]
        for _ in range(rounds):
            values = losses(*plain)
            for player, value in zip(plain, values, strict=True):
                grads = torch.autograd.grad(value, list(player.parameters()), retain_graph=True)
                for p, grad in zip(player.parameters(), grads, strict=True):
                    p.grad = grad
            for optimizer in optimizers:
                optimizer.step()
        return both, losses(*plain)[0]

    fmodels = [il.monkeypatch(player, copy_initial_weights=False) for player in players]
    diffopts = [
        il.get_diff_optim(momentum(p.parameters()), p.parameters(), fmodel=f)
        for p, f in zip(players, fmodels, strict=True)
    ]
    for _ in range(2):
        for diffopt, value in zip(diffopts, losses(*fmodels), strict=True):
            diffopt.step(value)
    weights = [p for player in players for p in player.parameters()]
    start = flat(weights).detach()
    actual = flat(p for f in fmodels for p in f.parameters())
    assert relative_error(actual, flat(play(start)[0].parameters())) < 1e-12
    grads = flat(torch.autograd.grad(losses(*fmodels)[0], weights))
    assert relative_error(grads, central_difference(lambda w: play(w)[1], start)) < 1e-6


# Parameters that some steps do not use. ---------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.heads = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.body(x)))


class InTurn:
    """A loss that goes through the first head, then the second, then both."""

    def __init__(self, x, y):
        self.x, self.y, self.calls = x, y, 0

    def __call__(self, model):
        heads = ((0,), (1,), (0, 1))[self.calls % 3]
        self.calls += 1
        return sum((model(self.x, head) - self.y).square().mean() for head in heads)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [2, 5])
def test_a_parameter_that_some_steps_do_not_use(make_optimizer, steps):
    """``steps`` and one more call are a multiple of three, so every run sees the same losses."""
    assert_exact_unroll(
        TwoHeads(), InTurn(torch.randn(4, 2), torch.randn(4, 1)), make_optimizer, steps
    )


# Mixed precision. -------------------------------------------------------------------------------


def conv_net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    ).float()


@pytest.mark.parametrize(
    "make_optimizer", [*OPTIMIZERS, lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True)]
)
@pytest.mark.parametrize("whole_loop", [True, False])
def test_autocast_keeps_the_weights_in_full_precision(make_optimizer, whole_loop):
    model, x, y = conv_net(), torch.randn(6, 1, 4, 4).float(), torch.randint(2, (6,))
    plain = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    with il.innerloop_ctx(model, optimizer, copy_initial_weights=False) as (fmodel, diffopt):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                output = fmodel(x)
                assert output.dtype == torch.bfloat16
                value = nn.functional.cross_entropy(output, y)
                if whole_loop:
                    diffopt.step(value)
            if not whole_loop:
                diffopt.step(value)
            assert {p.dtype for p in fmodel.parameters()} == {torch.float32}
        with torch.autocast("cpu", torch.bfloat16):
            value = nn.functional.cross_entropy(fmodel(x), y)
        value.backward()
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )
    for slots in diffopt.state[0].values():
        for slot in slots.values():
            assert not isinstance(slot, torch.Tensor) or slot.dtype != torch.bfloat16

    reference = make_optimizer(plain.parameters())
    for _ in range(3):
        reference.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = nn.functional.cross_entropy(plain(x), y)
        value.backward()
        reference.step()
    assert relative_error(flat(fmodel.parameters()), flat(plain.parameters())) < 1e-5


def matrices_only(model):
    return [p for p in model.parameters() if p.dim() == 2]


def test_muon_under_autocast():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).float()
    plain, x = copy.deepcopy(model), torch.randn(6, 4).float()
    optimizer = torch.optim.Muon(matrices_only(model), lr=0.05)
    with (
        torch.autocast("cpu", torch.bfloat16),
        il.innerloop_ctx(model, optimizer, copy_initial_weights=False) as (fmodel, diffopt),
    ):
        for _ in range(2):
            diffopt.step(fmodel(x).square().mean())
        value = fmodel(x).square().mean()
    assert {p.dtype for p in fmodel.parameters()} == {torch.float32}
    grads = torch.autograd.grad(value, list(model.parameters()))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)
    assert all(g.abs().max() > 0 for g in grads)

    reference = torch.optim.Muon(matrices_only(plain), lr=0.05)
    for _ in range(2):
        plain.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = plain(x).square().mean()
        value.backward()
        reference.step()
    # torch runs Muon's Newton-Schulz iteration in bfloat16.
    assert relative_error(flat(fmodel.parameters()), flat(plain.parameters())) < 1e-2


def test_a_scaler_for_the_meta_loss():
    loss = regression()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model = Net()
    twin = copy.deepcopy(model)
    rate, twin_rate = (torch.tensor(0.1, requires_grad=True) for _ in range(2))
    for net, lr, scaled in ((model, rate, True), (twin, twin_rate, False)):
        meta = torch.optim.Adam([*net.parameters(), lr], lr=0.01)
        for _ in range(2):
            meta.zero_grad()
            with il.innerloop_ctx(
                net, sgd(net.parameters()), copy_initial_weights=False, override={"lr": [lr]}
            ) as (fmodel, diffopt):
                for _ in range(2):
                    diffopt.step(loss(fmodel))
                value = loss(fmodel)
            if scaled:
                scaler.scale(value).backward()
                assert relative_error(lr.grad / scaler.get_scale(), lr.grad * 2.0**-10) < 1e-12
                scaler.step(meta)
                scaler.update()
            else:
                value.backward()
                meta.step()
    assert relative_error(flat(model.parameters()), flat(twin.parameters())) < 1e-12
    assert relative_error(rate.detach(), twin_rate.detach()) < 1e-12


# State. -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize("track", [True, False])
def test_state_goes_from_one_loop_to_the_next(make_optimizer, track):
    model, loss = Net(), regression()
    optimizer = make_optimizer(model.parameters())
    settings = {"track_higher_grads": track}
    with il.innerloop_ctx(model, optimizer, **settings) as (fmodel, diffopt):
        for _ in range(2):
            diffopt.step(loss(fmodel))
    weights = [w.detach().requires_grad_() for w in fmodel.parameters()]
    with il.innerloop_ctx(model, optimizer, **settings) as (again, other):
        other.load_state_dict(diffopt.state_dict())
        again.update_params(weights)
        for _ in range(2):
            other.step(loss(again))
    expected = trained(model, make_optimizer, loss, 4)[1]
    assert relative_error(flat(again.parameters()), expected) < 1e-12
    assert optimizer.state_dict()["state"] == {}


def test_a_loaded_state_is_a_copy():
    model, loss = Net(), regression()
    with il.innerloop_ctx(model, momentum(model.parameters())) as (fmodel, diffopt):
        diffopt.step(loss(fmodel))
        saved = diffopt.state_dict()
        kept = copy.deepcopy(saved)
        diffopt.load_state_dict(saved)
        diffopt.step(loss(fmodel))
    assert not any(t.requires_grad for s in saved["state"].values() for t in s.values())
    for index, slots in kept["state"].items():
        for name, value in slots.items():
            assert torch.equal(saved["state"][index][name], value)
    later = diffopt.state_dict()["state"][0]["momentum_buffer"]
    assert not torch.equal(later, kept["state"][0]["momentum_buffer"])


def test_loading_settings_replaces_learned_ones():
    model, loss = Net(), regression()
    rate = torch.tensor(0.3, requires_grad=True)
    with il.innerloop_ctx(model, momentum(model.parameters()), override={"lr": [rate]}) as (
        fmodel,
        diffopt,
    ):
        diffopt.load_state_dict(momentum(model.parameters()).state_dict())
        diffopt.step(loss(fmodel))
    assert diffopt.param_groups[0]["lr"] == 0.1
    expected = trained(model, momentum, loss, 1)[1]
    assert relative_error(flat(fmodel.parameters()), expected) < 1e-12


@pytest.mark.parametrize("by", ["its present weights", "those of the model"])
def test_an_added_group(by):
    model, loss = Net(), regression()
    fmodel = il.monkeypatch(model, copy_initial_weights=False)
    diffopt = il.get_diff_optim(
        momentum(model.first.parameters()), model.parameters(), fmodel=fmodel
    )
    diffopt.step(loss(fmodel))
    source = fmodel if by == "its present weights" else model
    diffopt.add_param_group({"params": source.last.parameters(), "lr": 0.2})
    diffopt.step(loss(fmodel))

    def plain(start):
        net = copy.deepcopy(model)
        set_weights(net, start)
        optimizer = momentum(net.first.parameters())
        for _ in range(2):
            net.zero_grad()
            loss(net).backward()
            optimizer.step()
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": net.last.parameters(), "lr": 0.2})
        return net

    start = flat(model.parameters()).detach()
    assert relative_error(flat(fmodel.parameters()), flat(plain(start).parameters())) < 1e-12
    grads = reversed_gradient(loss(fmodel), model)
    assert relative_error(grads, central_difference(lambda w: loss(plain(w)), start)) < 1e-6


def test_write_to_leaves_the_differentiable_optimizer_going():
    model, loss = Net(), regression()
    optimizer = momentum(model.parameters())
    with il.innerloop_ctx(model, optimizer, copy_initial_weights=False) as (fmodel, diffopt):
        diffopt.step(loss(fmodel))
        diffopt.write_to(optimizer)
        kept = optimizer.state[model.first.weight]["momentum_buffer"].clone()
        diffopt.step(loss(fmodel))
        value = loss(fmodel)
    assert torch.equal(optimizer.state[model.first.weight]["momentum_buffer"], kept)
    expected = unrolled(model, momentum, loss, 2)[0]
    assert (
        relative_error(reversed_gradient(value, model), reversed_gradient(expected, model)) < 1e-12
    )


# Memory. ----------------------------------------------------------------------------------------


def living_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_without_tracking_nothing_accumulates(make_optimizer):
    model, loss = Net(), regression()
    with il.innerloop_ctx(model, make_optimizer(model.parameters()), track_higher_grads=False) as (
        fmodel,
        diffopt,
    ):
        counts = []
        for _ in range(3):
            for _ in range(5):
                diffopt.step(loss(fmodel))
            counts.append(living_tensors())
        assert counts[0] == counts[1] == counts[2]
        assert len(fmodel._fast_params) == 1
        assert all(p.is_leaf and p.requires_grad for p in fmodel.parameters())
        for slots in diffopt.state[0].values():
            assert not any(isinstance(t, torch.Tensor) and t.requires_grad for t in slots.values())


def test_with_tracking_everything_is_freed_at_the_end():
    model, loss = Net(), regression()

    def run():
        unrolled(model, adam, loss, 4)[0].backward()

    run()
    before = living_tensors()
    for _ in range(3):
        run()
    assert living_tensors() == before


def test_write_to_leaves_numbers_where_there_were_numbers():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=True)
    rate = torch.tensor(0.3, requires_grad=True)
    with il.innerloop_ctx(model, optimizer, override={"lr": [rate]}) as (fmodel, diffopt):
        diffopt.step(fmodel(torch.ones(1, 2)).square().sum())
    diffopt.write_to(optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()  # foreach refuses a tensor rate


def test_write_to_keeps_the_optimizers_own_tensors():
    model = nn.Linear(2, 1)
    rate = torch.tensor(0.1, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with il.innerloop_ctx(model, optimizer, override={"lr": [0.7]}) as (fmodel, diffopt):
        diffopt.step(fmodel(torch.ones(1, 2)).square().sum())
    diffopt.write_to(optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.requires_grad
    assert rate.item() == 0.7


def test_a_scheduler_on_the_differentiable_optimizer_does_not_reach_the_original():
    model = nn.Linear(2, 1)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with il.innerloop_ctx(model, optimizer) as (fmodel, diffopt):
        scheduler = torch.optim.lr_scheduler.StepLR(diffopt, 1, 0.5)
        for _ in range(3):
            diffopt.step(fmodel(torch.ones(1, 2)).square().sum())
            scheduler.step()
    assert rate.item() == 0.1
    assert float(diffopt.param_groups[0]["lr"]) == pytest.approx(0.0125)


def test_without_tracking_the_state_has_no_graph_either():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    learned = il.get_trainable_opt_params(optimizer)
    with il.innerloop_ctx(model, optimizer, override=learned, track_higher_grads=False) as (f, d):
        for _ in range(3):
            d.step(f(torch.ones(1, 2)).square().sum())
    assert all(w.is_leaf and w.requires_grad for w in f.parameters())
    assert not any(slot.requires_grad for slot in d.state[0][0].values())


def test_switching_tracking_off_drops_the_graph_of_the_state():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with il.innerloop_ctx(model, optimizer) as (fmodel, diffopt):
        diffopt.step(fmodel(torch.ones(1, 2)).square().sum())
        assert diffopt.state[0][0]["momentum_buffer"].requires_grad
        fmodel.track_higher_grads = diffopt._track_higher_grads = False
        diffopt.step(fmodel(torch.ones(1, 2)).square().sum())
        assert not diffopt.state[0][0]["momentum_buffer"].requires_grad


def test_dampening_has_no_effect_while_momentum_is_zero():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, dampening=0.5)
    learned = il.get_trainable_opt_params(optimizer)
    x = torch.randn(4, 2)
    with il.innerloop_ctx(model, optimizer, override=learned) as (fmodel, diffopt):
        for _ in range(3):
            diffopt.step(fmodel(x).square().mean())
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        for ours, theirs in zip(fmodel.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.data, rtol=1e-12, atol=0)
        loss = fmodel(x).square().mean()
    assert torch.autograd.grad(loss, learned["dampening"][0])[0] == 0


def test_loading_its_own_state_truncates_and_keeps_learned_settings():
    model, x = nn.Linear(2, 1), torch.randn(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    learned = il.get_trainable_opt_params(optimizer)
    with il.innerloop_ctx(model, optimizer, override=learned) as (fmodel, diffopt):
        for _ in range(2):
            diffopt.step(fmodel(x).square().mean())
        fmodel(x).square().mean().backward()
        learned["lr"][0].grad = None
        fmodel.update_params([p.detach().requires_grad_() for p in fmodel.parameters()])
        diffopt.load_state_dict(diffopt.state_dict())
        diffopt.step(fmodel(x).square().mean())
        fmodel(x).square().mean().backward()
    assert learned["lr"][0].grad != 0
    assert diffopt.param_groups[0]["betas"][1] is learned["betas"][0][1]


def test_step_hooks_run():
    model, seen = nn.Linear(2, 1), []
    with il.innerloop_ctx(model, torch.optim.SGD(model.parameters(), lr=0.1)) as (fmodel, diffopt):
        diffopt.register_step_pre_hook(lambda *_: seen.append("before"))
        diffopt.register_step_post_hook(lambda *_: seen.append("after"))
        diffopt.step(fmodel(torch.ones(1, 2)).square().sum())
    assert seen == ["before", "after"]


def test_a_copy_of_optimizer_and_model_goes_its_own_way():
    model, x = nn.Linear(2, 1), torch.randn(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with il.innerloop_ctx(model, optimizer) as (fmodel, diffopt):
        diffopt.step(fmodel(x).square().mean())
        other_model, other = copy.deepcopy((fmodel, diffopt))
        assert other._fmodel is other_model
        kept = [p.detach().clone() for p in other_model.parameters()]
        diffopt.step(fmodel(x).square().mean())
        assert all(map(torch.equal, kept, other_model.parameters()))
        other.step(other_model(x).square().mean())
        for ours, theirs in zip(fmodel.parameters(), other_model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)


@pytest.mark.parametrize("target", ["another kind", "other shapes", "a rate per parameter"])
def test_write_to_refuses_before_it_writes(target):
    model, other = nn.Linear(2, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rates = [[0.1, 0.2]] if target == "a rate per parameter" else [0.3]
    with il.innerloop_ctx(model, optimizer, override={"lr": rates}) as (fmodel, diffopt):
        diffopt.step(fmodel(torch.ones(1, 2)).square().sum())
    into = {
        "another kind": torch.optim.Adam(model.parameters(), lr=0.1),
        "other shapes": torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9),
        "a rate per parameter": optimizer,
    }[target]
    with pytest.raises(il.InnerLoopError, match=r"Needed: .*Why: .*Write: "):
        diffopt.write_to(into)
    assert not into.state
    assert into.param_groups[0]["lr"] == 0.1


def test_settings_keep_the_precision_of_the_weights():
    optimizer = torch.optim.SGD(nn.Linear(2, 1).double().parameters(), lr=0.1)
    il.apply_trainable_opt_params(optimizer, il.get_trainable_opt_params(optimizer))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_state_of_another_rule_is_refused():
    params = [torch.zeros(2)]
    with pytest.raises(il.InnerLoopError, match=r"rule\.init"):
        il.optim.adam().update(params, params, il.optim.sgd().init(params))
