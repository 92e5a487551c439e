"""Inner schedules: every scheduler of torch gives the trajectory of plain torch, from any point.

Plain torch here is `optimizer.step(); scheduler.step()` on a twin that was built the same way.
"""

import copy
import inspect
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

import innerloop as il
from references import Net, assert_close, assert_derivative, batches, plain, squares
from test_errors import refuses

STEPS = 4

# The table of schedulers. -----------------------------------------------------------------------


class InverseRoot(lrs.LRScheduler):
    """A scheduler as a user writes one, with a state of its own."""

    def __init__(self, optimizer, warmup):
        self.warmup = warmup
        self.asked = 0
        super().__init__(optimizer)

    def get_lr(self):
        self.asked += 1
        factor = min((self.last_epoch + 1) / self.warmup, (self.last_epoch + 1) ** -0.5)
        return [factor * base for base in self.base_lrs]


class AlsoDecay(lrs.ExponentialLR):
    """A scheduler that moves another setting too."""

    def step(self, epoch=None):
        super().step()
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.01 * (self.last_epoch + 1)


def sequence(optimizer):
    first = lrs.ConstantLR(optimizer, factor=0.3, total_iters=2)
    return lrs.SequentialLR(optimizer, [first, lrs.ExponentialLR(optimizer, 0.7)], milestones=[2])


def chain(optimizer):
    first = lrs.LinearLR(optimizer, start_factor=0.2, total_iters=3)
    return lrs.ChainedScheduler([first, lrs.ExponentialLR(optimizer, 0.9)], optimizer=optimizer)


class Row(NamedTuple):
    make: Any
    proportional: bool = True
    """Whether its rates are those of the optimizer times numbers that do not depend on them."""


SCHEDULERS = {
    "LambdaLR": Row(lambda o: lrs.LambdaLR(o, lambda e: 0.9**e)),
    "LambdaLR per group": Row(lambda o: lrs.LambdaLR(o, [lambda e: 0.9**e, lambda e: 1 / (1 + e)])),
    "MultiplicativeLR": Row(lambda o: lrs.MultiplicativeLR(o, lambda e: 0.8 + 0.01 * e)),
    "StepLR": Row(lambda o: lrs.StepLR(o, 2, 0.5)),
    "MultiStepLR": Row(lambda o: lrs.MultiStepLR(o, [1, 4, 6], 0.3)),
    "ConstantLR": Row(lambda o: lrs.ConstantLR(o, factor=0.4, total_iters=4)),
    "LinearLR": Row(lambda o: lrs.LinearLR(o, start_factor=0.2, total_iters=4)),
    "ExponentialLR": Row(lambda o: lrs.ExponentialLR(o, 0.8)),
    "SequentialLR": Row(sequence),
    "PolynomialLR": Row(lambda o: lrs.PolynomialLR(o, total_iters=7, power=2.0)),
    "CosineAnnealingLR": Row(lambda o: lrs.CosineAnnealingLR(o, T_max=4)),
    "CosineAnnealingLR to a floor": Row(lambda o: lrs.CosineAnnealingLR(o, 4, 0.01), False),
    "ChainedScheduler": Row(chain),
    "CyclicLR": Row(lambda o: lrs.CyclicLR(o, 0.05, 0.2, step_size_up=2), False),
    "CyclicLR of the rate only": Row(
        lambda o: lrs.CyclicLR(
            o, 0.05, [0.2, 0.3], step_size_up=3, mode="exp_range", gamma=0.9, cycle_momentum=False
        ),
        False,
    ),
    "OneCycleLR": Row(lambda o: lrs.OneCycleLR(o, max_lr=[0.2, 0.1], total_steps=12), False),
    "CosineAnnealingWarmRestarts": Row(lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=3)),
    "SWALR": Row(lambda o: optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=4), False),
    "a user's": Row(lambda o: InverseRoot(o, 3)),
    "a user's with decay": Row(lambda o: AlsoDecay(o, 0.8)),
}

OPTIMIZERS = {
    "SGD": (optim.SGD, dict(momentum=0.8)),
    "Adam": (optim.Adam, dict(betas=(0.8, 0.9))),
}

EVERY = list(SCHEDULERS)


def test_the_table_has_every_scheduler_of_torch():
    classes = {
        name
        for name, kind in vars(lrs).items()
        if inspect.isclass(kind) and issubclass(kind, lrs.LRScheduler) and not name.startswith("_")
    }
    missing = classes - {name.split()[0] for name in SCHEDULERS}
    assert missing == {"LRScheduler", "ReduceLROnPlateau"}


class Setup:
    """A model, an optimizer of two groups and a scheduler, the same for the same arguments."""

    def __init__(self, scheduler, optimizer="SGD", rates=(0.1, 0.06), warm=0):
        generator_state = torch.get_rng_state()
        torch.manual_seed(3)
        self.model = Net()
        make, settings = OPTIMIZERS[optimizer]
        self.optimizer = make(
            [
                {"params": self.model.body.parameters(), "lr": rates[0], "name": "body"},
                {"params": self.model.head.parameters(), "lr": rates[1], "name": None},
            ],
            lr=0.5,
            **settings,
        )
        self.optimizer.param_groups[0]["mask"] = torch.ones(2)
        self.scheduler = SCHEDULERS[scheduler].make(self.optimizer)
        self.before = batches(warm)
        self.train = batches(STEPS)
        (self.val,) = batches(1)
        torch.set_rng_state(generator_state)
        plain(self.model, self.optimizer, squares, self.before, self.scheduler)

    def inner(self, **options):
        return il.InnerLoop(self.model, self.optimizer, squares, schedule=self.scheduler, **options)

    def run(self):
        """Plain training from here on; the last loss, measured."""
        self.losses = plain(self.model, self.optimizer, squares, self.train, self.scheduler)
        with torch.no_grad():
            return squares(self.model, self.val)


def snapshot(setup):
    """Everything of a scheduler and its optimizer that a call must not change."""
    state = copy.deepcopy((setup.scheduler.state_dict(), setup.optimizer.state_dict()))
    groups = [{k: id(v) for k, v in g.items()} for g in setup.optimizer.param_groups]
    return repr(state), groups, id(setup.optimizer.step), repr(vars(setup.scheduler))


# The trajectory. --------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("scheduler", EVERY)
def test_the_trajectory_is_that_of_plain_torch(scheduler, warm):
    expected, found = (Setup(scheduler, warm=warm) for _ in range(2))
    expected.run()
    before = snapshot(found)
    for learn in ("init", "lr"):
        adapted = found.inner(learn=learn).adapt(found.train)
        assert_close([adapted.losses], [torch.stack(expected.losses)])
        assert_close(adapted.params.values(), expected.model.parameters())
        assert snapshot(found) == before


@pytest.mark.parametrize("scheduler", ["CyclicLR", "OneCycleLR", "a user's with decay"])
def test_the_optimizers_state_is_that_of_plain_torch(scheduler):
    expected, found = (Setup(scheduler, "Adam", warm=2) for _ in range(2))
    expected.run()
    adapted = found.inner().adapt(found.train)
    adapted.write_to(found.model, found.optimizer)
    for a, e in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        ours, theirs = found.optimizer.state[a], expected.optimizer.state[e]
        assert ours.keys() == theirs.keys()
        assert_close([ours[k] for k in theirs], theirs.values())


@pytest.mark.parametrize("scheduler", ["StepLR", "OneCycleLR", "a user's"])
def test_a_scheduler_stepped_between_calls_is_seen(scheduler):
    expected, found = (Setup(scheduler) for _ in range(2))
    inner = found.inner(learn=("lr",))
    inner(found.train, found.val)
    for setup in (expected, found):
        plain(setup.model, setup.optimizer, squares, setup.train[:3], setup.scheduler)
    value = expected.run()
    assert_close([inner(found.train, found.val)], [value])


@pytest.mark.parametrize("scheduler", ["CyclicLR", "OneCycleLR"])
@pytest.mark.parametrize(("optimizer", "name"), [("SGD", "momentum"), ("Adam", "betas")])
def test_a_learned_setting_that_the_scheduler_moves(scheduler, optimizer, name):
    """It starts as plain torch, also when the scheduler has gone on since it was built."""
    expected, found = (Setup(scheduler, optimizer, warm=1) for _ in range(2))
    inner = found.inner(learn=(name, "lr"))
    for setup in (expected, found):
        plain(setup.model, setup.optimizer, squares, setup.train[:2], setup.scheduler)
    value = expected.run()
    assert_close([inner(found.train, found.val)], [value])
    assert_derivative(lambda: inner(found.train, found.val), inner.parameters())


# Derivatives. -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", [n for n, row in SCHEDULERS.items() if row.proportional])
def test_the_derivative_by_the_rates_is_that_of_plain_torch(scheduler):
    setup = Setup(scheduler)
    inner = setup.inner(learn=("lr",))
    (grad,) = torch.autograd.grad(inner(setup.train, setup.val), list(inner.parameters()))
    eps = 1e-4

    def at(k):
        moved = (0.1 + k * eps, 0.06 - 0.3 * k * eps)
        return Setup(scheduler, rates=moved).run().item()

    expected = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * eps)
    assert_close([grad @ torch.tensor([1.0, -0.3])], [torch.tensor(expected)], 1e-7)


@pytest.mark.parametrize("scheduler", EVERY)
def test_the_derivative_by_learned_rates_is_that_of_differences(scheduler):
    setup = Setup(scheduler, warm=2)
    learn = {
        "init": True,
        "lr": il.Learn(("parameter", "step"), steps=STEPS, transform="log"),
        "momentum": True,
    }
    inner = setup.inner(learn=learn)
    assert_derivative(lambda: inner(setup.train, setup.val), inner.parameters())


@pytest.mark.parametrize("backward", [il.Remat(), il.Forward()], ids=repr)
@pytest.mark.parametrize("scheduler", ["LambdaLR", "CyclicLR", "OneCycleLR", "a user's with decay"])
def test_other_strategies_see_the_same_schedule(scheduler, backward):
    grads = []
    for strategy in (il.Tape(), backward):
        setup = Setup(scheduler, warm=1)
        inner = setup.inner(learn=("init", "lr", "momentum"), backward=strategy)
        value = inner(setup.train, setup.val)
        plain(setup.model, setup.optimizer, squares, [], setup.scheduler)
        grads.append(torch.autograd.grad(value, list(inner.parameters())))
    assert_close(grads[1], grads[0], 1e-10)


def test_a_scheduler_that_goes_on_before_the_backward():
    """What is computed again sees the schedule of the forward."""
    grads = []
    for wait in (False, True):
        setup = Setup("OneCycleLR", warm=1)
        inner = setup.inner(learn=("lr", "momentum"), backward=il.Remat())
        value = inner(setup.train, setup.val)
        if wait:
            setup.optimizer.step()
            setup.scheduler.step()
        grads.append(torch.autograd.grad(value, list(inner.parameters())))
    assert_close(grads[1], grads[0])


# Rates that are tensors. ------------------------------------------------------------------------


def with_tensor_rates(scheduler, grad):
    setup = Setup(scheduler, rates=(torch.tensor(0.1), torch.tensor(0.06)))
    for group in setup.optimizer.param_groups:
        group["lr"].requires_grad_(grad)
    return setup


@pytest.mark.parametrize("backward", [il.Tape(), il.Remat()], ids=repr)
@pytest.mark.parametrize(
    "scheduler", ["LambdaLR", "ExponentialLR", "CosineAnnealingLR", "OneCycleLR", "CyclicLR"]
)
def test_rates_that_are_tensors(scheduler, backward):
    """Schedulers write to them in place."""
    expected = Setup(scheduler)
    found = with_tensor_rates(scheduler, grad=False)
    before = snapshot(found)
    inner = found.inner(backward=backward)
    value = inner(found.train, found.val)
    assert snapshot(found) == before
    twin = expected.inner()
    assert_close(
        torch.autograd.grad(value, list(inner.parameters())),
        torch.autograd.grad(twin(expected.train, expected.val), list(twin.parameters())),
        1e-10,
    )
    assert_close([value], [expected.run()])


@pytest.mark.parametrize("backward", [il.Tape(), il.Remat()], ids=repr)
@pytest.mark.parametrize("scheduler", ["LambdaLR", "ExponentialLR", "LinearLR"])
def test_a_rate_requiring_grad_gets_its_gradient_though_it_is_scheduled(scheduler, backward):
    found = with_tensor_rates(scheduler, grad=False)
    rates = [group["lr"].requires_grad_() for group in found.optimizer.param_groups]
    inner = found.inner(learn=(), backward=backward)
    grads = torch.autograd.grad(inner(found.train, found.val), rates)
    expected = Setup(scheduler)
    twin = expected.inner(learn=("lr",))
    (learned,) = torch.autograd.grad(twin(expected.train, expected.val), list(twin.parameters()))
    # The tensor holds the present rate, and what is learned is that before the schedule.
    first = torch.stack([rate.detach() for rate in rates]) / torch.tensor([0.1, 0.06])
    assert_close([torch.stack(grads) * first], [learned], 1e-10)


# Functions. -------------------------------------------------------------------------------------


def made(schedule, **options):
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return il.InnerLoop(model, optimizer, squares, schedule=schedule, **options)


@pytest.mark.parametrize("learn", ["init", "lr"])
def test_a_function_of_the_step(learn):
    *train, val = batches(STEPS + 1)
    asked = []

    def schedule(step):
        asked.append(step)
        return 0.5**step

    inner = made(schedule, learn=learn)
    model = copy.deepcopy(inner.model)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    plain(model, optimizer, squares, train, lrs.ExponentialLR(optimizer, 0.5))
    assert_close(inner.adapt(train).params.values(), model.parameters())
    assert asked == list(range(STEPS))
    assert all(type(step) is int for step in asked)
    assert_derivative(lambda: inner(train, val), inner.parameters())


def test_a_function_may_return_an_integer_or_nothing_of_the_rate():
    train = batches(3)
    inner = made(lambda step: 0)
    assert_close(inner.adapt(train).params.values(), inner.model.parameters())
    assert_close(
        made_alike(inner, lambda step: 1).adapt(train).params.values(),
        made_alike(inner, None).adapt(train).params.values(),
    )


def made_alike(inner, schedule):
    return il.InnerLoop(inner.model, inner.optimizer, squares, schedule=schedule)


@pytest.mark.parametrize("backward", [il.Tape(), il.Remat()], ids=repr)
def test_a_function_that_is_learned(backward):
    """Factors out of a tensor that requires grad get its gradient."""
    *train, val = batches(4)
    decay = torch.tensor(-0.3, requires_grad=True)
    inner = made(lambda step: (decay * step).exp(), learn=("lr",), backward=backward)
    assert_derivative(lambda: inner(train, val), [decay, *inner.parameters()])


class LearnedSchedule(nn.Module):
    def __init__(self):
        super().__init__()
        self.factors = nn.Parameter(torch.rand(4))

    def forward(self, step):
        return self.factors[step].exp()


@pytest.mark.parametrize("backward", [il.Tape(), il.Remat()], ids=repr)
def test_a_module_as_the_schedule_is_part_of_the_loop(backward):
    *train, val = batches(4)
    schedule = LearnedSchedule()
    inner = made(schedule, learn=("lr",), backward=backward)
    assert any(p is schedule.factors for p in inner.parameters())
    assert_derivative(lambda: inner(train, val), inner.parameters())


def test_a_schedule_times_rates_per_element_and_step():
    *train, val = batches(3)
    learn = {"lr": il.Learn(("element", "step"), steps=2)}
    inner = made(lambda step: (1.0, 0.25)[step], learn=learn)
    with torch.no_grad():
        scaled = made(None, learn=learn)
        scaled.model.load_state_dict(inner.model.state_dict())
        for p in scaled.settings.parameters():
            p.mul_(torch.tensor([1.0, 0.25]).reshape(2, *[1] * (p.dim() - 1)))
    assert_close([inner(train, val)], [scaled(train, val)])
    assert_derivative(lambda: inner(train, val), inner.parameters())


# Going back to the optimizer. ---------------------------------------------------------------------


ONE_FLOOR = "CosineAnnealingLR to a floor"  # for all groups


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("scheduler", EVERY)
def test_a_learned_rate_written_back_is_used_once(scheduler, warm):
    """After `write_to`, plain torch trains as the loop did; and a new loop starts there too."""
    setup = Setup(scheduler, warm=warm)
    inner = setup.inner(learn=("lr",))
    with torch.no_grad():
        inner.settings["lr"].mul_(torch.tensor([1.5, 1.5 if scheduler == ONE_FLOOR else 0.7]))
        value = inner(setup.train, setup.val)
        inner.write_to()
        assert_close([inner(setup.train, setup.val)], [value])
        for learn in ("init", "lr"):
            assert_close([setup.inner(learn=learn)(setup.train, setup.val)], [value])
        assert_close([setup.inner(learn="lr").hyper["lr"]], [inner.hyper["lr"]])
    assert_close([setup.run()], [value])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR", "CyclicLR of the rate only"])
def test_a_learned_momentum_written_back_is_cycled(scheduler, optimizer):
    setup = Setup(scheduler, optimizer, warm=2)
    name = "momentum" if optimizer == "SGD" else "betas"
    inner = setup.inner(learn=("lr", name))
    with torch.no_grad():
        inner.settings["lr"].mul_(1.5)
        inner.settings[name].mul_(0.6)
        value = inner(setup.train, setup.val)
        inner.write_to()
        assert_close([inner(setup.train, setup.val)], [value])
    assert_close([setup.run()], [value])


def test_rates_that_one_floor_does_not_fit_are_not_written():
    setup = Setup(ONE_FLOOR)
    inner = setup.inner(learn=("lr",))
    with torch.no_grad():
        inner.settings["lr"].mul_(torch.tensor([1.5, 0.7]))
    state = copy.deepcopy(setup.scheduler.state_dict())
    with refuses("CosineAnnealingLR", "inner.hyper", optimizer=setup.optimizer):
        inner.write_to()
    assert setup.scheduler.state_dict() == state


@pytest.mark.parametrize("scheduler", ["SequentialLR", "OneCycleLR", "a user's"])
def test_writing_to_another_optimizer_leaves_the_loop_alone(scheduler):
    setup = Setup(scheduler, warm=2)
    inner = setup.inner(learn=("lr",))
    other = copy.deepcopy(setup.optimizer)
    schedulers = [setup.scheduler, *getattr(setup.scheduler, "_schedulers", ())]
    with torch.no_grad():
        inner.settings["lr"].mul_(3)
        value = inner(setup.train, setup.val)
        rates = [group["lr"] for group in setup.optimizer.param_groups]
        bases = [list(one.base_lrs) for one in schedulers if hasattr(one, "base_lrs")]
        inner.write_to(other)
        assert_close([inner(setup.train, setup.val)], [value])
    assert [one.base_lrs for one in schedulers if hasattr(one, "base_lrs")] == bases
    assert [group["lr"] for group in setup.optimizer.param_groups] == rates
    written = [group["lr"] for group in other.param_groups]
    assert_close([torch.tensor(written)], [3 * torch.tensor(rates)])


# Refusals, copies. --------------------------------------------------------------------------------


def test_a_plateau_is_refused():
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with refuses("ReduceLROnPlateau", model=model, optimizer=optimizer):
        il.InnerLoop(model, optimizer, squares, schedule=lrs.ReduceLROnPlateau(optimizer))


@pytest.mark.parametrize(
    ("schedule", "names"),
    [
        (0.5, ["schedule=0.5"]),
        ("cosine", ["'cosine'"]),
        ([1.0, 0.5], ["[1.0, 0.5]"]),
        (lrs.StepLR, ["StepLR"]),
    ],
    ids=str,
)
def test_what_is_no_schedule_is_refused(schedule, names):
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with refuses(*names, model=model, optimizer=optimizer):
        il.InnerLoop(model, optimizer, squares, schedule=schedule)


def test_a_scheduler_of_another_optimizer_is_refused():
    model = Net()
    optimizer, other = (optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with refuses("another optimizer", "StepLR", optimizer=optimizer):
        il.InnerLoop(model, optimizer, squares, schedule=lrs.StepLR(other, 2))


@pytest.mark.parametrize("factor", [None, True, "1", [0.5], (0.1, 0.2)], ids=str)
def test_a_function_that_returns_no_number_is_refused(factor):
    inner = made(lambda step: factor)
    with refuses("schedule", "step 0", model=inner.model):
        inner(batches(2), batches(1)[0])


def test_one_cycle_that_ends_is_refused_clearly():
    """Torch raises a ValueError of its own when the schedule is over; it comes through."""
    setup = Setup("OneCycleLR", warm=10)
    with pytest.raises(ValueError, match="total"):
        setup.inner().adapt(setup.train)


@pytest.mark.parametrize("scheduler", ["SequentialLR", "OneCycleLR", "a user's"])
def test_a_deep_copy_has_its_own_scheduler(scheduler):
    setup = Setup(scheduler, warm=1)
    inner = setup.inner(learn=("init", "lr"))
    value = inner(setup.train, setup.val).detach()
    twin = copy.deepcopy(inner)
    assert twin.schedule is not inner.schedule
    assert twin.schedule.optimizer is twin.optimizer
    assert_close([twin(setup.train, setup.val)], [value])
    setup.run()
    assert_close([twin(setup.train, setup.val)], [value])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin.schedule.step()
    assert not torch.equal(twin(setup.train, setup.val), value)
