"""Tasks in threads: the loop's numbers, what threads must not share, and what runs in a loop."""

import contextvars
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn, optim
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import innerloop as il
from references import Net, squares
from test_errors import refuses
from test_tasks import built, normed, seeding
from ways import assert_as_loop, assert_same, gradients

LOOP = il.tasks.loop()


def two():
    return il.tasks.threads(2)


VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)


# Exact. -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 7, None])
def test_any_number_of_threads(n):
    inner, train, val = built(normed, optim.Adam, warm=2)
    assert_as_loop(inner, train, val, il.tasks.threads(n))


def test_tasks_run_in_threads_of_their_own():
    seen = set()

    def loss(model, batch):
        seen.add(threading.get_ident())
        return squares(model, batch)

    inner, train, val = built(loss=loss)
    inner(train, val, tasks=two())
    assert threading.get_ident() not in seen
    assert len(seen) <= 2


def test_what_the_caller_has_set_by_a_context_variable_holds_in_threads():
    inner, train, val = built(loss=lambda model, batch: VARIABLE.get() * squares(model, batch))
    token = VARIABLE.set(3.0)
    try:
        assert_as_loop(inner, train, val, two())
    finally:
        VARIABLE.reset(token)


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return 2 * found if func is torch.Tensor.square else found


@pytest.mark.parametrize(
    "context",
    [
        Doubled,
        lambda: FlopCounterMode(display=False),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: 2 * t, lambda t: t),
    ],
    ids=["functions", "operations", "saved tensors"],
)
def test_what_is_around_one_thread_only_has_the_tasks_run_in_a_loop(context):
    inner, train, val = built(loss=lambda model, batch: (model(batch[0]) - batch[1]).square().sum())
    way = two()
    with context():
        expected = inner(train, val, tasks=LOOP)
        with pytest.warns(UserWarning, match="one thread only"):
            found = inner(train, val, tasks=way)
    assert_same([found], [expected])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_as_loop(inner, train, val, way)


def test_the_way_may_be_the_loops_own():
    inner, train, val = built(tasks=two())
    assert_same([inner(train, val)], [inner(train, val, tasks=LOOP)])
    assert_same([inner(train, val, tasks=True)], [inner(train, val, tasks=LOOP)])
    single = inner([tuple(p[0] for p in b) for b in train], tuple(p[0] for p in val), tasks=False)
    assert single.shape == ()


def test_gradients_in_grad_of_the_model():
    inner, train, val = built(normed, optim.Adam)
    for way in (two(), LOOP):
        inner(train, val, tasks=way).mean().backward()
    grads = [p.grad.clone() for p in inner.parameters()]
    inner.zero_grad()
    inner(train, val, tasks=LOOP).mean().backward()
    assert_same(grads, [2 * p.grad for p in inner.parameters()])


def test_backward_twice_with_retain_graph():
    inner, train, val = built()
    losses = inner(train, val, tasks=two())
    first = gradients(losses.sum(), inner, retain_graph=True)
    again = gradients(losses.sum(), inner, retain_graph=True)
    one = gradients(losses[1], inner)
    assert_same(again, first)
    assert_same(one, gradients(inner(train, val, tasks=LOOP)[1], inner))


def collecting():
    """A loop whose validation loss leaves a term elsewhere, and that place."""
    left = []

    def measured(model, batch):
        left.append(model(batch[0]).square().mean())
        return squares(model, batch)

    return *built(val_loss=measured), left


def test_terms_that_the_loss_leaves_elsewhere_have_their_gradient():
    inner, train, val, left = collecting()
    found = []
    for way in (two(), LOOP):
        left.clear()
        total = inner(train, val, tasks=way).sum() + sum(left)
        found.append(gradients(total, inner, retain_graph=True))
    assert_same(*found)


def test_such_terms_need_the_graph_a_second_time():
    inner, train, val, left = collecting()
    total = inner(train, val, tasks=two()).sum() + sum(left)
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


class Clipped(torch.autograd.Function):
    """The identity, with a derivative that is not linear in what comes back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.01, 0.01)


def test_a_backward_that_is_not_linear():
    inner, train, val = built(
        loss=lambda model, batch: (Clipped.apply(model(batch[0])) - batch[1]).square().mean()
    )
    assert_as_loop(inner, train, val, two())


def test_a_task_that_diverged_and_is_left_out():
    inner, train, val = built(lambda: nn.Linear(2, 1))
    train = [(torch.stack([x[0], 1e60 * x[1], x[2]]), y) for x, y in train]
    found = []
    for way in (two(), LOOP):
        losses = inner(train, val, tasks=way)
        assert losses[1] > 1e100
        found.append(gradients(losses[losses < 1e100].mean(), inner))
    assert_same(*found)


def test_a_second_backward_without_retain_graph_is_refused_as_by_torch():
    inner, train, val = built()
    losses = inner(train, val, tasks=two())
    losses.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        losses.sum().backward()


def test_create_graph_is_refused():
    inner, train, val = built()
    losses = inner(train, val, tasks=two())
    with refuses("create_graph=True", "loop()", kind=il.RequirementError):
        gradients(losses.sum(), inner, create_graph=True)


# What threads have to be told. ------------------------------------------------------------------


def test_autocast_holds_in_threads():
    torch.set_default_dtype(torch.float32)
    inner, train, val = built()
    seen = []

    def loss(model, batch):
        out = model(batch[0])
        seen.append((out.dtype, torch.is_autocast_enabled("cpu")))
        return (out - batch[1]).square().mean()

    inner.loss = loss
    for way in (two(), LOOP):
        seen.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = inner(train, val, tasks=way)
        losses.sum().backward()
        assert set(seen) == {(torch.bfloat16, True)}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("before", [1, 2])
def test_the_number_of_threads_of_torch_is_restored(before):
    kept = torch.get_num_threads()
    torch.set_num_threads(before)
    try:
        inner, train, val = built()
        losses = inner(train, val, tasks=two())
        assert torch.get_num_threads() == before
        losses.sum().backward()
        assert torch.get_num_threads() == before

        def wrong(model, batch):
            raise KeyError("no")

        inner.loss = wrong
        with pytest.raises(KeyError, match="no"):
            inner(train, val, tasks=two())
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(kept)


@pytest.mark.parametrize("kind", [KeyError, ValueError, il.RequirementError, RuntimeError])
def test_an_error_in_a_task_is_its_own(kind):
    _, train, val = built()
    marked = [train[0][0][1]]

    def loss(model, batch):
        if torch.equal(batch[0], marked[0]):
            raise kind("task number one is wrong")
        return squares(model, batch)

    inner, *_ = built(loss=loss)
    with pytest.raises(kind, match="task number one is wrong"):
        inner(train, val, tasks=two())
    marked[0] = torch.zeros(())
    assert_as_loop(inner, train, val, two())


# What runs in a loop. ---------------------------------------------------------------------------


def dropping():
    return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))


def test_random_numbers_are_drawn_in_a_loop():
    """One warning; the same numbers as of a loop with the same seed, and the same again."""
    inner, train, val = built(dropping)
    way = two()
    torch.manual_seed(7)
    expected = inner(train, val, tasks=LOOP)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    with pytest.warns(UserWarning, match="draws random numbers") as found:
        losses = inner(train, val, tasks=way)
    assert len(found) == 1
    assert_same([losses], [expected], 0)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(7)
    again = inner(train, val, tasks=way)  # without a second warning
    assert_same([again], [expected], 0)
    assert_same(gradients(losses.sum(), inner), gradients(expected.sum(), inner))


def test_a_model_that_draws_no_more_runs_in_threads_again():
    seen = set()

    def loss(model, batch):
        seen.add(threading.get_ident())
        return squares(model, batch)

    inner, train, val = built(dropping, loss=loss)
    way = two()
    with pytest.warns(UserWarning, match="random"):
        inner(train, val, tasks=way)
    inner.eval()
    seen.clear()
    inner(train, val, tasks=way)
    assert threading.get_ident() not in seen


@pytest.mark.parametrize("where", ["loss", "val_loss"])
def test_a_closed_over_tensor_has_its_gradient_in_a_loop(where):
    scale = torch.tensor(1.5, requires_grad=True)
    inner, train, val = built(**{where: lambda m, b: scale * squares(m, b)})
    way = two()
    with pytest.warns(UserWarning, match="was not given") as found:
        losses = inner(train, val, tasks=way)
    assert len(found) == 1
    expected = inner(train, val, tasks=LOOP)
    assert_same(
        torch.autograd.grad(losses.sum(), [scale]), torch.autograd.grad(expected.sum(), [scale])
    )
    inner(train, val, tasks=way)  # no second warning


def test_a_tensor_closed_over_at_the_last_task_only():
    """Every task is looked at."""
    _, train, val = built()
    last = train[0][0][-1]
    scale = torch.tensor(1.5, requires_grad=True)

    def loss(model, batch):
        found = squares(model, batch)
        return scale * found if torch.equal(batch[0], last) else found

    inner, *_ = built(loss=loss)
    with pytest.warns(UserWarning, match="was not given"):
        losses = inner(train, val, tasks=two())
    assert torch.autograd.grad(losses.sum(), [scale])[0] != 0


def test_without_gradients_a_closed_over_tensor_is_no_reason():
    scale = torch.tensor(1.5, requires_grad=True)
    inner, train, val = built(loss=lambda m, b: scale * squares(m, b))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        inner(train, val, tasks=two())


def test_a_number_of_threads_that_is_none():
    for n in (0, -1, 1.5, True, "2"):
        with refuses(f"threads({n!r})"):
            il.tasks.threads(n)


@pytest.mark.parametrize("given", [1, "vmap", il.tasks.vmap, None, [True]], ids=repr)
def test_what_is_no_way_is_refused(given):
    inner, train, val = built()
    if given is None:
        with refuses("tasks=None"):
            il.InnerLoop(inner.model, inner.optimizer, squares, tasks=given)
        return
    with refuses("tasks="):
        inner(train, val, tasks=given)


def test_calls_from_several_threads_at_once():
    """Each with threads for its own tasks."""
    inner, train, val = built()
    expected = inner(train, val, tasks=LOOP)
    results = []
    callers = [
        threading.Thread(target=lambda: results.append(inner(train, val, tasks=two())))
        for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert len(results) == 3
    for losses in results:
        assert_same([losses], [expected])


SCRIPT = """
import os, torch, innerloop as il

def squares(model, batch):
    return (model(batch) - 1).square().mean()

def built(loss):
    model = torch.nn.Linear(2, 1)
    return il.InnerLoop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)

x, way = torch.ones(4, 3, 2), il.tasks.threads(2)
inner = built(squares)

def nesting(model, batch):
    with torch.no_grad():
        inner([x], x, tasks=il.tasks.threads(2))
    return squares(model, batch)

built(nesting)([x], x, tasks=way).sum().backward()
if hasattr(os, "fork"):
    child = os.fork()
    if child == 0:
        inner([x], x, tasks=il.tasks.threads(2)).sum().backward()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_threads_inside_threads_and_after_a_fork():
    """They must not wait for threads they run in; in a process that can be ended if they do."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_forward_mode_derivatives_do_not_end_silently():
    inner, train, (x, y) = built()
    with torch.autograd.forward_ad.dual_level():
        val = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), y
        with pytest.warns(UserWarning, match="forward-mode"):
            losses = inner(train, val, tasks=two())
        assert (torch.autograd.forward_ad.unpack_dual(losses).tangent != 0).all()


def test_draws_after_which_the_random_state_is_put_back():
    """The state afterwards tells nothing."""
    inner, train, val = built(loss=seeding)
    with pytest.warns(UserWarning, match="random numbers"):
        losses = inner(train, val, tasks=two())
    assert_same([losses], [inner(train, val, tasks=LOOP)])


def test_a_hook_that_is_registered_after_the_first_call():
    inner, train, val = built()
    way = two()
    inner(train, val, tasks=way)
    inner.model.body.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="Linear has a forward hook"):
        inner(train, val, tasks=way)


@pytest.mark.parametrize("where", ["model", "loss"])
def test_a_forward_hook_has_the_tasks_run_in_a_loop(where):
    kept, teacher = {}, Net()

    def loss(model, batch):
        with torch.no_grad():
            teacher(batch[0])
        return squares(model, batch) + (model.body(batch[0]) - kept["features"]).square().mean()

    inner, train, val = built(loss=loss)
    hooked = inner.model if where == "model" else teacher
    hooked.body.register_forward_hook(lambda _m, _i, out: kept.update(features=out.detach()))
    with pytest.warns(UserWarning, match="Linear has a forward hook"):
        losses = inner(train, val, tasks=two())
    assert_same([losses], [inner(train, val, tasks=LOOP)])


def test_hooks_of_torch_are_no_reason():
    def model():
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 3)), nn.Linear(3, 1))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        inner, train, val = built(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_as_loop(inner, train, val, two())


def test_no_task_goes_on_after_an_error():
    ended, going_on = [], threading.Event()

    def loss(model, batch):
        if batch[0].flatten()[0] == 0:
            raise KeyError("mine")
        going_on.wait(0.2)
        ended.append(batch)
        return squares(model, batch)

    inner, train, val = built(loss=loss)
    train[0][0][1] = 0
    with pytest.raises(KeyError, match="mine"):
        inner(train, val, tasks=two())
    count = len(ended)
    going_on.wait(0.5)
    assert len(ended) == count
