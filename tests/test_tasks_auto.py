"""The way that is chosen by trying: what it tries, what it says, and that it stays."""

import pytest
import torch
from torch import nn, optim

import innerloop as il
from references import squares
from test_tasks import built, normed
from test_tasks_threads import dropping
from test_tasks_vmap import unbatchable
from ways import assert_same, gradients

LOOP = il.tasks.loop()


@pytest.fixture
def two_cores():
    """Threads are tried only where torch may use several."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def assert_loops(inner, losses, train, val):
    expected = inner(train, val, tasks=LOOP)
    assert_same([losses], [expected])
    assert_same(gradients(losses.sum(), inner), gradients(expected.sum(), inner))


@pytest.mark.parametrize(("make_model", "make"), [(normed, optim.Adam), (unbatchable, optim.SGD)])
def test_it_says_what_it_chose_and_why(make_model, make, two_cores):
    inner, train, val = built(make_model, make)
    way = il.tasks.auto()
    assert "nothing tried" in str(way)
    losses = inner(train, val, tasks=way)
    assert_loops(inner, losses, train, val)
    assert torch.get_num_threads() == 2
    shown = str(way)
    assert str(way.chosen) in shown.splitlines()[0]
    assert "fastest" in shown
    for name in ("loop()", "vmap(", "threads("):
        assert name in shown
    assert shown.count(" ms") == sum(t.seconds is not None for t in way.trials)


def test_what_cannot_be_used_is_left_out_without_a_warning(two_cores):
    inner, train, val = built(unbatchable)
    way = il.tasks.auto()
    inner(train, val, tasks=way)
    assert not isinstance(way.chosen, il.tasks.vmap)
    assert "not used: the layer Looking" in str(way)

    scale = torch.tensor(2.0, requires_grad=True)
    inner, train, val = built(loss=lambda m, b: scale * squares(m, b))
    way = il.tasks.auto()
    losses = inner(train, val, tasks=way)
    assert not isinstance(way.chosen, il.tasks.threads)
    assert "was not given" in str(way)
    expected = inner(train, val, tasks=LOOP)
    assert_same(
        torch.autograd.grad(losses.sum(), [scale]), torch.autograd.grad(expected.sum(), [scale])
    )


def test_it_stays(monkeypatch):
    """Only the first call tries."""
    calls = []
    inner, train, val = built(
        loss=lambda m, b: (calls.append(1), squares(m, b))[1], tasks=il.tasks.auto()
    )
    inner(train, val)
    first, chosen = len(calls), inner.tasks.chosen
    calls.clear()
    inner(train, val)
    inner([train[0]] * 2, val)
    assert inner.tasks.chosen is chosen
    assert 0 < len(calls) < first


def test_the_default_gives_the_same_bits_at_every_call():
    inner, train, val = built()
    losses = [inner(train, val, tasks=True) for _ in range(3)]
    assert all(torch.equal(found, losses[0]) for found in losses)
    assert_loops(inner, losses[0], train, val)


def test_nothing_is_tried_without_gradients_or_for_one_task():
    inner, train, val = built()
    way = il.tasks.auto()
    with torch.no_grad():
        inner(train, val, tasks=way)
    inner.adapt(train, tasks=way)
    inner([tuple(p[:1] for p in b) for b in train], tuple(p[:1] for p in val), tasks=way)
    assert way.chosen is None
    inner(train, val, tasks=way)
    assert way.chosen is not None


def test_trials_do_not_move_the_random_numbers():
    inner, train, val = built(dropping)
    way = il.tasks.auto()
    torch.manual_seed(3)
    inner(train, val, tasks=way)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    inner(train, val, tasks=way.chosen)
    assert torch.equal(torch.get_rng_state(), after)


def test_trials_leave_no_gradients_and_no_carried_state():
    inner, train, val = built(learn=("lr",), backward=il.Truncated(1, carry=True))
    inner(train, val, tasks=il.tasks.auto())
    assert all(p.grad is None for p in inner.parameters())
    assert {state.time for state in inner._carried.values()} == {len(train)}


def test_a_way_with_other_losses_is_not_used():
    """What torch batches wrongly is found out, as here a layer that mixes the tasks."""

    class Mixing(nn.Module):
        def forward(self, x):
            if torch._C._are_functorch_transforms_active():
                return 2 * x
            return x

    inner, train, val = built(lambda: nn.Sequential(nn.Linear(2, 1), Mixing()))
    way = il.tasks.auto()
    inner(train, val, tasks=way)
    assert isinstance(way.chosen, il.tasks.loop)
    assert "another result" in str(way)


def test_data_that_asks_for_a_gradient_alone():
    model = nn.Linear(2, 1)
    inner = il.InnerLoop(model, optim.SGD(model.parameters(), lr=0.1), squares, learn=())
    x = torch.randn(3, 4, 2, requires_grad=True)
    y = torch.randn(3, 4, 1)
    losses = inner([(x, y)], (x.detach(), y), tasks=True)
    (found,) = torch.autograd.grad(losses.sum(), [x])
    losses = inner([(x, y)], (x.detach(), y), tasks=LOOP)
    assert_same([found], torch.autograd.grad(losses.sum(), [x]))


def test_a_loss_that_counts_its_calls():
    calls = []

    def counted(model, batch):
        calls.append(1)
        return squares(model, batch) * len(calls)

    inner, train, val = built(loss=counted)
    way = il.tasks.auto()
    inner(train, val, tasks=way).sum().backward()
    assert way.chosen == il.tasks.loop()


def test_data_that_was_computed_from_what_is_learned(two_cores):
    """The trials leave the graph behind it as it is."""
    inner, train, val = built()
    found = []
    for way in (il.tasks.auto(), LOOP):
        factor = inner.model.body.weight.sum().exp()
        losses = inner([(factor * x, y) for x, y in train], val, tasks=way)
        found.append(gradients(losses.sum(), inner))
    assert_same(*found)


def test_a_closed_over_tensor_that_was_computed_from_what_is_learned(two_cores):
    def loss(model, batch):
        return squares(model, batch) * factor

    inner, train, val = built(loss=loss)
    found = []
    for way in (il.tasks.auto(), LOOP):
        factor = inner.model.body.weight.sum().exp()
        found.append(gradients(inner(train, val, tasks=way).sum(), inner))
    assert_same(*found)
