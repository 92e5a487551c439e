"""`diagnose` on set-ups that people really get wrong, and on some that are right.

Each broken set-up is a function that builds it; the table says what the report must name: the
meta-parameter, the operation, the line or module, and what to write instead.
"""

import copy
import random
import re
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

import innerloop as il
from inner_problems import PROBLEMS
from innerloop.diagnose import diagnose

SGD = torch.optim.SGD
STEPS = 2


def data(steps=STEPS):
    *train, val = [(torch.randn(5, 2), torch.randn(5, 1)) for _ in range(steps + 1)]
    return train, val


def squares(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def mlp():
    return nn.Sequential(nn.Linear(2, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False))


def loop(loss=squares, model=None, *, lr=0.1, momentum=0.0, **options):
    """An inner loop with what it needs; `init` and the rate are learned if nothing else is said."""
    model = mlp() if model is None else model
    options.setdefault("learn", ("init", "lr"))
    inner = il.InnerLoop(model, SGD(model.parameters(), lr=lr, momentum=momentum), loss, **options)
    return inner, *data()


class Parted(nn.Module):
    """A body and a head, to be cut apart between them."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body(x))


# Broken set-ups. --------------------------------------------------------------------------------


class Broken(NamedTuple):
    """The text of a report on one meta-parameter of a broken set-up."""

    name: str
    build: object
    row: str
    requirement: str
    says: str
    """A part of the problem, or of the error: the operation."""
    where: str
    """A part of the place: the line's code, or the module."""
    write: str
    reached: bool = False
    """True if a gradient arrives nevertheless, but a wrong one."""


BROKEN = []
FIRST = "model.0.weight"


def broken(*expected, **options):
    def add(build):
        BROKEN.append(Broken(build.__name__, build, *expected, **options))
        return build

    return add


def broken_loss(*expected, reached=False, model=mlp, **options):
    """The same for the loss of a loop: a function, or the class of a module."""

    def add(loss):
        def build():
            return loop(loss() if isinstance(loss, type) else loss, model(), **options)

        BROKEN.append(Broken(loss.__name__, build, *expected, reached=reached))
        return build

    return add


@broken_loss(FIRST, "IIIb", ".detach()", "predicted = ", "without .detach")
def detach_in_the_loss(model, batch):
    predicted = model(batch[0]).detach()
    return F.mse_loss(predicted, batch[1])


@broken(
    "model.0.body.0.weight",
    "IIIb",
    ".detach()",
    "in model.0: return self.head(self.body(x).detach())",
    "without .detach()",
)
def detach_in_the_model():
    class Cut(Parted):
        def forward(self, x):
            return self.head(self.body(x).detach())

    return loop(model=nn.Sequential(Cut()))


@broken_loss(
    FIRST, "IIIb", ".detach()", "penalty = sum(p.detach()", "without .detach()", reached=True
)
def detach_on_the_parameters(model, batch):
    penalty = sum(p.detach().square().sum() for p in model.parameters())
    return squares(model, batch) + 0.1 * penalty


@broken_loss(
    "model.weight",
    "IIIb",
    ".data",
    "model.weight.data",
    "without .data",
    model=lambda: nn.Linear(2, 1),
)
def data_of_a_parameter(model, batch):
    return F.mse_loss(F.linear(batch[0], model.weight.data, model.bias), batch[1])


@broken(FIRST, "II", ".detach()", "g.detach() for name", "without .detach()", reached=True)
def detach_in_the_grad_transform():
    def constant(grads):
        return {name: g.detach() for name, g in grads.items()}

    return loop(grad_transform=constant)


@broken("settings.lr", "IIIa", ".detach()", "raw.detach().exp()", "without")
def detach_in_a_transform():
    pair = (lambda raw: raw.detach().exp(), torch.log)
    return loop(learn={"init": True, "lr": il.Learn(transform=pair)})


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.3))

    def forward(self, model, batch):
        return self.scale * squares(model, batch)


@broken_loss("loss.scale", "IIIb", ".item()", "in loss: return self", "tensor", val_loss=squares)
class item_in_the_loss(Weighted):
    def forward(self, model, batch):
        return self.scale.item() * squares(model, batch)


@broken_loss("loss.scale", "IIIb", "float(...)", "twice = 2 * float", "tensor", val_loss=squares)
class float_in_the_loss(Weighted):
    def forward(self, model, batch):
        twice = 2 * float(self.scale)
        return twice * squares(model, batch)


@broken_loss(FIRST, "IIIb", ".item()", ").item()", "the tensor itself")
def item_of_the_loss(model, batch):
    return squares(model, batch).item()


@broken(
    "optimizer.rate",
    "IIIa",
    ".item()",
    "in optimizer: rate = self.rate.exp().item()",
    "the tensor itself",
)
def item_in_a_learned_optimizer():
    class Rate(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = nn.Parameter(torch.tensor(-2.0))

        def init(self, params):
            return ()

        def update(self, params, grads, state):
            rate = self.rate.exp().item()
            return {n: p - rate * grads[n] for n, p in params.items()}, state

    return il.InnerLoop(mlp(), Rate(), squares), *data()


@broken("model.weight", "I", "argmax", "predicted = ", "cross_entropy")
@broken("settings.lr", "I", "argmax", "predicted = ", "cross_entropy")
def argmax_metric():
    def accuracy(model, batch):
        predicted = model(batch[0]).argmax(-1)
        return (predicted == batch[1]).double().mean()

    def entropy(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    inner, *_ = loop(entropy, nn.Linear(2, 3), val_loss=accuracy)
    *train, val = [(torch.randn(6, 2), torch.randint(3, (6,))) for _ in range(STEPS + 1)]
    return inner, train, val


@broken(FIRST, "I", "comparison >", "(model(batch[0]) > 0)", "sigmoid")
def compared_metric():
    def accuracy(model, batch):
        return ((model(batch[0]) > 0) == (batch[1] > 0)).double().mean()

    return loop(val_loss=accuracy)


@broken(
    "model.body.0.weight",
    "IIIb",
    "no_grad",
    "in model: features = self.body(x)",
    "outside of the block",
)
def no_grad_block():
    class Frozen(Parted):
        def forward(self, x):
            with torch.no_grad():
                features = self.body(x)
            return self.head(features)

    return loop(model=Frozen())


@broken_loss(FIRST, "IIIb", "no_grad", "mse_loss(model(", "outside of the block")
@torch.no_grad()
def no_grad_loss(model, batch):
    return squares(model, batch)


@broken_loss(FIRST, "IIIb", "inference_mode", "hidden = model[0]", "outside of the block")
def inference_block(model, batch):
    with torch.inference_mode():
        hidden = model[0](batch[0])
    return F.mse_loss(model[2](hidden), batch[1])


@broken_loss("loss.spare", "IIIb", "The loss never uses", "", "remove it", val_loss=squares)
class unused_in_the_loss(Weighted):
    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))


@broken("model.spare.weight", "IIIb", "The model never uses", "", "remove it")
def unused_in_the_model():
    class Spare(Parted):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(4, 4)

    return loop(model=Spare())


@broken_loss(FIRST, "IIIb", "cdist", "torch.cdist(", "x[:, None]")
def no_second_derivative(model, batch):
    return torch.cdist(model(batch[0]), batch[1]).mean()


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


@broken_loss(FIRST, "IIIb", "Squared", "Squared.apply", "composed of differ")
def differentiable_once(model, batch):
    return Squared.apply(model(batch[0]) - batch[1]).mean()


@broken_loss(
    FIRST,
    "IIIb",
    "wrote in place to the weight '0.weight'. clamp_ writes in place",
    "model[0].weight.clamp_(",
    "a new tensor",
)
def clamp_in_place(model, batch):
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)
    return squares(model, batch)


@broken_loss(
    FIRST, "IIIb", "mul_ writes in place", "p.data.mul_(0.9)", "a new tensor", reached=True
)
def decay_in_place(model, batch):
    for p in model.parameters():
        p.data.mul_(0.9)
    return squares(model, batch)


@broken_loss(FIRST, "", "in place", "hidden.add_(1)", "x = x + y and not x += y")
def overwritten(model, batch):
    hidden = torch.exp(model(batch[0]))
    hidden.add_(1)
    return (hidden - batch[1]).square().mean()


@broken(FIRST, "", "in place", "batch[0].mul_(0.5)", "x = x + y")
def batch_in_place():
    def loss(model, batch):
        batch[0].mul_(0.5)
        return squares(model, batch)

    inner, train, val = loop(loss)
    return inner, [train[0]] * STEPS, val


@broken_loss(
    FIRST,
    "IIIb",
    "The gradient is zero. Part of the loss is computed in half precision",
    ".half()",
    "float32",
    model=lambda: mlp().float(),
)
def half_that_underflows(model, batch):
    predicted = 1e-4 * model(batch[0].float()).half()
    return 1e-6 * predicted.square().mean()


@broken_loss(
    FIRST,
    "IIIb",
    "computed in half precision",
    ".half()",
    "float32",
    model=lambda: mlp().float(),
    lr=1e-9,
)
def half_that_overflows(model, batch):
    predicted = model(batch[0].float()).half()
    return 100 * (predicted * 300).square().mean()


@broken(FIRST, "IIIb", "computed in half precision", ".half()", "float32")
def half_that_overflows_in_the_gradient():
    def measure(model, batch):
        predicted = model(batch[0].float()).half()
        return 1e6 * predicted.float().mean()

    def plain(model, batch):
        return model(batch[0].float()).square().mean()

    return loop(plain, mlp().float(), val_loss=measure)


@broken("model.2.weight", "IIIb", "The gradient is not finite", "", "sqrt")
def root_at_zero():
    def measure(model, batch):
        return (0 * model[2].weight).square().sum().sqrt() + squares(model, batch)

    return loop(val_loss=measure)


@broken_loss(FIRST, "IIIb", "tensor(...) copies", "return torch.tensor(", "stack")
def copied(model, batch):
    return torch.tensor(squares(model, batch))


@broken_loss(FIRST, "IIIb", "A new parameter", "model[2](hidden)", "without nn.Parameter")
def new_parameter(model, batch):
    hidden = nn.Parameter(model[0](batch[0]))
    return F.mse_loss(model[2](hidden), batch[1])


@broken_loss(FIRST, "IIIb", ".detach()", ".numpy()", "without .detach()")
def through_numpy(model, batch):
    hidden = numpy.tanh(model[0](batch[0]).detach().numpy())
    return F.mse_loss(model[2](torch.from_numpy(hidden)), batch[1])


@broken_loss(
    FIRST,
    "IIIb",
    "torch.autograd.grad",
    "slope = torch.autograd.grad(",
    "create_graph=True",
    reached=True,
)
def penalty_without_graph(model, batch):
    x = batch[0].clone().requires_grad_()
    out = model(x)
    slope = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    return F.mse_loss(out, batch[1]) + slope.square().mean()


@broken_loss("loss.scale", "IIIb", "round", "in loss: return", "without round", val_loss=squares)
class rounded(Weighted):
    def forward(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1] * torch.round(10 * self.scale))


@broken(FIRST, "IIIb", "model from outside", "model(batch[0])", "argum")
def outside_in_the_loss():
    model = mlp()

    def loss(_, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    return loop(loss, model)


@broken("settings.lr", "I", "from outside", "model(batch[0])", "argument")
def outside_in_the_val_loss():
    model = mlp()

    def measure(_, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    return loop(squares, model, val_loss=measure)


@broken("loss.scale", "IIIb", "first_order=True", "", "first_order=False")
def first_order_learned_loss():
    return loop(Weighted(), val_loss=squares, first_order=True)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        doubled = 2 * x
        return doubled + 1

    @staticmethod
    def backward(ctx, grad):
        return grad


@broken_loss(
    FIRST,
    "IIIb",
    "Finite differences differ",
    "",
    "backward of the autograd.Function Twice",
    reached=True,
)
def wrong_backward(model, batch):
    return F.mse_loss(Twice.apply(model(batch[0])), batch[1])


@broken_loss(FIRST, "", "shapes cannot be multiplied", "batch[0].T", "avoids the error")
def crash(model, batch):
    return F.mse_loss(model(batch[0].T), batch[1])


@broken(FIRST, "", "Truncated(k=1", "", "Truncated(2), another")
def truncated_before_the_start():
    return loop(backward=il.Truncated(1))


@broken(FIRST, "", "You gave a Tensor as the batches", "", "[batch] * 5")
def no_batches():
    inner, train, val = loop()
    return inner, train[0][0], val


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: f"{case.name}-{case.row}")
def test_the_report_names_what_is_broken_and_what_to_write(case):
    inner, train, val = case.build()
    before = copy.deepcopy(inner.state_dict())
    report = diagnose(inner, train, val)
    row = report[case.row]
    finding = next(found for found in report.findings if case.row in found.rows)
    where = " | ".join(finding.where)
    assert not report.healthy
    assert finding.kind == "broken"
    assert (row.reached, row.requirement) == (case.reached, case.requirement)
    assert case.says in f"{finding.problem} {finding.message}"
    assert case.where in where
    assert (Path(__file__).name in where) is bool(case.where)
    assert case.write in finding.write
    assert row.problem == finding.problem
    assert row.write == finding.write
    for text in (case.row, row.write.split()[0]):
        assert text in str(report)
    assert all(torch.equal(before[name], value) for name, value in inner.state_dict().items())


def test_a_path_that_is_cut_still_has_an_influence():
    """Unlike that of a parameter that does not matter."""
    report = diagnose(*item_in_the_loss())
    assert report["loss.scale"].difference.influence
    report = diagnose(*unused_in_the_loss())
    assert not report["loss.spare"].difference.influence
    assert report["loss.scale"].reached


def test_a_val_loss_with_a_model_from_outside_is_no_measure_of_training():
    report = diagnose(*outside_in_the_val_loss())
    row = report["model.0.weight"]
    assert row.reached
    assert row.requirement == "I"
    assert report.b_norms == (0.0,) * (STEPS + 1)
    assert any("does not depend on the trained weights" in f.problem for f in report.findings)


def test_a_batch_written_to_is_noticed():
    report = diagnose(*batch_in_place())
    assert any("writes in place to its batch" in f.problem for f in report.findings)


def test_the_error_is_kept_in_full():
    report = diagnose(*argmax_metric())
    assert "RequirementError: The validation loss does not depend" in report.findings[0].message
    report = diagnose(*crash())
    assert "RuntimeError" in report.findings[0].message
    assert report.val_loss is None
    assert report["model.0.weight"].difference.verdict == "not judged"


# Set-ups that are right, or that are approximate by choice. -------------------------------------


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "learned_loss"])
def test_a_healthy_loop(name):
    problem = PROBLEMS[name]
    model, loss, train, val = problem.build()
    trained = [p for n, p in model.named_parameters() if n not in problem.left_out]
    inner = il.InnerLoop(model, SGD(trained, lr=0.1, momentum=0.9), loss, learn=("init", "lr"))
    report = diagnose(inner, train, val)
    assert report.healthy, str(report)
    assert not [found for found in report.findings if found.kind != "note"]
    assert {row.difference.verdict for row in report.rows} == {"agrees"}
    assert {row.requirement for row in report.rows} == {"IIIa", "IIIb"}
    assert all((row.difference.error or 0) < 1e-6 for row in report.rows)


@pytest.mark.parametrize(
    "backward", [il.Remat(), il.Binomial(2), il.Forward(), il.Auto("1GB")], ids=str
)
def test_strategies_report_the_same(backward):
    inner, train, val = loop(momentum=0.9)
    expected = diagnose(inner, train, val)
    inner.backward = backward
    report = diagnose(inner, train, val)
    assert report.healthy
    assert report.backward == str(backward)
    for row, other in zip(report.rows, expected.rows, strict=True):
        assert row.norm == pytest.approx(other.norm, rel=1e-9)
        assert row.per_step == pytest.approx(other.per_step, rel=1e-9)
    assert report.b_norms == pytest.approx(expected.b_norms, rel=1e-9)


def test_values_only_logged_are_no_finding():
    def loss(model, batch):
        predicted = model(batch[0])
        value = F.mse_loss(predicted, batch[1])
        return value, {"right": (predicted.detach() > 0).double().mean(), "loss": value.item()}

    report = diagnose(*loop(loss))
    assert report.healthy
    assert not report.findings


def test_momentum_that_starts_at_zero_is_reached():
    row = diagnose(*loop(learn=("lr", "momentum")))["settings.momentum"]
    assert row.reached
    assert row.difference.verdict == "agrees"


def test_half_precision_that_holds_is_a_note():
    def loss(model, batch):
        return F.mse_loss(model(batch[0].float()).half(), batch[1].half())

    report = diagnose(*loop(loss, mlp().float()))
    (finding,) = report.findings
    assert finding.kind == "note"
    assert "half precision" in finding.problem
    assert ".half()" in finding.where[0]
    unsure = [row.difference for row in report.rows if row.difference.verdict == "not judged"]
    assert unsure
    assert "L_val has about 3 digits" in unsure[0].why
    assert report.healthy


def test_randomness_that_cannot_be_replayed_is_not_judged():
    calls = []

    def loss(model, batch):
        calls.append(None)
        return squares(model, batch) * (1 + 0.1 * len(calls))

    report = diagnose(*loop(loss))
    assert {row.difference.verdict for row in report.rows} == {"not judged"}
    assert "L_val does not repeat" in report.rows[0].difference.why
    assert "L_val does not repeat" in str(report)


def test_randomness_of_torch_numpy_and_python_is_replayed():
    def loss(model, batch):
        noise = random.random() + numpy.random.rand() + torch.rand(()).item()
        return noise * squares(model, batch)

    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    report = diagnose(*loop(loss, model))
    assert {row.difference.verdict for row in report.rows} == {"agrees"}


def test_float32_is_judged_by_its_own_digits():
    inner, train, val = loop(model=mlp().float())
    train = [tuple(t.float() for t in batch) for batch in train]
    report = diagnose(inner, train, tuple(t.float() for t in val))
    assert {row.difference.verdict for row in report.rows} == {"agrees"}
    assert max(row.difference.error for row in report.rows) < 1e-2


def test_no_steps():
    inner, _, val = loop()
    report = diagnose(inner, [], val)
    assert report["model.0.weight"].requirement == "I"
    assert not report["settings.lr"].reached
    assert report.losses == ()
    assert len(report.b_norms) == 1


def test_a_tensor_rate_inside_the_optimizer():
    model = mlp()
    rate = torch.tensor(0.1, requires_grad=True)
    inner = il.InnerLoop(model, SGD(model.parameters(), lr=rate), squares)
    report = diagnose(inner, *data())
    assert report["optimizer.lr"].reached
    assert report["optimizer.lr"].difference.verdict == "agrees"


def test_of_many_parameters_those_of_a_part_are_moved_together():
    inner, train, val = loop()
    report = diagnose(inner, train, val, checks=2)
    assert report["model.0.weight"].difference.why == "together with 1 other"
    assert report["model.0.weight"].difference.verdict == "agrees"
    assert report["settings.lr"].difference.why == ""
    assert "checks=3 moves each by itself" in report.findings[0].problem


def test_of_many_parameters_those_that_differ_are_found():
    """The others of the same part still agree."""
    inner, train, val = detach_in_the_model()
    report = diagnose(inner, train, val, checks=1)
    expected = diagnose(inner, train, val)
    assert report["model.0.head.weight"].difference.why == "together with 1 other"
    for row, other in zip(report.rows, expected.rows, strict=True):
        assert row.difference.verdict == other.difference.verdict
        assert row.difference.influence == other.difference.influence


def test_tasks():
    """The first task is diagnosed, of a loop made for tasks or told so by the call."""
    inner, train, val = loop()
    single = diagnose(inner, train, val)
    stacked = [tuple(torch.stack([t, t + 1]) for t in batch) for batch in (*train, val)]
    made = il.InnerLoop(inner.model, inner.optimizer, squares, learn=("init", "lr"), tasks=True)
    for report in (
        diagnose(inner, stacked[:-1], stacked[-1], tasks=True),
        diagnose(made, stacked[:-1], stacked[-1]),
        diagnose(made, train, val, tasks=False),
    ):
        assert report.healthy, str(report)
        assert report.val_loss == pytest.approx(single.val_loss)


def test_what_is_no_inner_loop_is_refused():
    with pytest.raises(il.InnerLoopError, match="You gave a Linear to diagnose"):
        diagnose(nn.Linear(1, 1), [], None)


# Findings where nothing is broken. --------------------------------------------------------------


class Judged(NamedTuple):
    """The finding on one meta-parameter of a set-up that is right, or approximate by choice."""

    build: object
    kind: str
    row: str
    says: str
    write: str
    where: str


JUDGED = []


def judged(kind, row, says, write, where=""):
    def add(build):
        JUDGED.append(Judged(build, kind, row, says, write, where))
        return build

    return add


@judged("by choice", FIRST, "first_order=True leaves out the second deriv", "first_order=False")
def first_order():
    return loop(first_order=True)


@judged("by choice", FIRST, "Reptile takes the adapted weights as fixed", "first_order_maml")
def reptile():
    return il.algorithms.reptile(mlp(), squares), data()[0], None


@judged("by choice", "settings.lr", "only the last 1 of 2 steps", "Binomial(8)")
def truncated():
    return loop(learn=("lr",), backward=il.Truncated(1))


class Ridge(Weighted):
    def forward(self, model, batch):
        return squares(model, batch) + self.scale * model.weight.square().sum()


@judged("by choice", "loss.scale", "exact only where training has converged", "more steps")
def implicit_before_convergence(steps=5):
    options = {"learn": (), "val_loss": squares, "backward": il.Implicit(), "lr": 0.2}
    inner, train, val = loop(Ridge(), nn.Linear(2, 1), **options)
    return inner, train[:1] * steps, val


@judged("no influence", "settings.lr", "training moves nothing", "dead ReLUs")
def rate_without_an_inner_gradient():
    def flat(model, batch):
        return F.relu(model(batch[0]) - 100).mean()

    return loop(flat, learn=("lr",), val_loss=squares)


@judged("no influence", "loss.scale", "piecewise linear", "softplus")
def piecewise_linear_loss():
    class Hinge(Weighted):
        def forward(self, model, batch):
            return F.relu(self.scale + model(batch[0]) * batch[1]).mean()

    return loop(Hinge(), nn.Linear(2, 1), val_loss=squares)


@judged("no influence", "loss.compare.2.bias", "constant added to the loss", "multiplies something")
def last_bias_of_a_learned_loss():
    model, loss, train, val = PROBLEMS["learned_loss"].build()
    inner = il.InnerLoop(model, SGD(model.parameters(), lr=0.1), loss, val_loss=squares)
    return inner, train, val


@judged("no influence", "settings.dampening", "momentum alone", "momentum above 0")
def dampening_without_momentum():
    return loop(learn=("dampening",))


@judged("no influence", "loss.scale", "does not change", "create_graph=True", "retain_graph=True")
def penalty_that_left_the_graph():
    class Penalized(Weighted):
        def forward(self, model, batch):
            found = squares(model, batch)
            (slope,) = torch.autograd.grad(found, [model[0].weight], retain_graph=True)
            return found + self.scale * slope.square().sum()

    return loop(Penalized(), val_loss=squares, learn=("lr",))


@judged("no influence", "loss.scale", "does not change", "torch.sigmoid", "> 0.3")
def choice_by_a_parameter():
    class Chosen(Weighted):
        def forward(self, model, batch):
            return squares(model, batch) * (2 if self.scale > 0.3 else 1)

    return loop(Chosen(), val_loss=squares, learn=("lr",))


@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case.build.__name__)
def test_a_zero_or_approximate_gradient_is_explained(case):
    report = diagnose(*case.build())
    finding = next(found for found in report.findings if case.row in found.rows)
    row = report[case.row]
    by_choice = case.kind == "by choice"
    assert finding.kind == case.kind
    assert case.says in finding.problem and case.write in finding.write
    assert any(case.where in place for place in finding.where or [""])
    assert row.reached is report.healthy is by_choice
    assert row.difference.verdict == ("differs" if by_choice else "agrees")
    assert by_choice or [r.name for r in report.rows if not r.reached] == [case.row]


def test_first_order_names_its_requirement_and_reptile_has_no_such_flag():
    assert diagnose(*first_order())[FIRST].requirement == "II"
    assert "first_order=False" not in str(diagnose(*reptile()))


def test_the_implicit_gradient_after_convergence_is_right():
    report = diagnose(*implicit_before_convergence())
    assert any("A warning was given: Training ended" in f.problem for f in report.findings)
    converged = diagnose(*implicit_before_convergence(steps=60))
    assert converged["loss.scale"].difference.verdict == "agrees"


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: loop(learn=()), "There is no meta-parameter"),
        (lambda: loop(Weighted()), "L_val is the learned loss itself"),
        (lambda: repeated(loop(model=nn.Linear(2, 1), lr=5.0), 8), "explodes on its way back"),
    ],
)
def test_findings_on_the_whole(build, says):
    assert any(says in found.problem for found in diagnose(*build()).findings)


def repeated(setup, steps):
    inner, train, val = setup
    return inner, train[:1] * steps, val


# The numbers. -----------------------------------------------------------------------------------


def test_norms_by_step_of_a_scalar_problem():
    """Eq. 2 for ℓ = (w - x)² / 2: G = w - x, so that B and A can be written down."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(3.0)

    def half(model, target):
        return 0.5 * (model.weight - target).square().sum()

    inner = il.InnerLoop(model, SGD(model.parameters(), lr=0.1), half, learn=("init", "lr"))
    x0, x1, x = (torch.tensor(v) for v in (1.0, 2.0, -1.0))
    report = diagnose(inner, [x0, x1], x)
    w0, lr = 3.0, 0.1
    w1 = w0 - lr * (w0 - 1)
    w2 = w1 - lr * (w1 - 2)
    b2 = w2 + 1
    b1, b0 = b2 * (1 - lr), b2 * (1 - lr) ** 2
    assert report.losses == pytest.approx(((w0 - 1) ** 2 / 2, (w1 - 2) ** 2 / 2))
    assert report.grad_norms == pytest.approx((w0 - 1, w1 - 2))
    assert report.b_norms == pytest.approx((b0, b1, b2))
    assert report["model.weight"].per_step == pytest.approx((b0, b1))
    assert report["model.weight"].norm == pytest.approx(b0)
    assert report["settings.lr"].per_step == pytest.approx((b1 * (w0 - 1), b2 * (w1 - 2)))
    assert report["settings.lr"].norm == pytest.approx(b1 * (w0 - 1) + b2 * (w1 - 2))


def test_norms_by_step_of_a_transformed_setting():
    """The part of a step is counted in the learned number: d lr / d raw = lr for a logarithm."""
    inner, train, val = loop()
    logarithm = il.InnerLoop(
        inner.model, inner.optimizer, squares, learn={"init": True, "lr": il.Learn(transform="log")}
    )
    plain, scaled = (diagnose(i, train, val)["settings.lr"] for i in (inner, logarithm))
    assert scaled.per_step == pytest.approx([0.1 * norm for norm in plain.per_step])


def test_the_memory_forecast():
    report = diagnose(*loop())
    assert report.memory is not None
    assert {str(row.strategy) for row in report.memory.rows} >= {"Tape()", "Remat(every=1)"}
    assert "Remat(every=1)" in str(report)


# Leaving no trace. ------------------------------------------------------------------------------


def test_nothing_is_touched():
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train, val = data()
    squares(model, val).backward()
    optimizer.step()
    inner = il.InnerLoop(model, optimizer, squares, learn=("init", "lr", "betas"))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), inner.state_dict()))
    batches = copy.deepcopy((train, val))
    grads = [(p.grad, p.grad.clone()) for p in model.parameters()]
    versions = [(p, p._version, p.data_ptr()) for p in inner.parameters()]
    states = (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy())
    report = diagnose(inner, train, val)
    after = (model.state_dict(), optimizer.state_dict(), inner.state_dict())
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
    torch.testing.assert_close((train, val), batches, rtol=0, atol=0)
    for p, (grad, content) in zip(model.parameters(), grads, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, content)
    assert all(p.grad is None for p in inner.settings.parameters())
    assert all(p._version == v and p.data_ptr() == at for p, v, at in versions)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()
    assert {row.difference.verdict for row in report.rows} <= {"agrees", "not judged"}


def test_a_graph_that_is_waiting_can_still_be_used():
    inner, train, val = loop()
    value = inner(train, val)
    expected = torch.autograd.grad(value, list(inner.parameters()), retain_graph=True)
    diagnose(inner, train, val)
    again = torch.autograd.grad(value, list(inner.parameters()))
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_a_backward_inside_the_loss_leaves_no_gradient():
    def loss(model, batch):
        value = squares(model, batch)
        value.backward(retain_graph=True)
        return value

    inner, train, val = loop(loss)
    diagnose(inner, train, val)
    assert all(p.grad is None for p in inner.parameters())


def test_the_state_that_truncation_carries_is_kept():
    inner, train, val = loop(learn=("lr",), backward=il.Truncated(3, carry=True))
    inner(train, val)
    carried = inner._carried
    report = diagnose(inner, train, val)
    assert inner._carried is carried
    assert report["settings.lr"].difference.verdict == "agrees"
    inner.restart()
    with torch.no_grad():
        assert report.val_loss == pytest.approx(inner(train, val).item())


def test_gradients_may_be_off():
    inner, train, val = loop()
    with torch.no_grad():
        assert diagnose(inner, train, val).healthy
        assert not torch.is_grad_enabled()


# The page. --------------------------------------------------------------------------------------


def masked(text):
    """Numbers that depend on the machine, and how wide they make a column, left out."""
    text = re.sub(r"\d+(\.\d+)?(e[+-]\d+)?( k?B|x\b)?", "#", text)
    return [line for line in re.sub(r"[ -]{2,}", "  ", text).splitlines() if "slots" not in line]


def test_the_page_shows_what_is_printed(capsys, tmp_path, monkeypatch):
    """Its Python blocks, put into one file in order, print its text blocks."""
    page = Path(__file__).parents[1] / "docs" / "diagnose.md"
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks].count("text") >= 2
    file = tmp_path / "train.py"
    file.write_text("".join(block for kind, block in blocks if kind == "python"))
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    namespace, line = {}, 0
    for kind, block in blocks:
        if kind == "python":
            exec(compile("\n" * line + block, str(file), "exec"), namespace)
            line += block.count("\n")
        else:
            assert masked(capsys.readouterr().out.strip()) == masked(block.strip())
