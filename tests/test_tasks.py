"""A task axis: every task as if it were called alone."""

import copy

import pytest
import torch
from torch import nn, optim

import innerloop as il
from references import Net, assert_close, assert_derivative, batches, plain, squares
from test_errors import refuses

TASKS, STEPS = 3, 2


def normed():
    return nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))


def one(batch, task):
    return tuple(part[task] for part in batch)


def built(make_model=Net, make=optim.SGD, loss=squares, warm=0, **options):
    model = make_model()
    optimizer = make(model.parameters(), lr=0.1)
    plain(model, optimizer, squares, batches(warm))
    options.setdefault("learn", ("init", "lr"))
    inner = il.InnerLoop(model, optimizer, loss, **options)
    *train, val = batches(STEPS + 1, TASKS)
    return inner, train, val


def seeding(model, batch):
    """A loss with the same noise at every call, which leaves the random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        noise = torch.randn(())
    return squares(model, (batch[0] + noise, batch[1]))


# Each task equals the single call. ----------------------------------------------------------------


@pytest.mark.parametrize(
    "backward", [il.Tape(), il.Remat(), il.Binomial(1), il.Forward(), il.Truncated(9)], ids=repr
)
@pytest.mark.parametrize(("make_model", "make"), [(Net, optim.SGD), (normed, optim.Adam)])
def test_every_task_is_the_single_call(make_model, make, backward):
    inner, train, val = built(make_model, make, warm=2, backward=backward)
    together = inner(train, val, tasks=True)
    assert together.shape == (TASKS,)
    parameters = list(inner.parameters())
    for t in range(TASKS):
        single = inner([one(batch, t) for batch in train], one(val, t))
        assert_close([together[t]], [single], 1e-13)
        assert_close(
            torch.autograd.grad(together[t], parameters, retain_graph=True),
            torch.autograd.grad(single, parameters),
            1e-11,
        )


def test_the_mean_over_tasks_by_differences():
    inner, train, val = built(normed)
    assert_derivative(lambda: inner(train, val, tasks=True).mean(), inner.parameters())


def test_the_model_stays_as_it_is():
    inner, train, val = built(normed, optim.Adam, warm=2)
    before = copy.deepcopy((inner.model.state_dict(), inner.optimizer.state_dict()))
    inner(train, val, tasks=True).sum().backward()
    now = (inner.model.state_dict(), inner.optimizer.state_dict())
    assert repr(now) == repr(before)


def test_adapted_models_of_all_tasks():
    inner, train, val = built(normed, optim.Adam, warm=1)
    together = inner.adapt(train, tasks=True)
    assert len(together) == TASKS
    assert repr(together) == "AdaptedTasks(3 x Adapted(Sequential, steps=2))"
    single = [inner.adapt([one(batch, t) for batch in train]) for t in range(TASKS)]
    names = list(single[0].params)
    assert list(together.params) == names
    for name in names:
        assert_close([together.params[name]], [torch.stack([s.params[name] for s in single])])
    for name in single[0].buffers:
        expected = torch.stack([s.buffers[name] for s in single])
        assert_close([together.buffers[name]], [expected])
    assert_close([together.losses], [torch.stack([s.losses for s in single])])
    assert together.aux is None
    assert len(together.opt_state) == TASKS
    x = val[0]
    assert_close([together(x)], [torch.stack([s(x[t]) for t, s in enumerate(single)])])
    together, single = inner.adapt(train, tasks=True), inner.adapt(train, tasks=True)
    assert_close([together(input=x)], [single(x)])
    assert_close([together.each[1](x[1])], [inner.adapt([one(b, 1) for b in train])(x[1])])


def test_auxiliary_outputs_of_all_tasks():
    inner, train, val = built(
        loss=lambda m, b: (squares(m, b), {"w": m.head.weight, "n": "word", "k": b[0].sum()})
    )
    aux = inner.adapt(train, tasks=True).aux
    assert aux["w"].shape == (TASKS, STEPS, 1, 3)
    assert aux["n"] == [["word"] * STEPS] * TASKS
    assert_close([aux["k"]], [torch.stack([x.sum((1, 2)) for x, _ in train], 1)])
    assert inner(train, val, tasks=True).shape == (TASKS,)


def test_losses_of_all_tasks_are_differentiable():
    inner, train, _ = built()
    weights = torch.rand(TASKS, STEPS)
    assert_derivative(
        lambda: (inner.adapt(train, tasks=True).losses * weights).sum(), inner.parameters()
    )


def test_without_gradients_no_graph_is_kept():
    inner, train, val = built()
    with torch.no_grad():
        adapted = inner.adapt(train, tasks=True)
        value = inner(train, val, tasks=True)
    assert not value.requires_grad
    assert not any(p.requires_grad for p in adapted.params.values())
    assert not adapted.losses.requires_grad


def test_random_numbers_are_drawn_task_after_task():
    def dropping():
        return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    inner, train, _ = built(dropping)
    torch.manual_seed(7)
    together = inner.adapt(train, tasks=il.tasks.loop()).losses
    torch.manual_seed(7)
    single = [inner.adapt([one(b, t) for b in train]).losses for t in range(TASKS)]
    assert_close([together], [torch.stack(single)])
    assert not torch.equal(together[0], together[1])


# What has a task axis. ----------------------------------------------------------------------------


def test_one_batch_used_for_every_step():
    """The way of the README: the same support set five times."""
    inner, (support, *_), val = built()
    together = inner([support] * 5, val, tasks=True)
    single = [inner([one(support, t)] * 5, one(val, t)) for t in range(TASKS)]
    assert_close([together], [torch.stack(single)])


def test_a_batch_that_is_repeated_stays_one_object():
    seen = []

    def loss(model, batch):
        seen.append(id(batch))
        return squares(model, batch)

    inner, (support, *_), _ = built(loss=loss)
    inner.adapt([support] * 4, tasks=il.tasks.loop())
    assert all(len(set(seen[4 * t : 4 * t + 4])) == 1 for t in range(TASKS))


def test_a_single_task():
    inner, train, val = built()
    train, val = ([tuple(p[:1] for p in b) for b in data] for data in (train, [val]))
    value = inner(train, val[0], tasks=True)
    assert value.shape == (1,)
    assert_close([value[0]], [inner([one(b, 0) for b in train], one(val[0], 0))])


def test_what_is_no_tensor_belongs_to_all_tasks():
    def loss(model, batch):
        assert batch["name"] == "word"
        x, y = batch["data"]
        return batch["scale"] * squares(model, (x, y))

    inner, train, val = built(loss=loss)
    train, val = (
        [{"data": list(b), "scale": 2, "name": "word"} for b in data] for data in (train, [val])
    )
    together = inner(train, val[0], tasks=True)

    def slice_of(batch, t):
        return {**batch, "data": [part[t] for part in batch["data"]]}

    single = [inner([slice_of(b, t) for b in train], slice_of(val[0], t)) for t in range(TASKS)]
    assert_close([together], [torch.stack(single)])


def test_zero_steps_of_several_tasks():
    inner, _, val = built(learn=("init",))
    together = inner([], val, tasks=True)
    assert_close([together], [torch.stack([squares(inner.model, one(val, t)) for t in range(3)])])
    assert_derivative(lambda: inner([], val, tasks=True).sum(), inner.parameters())


def test_generators_and_loaders_of_tasks():
    inner, train, val = built()
    expected = inner(train, val, tasks=True)
    assert_close([inner((b for b in train), val, tasks=True)], [expected])
    loader = torch.utils.data.DataLoader(train, batch_size=None)
    assert_close([inner(loader, val, tasks=True)], [expected])


# Refusals. --------------------------------------------------------------------------------------


def never(model, batch):
    raise AssertionError("work was done before the refusal")


WRONG = {
    "another number in val": (lambda train, val: (train, tuple(p[:2] for p in val)), ["2, 3"]),
    "another number in one batch": (
        lambda train, val: ([train[0], tuple(p[:1] for p in train[1])], val),
        ["1, 3"],
    ),
    "another number in one tensor": (
        lambda train, val: ([(train[0][0], train[0][1][:2])], val),
        ["2, 3"],
    ),
    "a scalar": (lambda train, val: ([(*train[0], torch.tensor(1.0))], val), ["0-d"]),
    "a scalar in val": (lambda train, val: (train, (*val, torch.tensor(1.0))), ["0-d"]),
    "no tensor": (lambda train, val: ([1, 2], None), ["no tensor"]),
    "no task": (
        lambda train, val: ([tuple(p[:0] for p in train[0])], tuple(p[:0] for p in val)),
        [],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_axes_that_do_not_fit_are_refused_before_any_work(case):
    change, names = WRONG[case]
    inner, train, val = built(loss=never)
    train, val = change(train, val)
    with refuses("tasks=True", *names, model=inner.model, optimizer=inner.optimizer):
        inner(train, val, tasks=True)


def test_adapting_to_nothing_is_refused():
    inner, *_ = built(loss=never)
    with refuses("tasks=True", "no tensor"):
        inner.adapt([], tasks=True)


def test_writing_several_models_to_one_is_refused():
    inner, train, _ = built()
    adapted = inner.adapt(train, tasks=True)
    with refuses("3 tasks", ".each[0]", model=inner.model, optimizer=inner.optimizer):
        adapted.write_to(inner.model, inner.optimizer)
    adapted.each[0].write_to(inner.model, inner.optimizer)


def test_calling_with_another_number_of_tasks_is_refused():
    """Not silently the first ones only."""
    inner, train, val = built()
    adapted = inner.adapt(train, tasks=True)
    for x in (val[0][:2], torch.cat([val[0], val[0]])):
        with refuses():
            adapted(x)
