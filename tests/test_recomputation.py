"""Computing a step again must be computing the same: random numbers, buffers, modes, memory."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import innerloop as il
from inner_problems import Training, squares, training
from strategies import ALL, EXACT, Tensors, as_tape, as_tape_or_refused, assert_same

AUTO = il.Auto("1GB")
"""It measures a step before the first one, which must leave no trace."""

each_strategy = pytest.mark.parametrize("backward", [*ALL, AUTO], ids=repr)
each_exact = pytest.mark.parametrize("backward", EXACT, ids=repr)
each_walk = pytest.mark.parametrize("backward", EXACT[:-1], ids=repr)


def gradients(name: str, backward: Any, between: Callable[[], Any] = lambda: None) -> list[Tensor]:
    """The gradients of a problem, with something done between forward and backward."""
    torch.manual_seed(0)
    loop, train, val = training(name)
    value = loop.value(train, val, backward)
    between()
    return loop.grads(value)


# Random numbers. --------------------------------------------------------------------------------


@each_strategy
def test_the_generator_is_left_as_plain_training_leaves_it(backward: Any) -> None:
    loop, train, val = training("dropout")
    torch.manual_seed(1)
    value = loop.value(train, val, backward)
    after_forward = torch.get_rng_state()
    loop.grads(value)
    assert torch.equal(torch.get_rng_state(), after_forward)
    torch.manual_seed(1)
    for batch in (*train, val):
        loop.loss(loop.model, batch)
    assert torch.equal(torch.get_rng_state(), after_forward)


@each_exact
def test_another_seed_before_the_backward_changes_nothing(backward: Any) -> None:
    changed = gradients("dropout", backward, lambda: torch.manual_seed(99))
    assert_same(changed, gradients("dropout", il.Tape()))


@as_tape
def test_every_step_has_its_own_random_numbers(backward: Any) -> Tensors:
    """The same batch at each step, so that only the masks differ."""
    loop, train, val = training("dropout")
    state, losses = loop.unrolled([train[0]] * 5, backward)
    assert len(set(losses.tolist())) == 5
    return loop.grads(loop.measured(state, val))


FOR_TASKS = [strategy.for_tasks(2) for strategy in (il.Remat(), il.Remat(every=2), il.Binomial(2))]


@pytest.mark.parametrize("backward", FOR_TASKS, ids=repr)
@pytest.mark.parametrize("name", ["mlp", "convolution", "dropout"])
def test_for_several_tasks_no_graph_is_made_ahead(name: str, backward: Any) -> None:
    """Then the last step is computed again like the others, with its own random numbers."""
    changed = gradients(name, backward, lambda: torch.manual_seed(99))
    assert_same(changed, gradients(name, il.Tape()))


# Buffers. ---------------------------------------------------------------------------------------


@each_strategy
def test_buffers_advance_once_per_step(backward: Any) -> None:
    loop, train, val = training("convolution")
    own = {name: buffer.clone() for name, buffer in loop.model.named_buffers()}
    state, _ = loop.unrolled(train, backward)
    value = loop.measured(state, val)
    before = {name: buffer.clone() for name, buffer in state.buffers.items()}
    loop.grads(value, retain_graph=True)
    loop.grads(value)
    for name, buffer in loop.model.named_buffers():
        assert torch.equal(buffer, own[name]), name
        assert torch.equal(state.buffers[name], before[name]), name
    counts = [b for name, b in state.buffers.items() if name.endswith("num_batches_tracked")]
    assert [count.item() for count in counts] == [len(train)] * 2
    assert {count.dtype for count in counts} == {torch.int64}


@as_tape
def test_each_step_sees_the_buffers_of_its_own_time(backward: Any) -> Tensors:
    """Running statistics that act: in evaluation mode, but advanced by hand in the loss."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        norm = model[1]
        with torch.no_grad():
            norm.running_mean.mul_(0.5).add_(batch[0].mean())
        return squares(model, batch)

    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).eval()
    loop = Training(model, loss)
    batches = [(torch.randn(4, 2) + k, torch.randn(4, 1)) for k in range(5)]
    state, losses = loop.unrolled(batches[:4], backward)
    return [*loop.grads(loop.measured(state, batches[4])), losses, *state.buffers.values()]


# Modes. -----------------------------------------------------------------------------------------


@each_exact
@pytest.mark.parametrize("name", ["dropout", "convolution"])
def test_evaluation_mode_between_forward_and_backward_changes_nothing(
    name: str, backward: Any
) -> None:
    torch.manual_seed(0)
    loop, train, val = training(name)
    value = loop.value(train, val, backward)
    loop.model.eval()
    assert_same(loop.grads(value), gradients(name, il.Tape()))


@each_strategy
def test_no_grad_leaves_no_graph(backward: Any) -> None:
    loop, train, _ = training()
    with torch.no_grad():
        state, losses = loop.unrolled(train, backward)
    tracked, _ = loop.unrolled(train, il.Tape())
    assert not losses.requires_grad
    assert not any(p.requires_grad for p in state.params.values())
    assert_same(state.params.values(), tracked.params.values(), 0)


@pytest.mark.parametrize("backward", [*EXACT[:-1], AUTO], ids=repr)
def test_autocast_is_restored(backward: Any) -> None:
    """Forward inside the region, backward outside of it, as torch advises."""
    found = []
    for strategy in (backward, il.Tape()):
        torch.manual_seed(0)
        loop, train, val = half_precision_training()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            state, (losses, seen) = loop.unrolled(train, strategy)
        assert seen.dtype == torch.bfloat16
        assert {p.dtype for p in state.params.values()} == {torch.float32}
        found.append([*loop.grads(losses.sum() + loop.measured(state, val)), losses])
    assert_same(*found, 1e-6)


def half_precision_training() -> tuple[Training, list[Any], Any]:
    """In float32, which autocast casts, with the model's output as a second output."""

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        found = model(batch[0])
        return (found.float() - batch[1]).square().mean(), found

    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    *train, val = [(torch.randn(6, 2), torch.randn(6, 1)) for _ in range(4)]
    return Training(model, loss), train, val


# In-place changes between forward and backward. -------------------------------------------------


IN_PLACE, AGAIN = r"in place|inplace", "computed a second time"
CHANGES: dict[str, tuple[Callable[..., Any], str | None]] = {
    "weights": (lambda loop, train, state: loop.params["first.weight"].mul_(2), IN_PLACE),
    "rate": (lambda loop, train, state: loop.lr.mul_(2), IN_PLACE),
    "batch": (lambda loop, train, state: train[1][0].mul_(2), IN_PLACE),
    "model": (lambda loop, train, state: loop.model.first.weight.mul_(2), None),
    "list of batches": (lambda loop, train, state: train.__setitem__(1, train[0]), AGAIN),
    "mapping of weights": (
        lambda loop, train, state: loop.params.update({"first.weight": torch.zeros(3, 2)}),
        None,
    ),
    "mapping of settings": (
        lambda loop, train, state: loop.meta.opt.update(lr=torch.tensor(0.7, requires_grad=True)),
        None,
    ),
    "mapping of last weights": (
        lambda loop, train, state: state.params.update({"first.weight": torch.zeros(3, 2)}),
        None,
    ),
}
"""What is changed, and what a walk says of it; it never gives the gradient of something else."""


@pytest.mark.parametrize("change", CHANGES)
@each_exact
def test_a_change_after_the_forward(change: str, backward: Any) -> None:
    expected = gradients("mlp", il.Tape())
    torch.manual_seed(0)
    loop, train, val = training()
    leaves = loop.leaves
    state, _ = loop.unrolled(train, backward)
    value = loop.measured(state, val)
    act, message = CHANGES[change]
    with torch.no_grad():
        act(loop, train, state)
    if message is None or isinstance(backward, il.Forward):
        assert_same(torch.autograd.grad(value, leaves), expected)
    else:
        with pytest.raises(il.InnerLoopError, match=message):
            torch.autograd.grad(value, leaves)


@each_walk
def test_a_change_that_no_value_shows_is_refused(backward: Any) -> None:
    """Learned data in another order: the same losses, but each row's gradient at another place."""
    loop, train, val = training()
    x, y = train[0][0], train[0][1].requires_grad_()
    value = loop.value(train, val, backward)
    with torch.no_grad():
        x.copy_(x.flip(0).clone())
        y.copy_(y.flip(0).clone())
    with pytest.raises(il.InnerLoopError, match=IN_PLACE):
        loop.grads(value, y)


# Losses that do not repeat. ---------------------------------------------------------------------


class Unrepeatable:
    """A loss scaled by numbers that no generator of torch replays; it notes what it used."""

    def __init__(self, replayed: list[float] | None = None) -> None:
        self.used: list[float] = []
        self.replayed = replayed

    def draw(self) -> float:
        used = self.replayed[len(self.used)] if self.replayed else random.random()
        self.used.append(used)
        return used

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return squares(model, batch) * (1 + self.draw())


class OnlyInGradient(Unrepeatable):
    """Its value is the same whatever is drawn; its gradient is not."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        plain = squares(model, batch)
        return plain.detach() + (plain - plain.detach()) * (1 + self.draw())


class CountsItsCalls(Unrepeatable):
    def draw(self) -> float:
        self.used.append(self.replayed[len(self.used)] if self.replayed else len(self.used) / 4)
        return self.used[-1]


class OwnGenerator(Unrepeatable):
    """A generator of the user's own, which is not the one that recomputation replays."""

    def __init__(self, replayed: list[float] | None = None) -> None:
        super().__init__(replayed)
        self.generator = torch.Generator().manual_seed(3)

    def draw(self) -> float:
        drawn = torch.rand((), generator=self.generator).item()
        self.used.append(self.replayed[len(self.used)] if self.replayed else drawn)
        return self.used[-1]


KINDS = [Unrepeatable, OnlyInGradient, CountsItsCalls, OwnGenerator]


@pytest.mark.parametrize("kind", KINDS)
@each_walk
def test_a_loss_that_does_not_repeat_is_refused(kind: Any, backward: Any) -> None:
    plain, train, val = training()
    loop = Training(plain.model, kind())
    with pytest.raises(il.InnerLoopError, match=rf"(?s){AGAIN}.*Needed:.*Why:.*Write:") as info:
        loop.grads(loop.value(train, val, backward))
    if kind is OwnGenerator:
        assert "torch.Generator" in str(info.value)


@pytest.mark.parametrize("kind", [Unrepeatable, CountsItsCalls, OwnGenerator])
@each_walk
def test_it_is_refused_beside_a_computed_closure_too(kind: Any, backward: Any) -> None:
    """Such steps are recomputed by torch.utils.checkpoint, which compares no values."""
    plain, train, val = training()
    loss, factor = kind(), torch.ones((), requires_grad=True).exp()
    loop = Training(plain.model, lambda model, batch: loss(model, batch) * factor)
    with pytest.raises(il.InnerLoopError, match=AGAIN):
        loop.grads(loop.value(train, val, backward))


@pytest.mark.parametrize("backward", [il.Tape(), il.Forward(), AUTO], ids=repr)
def test_a_loss_that_need_not_repeat_is_right(backward: Any) -> None:
    """For the numbers of the forward."""
    plain, train, val = training()
    loss = Unrepeatable()
    loop = Training(plain.model, loss)
    value = squares(loop.f.bind(loop.unrolled(train, backward)[0].params), val)
    used = loss.used[-len(train) :]  # Auto has measured a step before
    actual = loop.grads(value)
    same = Training(plain.model, Unrepeatable(used))
    value = squares(same.f.bind(same.unrolled(train, il.Tape())[0].params), val)
    assert_same(actual, same.grads(value))


def test_a_weight_frozen_before_the_backward_changes_nothing() -> None:
    """The step that is computed again trains the weights that the first one trained."""
    found = []
    for freeze in (False, True):
        torch.manual_seed(0)
        loop, train, val = training()
        optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.9)
        inner = il.InnerLoop(loop.model, optimizer, squares, ("lr",), il.Remat())
        value = inner(train, val)
        next(loop.model.parameters()).requires_grad_(not freeze)
        found.append(torch.autograd.grad(value, list(inner.parameters())))
    assert_same(*found)


# Several backward passes. -----------------------------------------------------------------------


@each_strategy
def test_backward_twice(backward: Any) -> None:
    loop, train, val = training("dropout")
    value = loop.value(train, val, backward)
    first = loop.grads(value, retain_graph=True)
    assert_same(loop.grads(value), first, 0)


@each_strategy
def test_backward_into_grad_accumulates(backward: Any) -> None:
    loop, train, val = training()
    value = loop.value(train, val, backward)
    expected = loop.grads(value, retain_graph=True)
    value.backward(retain_graph=True)
    value.backward()
    assert_same([leaf.grad / 2 for leaf in loop.leaves], expected, 1e-15)


@each_exact
def test_some_leaves_alone(backward: Any) -> None:
    """Gradients do not depend on which others are asked for."""
    loop, train, val = training()
    expected = loop.grads(loop.value(train, val, il.Tape()))
    value = loop.value(train, val, backward)
    for leaf, e in zip(loop.leaves, expected, strict=True):
        assert_same(torch.autograd.grad(value, [leaf], retain_graph=True), [e])


@each_exact
def test_outputs_backward_one_by_one(backward: Any) -> None:
    """The last weights, then the losses, each on its own, add up to both together."""
    loop, train, val = training()
    state, losses = loop.unrolled(train, il.Tape())
    expected = loop.grads(loop.measured(state, val) + losses[1] * 2)
    state, losses = loop.unrolled(train, backward)
    one = loop.grads(loop.measured(state, val), retain_graph=True)
    other = loop.grads(losses[1] * 2)
    assert_same([a + b for a, b in zip(one, other, strict=True)], expected)


@as_tape_or_refused("Tape")
@pytest.mark.parametrize("name", ["mlp", "dropout", "convolution"])
def test_recomputation_can_be_differentiated_again(name: str, backward: Any) -> Tensors:
    loop, train, val = training(name)
    return second_derivative(loop, loop.value(train, val, backward))


def second_derivative(loop: Training, value: Tensor) -> list[Tensor]:
    grads = loop.grads(value, create_graph=True)
    return loop.grads(sum(g.square().sum() for g in grads))


# Dropout in a functional form, without a module. ------------------------------------------------


@as_tape
def test_random_numbers_of_a_loss_on_plain_tensors(backward: Any) -> Tensors:
    def loss(params: Tensor, batch: Tensor) -> Tensor:
        noisy = F.dropout(params * (1 + 0.3 * torch.randn_like(params)), 0.5)
        return (torch.tanh(noisy) - batch).square().sum()

    weights = torch.randn(6, requires_grad=True)
    rule = il.optim.adam(lr=0.05)
    start = il.State(weights, opt=rule.init(weights))
    step = il.inner_step(loss, rule)
    state, losses = il.unroll(step, start, il.Meta(), list(torch.randn(5, 6)), backward=backward)
    return [*torch.autograd.grad(state.params.square().sum(), weights), losses]
