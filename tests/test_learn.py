"""What is learned, for what each setting has a value, and in what range.

For every granularity, transform and setting: the loop starts as plain torch does, and its gradient
is that of rules written out by hand with a value for every element.
"""

import math

import pytest
import torch
from torch import nn, optim

import innerloop as il
from references import (
    Adam,
    Net,
    Sgd,
    assert_close,
    assert_derivative,
    batches,
    by_hand,
    called,
    plain,
    squares,
)
from test_errors import refuses

STEPS = 2


class Lengths(nn.Module):
    """Parameters whose lengths are those of the groups they are in, a 0-d one, a single one."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.randn(()))
        self.matrix = nn.Parameter(torch.randn(2, 3))
        self.last = nn.Parameter(torch.randn(1))
        self.square = nn.Parameter(torch.randn(2, 2))
        self.both = nn.Parameter(torch.randn(2))

    def forward(self, x):
        hidden = torch.tanh(self.scale * (x @ self.matrix) + self.shift)
        return (hidden[:, :2] @ self.square + self.both).sum(-1, keepdim=True) * self.last


GROUPS = (("matrix", "scale", "shift"), ("last",), ("both", "square"))
"""Sizes 3, 1 and 2, not in the model's order; `shift` has length 3, `last` 1, `both` 2."""

FAMILIES = {
    "SGD": (optim.SGD, Sgd, dict(lr=0.1, momentum=0.6, weight_decay=0.05)),
    "plain SGD": (optim.SGD, Sgd, dict(lr=0.1, weight_decay=0.05)),
    "Adam": (optim.Adam, Adam, dict(lr=0.04, betas=(0.7, 0.9), eps=0.01, weight_decay=0.03)),
}
SETTINGS = [(family, name) for family, (*_, settings) in FAMILIES.items() for name in settings]

PER = ["group", "parameter", "element"]
PER = [*PER, "step", *((name, "step") for name in PER)]

TRANSFORMS = {
    "none": (None, lambda raw: raw),
    "log": ("log", lambda raw: raw.exp()),
    "logit": ("logit", lambda raw: 1 / (1 + (-raw).exp())),
    "softplus": ("softplus", lambda raw: (1 + raw.exp()).log()),
    "pair": ((torch.square, torch.sqrt), lambda raw: raw**2),
}
"""What to write, and what it means."""


def shown(value):
    """A short name of a parametrized value."""
    return "+".join(value) if isinstance(value, tuple) else str(value)


def as_learn(per, transform=None, steps=STEPS):
    stepwise = per == "step" or "step" in per
    return il.Learn(per=per, steps=steps if stepwise else None, transform=transform)


def grouped(model, family, groups=GROUPS):
    """An optimizer with other settings in every group."""
    make, _, settings = FAMILIES[family]
    return make(
        [
            {
                "params": [model.get_parameter(name) for name in names],
                **{
                    key: tuple(v**k for v in value) if isinstance(value, tuple) else value / k
                    for key, value in settings.items()
                },
            }
            for k, names in enumerate(groups, 1)
        ],
        **settings,
    )


class Reference:
    """The settings of each step and parameter, by hand, out of the loop's own meta-parameters."""

    def __init__(self, inner, learned, transforms, groups=GROUPS, family=None):
        self.inner, self.learned, self.transforms = inner, learned, transforms
        self.family = family or type(inner.optimizer).__name__
        self.names = [name for group in groups for name in group]
        self.group_of = {name: g for g, group in enumerate(groups) for name in group}

    def setting(self, key, step, name):
        group = self.group_of[name]
        if key not in self.learned:
            return self.inner.optimizer.param_groups[group][key]
        per, raw = self.learned[key], self.inner.settings[key]
        per = (per,) if isinstance(per, str) else per
        if "element" in per:
            raw = raw[self.names.index(name)]
        if "step" in per:
            raw = raw[step]
        if "element" not in per:
            raw = raw[self.names.index(name) if "parameter" in per else group]
        value = self.transforms[key](raw)
        return tuple(value) if key == "betas" else value

    def rule(self, step, name):
        _, rule, settings = FAMILIES[self.family]
        return rule(**{key: self.setting(key, step, name) for key in settings})

    def value(self, train, val, init=False):
        model = self.inner.model
        params = dict(model.named_parameters())
        params = params if init else {n: p.detach().requires_grad_() for n, p in params.items()}
        trained = by_hand(params, lambda own, b: squares(called(model, own), b), train, self.rule)
        return squares(called(model, trained), val)


def perturb(parameters):
    with torch.no_grad():
        for p in parameters:
            p.mul_(1 - 0.1 * torch.rand_like(p))


BY_HAND = [
    *((*row, per, "log") for row in SETTINGS for per in PER),
    *(("SGD", "lr", per, how) for per in PER for how in TRANSFORMS if how != "log"),
    *(("Adam", "betas", ("element", "step"), how) for how in TRANSFORMS if how != "log"),
]


@pytest.mark.parametrize(("family", "name", "per", "transform"), BY_HAND, ids=shown)
def test_every_setting_granularity_and_range(family, name, per, transform):
    model = Lengths()
    *train, val = batches(STEPS + 1)
    optimizer = grouped(model, family)
    learn = as_learn(per, TRANSFORMS[transform][0])
    inner = il.InnerLoop(model, optimizer, squares, learn={name: learn})

    expected = Lengths()
    expected.load_state_dict(model.state_dict())
    plain(expected, grouped(expected, family), squares, train)
    with torch.no_grad():
        adapted = inner.adapt(train)
    assert_close([adapted.params[n] for n, _ in model.named_parameters()], expected.parameters())

    parameters = list(inner.parameters())
    perturb(parameters)
    reference = Reference(inner, {name: per}, {name: TRANSFORMS[transform][1]}, family=family)
    value = reference.value(train, val)
    found = inner(train, val)
    assert_close([found], [value])
    assert_close(
        torch.autograd.grad(found, parameters), torch.autograd.grad(value, parameters), 1e-10
    )


def test_everything_at_once_each_in_its_own_way():
    """Settings of one optimizer at different granularities and ranges, and the initial weights."""
    model = Lengths()
    *train, val = batches(STEPS + 1)
    per = {
        "lr": ("element", "step"),
        "betas": "parameter",
        "eps": "group",
        "weight_decay": "step",
    }
    transform = {"lr": "log", "betas": "logit", "eps": "softplus", "weight_decay": "none"}
    learn = {name: as_learn(per[name], TRANSFORMS[transform[name]][0]) for name in per}
    inner = il.InnerLoop(model, grouped(model, "Adam"), squares, learn={"init": True, **learn})
    perturb(inner.settings.parameters())
    parameters = list(inner.parameters())
    assert {id(p) for p in model.parameters()} < {id(p) for p in parameters}
    grads = assert_derivative(
        lambda: inner(train, val), parameters, eps=1e-3, relative=True, directions=3
    )
    reference = Reference(inner, per, {n: TRANSFORMS[t][1] for n, t in transform.items()})
    value = reference.value(train, val, init=True)
    assert_close(grads, torch.autograd.grad(value, parameters), 1e-10)


@pytest.mark.parametrize("backward", [il.Remat(), il.Forward()], ids=repr)
def test_everything_at_once_under_other_strategies(backward):
    model = Lengths()
    *train, val = batches(STEPS + 1)
    learn = {
        "init": True,
        "lr": as_learn(("parameter", "step"), "log"),
        "momentum": as_learn("element", "logit"),
        "weight_decay": True,
    }
    grads = []
    for strategy in (il.Tape(), backward):
        inner = il.InnerLoop(model, grouped(model, "SGD"), squares, learn, strategy)
        grads.append(torch.autograd.grad(inner(train, val), list(inner.parameters())))
    assert_close(grads[1], grads[0], 1e-10)


# Granularities that could be taken for each other. -----------------------------------------------


def test_rates_of_parameters_keep_no_more_than_one_rate():
    """A tape has the gradients to keep, whatever they are multiplied with."""
    model = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 1))
    *train, val = batches(6)
    kept = {}
    for per in ("group", "parameter"):
        inner = il.InnerLoop(
            model,
            optim.SGD(model.parameters(), lr=0.1),
            squares,
            learn={"lr": as_learn(per)},
            backward=il.Tape(),
        )
        storages = {}

        def keep(tensor, storages=storages):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = inner(train, val)
        kept[per] = sum(storage.nbytes() for storage in storages.values())
        del loss
    assert kept["parameter"] < 1.05 * kept["group"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_group_as_large_as_its_parameters_are_long(count):
    """One value per parameter, `[count]`, is not taken for one per element of `[count]`."""

    class Vectors(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList(torch.randn(count) for _ in range(count))

        def forward(self):
            return torch.stack(list(self.parts))

    def loss(model, batch):
        return (model() - batch).pow(4).sum()

    model = Vectors()
    inner = il.InnerLoop(
        model,
        optim.SGD(model.parameters(), lr=0.01),
        loss,
        learn={"lr": il.Learn(per="parameter")},
    )
    target = torch.randn(count, count)
    (found,) = torch.autograd.grad(inner([target], target), list(inner.parameters()))
    start = torch.stack(list(model.parts)).detach()
    grad = 4 * (start - target) ** 3
    new = start - 0.01 * grad
    assert_close([found], [(4 * (new - target) ** 3 * -grad).sum(1)])


@pytest.mark.parametrize("name", ["momentum", "weight_decay"])
@pytest.mark.parametrize("per", ["group", "parameter", ("element", "step")])
def test_a_setting_that_starts_at_zero(name, per):
    model = Lengths()
    *train, val = batches(STEPS + 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    inner = il.InnerLoop(model, optimizer, squares, learn={name: as_learn(per)})
    expected = Lengths()
    expected.load_state_dict(model.state_dict())
    plain(expected, optim.SGD(expected.parameters(), lr=0.1), squares, train)
    assert_close(inner.adapt(train).params.values(), expected.parameters())
    assert_derivative(lambda: inner(train, val), inner.parameters())


# Which weights. ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["SGD", "Adam"])
def test_frozen_weights_in_the_optimizer(family):
    """They stay where they are, and a setting of theirs has no influence."""
    model = Lengths()
    model.matrix.requires_grad_(False)
    model.both.requires_grad_(False)
    *train, val = batches(STEPS + 1)
    inner = il.InnerLoop(
        model, grouped(model, family), squares, learn={"init": True, "lr": il.Learn("parameter")}
    )
    expected = Lengths()
    expected.load_state_dict(model.state_dict())
    expected.matrix.requires_grad_(False)
    expected.both.requires_grad_(False)
    plain(expected, grouped(expected, family), squares, train)
    adapted = inner.adapt(train)
    assert_close(adapted.params.values(), expected.parameters())
    assert torch.equal(adapted.params["matrix"], model.matrix)

    moving = [p for p in inner.parameters() if p.requires_grad]
    assert_derivative(lambda: inner(train, val), moving)
    inner(train, val).backward()
    still = [sum(GROUPS, ()).index(name) for name in ("matrix", "both")]
    assert inner.settings["lr"].grad[still].tolist() == [0, 0]
    assert inner.settings["lr"].grad.count_nonzero() == 4
    assert model.matrix.grad is None


@pytest.mark.parametrize("first_order", [False, True])
def test_only_the_head_is_trained(first_order):
    """ANIL: the body is in no optimizer, and its initial weights are learned all the same."""
    model = Net()
    *train, val = batches(STEPS + 1)
    inner = il.InnerLoop(
        model,
        optim.SGD(model.head.parameters(), lr=0.3),
        squares,
        learn=("init", "lr"),
        first_order=first_order,
    )
    assert [name for name, _ in inner.named_parameters()] == [
        *(f"model.{name}" for name, _ in model.named_parameters()),
        "settings.lr",
    ]
    adapted = inner.adapt(train)
    assert torch.equal(adapted.params["body.weight"], model.body.weight)
    assert not torch.equal(adapted.params["head.weight"], model.head.weight)

    lr = torch.tensor([0.3], requires_grad=True)
    found = by_hand(
        dict(model.named_parameters()),
        lambda own, batch: squares(called(model, own), batch),
        train,
        lambda step, name: Sgd(lr),
        trained=("head.weight", "head.bias"),
        first_order=first_order,
    )
    leaves = [*model.parameters(), lr]
    expected = torch.autograd.grad(squares(called(model, found), val), leaves)
    assert_close(torch.autograd.grad(inner(train, val), list(inner.parameters())), expected, 1e-11)
    if not first_order:
        assert_derivative(lambda: inner(train, val), inner.parameters())


# Names, mappings and what they give. --------------------------------------------------------------

ALL = ["model.body.weight", "model.body.bias", "model.head.weight", "model.head.bias"]


@pytest.mark.parametrize(
    ("learn", "names"),
    [
        ((), []),
        ("init", ALL),
        ("lr", ["settings.lr"]),
        (["lr", "init"], [*ALL, "settings.lr"]),
        ({"init": False, "lr": True}, ["settings.lr"]),
        ({"init": il.Learn(), "lr": False}, ALL),
        (
            {"betas": il.Learn(transform="logit"), "eps": il.Learn("parameter")},
            ["settings.betas", "settings.eps"],
        ),
        ({"lr": il.Learn("element")}, [f"settings.lr.{i}" for i in range(4)]),
    ],
    ids=str,
)
def test_parameters_are_what_is_learned(learn, names):
    model = Net()
    inner = il.InnerLoop(model, optim.Adam(model.parameters(), lr=0.01), squares, learn=learn)
    assert [name for name, _ in inner.named_parameters()] == names
    assert list(inner.state_dict()) == names
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in inner.parameters())


def test_a_set_of_names_and_the_default():
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    default = il.InnerLoop(model, optimizer, squares)
    assert [name for name, _ in default.named_parameters()] == ALL
    both = il.InnerLoop(model, optimizer, squares, learn={"init", "lr"})
    assert [name for name, _ in both.named_parameters()] == [*ALL, "settings.lr"]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_hyper_is_in_natural_units(transform):
    model = Lengths()
    chosen = TRANSFORMS[transform][0]
    learn = {
        "lr": il.Learn(("parameter", "step"), steps=4, transform=chosen),
        "betas": il.Learn("element", transform=chosen),
    }
    inner = il.InnerLoop(model, grouped(model, "Adam"), squares, learn=learn)
    hyper = inner.hyper
    assert hyper.keys() == {"lr", "betas"}
    rates = torch.tensor([0.04] * 3 + [0.02] + [0.04 / 3] * 2)
    assert_close([hyper["lr"]], [rates.expand(4, 6)])
    assert_close(
        hyper["betas"][3:5],
        [torch.tensor([[0.49], [0.81]]), torch.tensor([[0.7**3] * 2, [0.9**3] * 2])],
    )
    assert not any(t.requires_grad for t in (hyper["lr"], *hyper["betas"]))


def test_learn_is_a_value():
    assert il.Learn("parameter") == il.Learn(per=("parameter",))
    assert hash(il.Learn(("group", "step"), steps=2)) == hash(il.Learn(("group", "step"), 2))
    with pytest.raises(AttributeError):
        il.Learn().per = "step"
    assert repr(il.Learn(transform="log")) == "Learn(per=('group',), steps=None, transform='log')"


def test_steps_that_are_not_taken_have_no_influence():
    model = Net()
    inner = il.InnerLoop(
        model,
        optim.SGD(model.parameters(), lr=0.1),
        squares,
        learn={"lr": il.Learn("step", steps=4)},
    )
    *train, val = batches(3)
    inner(train, val).backward()
    assert inner.settings["lr"].grad.count_nonzero(0).tolist() == [2]
    assert inner.settings["lr"].grad[2:].tolist() == [[0], [0]]


# Refusals. --------------------------------------------------------------------------------------


def never(model, batch):
    raise AssertionError("work was done before the refusal")


@pytest.mark.parametrize(
    ("learn", "names"),
    [
        ("lrr", ["'lrr'", "lr, betas"]),
        (("init", "learning_rate"), ["'learning_rate'"]),
        ("momentum", ["'momentum'", "Adam"]),
        (("amsgrad",), ["'amsgrad'", "discrete"]),
        (("foreach",), ["'foreach'", "discrete"]),
        (("params",), ["'params'"]),
        (None, ["learn=None"]),
        (5, ["learn=5"]),
        (["init", 3], ["3"]),
        ({3: True}, ["3"]),
        ({"lr": None}, ["'lr'"]),
        ({"lr": "log"}, ["'lr'", "'log'"]),
        ({"lr": 0.1}, ["'lr'", "0.1"]),
        ({"lr": il.Learn}, ["'lr'"]),
        ({"init": il.Learn("element")}, ["'init'"]),
        ({"init": il.Learn(transform="log")}, ["'init'"]),
    ],
    ids=str,
)
def test_wrong_names_and_mappings_are_refused(learn, names):
    model = Net()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    with refuses(*names, model=model, optimizer=optimizer):
        il.InnerLoop(model, optimizer, never, learn=learn)


WRONG_WAYS = {
    "unknown": dict(per="layer"),
    "two of a kind": dict(per=("group", "parameter")),
    "step twice": dict(per=("step", "step"), steps=2),
    "none": dict(per=None),
    "a number": dict(per=3),
    "a name and a number": dict(per=("group", 3)),
    "no steps": dict(per="step"),
    "no steps for two": dict(per=("parameter", "step")),
    "steps alone": dict(steps=3),
    "zero steps": dict(per="step", steps=0),
    "fewer steps": dict(per="step", steps=-1),
    "broken steps": dict(per="step", steps=2.0),
    "yes as steps": dict(per="step", steps=True),
    "a word as steps": dict(per="step", steps="3"),
    "unknown range": dict(transform="exp"),
    "a number as range": dict(transform=3),
    "a list as range": dict(transform=["log"]),
    "half a pair": dict(transform=torch.exp),
    "half a pair in a tuple": dict(transform=(torch.exp,)),
    "a pair of words": dict(transform=("exp", "log")),
    "three": dict(transform=(torch.exp, torch.log, torch.log)),
}


@pytest.mark.parametrize("case", WRONG_WAYS)
def test_wrong_ways_to_learn_are_refused(case):
    with refuses("Learn("):
        il.Learn(**WRONG_WAYS[case])


OUT_OF_RANGE = {
    "zero": (dict(lr=0.0), "lr", "log"),
    "zero in softplus": (dict(lr=0.0), "lr", "softplus"),
    "one in logit": (dict(lr=1.0), "lr", "logit"),
    "above one in logit": (dict(lr=1.5), "lr", "logit"),
    "no decay": (dict(weight_decay=0.0), "weight_decay", "log"),
    "one of two": (dict(betas=(0.0, 0.9)), "betas", "logit"),
    "not the inverse": (dict(lr=0.1), "lr", (torch.exp, torch.sqrt)),
    "a number": (dict(lr=0.1), "lr", (torch.exp, lambda y: math.log(y))),
    "another shape": (dict(lr=1.0), "lr", (torch.exp, lambda y: torch.zeros(2))),
}


@pytest.mark.parametrize("case", OUT_OF_RANGE)
def test_a_start_out_of_the_transforms_range_is_refused(case):
    """Also one that a pair does not lead back to: the loop would start somewhere else."""
    settings, name, transform = OUT_OF_RANGE[case]
    model = Net()
    optimizer = optim.Adam(model.parameters(), **settings)
    with refuses(repr(name), model=model, optimizer=optimizer):
        il.InnerLoop(model, optimizer, never, learn={name: il.Learn(transform=transform)})


def test_the_component_out_of_range_is_shown():
    model = Net()
    optimizer = optim.Adam(model.parameters(), betas=(0.9, 0.0))
    with refuses("'betas'", "the value 0."):
        il.InnerLoop(model, optimizer, never, learn={"betas": il.Learn(transform="logit")})


def test_a_setting_without_a_number_is_refused():
    model = Net()
    optimizer = optim.Adafactor(model.parameters())
    assert optimizer.param_groups[0]["eps"][0] is None
    with refuses("'eps'", "None", optimizer=optimizer):
        il.InnerLoop(model, optimizer, never, learn=("eps",))


@pytest.mark.parametrize("per", ["step", ("element", "step")])
@pytest.mark.parametrize("backward", [il.Tape(), il.Remat()], ids=repr)
def test_more_steps_than_values_are_refused_before_the_first(per, backward):
    model = Net()
    inner = il.InnerLoop(
        model,
        optim.SGD(model.parameters(), lr=0.1),
        never,
        learn={"lr": il.Learn(per, steps=2)},
        backward=backward,
    )
    train = batches(3)
    with refuses("'lr'", "2 steps", "steps=3", model=model):
        inner(train, train[0])


@pytest.mark.parametrize("value", [1e-9, 1e-3, 1.0, 40.0, 1e4])
@pytest.mark.parametrize("name", ["log", "softplus"])
def test_ranges_hold_small_and_large_values(name, value):
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=value)
    inner = il.InnerLoop(model, optimizer, squares, learn={"lr": il.Learn(transform=name)})
    assert math.isclose(inner.hyper["lr"].item(), value, rel_tol=1e-12)
