"""Tasks in one batched computation: their own masks and statistics, and what cannot be batched."""

import pytest
import torch
from torch import Tensor, nn, optim

import innerloop as il
from references import Net, assert_derivative, batches, squares
from test_errors import refuses
from test_tasks import STEPS, TASKS, built, normed, seeding
from ways import assert_as_loop, assert_same, gradients

LOOP = il.tasks.loop()


VMAP = il.tasks.vmap()


# Dropout. ---------------------------------------------------------------------------------------


class Seen(nn.Module):
    """Two equal inputs, one masked."""

    def __init__(self, p=0.5):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(2, 8), nn.Dropout(p), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.drop(self.first(x)))


def test_masks_differ_between_tasks():
    """Tasks with the same data would be the same without."""
    model = Seen()
    inner = il.InnerLoop(model, optim.SGD(model.parameters(), lr=0.1), squares)
    x, y = torch.randn(1, 5, 2).expand(4, -1, -1), torch.randn(1, 5, 1).expand(4, -1, -1)
    losses = inner.adapt([(x, y)] * 2, tasks=il.tasks.vmap()).losses
    assert len(losses[:, 0].unique()) == 4
    assert len(losses.flatten().unique()) == 8
    inner.eval()
    losses = inner.adapt([(x, y)] * 2, tasks=il.tasks.vmap()).losses
    assert_same([losses], [losses[:1].expand(4, -1)])


def test_masks_are_reproducible_and_the_gradient_is_of_them():
    model = Seen()
    inner = il.InnerLoop(model, optim.SGD(model.parameters(), lr=0.1), squares, ("init", "lr"))
    *train, val = batches(3, TASKS)

    def value():
        torch.manual_seed(5)
        return inner(train, val, tasks=il.tasks.vmap()).sum()

    assert torch.equal(value(), value())
    assert_derivative(value, inner.parameters())


@pytest.mark.parametrize("backward", [il.Remat(), il.Binomial(1)], ids=repr)
def test_masks_are_the_same_when_steps_are_computed_again(backward):
    found = []
    for strategy in (il.Tape(), backward):
        torch.manual_seed(0)
        model = Seen()
        inner = il.InnerLoop(
            model, optim.Adam(model.parameters(), lr=0.1), squares, ("init", "lr"), strategy
        )
        *train, val = batches(4, TASKS)
        losses = inner(train, val, tasks=il.tasks.vmap())
        found.append([losses, *gradients(losses.sum(), inner)])
    assert_same(*found)


# Running statistics. ----------------------------------------------------------------------------


def convolutional(**options):
    return nn.Sequential(
        nn.Unflatten(1, (1, 2)),
        nn.Conv1d(1, 3, 2, bias=False),
        nn.BatchNorm1d(3, **options),
        nn.Flatten(),
        nn.Tanh(),
        nn.Linear(3, 1),
    )


@pytest.mark.parametrize("make", [normed, convolutional])
def test_running_statistics_of_each_task_are_the_loops(make):
    inner, train, _ = built(make, optim.Adam, warm=2)
    found, expected = (inner.adapt(train, tasks=way) for way in (il.tasks.vmap(), LOOP))
    assert found.buffers.keys() == expected.buffers.keys()
    for name, buffer in expected.buffers.items():
        assert found.buffers[name].dtype == buffer.dtype
        assert_same([found.buffers[name].double()], [buffer.double()])
    assert not torch.equal(*next(iter(found.buffers.values()))[:2])


def test_frozen_statistics_stay():
    inner, train, val = built(normed, optim.Adam, warm=2)
    way = il.tasks.vmap(running_stats="frozen")
    before = {name: b.clone() for name, b in inner.model.named_buffers()}
    adapted = inner.adapt(train, tasks=way)
    for name, buffer in before.items():
        for each in adapted.buffers[name]:
            assert torch.equal(each, buffer)
    assert_as_loop(inner, train, val, way)


def test_frozen_statistics_stay_in_a_loop():
    class Norm(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x if x.sum() > 1e9 else x.clone())

    inner, train, val = built(lambda: nn.Sequential(nn.Linear(2, 3), Norm(3), nn.Linear(3, 1)))
    way = il.tasks.vmap(running_stats="frozen")
    with pytest.warns(UserWarning, match="Norm"):
        adapted = inner.adapt(train, tasks=way)
    assert adapted.buffers["1.running_mean"].abs().sum() == 0
    assert adapted.buffers["1.num_batches_tracked"].tolist() == [0] * TASKS
    assert_as_loop(inner, train, val, way)


def test_frozen_statistics_and_other_buffers():
    """Only those of norms stay."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = normed()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return self.net(x)

    inner, train, _ = built(Counting)
    adapted = inner.adapt(train, tasks=il.tasks.vmap(running_stats="frozen"))
    assert adapted.buffers["calls"].tolist() == [STEPS] * TASKS
    assert adapted.buffers["net.1.num_batches_tracked"].tolist() == [0] * TASKS


@pytest.mark.parametrize("momentum", [0.3, None])
def test_the_momentum_of_statistics(momentum):
    inner, train, _ = built(lambda: convolutional(momentum=momentum))
    found, expected = (inner.adapt(train, tasks=way) for way in (il.tasks.vmap(), LOOP))
    for name, buffer in expected.buffers.items():
        assert_same([found.buffers[name].double()], [buffer.double()])


def test_norms_that_use_their_statistics():
    inner, train, val = built(normed, warm=3)
    inner.eval()
    assert_as_loop(inner, train, val, VMAP)


def test_one_example_in_training_is_refused_as_by_torch():
    inner, train, val = built(normed)
    train = [tuple(p[:, :1] for p in b) for b in train]
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        inner(train, val, tasks=LOOP)
    with pytest.raises(ValueError, match="more than 1 value"):
        inner(train, val, tasks=il.tasks.vmap())


# What cannot be batched. ------------------------------------------------------------------------


class Looking(nn.Module):
    """Looks at values."""

    def forward(self, x):
        return x if x.sum().item() > 0 else 2 * x


def unbatchable():
    return nn.Sequential(nn.Linear(2, 3), Looking(), nn.Linear(3, 1))


def test_a_model_that_cannot_be_batched_warns_once_and_is_the_loop():
    inner, train, val = built(unbatchable)
    way = il.tasks.vmap()
    with pytest.warns(UserWarning, match="layer Looking") as found:
        losses = inner(train, val, tasks=way)
    assert len(found) == 1
    assert_as_loop(inner, train, val, way)  # without a warning
    expected = inner(train, val, tasks=LOOP)
    assert_same(gradients(losses.sum(), inner), gradients(expected.sum(), inner))


def test_after_one_refusal_another_model_is_batched():
    """What one model cannot do says nothing about another one."""
    inner, train, val = built(unbatchable)
    way = il.tasks.vmap()
    with pytest.warns(UserWarning, match="Looking"):
        inner(train, val, tasks=way)
    seen = []

    def loss(model, batch):
        seen.append(batch[0].dim())
        assert torch._C._are_functorch_transforms_active()
        return squares(model, batch)

    other, *_ = built(loss=loss)
    other(train, val, tasks=way)
    third, *_ = built(unbatchable)
    with pytest.warns(UserWarning, match="Looking"):
        third(train, val, tasks=way)


@pytest.mark.parametrize("where", ["loss", "val_loss"])
def test_a_loss_that_looks_at_values(where):
    def looking(model, batch):
        found = squares(model, batch)
        return found if found > 0.1 else 2 * found

    inner, train, val = built(**{where: looking})
    with pytest.warns(UserWarning, match="the loss"):
        losses = inner(train, val, tasks=il.tasks.vmap())
    assert_same([losses], [inner(train, val, tasks=LOOP)])


def test_an_error_of_the_users_is_not_hidden():
    def loss(model, batch):
        return squares(model, batch) + batch[2]

    inner, train, val = built(loss=loss)
    with pytest.raises(IndexError, match="out of range"):
        inner(train, val, tasks=il.tasks.vmap())
    inner, train, val = built(lambda: nn.Linear(7, 1))
    with pytest.raises(RuntimeError, match="shapes"):
        inner(train, val, tasks=il.tasks.vmap())


def test_after_one_wrong_batch_the_model_is_batched():
    inner, train, val = built()
    way = il.tasks.vmap()
    with pytest.raises(RuntimeError, match="shapes"):
        inner([(x[..., :1], y) for x, y in train], val, tasks=way)
    seen = []
    inner.model.register_forward_hook(
        lambda *_: seen.append(torch._C._are_functorch_transforms_active())
    )
    inner(train, val, tasks=way)
    assert seen and all(seen)


def test_a_loss_of_several_values_is_refused():
    inner, train, val = built(loss=lambda m, b: (m(b[0]) - b[1]).square())
    for way in (il.tasks.vmap(), LOOP):
        with refuses("loss"):
            inner(train, val, tasks=way)


def test_a_policy_that_is_none():
    with refuses("running_stats='shared'"):
        il.tasks.vmap(running_stats="shared")


def test_weights_say_that_they_require_grad():
    """And those that are frozen that they do not."""

    def loss(model, batch):
        trained = [p for p in model.parameters() if p.requires_grad]
        return squares(model, batch) + sum(p.square().sum() for p in trained)

    def model():
        made = Net()
        made.body.bias.requires_grad_(False)
        return made

    inner, train, val = built(model, loss=loss)
    found = inner(train, val, tasks=il.tasks.vmap())
    expected = il.InnerLoop(inner.model, inner.optimizer, loss, learn=("init", "lr"))
    assert_same([found], [expected(train, val, tasks=LOOP)])


@pytest.mark.parametrize(
    "function",
    [
        *(torch.max, Tensor.min, Tensor.median, torch.nanmedian),
        lambda x: torch.max(input=x),
        lambda x: torch.vmap(lambda row: row.max())(x.view(2, -1)).sum(),
    ],
)
def test_equal_extremes_share_their_gradient(function):
    def loss(model, batch):
        out = model(batch[0])
        return squares(model, batch) + function(torch.cat([out, out])).square()

    inner, train, val = built(loss=loss)
    assert_as_loop(inner, train, val, VMAP)


def test_a_seed_that_the_loss_sets():
    inner, train, val = built(loss=seeding)
    with pytest.warns(UserWarning, match="seed"):
        losses = inner(train, val, tasks=il.tasks.vmap())
    assert_same([losses], [inner(train, val, tasks=LOOP)])


# Everything else that a call can be. ------------------------------------------------------------


def test_a_closed_over_tensor_has_its_gradient():
    scale = torch.tensor(1.5, requires_grad=True)
    inner, train, val = built(loss=lambda m, b: scale * squares(m, b))
    found = []
    for way in (il.tasks.vmap(), LOOP):
        found.append(torch.autograd.grad(inner(train, val, tasks=way).sum(), [scale]))
    assert_same(*found)


def test_a_second_derivative_of_the_meta_loss():
    inner, train, val = built()
    found = []
    for way in (il.tasks.vmap(), LOOP):
        grads = gradients(inner(train, val, tasks=way).sum(), inner, create_graph=True)
        found.append(gradients(sum(g.square().sum() for g in grads), inner))
    assert_same(*found)


# il.batched. ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [il.Tape(), il.Remat(), il.Binomial(1)], ids=repr)
def test_a_batched_step_is_the_step_of_each_task(backward):
    model = normed()
    f = il.functional(model)
    rule = il.optim.adam(lr=0.1)
    step = il.inner_step(squares, rule, model)
    lr = torch.tensor(0.1, requires_grad=True)
    params = {
        n: (p.detach() + 0.1 * torch.randn(TASKS, *p.shape)).requires_grad_()
        for n, p in f.params.items()
    }
    buffers = {n: b.expand(TASKS, *b.shape) for n, b in f.buffers.items()}
    train = batches(3, TASKS)
    meta = il.Meta({"lr": lr})
    state, outs = il.unroll(il.batched(step), il.State(params, buffers), meta, train, backward)
    assert outs.shape == (3, TASKS)
    found = [*state.params.values(), outs]
    grads = torch.autograd.grad(sum(v.square().sum() for v in found), [*params.values(), lr])
    each = []
    for t in range(TASKS):
        start = il.State({n: p[t] for n, p in params.items()}, f.buffers)
        each.append(il.unroll(step, start, meta, [tuple(p[t] for p in b) for b in train]))
    expected = [torch.stack([s.params[n] for s, _ in each]) for n in params]
    expected.append(torch.stack([o for _, o in each], 1))
    assert_same(found, expected)
    total = sum(v.square().sum() for v in expected)
    assert_same(grads, torch.autograd.grad(total, [*params.values(), lr]))
