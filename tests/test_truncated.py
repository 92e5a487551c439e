"""Truncation is a detached state: by hand, with every strategy inside, and from call to call."""

import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import innerloop as il
from inner_problems import LearnedLoss, Training, squares, training
from innerloop.learned import LSTMOptimizer
from problems import Net
from strategies import assert_same

WITHIN = [il.Tape(), il.Remat(every=2), il.Binomial(1), il.Forward()]
each_within = pytest.mark.parametrize("within", WITHIN, ids=repr)
NAMES = ["mlp", "dropout", "convolution"]


def cut(state: il.State) -> il.State:
    """The state as constants, built anew by hand."""
    params = {name: p.detach().clone() for name, p in state.params.items()}
    buffers = {name: b.detach().clone() for name, b in state.buffers.items()}
    opt = tuple(
        block._replace(
            slots={
                name: slot.detach().clone() if isinstance(slot, Tensor) else slot
                for name, slot in block.slots.items()
            }
        )
        for block in state.opt
    )
    return il.State(params, buffers, opt, state.time)


def by_hand(loop: Training, train: list[Any], k: int) -> tuple[il.State, Tensor]:
    """All but the last k steps, the state detached, then the last k."""
    first = max(len(train) - k, 0)
    if first == 0:
        return loop.unrolled(train, il.Tape())
    state, early = loop.unrolled(train[:first], il.Tape())
    state, late = il.unroll(loop.step, cut(state), loop.meta, train[first:])
    return state, torch.cat([early.detach(), late])


@each_within
@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("name", NAMES)
def test_truncated_is_truncation_by_detach(name: str, k: int, within: Any) -> None:
    found = []
    for truncated in (True, False):
        torch.manual_seed(0)
        loop, train, val = training(name)
        train = [*train, *train[:2]]
        if truncated:
            state, losses = loop.unrolled(train, il.Truncated(k, within=within))
        else:
            state, losses = by_hand(loop, train, k)
        assert state.time == len(train)
        grads = loop.grads(loop.measured(state, val) + losses.sum())
        found.append([*grads, losses, *state.params.values(), *state.buffers.values()])
        if k < len(train):
            assert all(not g.any() for g in grads[:-1])
        assert grads[-1] != 0
    assert_same(*found)


@pytest.mark.parametrize("within", WITHIN[:-1], ids=repr)
def test_parameters_of_the_loss_and_learned_data(within: Any) -> None:
    """Both act at every step; only the last two count."""
    found = []
    for truncated in (True, False):
        torch.manual_seed(0)
        model, loss = Net(), LearnedLoss()
        weights = {n: p.detach().clone().requires_grad_() for n, p in loss.named_parameters()}
        batches = [(torch.randn(4, 2), torch.randn(4, 1).requires_grad_()) for _ in range(4)]
        rule, f = il.optim.sgd(lr=0.1, momentum=0.9), il.functional(model)
        step, meta = il.inner_step(loss, rule, model), il.Meta(loss=weights)
        start = il.State(f.params, {}, rule.init(f.params))
        if truncated:
            backward = il.Truncated(2, within=within)
            state, _ = il.unroll(step, start, meta, batches, backward=backward)
        else:
            state, _ = il.unroll(step, start, meta, batches[:2])
            state, _ = il.unroll(step, cut(state), meta, batches[2:])
        value = squares(f.bind(state.params), [t.detach() for t in batches[0]])
        leaves = [*weights.values(), *(y for _, y in batches)]
        grads = torch.autograd.grad(value, leaves, materialize_grads=True)
        assert [bool(g.any()) for g in grads[-4:]] == [False, False, True, True]
        found.append(grads)
    assert_same(*found)


@each_within
def test_what_the_optimizer_does_not_have_is_cut_too(within: Any) -> None:
    """A weight that no step replaces is part of the state all the same."""

    def step(state: Any, meta: Tensor, batch: Tensor) -> tuple[Any, Tensor]:
        new = state["w"] - meta * torch.sin(state["w"] * state["still"] + batch)
        return {"w": new, "still": state["still"]}, state["w"]

    w, still, lr = (torch.tensor(v, requires_grad=True) for v in (0.3, 0.7, 0.2))
    batches = list(torch.randn(4))
    start = {"w": w, "still": still}
    backward = il.Truncated(2, within=within)
    state, _ = il.unroll(step, start, lr, batches, backward=backward)
    total = state["w"] + state["still"]
    grads = torch.autograd.grad(total, [w, still, lr], materialize_grads=True)

    state, _ = il.unroll(step, start, lr, batches[:2])
    cut_state = {name: t.detach() for name, t in state.items()}
    state, _ = il.unroll(step, cut_state, lr, batches[2:])
    total = state["w"] + state["still"]
    assert_same(grads, torch.autograd.grad(total, [w, still, lr], materialize_grads=True))


@each_within
def test_a_meta_parameter_that_went_into_the_state_is_cut_there(within: Any) -> None:
    """As a running value of it, which the next step starts from."""

    def step(state: Any, meta: Tensor, batch: Tensor) -> tuple[Any, Tensor]:
        new = state["w"] - state["rate"] * torch.sin(state["w"] + batch)
        return {"w": new, "rate": meta if state["rate"] == 0 else state["rate"]}, state["w"]

    lr, batches = torch.tensor(0.2, requires_grad=True), list(torch.randn(4))
    start = {"w": torch.tensor(0.3), "rate": torch.tensor(0.0)}
    state, _ = il.unroll(step, start, lr, batches, backward=il.Truncated(2, within=within))
    assert_same([state["w"]], [il.unroll(step, start, lr, batches)[0]["w"]])
    grads = torch.autograd.grad(state["w"] + 0 * lr, lr)
    assert not grads[0].any()


@each_within
@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("ragged", [False, True])
def test_outputs_are_joined_as_those_of_the_tape(ragged: bool, k: int, within: Any) -> None:
    """Lists, tuples and mappings of outputs, of one shape or of several."""
    loop, train, _ = training()
    batches = [*train, [t[:2] for t in train[0]] if ragged else train[0]]

    def loss(model: nn.Module, batch: Any) -> Any:
        found = model(batch[0])
        more = [found, {"mean": found.mean(), "word": "x"}]
        return squares(model, batch), more, (len(batch[0]), None)

    found = []
    for strategy in (il.Truncated(k, within=within), il.Tape()):
        outs = Training(loop.model, loss).unrolled(batches, strategy)[1]
        leaves, spec = torch.utils._pytree.tree_flatten(outs)
        found.append((spec, [v for v in leaves if not isinstance(v, Tensor)]))
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        assert all(t.requires_grad for t in tensors if t.dim() and len(t) == 4)
        found.append(tensors)
    assert found[0] == found[2]
    assert_same(found[1], found[3])


def test_early_steps_keep_no_graph() -> None:
    """As many tensors are held for the backward whatever comes before the last step."""
    loop, train, val = training()

    def held_after(steps: int) -> int:
        held = weakref.WeakSet()

        class Held:
            def __init__(self, tensor: Tensor) -> None:
                self.tensor = tensor
                held.add(self)

        with torch.autograd.graph.saved_tensors_hooks(Held, lambda h: h.tensor):
            value = loop.value((train * 4)[:steps], val, il.Truncated(1))
        assert value.requires_grad
        return len(held)

    assert held_after(2) == held_after(12) > 0


@pytest.mark.parametrize("k", [0, -1, 2.0, True, None, "3"])
def test_a_wrong_count_is_refused(k: Any) -> None:
    with pytest.raises(il.InnerLoopError, match=r"Truncated\(k="):
        il.Truncated(k)


@pytest.mark.parametrize("within", [il.Truncated(2), il.Tape, "tape", None], ids=str)
def test_a_wrong_strategy_within_is_refused(within: Any) -> None:
    with pytest.raises(il.InnerLoopError, match="within="):
        il.Truncated(2, within=within)


# From call to call. -----------------------------------------------------------------------------


def online(backward: Any, name: str = "mlp", learn: Any = ("lr", "momentum")) -> Any:
    torch.manual_seed(0)
    loop, train, val = training(name)
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.9)
    return (
        il.InnerLoop(loop.model, optimizer, loop.loss, learn=learn, backward=backward),
        train,
        val,
    )


@pytest.mark.parametrize("within", WITHIN[:-1], ids=repr)
@pytest.mark.parametrize("name", ["mlp", "convolution", "dropout"])
def test_a_carried_state_goes_on_from_call_to_call(name: str, within: Any) -> None:
    """Three calls of two steps: each a plain unroll from the detached state of the one before."""
    inner, train, val = online(il.Truncated(2, within=within, carry=True), name)
    batches = [*train, *train]
    torch.manual_seed(1)
    calls = []
    for first in (0, 2, 4):
        value = inner(batches[first : first + 2], val)
        # Its graph is freed before the next call: what is carried has no history.
        calls.append([value, *torch.autograd.grad(value, list(inner.parameters()))])

    loop, _, _ = training(name)
    loop = Training(inner.model, inner.loss)
    lr, momentum = (inner.settings[n].detach().requires_grad_() for n in ("lr", "momentum"))
    meta, state = il.Meta(opt={"lr": lr[0], "momentum": momentum[0]}), loop.start
    torch.manual_seed(1)
    for first, (value, *grads) in zip((0, 2, 4), calls, strict=True):
        state, _ = il.unroll(loop.step, cut(state), meta, batches[first : first + 2])
        expected = loop.measured(state, val)
        assert_same([value], [expected])
        # In the order of `learn`; a learned setting has one value for each group.
        assert_same(grads, torch.autograd.grad(expected, [lr, momentum]))


def test_only_a_carried_run_goes_on_until_it_is_restarted() -> None:
    inner, train, val = online(il.Truncated(2))
    first = inner(train[:2], val)
    assert torch.equal(inner(train[:2], val), first)
    carrying, _, _ = online(il.Truncated(2, carry=True))
    before = [p.clone() for p in carrying.model.parameters()]
    assert torch.equal(carrying(train[:2], val), first)
    assert not torch.equal(carrying(train[:2], val), first)
    assert_same(carrying.model.parameters(), before, 0)
    assert not carrying.optimizer.state
    carrying.restart()
    assert torch.equal(carrying(train[:2], val), first)


@pytest.mark.parametrize("tasks", [False, True], ids=["one", "tasks"])
@pytest.mark.parametrize("kind", ["sgd", "adam", "learned"])
def test_a_run_that_is_saved_half_way_goes_on(kind: str, tasks: bool) -> None:
    """From a file, in a loop that never took the first steps."""
    model = nn.Linear(2, 1)
    make: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=0.1),
        "learned": lambda: LSTMOptimizer(hidden=3),
    }

    def loop() -> il.InnerLoop:
        learn = () if kind == "learned" else ("lr",)
        carried = il.Truncated(2, carry=True)
        return il.InnerLoop(model, make[kind](), distance, learn, carried, tasks=tasks)

    def distance(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - 1).square().mean()

    x = torch.randn(*([3] if tasks else []), 5, 2)
    inner, other = loop(), loop()
    inner([x] * 2, x)
    file = io.BytesIO()
    torch.save(inner.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other([x] * 2, x), inner([x] * 2, x))
    # And what was saved at the beginning begins.
    fresh = loop()
    fresh.load_state_dict(inner.state_dict())
    other.load_state_dict({k: v for k, v in inner.state_dict().items() if k != "_carried"})
    fresh.restart()
    expected = fresh([x] * 2, x)
    assert torch.equal(other([x] * 2, x), expected)
    # A loop that carries nothing starts anew.
    other.backward = il.Tape()
    other.load_state_dict(inner.state_dict())
    assert torch.equal(other([x] * 2, x), expected)


def test_adapt_goes_on_as_well() -> None:
    inner, train, _ = online(il.Truncated(3, carry=True))
    with torch.no_grad():
        inner.adapt(train[:1])
        twice = inner.adapt(train[1:])
    plain, _, _ = online(il.Tape())
    with torch.no_grad():
        once = plain.adapt(train)
    assert_same(twice.params.values(), once.params.values())


def test_learning_the_initial_weights_through_a_cut_is_refused() -> None:
    inner, train, val = online(il.Truncated(2), learn=("init", "lr"))
    with pytest.raises(il.RequirementError, match="init"):
        inner(train, val)
    inner(train[:2], val).backward()
    assert all(isinstance(p.grad, Tensor) for p in inner.parameters())


class Untouched(nn.Module):
    """Not a strategy."""


def test_what_is_no_strategy_is_refused() -> None:
    loop, train, _ = training()
    for wrong in (il.Truncated, Untouched(), "remat", 3):
        with pytest.raises(il.InnerLoopError, match="strategy"):
            loop.unrolled(train, wrong)


def test_a_run_alone_and_runs_of_tasks_count_their_own_steps() -> None:
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    learn = {"lr": il.Learn(per="step", steps=3)}
    inner = il.InnerLoop(model, sgd, _squares, learn, il.Truncated(3, carry=True))
    x, y = torch.randn(2, 4, 3), torch.randn(2, 4, 1)
    inner([(x, y)] * 3, (x, y), tasks=True)
    inner([(x[0], y[0])] * 3, (x[0], y[0]))
    with pytest.raises(il.InnerLoopError, match="for 3 steps"):
        inner([(x[0], y[0])], (x[0], y[0]))


def _squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()
