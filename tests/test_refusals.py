"""Set-ups whose gradient would silently be another one: each is right, or refused by name."""

import dataclasses
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn, optim

import innerloop as il

STRATEGIES = [il.Tape(), il.Remat(), il.Forward()]


def squares(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def data(count=12):
    return torch.randn(count, 3), torch.randn(count, 1)


def loop(model=None, loss=squares, learn=("init",), backward=None):
    model = nn.Linear(3, 1) if model is None else model
    return il.InnerLoop(model, optim.SGD(model.parameters(), lr=0.1), loss, learn, backward)


@pytest.mark.parametrize("decay", [1e-3, 0.3])
def test_weight_decay_is_part_of_the_equation(decay):
    """SGD rests where the gradient with its penalty is zero; so does the closed form."""
    (x, y), (u, v) = data(), data()
    model = nn.Linear(3, 1, bias=False)
    optimizer = optim.SGD(model.parameters(), lr=0.2, weight_decay=decay)
    inner = il.InnerLoop(model, optimizer, squares, ("weight_decay",), il.Implicit())
    value = inner([(x, y)] * 400, (u, v))
    (found,) = torch.autograd.grad(value, inner.settings.weight_decay)
    penalty = torch.tensor(decay, requires_grad=True)
    weights = torch.linalg.solve(2 * x.T @ x / 12 + penalty * torch.eye(3), 2 * x.T @ y / 12)
    expected = (u @ weights - v).square().mean()
    (gradient,) = torch.autograd.grad(expected, penalty)
    assert torch.allclose(value, expected, rtol=1e-10)
    assert torch.allclose(found, gradient, rtol=1e-8)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.ASGD])
def test_a_decay_beside_the_gradient_is_refused_by_implicit(kind):
    model = nn.Linear(3, 1)
    optimizer = kind(model.parameters(), lr=0.1)
    inner = il.InnerLoop(model, optimizer, squares, backward=il.Implicit(proximal=1.0))
    with pytest.raises(il.RequirementError, match="decoupled weight decay"):
        inner([data()] * 3, data())


class Remembers(nn.Module):
    """Keeps a running mean of its features in a buffer, with its graph or without."""

    def __init__(self, detach):
        super().__init__()
        self.linear, self.detach = nn.Linear(3, 1), detach
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        out = self.linear(x)
        new = out.detach() if self.detach else out
        self.mean = 0.9 * self.mean + 0.1 * new.mean(0)
        return out - self.mean


@pytest.mark.parametrize("backward", STRATEGIES, ids=repr)
def test_a_graph_in_a_buffer_is_refused_and_a_number_is_not(backward):
    for detach in (True, False):
        model = Remembers(detach)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        inner = il.InnerLoop(model, optimizer, squares, backward=backward)
        if detach:
            assert inner.adapt([data()] * 3).buffers["mean"].ne(0).all()
        else:
            with pytest.raises(il.RequirementError, match="buffer 'mean'"):
                inner([data()] * 3, data())


class Teacher(nn.Module):
    """A frozen copy of the student that follows it, written to in place in the forward."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for ours, theirs in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                ours.lerp_(theirs, 0.1)
        return self.student(x) - self.teacher(x)


@pytest.mark.parametrize("backward", STRATEGIES, ids=repr)
def test_a_frozen_weight_written_to_in_the_forward_is_refused(backward):
    model = Teacher()
    inner = il.InnerLoop(
        model, optim.SGD(model.student.parameters(), lr=0.1), squares, backward=backward
    )
    with pytest.raises(il.InnerLoopError, match=r"wrote in place to the weight 'teacher\.weight'"):
        inner([data()] * 2, data())


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("backward", STRATEGIES, ids=repr)
def test_a_validation_loss_that_writes_to_a_weight_is_refused(backward, steps):
    model = Teacher()

    def loss(model, batch):
        return (model.student(batch[0]) - batch[1]).square().mean()

    sgd = optim.SGD(model.student.parameters(), lr=0.1)
    inner = il.InnerLoop(model, sgd, loss, backward=backward, val_loss=squares)
    with pytest.raises(il.InnerLoopError, match=r"wrote in place to the weight 'teacher\.weight'"):
        inner([data()] * steps, data())


@pytest.mark.parametrize("steps", [0, 1])
def test_an_embedding_that_writes_to_its_rows_is_refused_before_it_does(steps):
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 1))
    before = model[0].weight.detach().clone()
    inner = il.InnerLoop(model, optim.SGD(model.parameters(), lr=0.1), squares)
    batch = torch.arange(5), torch.randn(5, 1)
    with pytest.raises(il.InnerLoopError, match=r"'0' of the model is a Embedding with max_norm"):
        inner([batch] * steps, batch)
    assert torch.equal(model[0].weight, before)


def test_a_layer_replaced_after_the_loop_was_made_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    inner = il.InnerLoop(model, optim.Adam(model.parameters()), squares)
    inner([data()], data())
    model[1] = nn.Linear(3, 1)
    with pytest.raises(il.InnerLoopError, match=r"replaced '1\.weight'"):
        inner([data()], data())


def test_auto_does_not_take_a_strategy_that_cannot_follow_the_loss():
    """One learned number would make Forward fit into the least memory."""
    scale = torch.tensor(1.5, requires_grad=True)
    model = nn.Linear(3, 1)
    grads = []
    for backward in (il.Tape(), il.Auto("1GB"), il.Auto("100kB")):
        inner = il.InnerLoop(
            model,
            optim.SGD(model.parameters(), lr=0.1),
            lambda m, b: scale * squares(m, b),
            ("lr",),
            backward,
        )
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(inner([data()] * 40, data()), scale)[0])
    assert torch.allclose(grads[0], grads[1], rtol=1e-12)
    assert torch.allclose(grads[0], grads[2], rtol=1e-12)


def test_auto_judges_by_the_largest_batch():
    model = nn.Linear(3, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    small, large = data(2), data(20_000)
    peaks = []
    for train in ([small] * 4, [small, small, large, small]):
        auto = il.Auto("1GB")
        il.InnerLoop(model, optimizer, squares, backward=auto)(train, small)
        peaks.append(auto.forecast.cost.peak)
    assert peaks[1] > 100 * peaks[0]


@pytest.mark.parametrize("wrong", [np.zeros((4, 2)), object()], ids=["array", "object"])
def test_what_cannot_be_divided_among_tasks_is_refused(wrong):
    inner = loop()
    x, y = torch.randn(4, 5, 3), torch.randn(4, 5, 1)
    with pytest.raises(il.InnerLoopError, match=type(wrong).__name__):
        inner([(x, y, wrong)], (x, y), tasks=True)


def halve(grad):
    return 0.5 * grad


HOOKS = {
    "gradient": lambda model, optimizer: model.weight.register_hook(halve),
    "accumulation": lambda model, optimizer: model.weight.register_post_accumulate_grad_hook(
        lambda p: p.grad.mul_(0.5)
    ),
    "before": lambda model, optimizer: optimizer.register_step_pre_hook(lambda *_: None),
    "after": lambda model, optimizer: optimizer.register_step_post_hook(lambda *_: None),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_hooks_of_ordinary_training_are_not_left_out_in_silence(register):
    model = nn.Linear(3, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    inner = il.InnerLoop(model, optimizer, squares)
    inner([data()], data())
    register(model, optimizer)
    with pytest.warns(UserWarning, match="does not run"):
        inner([data()], data())


def test_without_a_gradient_a_graph_in_a_buffer_is_no_matter():
    model = Remembers(detach=False)
    inner = il.InnerLoop(model, optim.SGD(model.parameters(), lr=0.1), squares)
    with torch.no_grad():
        assert not inner.adapt([data()] * 3).buffers["mean"].requires_grad


class Lazy(list):
    """Batches that are made anew whenever they are asked for."""

    def __getitem__(self, j):
        return tuple(t.clone() for t in super().__getitem__(j))

    def __iter__(self):
        return (self[j] for j in range(len(self)))


def test_batches_that_are_made_when_asked_for_serve_tasks():
    inner = loop()
    train = [(torch.randn(4, 5, 3), torch.randn(4, 5, 1)) for _ in range(3)]
    value = inner(train, train[0], tasks=True)
    assert torch.equal(value, inner(Lazy(train), train[0], tasks=True))


class Distilled(Lazy):
    """Learned data, cut out of one tensor whenever a batch is asked for."""

    def __init__(self, x, y):
        super().__init__(range(len(x)))
        self.x, self.y = x, y

    def __getitem__(self, j):
        return self.x[j], self.y


@pytest.mark.parametrize(
    "backward", [il.Remat(2), il.Binomial(2), il.Truncated(9, il.Remat())], ids=repr
)
def test_learned_data_made_when_asked_for_gets_its_gradient(backward):
    model = nn.Linear(3, 1)
    x, y = torch.randn(5, 6, 3, requires_grad=True), torch.randn(6, 1)
    val, grads = data(), []
    for how in (il.Tape(), backward):
        inner = il.InnerLoop(model, optim.SGD(model.parameters(), lr=0.1), squares, backward=how)
        grads.append(torch.autograd.grad(inner(Distilled(x, y), val), x)[0])
    assert torch.allclose(*grads, rtol=1e-12, atol=0)


@pytest.mark.parametrize("backward", [il.Remat(), il.Binomial(2)], ids=repr)
def test_batches_made_when_asked_for_are_not_kept(backward):
    alive = []

    class Counted(Distilled):
        def __getitem__(self, j):
            batch = super().__getitem__(j)
            alive.append(weakref.ref(batch[0]))
            return batch

    inner = loop(backward=backward)
    value = inner(Counted(torch.randn(30, 6, 3), torch.randn(6, 1)), data())
    assert sum(reference() is not None for reference in alive) < 5
    value.backward()


def test_parameters_of_a_loss_function_with_a_model_are_handed_to_it():
    model, power = nn.Linear(3, 1), torch.tensor(2.0, requires_grad=True)
    params = il.functional(model).params
    step = il.inner_step(
        lambda m, b, phi: (m(b[0]) - b[1]).abs().pow(phi["power"]).mean(), il.optim.sgd(0.1), model
    )
    state, _ = il.unroll(step, il.State(params), il.Meta(loss={"power": power}), [data()] * 2)
    assert torch.autograd.grad(squares(il.functional(model).bind(state.params), data()), power)[0]


def test_what_is_no_rule_or_no_meta_is_explained():
    model = nn.Linear(3, 1)
    with pytest.raises(il.InnerLoopError, match="from_torch"):
        il.inner_step(squares, optim.SGD(model.parameters(), lr=0.1), model)
    step = il.inner_step(squares, il.optim.sgd(0.1), model)
    state = il.State(il.functional(model).params)
    with pytest.raises(il.InnerLoopError, match="Meta"):
        il.unroll(step, state, {"lr": 0.1}, [data()])


def test_an_error_in_the_loss_shows_what_it_was_called_with():
    inner = loop()
    with pytest.raises(ValueError, match="values to unpack") as info:
        inner(data(), data())  # not [data()] * 5
    notes = getattr(info.value, "__notes__", None)
    assert notes is None or "Tensor[12, 3]" in notes[0]


# Buffers that require grad. ---------------------------------------------------------------------


class Scaled(nn.Module):
    """A linear layer whose input is scaled by a buffer, as a hypernetwork might set it."""

    def __init__(self, scale):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return self.linear(x * self.scale)


class ScaledLoss(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, model, batch):
        return self.scale * squares(model, batch)


class ScaledOptimizer(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", scale)

    def init(self, params):
        return ()

    def update(self, params, grads, state):
        return {name: p - self.scale * grads[name] for name, p in params.items()}, state


def with_a_learned_buffer(where, scale, backward):
    model = Scaled(scale if where == "scale" else torch.tensor(0.7))
    loss = ScaledLoss(scale) if where == "loss:scale" else squares
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    if where == "optimizer:scale":
        optimizer = ScaledOptimizer(scale)
    return il.InnerLoop(model, optimizer, loss, backward=backward, val_loss=squares)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("computed", [False, True], ids=["leaf", "computed"])
@pytest.mark.parametrize("where", ["scale", "loss:scale", "optimizer:scale"])
@pytest.mark.parametrize("backward", STRATEGIES, ids=repr)
def test_a_buffer_that_requires_grad_is_refused_by_name(backward, where, computed, steps):
    root = torch.tensor(0.7, requires_grad=True)
    inner = with_a_learned_buffer(where, root.exp() if computed else root, backward)
    with pytest.raises(il.RequirementError, match=f"buffer '{where}'.*Needed:.*Write:"):
        inner([data()] * steps, data())
    with torch.no_grad():
        assert not inner([data()] * steps, data()).requires_grad
        inner.adapt([data()] * steps)


@pytest.mark.parametrize("backward", STRATEGIES, ids=repr)
def test_a_buffer_of_a_state_that_requires_grad_is_refused(backward):
    scale = torch.tensor(0.7, requires_grad=True)
    model = Scaled(torch.tensor(0.7))
    f, step = il.functional(model), il.inner_step(squares, il.optim.sgd(0.1), model)
    state = il.State(f.params, {"scale": scale})
    with pytest.raises(il.RequirementError, match="buffer 'scale'"):
        il.unroll(step, state, il.Meta(), [data()], backward=backward)
    with pytest.raises(il.RequirementError, match="buffer 'scale'"):
        step(state, il.Meta(), data())
    with pytest.raises(il.RequirementError, match="buffer 'scale'"):
        f.bind(f.params, {"scale": scale})
    with torch.no_grad():
        il.unroll(step, state, il.Meta(), [data()], backward=backward)


@pytest.mark.parametrize("track", [True, False])
def test_a_buffer_that_requires_grad_is_refused_by_the_context(track):
    model = Scaled(torch.tensor(0.7, requires_grad=True))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    if track:
        with pytest.raises(il.RequirementError, match="buffer 'scale'"):
            il.monkeypatch(model)
    else:
        with il.innerloop_ctx(model, optimizer, track_higher_grads=False) as (fmodel, diffopt):
            diffopt.step(squares(fmodel, data()))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("backward", STRATEGIES, ids=repr)
def test_statistics_that_steps_leave_behind_are_no_learned_buffers(backward, wrapped):
    """A second unroll, and a measurement, take them as they come; also out of a step around one."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    f, made = il.functional(model), il.inner_step(squares, il.optim.sgd(0.1), model)
    step = (lambda state, meta, batch: made(state, meta, batch)) if wrapped else made
    state = il.State(f.params, f.buffers)
    for _ in range(2):
        state, _ = il.unroll(step, state, il.Meta(), [data()] * 3, backward=backward)
    assert squares(f.bind(state.params, state.buffers), data()).requires_grad


# Objects that hold tensors. ---------------------------------------------------------------------


@dataclasses.dataclass
class Held:
    """Not known to torch as a container."""

    tensors: dict


@dataclasses.dataclass
class Registered:
    tensors: dict


torch.utils._pytree.register_dataclass(Registered)


class Named(NamedTuple):
    tensors: dict


class Momentum(nn.Module):
    """A learned optimizer with a state of some kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.rate, self.decay = (nn.Parameter(torch.tensor(v)) for v in (0.1, 0.8))

    def init(self, params):
        return self.kind({name: torch.zeros_like(p) for name, p in params.items()})

    def update(self, params, grads, state):
        kept = {name: self.decay * state.tensors[name] + g for name, g in grads.items()}
        return {name: p - self.rate * kept[name] for name, p in params.items()}, self.kind(kept)


OTHERS = [il.Remat(every=2), il.Forward(), il.Truncated(2, il.Remat()), il.Auto("1GB")]


def by_momentum(kind, backward):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    inner = il.InnerLoop(model, Momentum(kind), squares, (), backward)
    return torch.autograd.grad(inner([data()] * 4, data()), list(inner.parameters()))


@pytest.mark.parametrize("backward", OTHERS, ids=repr)
def test_a_state_in_an_object_is_refused_and_in_a_container_it_is_right(backward):
    truncated = isinstance(backward, il.Truncated)
    expected = by_momentum(Named, il.Truncated(2) if truncated else il.Tape())
    for kind in (Registered, Named):
        torch.testing.assert_close(by_momentum(kind, backward), expected, rtol=1e-10, atol=0)
    with pytest.raises(il.RequirementError, match=r"a Held.*Needed:.*register_dataclass\(Held\)"):
        by_momentum(Held, backward)


def test_a_state_in_an_object_is_right_with_the_tape():
    found, expected = (by_momentum(kind, il.Tape()) for kind in (Held, Named))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Slotted:
    __slots__ = ("inside",)

    def __init__(self, inside):
        self.inside = inside


def wrapped_in_a_set(tensor):
    return {tensor}


HIDING = [Held, Slotted, wrapped_in_a_set, lambda t: Slotted([{"deep": (Held(t),)}])]


@pytest.mark.parametrize("hide", HIDING, ids=["dataclass", "slots", "set", "deep"])
@pytest.mark.parametrize("backward", [*OTHERS[:2], il.Implicit(proximal=1.0)], ids=repr)
def test_an_output_in_an_object_is_refused(backward, hide):
    def loss(model, batch):
        return squares(model, batch), hide(model(batch[0]))

    inner = loop(loss=loss, backward=backward)
    with pytest.raises(il.RequirementError, match="object that holds tensors"):
        inner.adapt([data()] * 2)
    with torch.no_grad():
        assert len(inner.adapt([data()] * 2).aux) == 2


@pytest.mark.parametrize("backward", [*STRATEGIES, il.Truncated(1)], ids=repr)
def test_other_outputs_are_no_matter(backward):
    plain = {"word": "x", "count": 3, "none": None, "array": np.zeros(2), "object": object()}
    plain |= {"held": Held({"count": 3}), "places": Held(torch.arange(3)), "function": squares}

    def loss(model, batch):
        return squares(model, batch), plain

    inner = loop(None, loss, ("lr",), backward)
    aux = inner.adapt([data()] * 2).aux
    assert all(found == [plain[name]] * 2 for name, found in aux.items() if name != "array")


# Nothing to train. ------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", STRATEGIES, ids=repr)
def test_frozen_weights_are_named_as_the_reason(backward):
    model = nn.Linear(3, 1)
    inner = loop(model, squares, ("lr",), backward)
    model.requires_grad_(False)
    with pytest.raises(il.RequirementError, match="frozen"):
        inner([data()] * 2, data())


class Another(nn.Module):
    """Measures a model of its own instead of the one it is handed."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(3, 1)

    def forward(self, model, batch):
        return squares(self.other, batch)


@pytest.mark.parametrize("backward", [il.Tape(), il.Forward()], ids=repr)
def test_a_loss_of_another_model_is_refused(backward):
    inner = loop(None, Another(), ("lr",), backward)
    with pytest.raises(il.RequirementError, match="does not depend on any of the weights"):
        inner([data()] * 2, data())
