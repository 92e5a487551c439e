"""The fold itself: what goes in and comes out, the same under every strategy."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import innerloop as il
from inner_problems import Training, squares, training
from problems import central_difference
from strategies import ALL, Tensors, apart, as_tape, as_tape_or_refused, assert_same

each_strategy = pytest.mark.parametrize("backward", ALL, ids=repr)


# Numbers of steps. ------------------------------------------------------------------------------


@each_strategy
def test_zero_steps_return_the_state_and_its_gradient(backward: Any) -> None:
    loop, _, val = training()
    state, outs = loop.unrolled([], backward)
    assert outs is None
    assert state.time == 0
    assert state.params.keys() == loop.params.keys()
    assert_same(state.params.values(), loop.params.values(), 0)
    grads = loop.grads(loop.measured(state, val))
    bound = loop.f.bind(loop.params)
    assert_same(grads, loop.grads(loop.loss(bound, val)), 0)


@pytest.mark.parametrize("steps", [1, 2, 3, 9])
@as_tape
def test_any_number_of_steps(steps: int, backward: Any) -> Tensors:
    loop, train, val = training()
    batches = (train * 3)[:steps]
    state, losses = loop.unrolled(batches, backward)
    assert state.time == steps
    assert losses.shape == (steps,)
    return [*loop.grads(loop.measured(state, val) + losses.prod()), losses]


@as_tape
def test_unrolls_follow_each_other(backward: Any) -> Tensors:
    """Two unrolls, the second from the state of the first, are one."""
    loop, train, val = training()
    cuts = [train] if backward == il.Tape() else [train[:2], train[2:]]
    state = loop.start
    for batches in cuts:
        state, _ = il.unroll(loop.step, state, loop.meta, batches, backward=backward)
    assert state.time == 3
    return loop.grads(loop.measured(state, val))


# Outputs. ---------------------------------------------------------------------------------------


def with_outputs(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    found = model(batch[0])
    return F.mse_loss(found, batch[1]), {
        "found": found,
        "pair": (found.norm(), found.detach().argmax()),
    }


@as_tape
def test_outputs_are_stacked_and_differentiable(backward: Any) -> Tensors:
    """A loss over every step, as for multi-step MAML, and over what else the loss returned."""
    plain, train, val = training()
    loop = Training(plain.model, with_outputs)
    state, (losses, more) = loop.unrolled(train, backward)
    assert losses.shape == (3,)
    assert more["found"].shape == (3, 5, 1)
    norms, places = more["pair"]
    assert norms.shape == places.shape == (3,)
    assert places.dtype == torch.int64
    weighted = (torch.tensor([0.2, 0.3, 0.5]) * losses).sum()
    total = weighted + more["found"].sin().sum() + norms[1] + loop.measured(state, val)
    return [*loop.grads(total), losses, more["found"], norms, places]


@as_tape
def test_outputs_alone(backward: Any) -> Tensors:
    """Nothing of the last state is used: B starts at the outputs."""
    plain, train, _ = training()
    loop = Training(plain.model, with_outputs)
    grads = loop.grads(loop.unrolled(train, backward)[1][1]["found"][1].sum())
    assert any(g.norm() > 0 for g in grads)
    return grads


def test_outputs_by_finite_differences() -> None:
    plain, train, _ = training()

    def total(lr: Tensor) -> Tensor:
        loop = Training(plain.model, with_outputs)
        _, (losses, more) = il.unroll(loop.step, loop.start, il.Meta(opt={"lr": lr}), train)
        return losses.square().sum() + more["found"].sum()

    lr = torch.tensor(0.1, requires_grad=True)
    (actual,) = torch.autograd.grad(total(lr), lr)
    assert apart(actual, central_difference(total, lr, 1e-4)) < 1e-6


@as_tape
def test_ragged_outputs(backward: Any) -> Tensors:
    """A last batch that is smaller: outputs that cannot be stacked are listed."""

    def step(state: Tensor, meta: Tensor, batch: Tensor) -> tuple[Tensor, Any]:
        found = batch @ state
        new = state - meta * torch.sin(found).mean() * state
        return new, {"found": found, "count": len(batch), "nothing": None, "sum": found.sum()}

    state, lr = torch.randn(2, requires_grad=True), torch.tensor(0.2, requires_grad=True)
    batches = [torch.randn(3, 2), torch.randn(3, 2), torch.randn(1, 2)]
    last, outs = il.unroll(step, state, lr, batches, backward=backward)
    assert [len(f) for f in outs["found"]] == list(outs["count"]) == [3, 3, 1]
    total = sum((k + 1) * f.square().sum() for k, f in enumerate(outs["found"]))
    total = total + last.sum() + outs["sum"].prod()
    return torch.autograd.grad(total, [state, lr])


# Own steps and own states. ----------------------------------------------------------------------


def masked_step(state: il.State, meta: il.Meta, batch: Tensor) -> tuple[il.State, Any]:
    """Integers and booleans beside the weights; a weight that stays; a count that is an output."""
    w, count = state.params["w"], state.params["count"]
    mask = state.buffers["mask"]
    slope = torch.cos(w * state.params["still"]) + batch
    new = torch.where(mask, w - meta.opt["lr"] * slope / (count + 1), w)
    params = {"w": new, "count": count + 1, "still": state.params["still"]}
    buffers = {"mask": mask.roll(1), "kept": state.buffers["kept"]}
    return il.State(params, buffers, state.opt, state.time + 1), {"count": count, "slope": slope}


@as_tape
@pytest.mark.parametrize("learned", [True, False], ids=["optimizer", "step"])
def test_a_state_whose_containers_are_written_to(learned: bool, backward: Any) -> Tensors:
    """New tensors put into the dictionary that was given, and that dictionary returned."""
    plain, train, val = training()
    decay = torch.tensor(0.8, requires_grad=True)
    if learned:
        step: Any = il.inner_step(squares, WritesToItsState(), plain.model)
        state, meta = il.State(plain.params), il.Meta({"decay": decay})
        last, _ = il.unroll(step, state, meta, train, backward=backward)
        value = squares(plain.f.bind(last.params), val)
    else:
        start = {"sum": torch.zeros(2), "count": 0}
        batches = list(torch.randn(4, 2))
        last, _ = il.unroll(running_sum, start, decay, batches, backward=backward)
        assert start == {"sum": start["sum"], "count": 0} and not start["sum"].any()
        value = last["sum"].square().sum() / last["count"]
    return torch.autograd.grad(value, decay)


class WritesToItsState(nn.Module):
    """A learned optimizer, as one would write it for ordinary training."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(0.0))

    def init(self, params: Any) -> Any:
        return {"kept": {name: torch.zeros_like(p) for name, p in params.items()}, "count": 0}

    def update(self, params: Any, grads: Any, state: Any) -> Any:
        state["count"] += 1
        for name, grad in grads.items():
            state["kept"][name] = self.decay * state["kept"][name] + grad
            params[name] = params[name] - 0.1 / state["count"] * state["kept"][name]
        return params, state


def running_sum(state: Any, decay: Tensor, batch: Tensor) -> tuple[Any, Tensor]:
    state["sum"] = decay * state["sum"] + torch.sin(batch * decay)
    state["count"] += 1
    return state, state["sum"]


@as_tape
def test_integer_boolean_and_constant_leaves(backward: Any) -> Tensors:
    w, still = (torch.randn(4, requires_grad=True) for _ in range(2))
    lr = torch.tensor(0.3, requires_grad=True)
    params = {"w": w, "count": torch.tensor(0), "still": still}
    buffers = {
        "mask": torch.tensor([True, False, True, True]),
        "kept": torch.arange(3, dtype=torch.int32),
    }
    state, outs = il.unroll(
        masked_step,
        il.State(params, buffers, opt=("text", None, 3)),
        il.Meta(opt={"lr": lr, "note": "not a tensor"}),
        list(torch.randn(5, 4)),
        backward=backward,
    )
    assert state.params["count"].item() == 5
    assert state.params["count"].dtype == torch.int64
    assert state.buffers["kept"].dtype == torch.int32
    assert state.opt == ("text", None, 3)
    assert outs["count"].tolist() == [0, 1, 2, 3, 4]
    value = state.params["w"].square().sum() + outs["slope"][2].sum()
    value = value + state.params["still"].sum()
    return [*torch.autograd.grad(value, [w, still, lr]), state.buffers["mask"]]


class Pendulum(NamedTuple):
    """A state of the user's own, without any name of the library's."""

    angle: Tensor
    speeds: list[Tensor]


def swing(state: Pendulum, stiffness: Tensor, push: Tensor) -> tuple[Pendulum, Tensor]:
    speed = state.speeds[-1] - 0.1 * stiffness * torch.sin(state.angle) + push
    return Pendulum(state.angle + 0.1 * speed, [state.speeds[-1], speed]), state.angle


@pytest.mark.parametrize("steps", [1, 2, 6])
@as_tape
def test_any_state_and_any_meta(steps: int, backward: Any) -> Tensors:
    """A named tuple that keeps earlier leaves, a bare tensor as meta-parameters."""
    angle, fast, slow, stiffness = (torch.randn((), requires_grad=True) for _ in range(4))
    start = Pendulum(angle, [fast, slow])
    pushes = list(torch.randn(steps))
    state, angles = il.unroll(swing, start, stiffness, pushes, backward=backward)
    assert type(state) is Pendulum
    value = state.angle + state.speeds[0] * state.speeds[1] + angles.square().sum()
    leaves = [angle, fast, slow, stiffness]
    return torch.autograd.grad(value, leaves, materialize_grads=True)


@as_tape
def test_leaves_that_change_places(backward: Any) -> Tensors:
    def swap(state: Any, meta: Tensor, batch: Tensor) -> Any:
        return {"a": state["b"], "b": state["a"], "c": state["c"] * state["a"] * batch}, meta

    state = {name: torch.randn((), requires_grad=True) for name in "abc"}
    leaves, batches = list(state.values()), list(torch.randn(3))
    last, _ = il.unroll(swap, state, torch.tensor(1.0), batches, backward=backward)
    value = last["a"].sin() + last["b"].exp() + last["c"]
    return torch.autograd.grad(value, leaves)


@as_tape_or_refused("batch")
@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_given_comes_out_again(steps: int, backward: Any) -> Tensors:
    """A step whose new state and whose output are the meta-parameters and the batch themselves."""

    def step(state: Any, meta: Tensor, batch: Tensor) -> tuple[Any, Any]:
        new = {"w": state["w"] * torch.sin(state["seen"]), "seen": batch, "meta": meta}
        return new, (meta, batch, state["meta"])

    w, meta = (torch.randn((), requires_grad=True) for _ in range(2))
    batches = [t.requires_grad_() for t in torch.randn(steps).unbind()]
    start = {"w": w, "seen": torch.tensor(0.5), "meta": torch.tensor(1.0)}
    state, outs = il.unroll(step, start, meta, batches, backward=backward)
    value = sum(t * (k + 1) for k, t in enumerate(state.values()))
    value = value + sum((out * (k + 2)).square().sum() for k, out in enumerate(outs))
    return torch.autograd.grad(value, [w, meta, *batches], materialize_grads=True)


@as_tape
def test_a_step_that_changes_nothing_has_differentiable_outputs(backward: Any) -> Tensors:
    def look(state: Tensor, meta: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return state, torch.sin(state * meta * batch)

    state, meta = (torch.randn((), requires_grad=True) for _ in range(2))
    batches = list(torch.randn(3))
    last, outs = il.unroll(look, state, meta, batches, backward=backward)
    return torch.autograd.grad(outs.square().sum() + last, [state, meta])


@as_tape
def test_one_tensor_in_several_places(backward: Any) -> Tensors:
    """The same leaf twice in the state, and in the meta-parameters as well."""

    def step(state: Any, meta: Tensor, batch: Tensor) -> tuple[Any, Tensor]:
        return {"a": state["a"] * torch.sin(state["b"] * meta), "b": state["b"] * batch}, meta * 2

    leaf, batches = torch.randn(3, requires_grad=True), list(torch.randn(4))
    last, outs = il.unroll(step, {"a": leaf, "b": leaf}, leaf, batches, backward=backward)
    value = last["a"].sum() + last["b"].sum() + outs.prod()
    return torch.autograd.grad(value, leaf)


@as_tape
def test_complex_leaves(backward: Any) -> Tensors:
    def step(state: Tensor, meta: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return state - meta * (state.abs() ** 2 * state + batch * state.conj()), (
            state * batch
        ).abs()

    state = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    lr = torch.tensor(0.2, requires_grad=True)
    batches = list(torch.randn(3, 3, dtype=torch.complex128))
    last, outs = il.unroll(step, state, lr, batches, backward=backward)
    value = last.abs().square().sum() + 2 * last.real.sum() + last.imag.sum() + outs.sum()
    return torch.autograd.grad(value, [state, lr])


@as_tape
def test_views_and_zero_size_leaves(backward: Any) -> Tensors:
    """Transposed and expanded tensors in the state, and one without elements."""

    def step(state: Any, meta: Tensor, batch: Tensor) -> tuple[Any, Tensor]:
        w, e = state["w"], state["e"]
        new = {"w": w - meta * torch.sin(w * e), "e": e * batch, "none": state["none"] * 2}
        return new, w.sum() + state["none"].sum()

    w, e, none = (torch.randn(shape, requires_grad=True) for shape in ((3, 2), (1, 3), (0, 2)))
    lr = torch.tensor(0.2, requires_grad=True)
    start = {"w": w.t(), "e": e.expand(2, 3), "none": none}
    last, outs = il.unroll(step, start, lr, list(torch.randn(3)), backward=backward)
    value = sum(t.sum() for t in last.values()) + outs.square().sum()
    return torch.autograd.grad(value, [w, e, none, lr])


@as_tape
def test_a_state_that_has_a_history(backward: Any) -> Tensors:
    """Not leaves but results: the gradient goes on to what they were computed from."""
    plain, train, val = training()
    root, rate = torch.randn((), requires_grad=True), torch.tensor(-2.0, requires_grad=True)
    params = {n: p.detach() * root.exp() for n, p in plain.params.items()}
    meta = il.Meta(opt={"lr": rate.exp()})
    start = plain.start._replace(params=params)
    state, losses = il.unroll(plain.step, start, meta, train, backward=backward)
    value = plain.measured(state, val) + losses.sum()
    return torch.autograd.grad(value, [root, rate])


# What gets a gradient. --------------------------------------------------------------------------


@as_tape_or_refused("batch")
def test_batches_that_require_grad(backward: Any) -> Tensors:
    """Learned data: one of its own for each step, one that is used at every step, one integer."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, (y, shift, row) = batch
        return F.mse_loss(model(x + shift)[row], y[row])

    plain, train, val = training()
    loop = Training(plain.model, loss)
    shift = torch.randn(2, requires_grad=True)
    learned = [y.requires_grad_() for _, y in train]
    batches = [(x, (y, shift, torch.tensor([0, 2, 4]))) for x, y in train]
    state, _ = loop.unrolled(batches, backward)
    grads = loop.grads(squares(loop.f.bind(state.params), val), shift, *learned)
    assert all(g.any() for g in grads)
    return grads


@as_tape_or_refused("batch")
def test_one_batch_repeated(backward: Any) -> Tensors:
    """`[support] * 5` with data that is learned: its gradient is the sum over the steps."""
    loop, train, val = training()
    x, y = (t.clone().requires_grad_() for t in train[0])
    state, losses = loop.unrolled([(x, y)] * 5, backward)
    return loop.grads(loop.measured(state, val) + losses.sum(), x, y)


def test_learned_data_by_finite_differences() -> None:
    loop, train, val = training()

    def value(y: Tensor) -> Tensor:
        return loop.value([(train[0][0], y), *train[1:]], val, il.Remat())

    y = train[0][1].clone().requires_grad_()
    (actual,) = torch.autograd.grad(value(y), y)
    assert apart(actual, central_difference(value, y, 1e-4)) < 1e-6


@as_tape
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("learned", ["first.weight", "last.bias", "lr"])
def test_only_some_leaves_require_grad(learned: str, steps: int, backward: Any) -> Tensors:
    """The rest of the first state is then constant, for the outputs as well."""
    loop, train, val = training()
    for leaf in loop.leaves:
        leaf.requires_grad_(False)
    leaf = (loop.params | {"lr": loop.lr})[learned].requires_grad_()
    state, losses = loop.unrolled(train[:steps], backward)
    return torch.autograd.grad(loop.measured(state, val) + losses.sum(), leaf)


@each_strategy
def test_nothing_requires_grad(backward: Any) -> None:
    loop, train, _ = training()
    for leaf in loop.leaves:
        leaf.requires_grad_(False)
    state, losses = loop.unrolled(train, backward)
    assert not losses.requires_grad
    assert not any(p.requires_grad for p in state.params.values())
    assert losses.shape == (3,)


@as_tape
def test_optimizer_state_that_requires_grad(backward: Any) -> Tensors:
    """A momentum buffer to start from is a leaf like any other."""
    loop, train, val = training()
    (block,) = loop.start.opt
    momentum = torch.randn_like(block.slots["momentum_buffer"]).requires_grad_()
    opt = (block._replace(slots={**block.slots, "momentum_buffer": momentum}),)
    start = loop.start._replace(opt=opt)
    state, _ = il.unroll(loop.step, start, loop.meta, train, backward=backward)
    return loop.grads(loop.measured(state, val), momentum)


@as_tape
def test_a_warm_optimizer_with_groups(backward: Any) -> Tensors:
    """Counts of steps in its state, and a rate for each group; betas for both."""
    loop, train, val = training()
    groups = [{"params": list(layer.parameters())} for layer in loop.model.children()]
    optimizer = torch.optim.Adam(groups, lr=0.05)
    for batch in train:
        optimizer.zero_grad()
        loop.loss(loop.model, batch).backward()
        optimizer.step()
    rule = il.optim.from_torch(optimizer, loop.f.params)
    params = {n: p.detach().requires_grad_() for n, p in loop.f.params.items()}
    rates = [torch.tensor(v, requires_grad=True) for v in (0.05, 0.02)]
    betas = torch.tensor([0.9, 0.99], requires_grad=True)
    step = il.inner_step(loop.loss, rule, loop.model)
    start = il.State(params, {}, rule.init(params))
    meta = il.Meta(opt={"lr": rates, "betas": betas})
    state, losses = il.unroll(step, start, meta, train, backward=backward)
    value = loop.measured(state, val) + losses.sum()
    return torch.autograd.grad(value, [*params.values(), *rates, betas])


@as_tape
def test_a_rate_for_each_element(backward: Any) -> Tensors:
    loop, train, val = training()
    rates = [(0.2 * torch.rand(p.shape)).requires_grad_() for p in loop.params.values()]
    meta = il.Meta(opt={"lr": [rates]})
    state, losses = il.unroll(loop.step, loop.start, meta, train, backward=backward)
    value = loop.measured(state, val) + losses.sum()
    return torch.autograd.grad(value, [*loop.params.values(), *rates])


@each_strategy
def test_nothing_but_what_was_asked_for_gets_a_gradient(backward: Any) -> None:
    """`.grad` of the model, of the leaves, and of the batches stays empty."""
    loop, train, val = training()
    torch.autograd.grad(loop.value(train, val, backward), [loop.lr])
    tensors = [*loop.model.parameters(), *loop.leaves, *(t for batch in train for t in batch)]
    assert all(t.grad is None for t in tensors)


# Loops inside of steps. -------------------------------------------------------------------------


def nested(outer: Any, inner: Any) -> list[Tensor]:
    """The loss of a step is what another training, of two steps, ends with."""
    weights, lr = torch.randn(2, requires_grad=True), torch.tensor(0.2, requires_grad=True)
    inside = il.optim.sgd(lr=0.1)
    inner_step = il.inner_step(lambda p, b, parts: ((p - b) ** 2 * parts["c"]).sum(), inside)

    def loss(params: Tensor, batch: Tensor, parts: Any) -> Tensor:
        start = il.State(batch.clone(), opt=inside.init(batch))
        meta = il.Meta(opt={"lr": parts["lr"]}, loss={"c": params.exp()})
        batches = [torch.zeros(2), torch.ones(2)]
        state, _ = il.unroll(inner_step, start, meta, batches, backward=inner)
        return (state.params - 1).square().sum()

    rule = il.optim.sgd(lr=0.3, momentum=0.5)
    step, start = il.inner_step(loss, rule), il.State(weights, opt=rule.init(weights))
    batches = list(torch.randn(3, 2))
    meta = il.Meta(loss={"lr": lr})
    state, losses = il.unroll(step, start, meta, batches, backward=outer)
    value = state.params.sum() + losses.sum()
    return list(torch.autograd.grad(value, [weights, lr]))


@as_tape
def test_a_tape_inside_of_any_strategy(backward: Any) -> Tensors:
    return nested(backward, il.Tape())


@as_tape_or_refused("Tape")
def test_any_strategy_inside_of_a_tape(backward: Any) -> Tensors:
    return nested(il.Tape(), backward)


# First order. -----------------------------------------------------------------------------------


@each_strategy
@pytest.mark.parametrize("name", ["mlp", "convolution", "lstm"])
def test_first_order_is_a_gradient_taken_as_given(name: str, backward: Any) -> None:
    """Against plain SGD with momentum whose inner gradients are detached."""
    torch.manual_seed(0)
    loop, train, val = training(name, first_order=True)
    state, losses = loop.unrolled(train, backward)
    actual = loop.grads(loop.measured(state, val) + losses.sum())

    params, buffers = loop.params, loop.f.buffers
    speed, total = dict.fromkeys(params), 0.0
    for batch in train:
        bound = loop.f.bind(params, buffers)
        loss = loop.loss(bound, batch)
        grads = torch.autograd.grad(loss, list(params.values()), retain_graph=True)
        named = dict(zip(params, (g.detach() for g in grads), strict=True))
        speed = {n: g if speed[n] is None else 0.9 * speed[n] + g for n, g in named.items()}
        params = {n: p - loop.lr * speed[n] for n, p in params.items()}
        buffers, total = dict(bound.named_buffers()), total + loss
    expected = loop.grads(loop.loss(loop.f.bind(params, buffers), val) + total)
    assert_same(actual, expected)


@as_tape
@pytest.mark.parametrize("name", ["mlp", "dropout", "transformer", "tied"])
def test_first_order_is_the_same_under_every_strategy(name: str, backward: Any) -> Tensors:
    loop, train, val = training(name, first_order=True)
    return loop.grads(loop.value(train, val, backward))


# Transforms and schedules. ----------------------------------------------------------------------


@as_tape
def test_gradient_transform_and_schedule(backward: Any) -> Tensors:
    def schedule(settings: Any, time: int) -> Any:
        return {**settings, "lr": settings["lr"] * 0.5**time}

    loop, train, val = training(grad_transform=il.clip_norm(0.1), schedule=schedule)
    state, losses = loop.unrolled(train, backward)
    return [*loop.grads(loop.measured(state, val)), losses]


@pytest.mark.filterwarnings("ignore:.torch.jit")
@each_strategy
def test_forward_mode_derivatives_are_refused(backward: Any) -> None:
    """They would end at an inner gradient."""
    step = il.inner_step(lambda params, batch: (params["w"] - batch) ** 2, il.optim.sgd(0.1))
    with forward_ad.dual_level():
        start = forward_ad.make_dual(torch.tensor(1.0), torch.tensor(1.0))
        with pytest.raises(il.RequirementError, match="forward-mode"):
            il.unroll(step, il.State({"w": start}), il.Meta(), [3.0, 3.0], backward)
