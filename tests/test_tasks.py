"""A task axis: every task as if it were called alone."""

import pytest
import torch
from torch import nn, optim

import innerloop as il
from references import Net, assert_close, assert_derivative, batches, plain, squares
from test_errors import refuses
from ways import assert_as_loop, assert_same, gradients

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
    "backward", [il.Tape(), il.Remat(), il.Forward(), il.Truncated(9)], ids=repr
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


# The ways to run them. ----------------------------------------------------------------------------

LOOP = il.tasks.loop()
each_way = pytest.mark.parametrize("way", [il.tasks.vmap(), il.tasks.threads(2)], ids=str)


class Momentum(nn.Module):
    """A learned optimizer."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(-2.0))
        self.decay = nn.Parameter(torch.tensor(0.5))

    def init(self, params):
        return {name: torch.zeros_like(p) for name, p in params.items()}

    def update(self, params, grads, state):
        state = {name: self.decay * s + grads[name] for name, s in state.items()}
        return {n: p - self.rate.exp() * state[n] for n, p in params.items()}, state


class Centered(nn.Module):
    """Subtracts a running mean of its outputs: each task is measured with its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        out = self.linear(x)
        self.mean = 0.5 * self.mean + 0.5 * out.detach().mean(0)
        return out - self.mean


OPTIONS = {
    "buffers that act": dict(make_model=Centered),
    # The norm of one task's gradient, not of all tasks'.
    "clipping": dict(grad_transform=il.clip_norm(0.05)),
    "schedule": dict(
        learn={"lr": il.Learn(per=("parameter", "step"), steps=STEPS), "init": True},
        schedule=lambda step: 0.5**step,
    ),
    "first order": dict(make_model=normed, make=optim.Adam, first_order=True),
    "learned optimizer": dict(make=lambda params, lr: Momentum(), learn=("init",)),
}


@each_way
@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_the_loop_by_every_way(case, way):
    assert_as_loop(*built(**OPTIONS[case]), way)


@each_way
def test_a_single_task_and_zero_steps_by_every_way(way):
    inner, train, val = built(learn=("init",))
    assert_as_loop(inner, [], val, way)
    train, val = [tuple(p[:1] for p in b) for b in train], tuple(p[:1] for p in val)
    assert_as_loop(inner, train, val, way)


@each_way
@pytest.mark.parametrize("repeated", [False, True])
def test_learned_data_has_its_gradient_by_every_way(repeated, way):
    inner, train, val = built()
    root = torch.randn(2, requires_grad=True)
    train = [train[0]] * 3 if repeated else train
    leaves = [*{id(b): b[0] for b in train}.values(), val[1]]
    for leaf in leaves:
        leaf.requires_grad_()
    found = []
    for each in (way, LOOP):
        given = train if repeated else [(x * root.exp(), y) for x, y in train]
        losses = inner(given, val, tasks=each)
        wanted = leaves if repeated else [*leaves, root]
        found.append(torch.autograd.grad(losses.square().sum(), wanted))
    assert_same(*found)
    assert all(g.any() for g in found[0])


@each_way
def test_adapted_models_by_every_way(way):
    inner, train, val = built(normed, optim.Adam, warm=1)
    found, expected = (inner.adapt(train, tasks=each) for each in (way, LOOP))
    assert_same(found.params.values(), expected.params.values())
    assert_same(*([b.double() for b in a.buffers.values()] for a in (found, expected)))
    assert_same([found.losses], [expected.losses])
    assert_same([found(val[0])], [expected(val[0])])
    assert list(found) == found.each
    grads = [gradients((a(val[0]) ** 2).sum() + a.losses.sum(), inner) for a in (found, expected)]
    assert_same(*grads)
    written = []
    for adapted in (found, expected):
        model = normed()
        optimizer = optim.Adam(model.parameters())
        adapted.each[1].write_to(model, optimizer)
        averages = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        written.append([*(p.detach() for p in model.parameters()), *averages])
    assert_same(*written)


@each_way
def test_auxiliary_outputs_by_every_way(way):
    inner, train, _ = built(
        loss=lambda m, b: (squares(m, b), {"w": m.head.weight, "n": "word", "k": b[0].sum()})
    )
    found, expected = (inner.adapt(train, tasks=each).aux for each in (way, LOOP))
    assert found["n"] == expected["n"] == [["word"] * STEPS] * TASKS
    assert_same([found["w"], found["k"]], [expected["w"], expected["k"]])
    assert_same(*(gradients(aux["w"].square().sum(), inner) for aux in (found, expected)))


@each_way
def test_a_run_that_goes_on_by_every_way(way):
    outcomes = []
    for each in (way, LOOP):
        torch.manual_seed(3)
        inner, train, val = built(learn=("lr",), backward=il.Truncated(1, carry=True))
        values = [inner(train, val, tasks=each) for _ in range(3)]
        outcomes.append([*values, *gradients(values[-1].sum(), inner)])
    assert_same(*outcomes)


@each_way
def test_without_gradients_no_graph_is_kept(way):
    inner, train, val = built(normed)
    with torch.no_grad():
        losses = inner(train, val, tasks=way)
        adapted = inner.adapt(train, tasks=way)
    assert not losses.requires_grad
    assert not adapted.losses.requires_grad
    assert not any(p.requires_grad for p in adapted.params.values())
    assert_same([losses], [inner(train, val, tasks=LOOP)])
    with torch.inference_mode():
        assert_same([inner(train, val, tasks=way).clone()], [losses])


@each_way
def test_the_model_stays_as_it_is(way):
    inner, train, val = built(normed, optim.Adam, warm=2)
    kinds = [type(m) for m in inner.model.modules()]
    before = repr((inner.model.state_dict(), inner.optimizer.state_dict()))
    inner(train, val, tasks=way).sum().backward()
    assert [type(m) for m in inner.model.modules()] == kinds
    assert repr((inner.model.state_dict(), inner.optimizer.state_dict())) == before


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
        with refuses("3 tasks"):
            adapted(x)
