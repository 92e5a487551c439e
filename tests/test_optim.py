"""Every rule against `torch.optim`, and every derivative against finite differences."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from innerloop import InnerLoopError, functional, optim
from innerloop.optim.blocks import state_by_parameter
from modules import python_calls
from optimizers import FLAGS, ONE_OF_EACH, ROWS, Row, build

EXACT = 1e-12
"""Relative distance to torch's trajectory: some hundred roundings in float64, over 20 steps."""

ROUNDING = 1e-10
"""What a difference may show where the derivative is 0: the loss's rounding over the width."""

WARM_STEPS = 5
FROZEN, IDLE = 2, 3
"""Positions of the parameter that is frozen, and of the one that some losses do not use."""
SPLIT = 3
SHAPES = [(3, 2), (), (2,), (3,), (2, 4)]
MATRICES = [(3, 2), (3, 3), (2, 2), (2, 3), (2, 4)]

each_row = pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
fresh_or_warm = pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
ELEMENTWISE = [row for row in ROWS if row.elementwise]
VARIANTS = [row for row in ELEMENTWISE if row in ONE_OF_EACH and not row.settings.get("maximize")]
"""The sign of the gradient, which `maximize` turns, has nothing to do with the settings."""
each_variant = pytest.mark.parametrize("row", ONE_OF_EACH, ids=[row.name for row in ONE_OF_EACH])


# The problem: a smooth loss, not quadratic, that couples all parameters and changes each step. ----


class Problem(NamedTuple):
    start: list[Tensor]
    target: list[Tensor]
    weight: list[Tensor]
    mix: list[Tensor]
    changing: bool

    def loss(self, params: list[Tensor], time: int) -> Tensor:
        time = time if self.changing else 0
        used = [i for i in range(len(params)) if not (i == IDLE and time % 4 == 2)]
        total = torch.zeros((), dtype=torch.float64)
        coupling = torch.zeros((), dtype=torch.float64)
        for i in used:
            value = _real(params[i]).to(torch.float64)
            phase = value - self.target[i] * (1 + 0.1 * (time % 3))
            total = total + (self.weight[i] * (1 + phase * phase).sqrt()).sum()
            coupling = coupling + (self.mix[i] * value).sum()
        return total + nn.functional.softplus(coupling)

    def gradients(self, params: list[Tensor], time: int) -> list[Any]:
        """One gradient per parameter, `None` for the frozen one and where the loss has none."""
        moving = [i for i in range(len(params)) if i != FROZEN]
        inputs = [params[i] for i in moving]
        graph = any(p.requires_grad for p in inputs)
        if not graph:
            inputs = [p.detach().requires_grad_() for p in inputs]
            params = _with(params, dict(zip(moving, inputs, strict=True)))
        found = torch.autograd.grad(
            self.loss(params, time), inputs, create_graph=graph, allow_unused=True
        )
        return _with([None] * len(params), dict(zip(moving, found, strict=True)))


def _with(items: list[Any], new: dict[int, Any]) -> list[Any]:
    return [new.get(i, item) for i, item in enumerate(items)]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def problem(row: Row, dtypes: list[torch.dtype] | None = None) -> Problem:
    random = torch.Generator().manual_seed(1)
    shapes = MATRICES if row.matrices_only else SHAPES
    dtypes = dtypes or [torch.float64] * len(shapes)

    def draw(low: float, high: float) -> list[Tensor]:
        return [
            _real(torch.zeros(shape, dtype=dtype))
            .new_empty(_real(torch.zeros(shape, dtype=dtype)).shape, dtype=torch.float64)
            .uniform_(low, high, generator=random)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]

    start = [
        (torch.view_as_complex(value) if dtype.is_complex else value).to(dtype)
        for value, dtype in zip(draw(-1, 1), dtypes, strict=True)
    ]
    # LBFGS compares gradients of two steps, which has a meaning only for one and the same loss.
    return Problem(
        start, draw(0.6, 1.6), draw(0.5, 1.5), draw(-0.5, 0.5), changing=not row.one_group
    )


def by_torch(row: Row, given: Problem, **extra: Any) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    params = [nn.Parameter(p.clone(), i != FROZEN) for i, p in enumerate(given.start)]
    return build(row, params, SPLIT, **extra), params


def torch_steps(
    optimizer: torch.optim.Optimizer, params: list[Tensor], given: Problem, times: range
) -> None:
    for time in times:

        def closure(time: int = time) -> Tensor:
            optimizer.zero_grad()
            loss = given.loss(params, time)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)


def evaluation(given: Problem, time: int) -> Callable[[list[Tensor]], tuple[Tensor, list[Any]]]:
    return lambda params: (given.loss(params, time), given.gradients(params, time))


def rule_steps(
    rule: optim.Rule,
    params: list[Tensor],
    given: Problem,
    times: range,
    hyper: Any = None,
    state: Any = None,
) -> tuple[list[Tensor], Any]:
    state = rule.init(params) if state is None else state
    for time in times:
        grads = given.gradients(params, time)
        settings = hyper(time) if callable(hyper) else hyper
        params, state = rule.update(
            params, grads, state, settings, evaluate=evaluation(given, time)
        )
    return params, state


def distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest distance over the largest value."""
    gaps = [(a.detach() - b.detach()).abs() for a, b in zip(actual, expected, strict=True)]
    gap = max(g.max().item() for g in gaps)
    return gap / max(b.detach().abs().max().item() for b in expected)


def detached(params: list[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


# Muon's iteration in float64, in place of torch's in bfloat16. ----------------------------------


def _newton_schulz_in_own_dtype(grad: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
    a, b, c = coefficients
    tall = grad.size(0) > grad.size(1)
    x = grad.T if tall else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


@pytest.fixture
def smooth_muon(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """torch's Muon without its rounding, and what makes ours so."""
    monkeypatch.setattr(
        "torch.optim._muon._zeropower_via_newtonschulz", _newton_schulz_in_own_dtype
    )
    return {"ns_dtype": torch.float64}


# Trajectories. ----------------------------------------------------------------------------------


def check_trajectory(row: Row, warm: bool, **extra: Any) -> None:
    given = problem(row)
    optimizer, params = by_torch(row, given, **extra)
    first = WARM_STEPS if warm else 0
    torch_steps(optimizer, params, given, range(first))
    rule = optim.from_torch(optimizer)
    ours, state = detached(params), None
    for time in range(first, first + 20):
        ours, state = rule_steps(rule, ours, given, range(time, time + 1), state=state)
        ours = detached(ours)
        torch_steps(optimizer, params, given, range(time, time + 1))
        assert distance(ours, params) < EXACT, time
    assert torch.equal(ours[FROZEN], given.start[FROZEN])
    assert not torch.equal(ours[0], given.start[0]) or row.settings["lr"] == 0


@each_row
@fresh_or_warm
def test_trajectory_is_torchs(row: Row, warm: bool) -> None:
    check_trajectory(row, warm)


MUON = [row for row in ROWS if row.matrices_only]


@pytest.mark.parametrize("row", MUON, ids=[row.name for row in MUON])
@fresh_or_warm
def test_trajectory_of_muon_in_float64(row: Row, warm: bool, smooth_muon: dict[str, Any]) -> None:
    check_trajectory(row, warm, **smooth_muon)


# Derivatives. -----------------------------------------------------------------------------------


class Unrolled:
    """A later loss as a function of one vector: the initial weights, then every setting."""

    def __init__(self, row: Row, warm: bool, given: Problem | None = None, **extra: Any) -> None:
        self.given = given = given or problem(row)
        optimizer, params = by_torch(row, given, **extra)
        self.first = WARM_STEPS if warm else 0
        torch_steps(optimizer, params, given, range(self.first))
        self.rule = optim.from_torch(optimizer)
        self.params = detached(params)
        # RAdam rectifies from the sixth or seventh step on; LBFGS makes several in one.
        self.steps = {torch.optim.RAdam: 8, torch.optim.LBFGS: 2}.get(row.kind, 4)
        self.moving = [i for i in range(len(params)) if i != FROZEN]
        self.settings = [
            (name, group, part, value)
            for name, values in self.rule.hyper.items()
            for group, given_value in enumerate(values)
            for part, value in enumerate(
                given_value if isinstance(given_value, tuple) else (given_value,)
            )
            if value is not None
        ]

    @property
    def point(self) -> Tensor:
        weights = [self.params[i].reshape(-1) for i in self.moving]
        return torch.cat([*weights, torch.tensor([float(s[-1]) for s in self.settings])])

    @property
    def weights(self) -> int:
        return sum(self.params[i].numel() for i in self.moving)

    @property
    def names(self) -> list[str]:
        names = [f"weight {i}" for i in range(self.weights)]
        return names + [f"{name}[{group}][{part}]" for name, group, part, _ in self.settings]

    def parts(self, point: Tensor) -> tuple[list[Tensor], dict[str, list[Any]]]:
        """The weights and the settings that a point stands for."""
        sizes = [self.params[i].numel() for i in self.moving]
        pieces = point[: self.weights].split(sizes)
        weights = [
            piece.reshape(self.params[i].shape)
            for piece, i in zip(pieces, self.moving, strict=True)
        ]
        hyper = {
            name: [list(v) if isinstance(v, tuple) else [v] for v in values]
            for name, values in self.rule.hyper.items()
        }
        for (name, group, part, _), value in zip(
            self.settings, point[self.weights :].unbind(), strict=True
        ):
            hyper[name][group][part] = value
        several = self.rule.family.settings
        return _with(self.params, dict(zip(self.moving, weights, strict=True))), {
            name: [tuple(v) if several[name] > 1 else v[0] for v in values]
            for name, values in hyper.items()
        }

    def __call__(self, point: Tensor, gradients: Any = None) -> Tensor:
        given = self.given if gradients is None else gradients
        params, hyper = self.parts(point)
        times = range(self.first, self.first + self.steps)
        params, state = rule_steps(self.rule, params, given, times, hyper)
        # ASGD's average acts on nothing; it is there to be used in place of the weights.
        averages = [
            slots.get("ax") for slots in state_by_parameter(self.rule.family, params, state)
        ]
        result = self.given.loss(params, 11)
        if any(average is not None for average in averages):
            used = [p if a is None else a for p, a in zip(params, averages, strict=True)]
            result = result + self.given.loss(used, 11)
        return result

    def gradient(self) -> Tensor:
        point = self.point.requires_grad_()
        return torch.autograd.grad(self(point), point)[0]

    def widths(self) -> Tensor:
        """A first step of the difference for each coordinate; smaller ones are tried as well."""
        widths = [1e-3] * self.weights
        for name, _, _, value in self.settings:
            if name in ("betas", "rho", "alpha") and value < 1:
                widths.append(0.2 * (1 - value))
            elif name in ("eps", "step_sizes") and self._scales_with(value):
                widths.append(1e-2 * value)
            else:
                widths.append(1e-3 * max(1.0, abs(value)))
        return torch.tensor(widths)

    def _scales_with(self, value: float) -> bool:
        """Whether the setting is compared with, or added to, something of its own size."""
        kind = self.rule.family.torch_class
        relative = (torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Rprop)
        return value > 0 and kind in relative

    def differences(self) -> Tensor:
        """Differences along every coordinate.

        Of several widths the one that agrees best with the next decides, coordinate by coordinate
        (Ridders, 1982), so that a kink nearby, or a small scale, is not stepped over. Of the two
        that agree the narrower is taken, unless they differ by no more than the loss's rounding
        over the narrower width: then the wider one is the better.
        """
        tried = 2 if self.rule.family.layout == "whole" else 5
        widths = torch.stack([self.widths() / 4**k for k in range(tried)])
        found = self._fourth_order(widths)
        apart = (found[1:] - found[:-1]).abs()
        best = apart.argmin(0, keepdim=True)
        rounding = torch.finfo(torch.float64).eps * self(self.point).abs() / widths[1:]
        narrower = (apart > rounding).gather(0, best)
        return found.gather(0, best + narrower.long())[0].detach()

    def _fourth_order(self, widths: Tensor) -> Tensor:
        """Central differences for each row of widths `[rows, coordinates]`, in one batch."""
        central = torch.tensor([1.0, -1.0, 2.0, -2.0]), torch.tensor([8.0, -8.0, -1.0, 1.0]) / 12
        forward = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([-11.0, 18.0, -9.0, 2.0]) / 6
        one_sided = torch.tensor([False] * self.weights + [self._at_edge(s) for s in self.settings])
        places, factors = (
            torch.where(one_sided, f[:, None], c[:, None])
            for f, c in zip(forward, central, strict=True)
        )
        shifts = torch.diag_embed(places * widths[:, None])
        values = self._at((self.point + shifts).flatten(0, 2)).view(shifts.shape[:3])
        return (factors * values).sum(1) / widths

    def _at_edge(self, setting: tuple[Any, ...]) -> bool:
        """Adafactor's d is at least 1, and at 1 the first update of a vector has a kink."""
        return self.rule.family.torch_class is torch.optim.Adafactor and setting[::3] == ("d", 1.0)

    def _at(self, points: Tensor) -> Tensor:
        if self.rule.family.layout == "whole":
            return torch.stack([self(p) for p in points]).detach()
        batched = _Batched(*self.given)
        return torch.func.vmap(lambda p: self(p, batched))(points)


class _Batched(Problem):
    """The same problem, with gradients that `vmap` can batch."""

    def gradients(self, params: list[Tensor], time: int) -> list[Any]:
        idle = IDLE if self.changing and time % 4 == 2 else None
        moving = [i for i in range(len(params)) if i not in (FROZEN, idle)]

        def loss(*inputs: Tensor) -> Tensor:
            return self.loss(_with(params, dict(zip(moving, inputs, strict=True))), time)

        found = torch.func.grad(loss, tuple(range(len(moving))))(*(params[i] for i in moving))
        return _with([None] * len(params), dict(zip(moving, found, strict=True)))


def check_derivatives(unrolled: Unrolled) -> None:
    actual, expected = unrolled.gradient().tolist(), unrolled.differences().tolist()
    wrong = {
        name: (a, e)
        for name, a, e in zip(unrolled.names, actual, expected, strict=True)
        if not abs(a - e) <= (1e-6 * abs(e) if a else ROUNDING)
    }
    assert not wrong


@each_row
@fresh_or_warm
def test_derivatives_are_finite_differences(
    row: Row, warm: bool, smooth_muon: dict[str, Any]
) -> None:
    check_derivatives(Unrolled(row, warm, **(smooth_muon if row.matrices_only else {})))


def test_derivative_of_muon_in_bfloat16_is_that_of_its_iteration_in_float64() -> None:
    row = MUON[0]
    slopes = []
    for extra in ({}, {"ns_dtype": torch.float64}):
        unrolled = Unrolled(row, warm=False, **extra)
        point = unrolled.point.requires_grad_()
        params, hyper = unrolled.parts(point)
        new, _ = rule_steps(unrolled.rule, params, unrolled.given, range(1), hyper)
        total = sum((mix * p).sum() for mix, p in zip(unrolled.given.mix, new, strict=True))
        slopes.append(torch.autograd.grad(total, point)[0])
        if not extra:
            rounded = detached(new)
    rates = torch.tensor(["lr" in name for name in unrolled.names])
    # The rate multiplies the iteration's value, so its slope is that of the rounded one.
    assert torch.allclose(slopes[0][~rates], slopes[1][~rates], rtol=1e-13, atol=1e-13)
    assert not torch.equal(slopes[0][rates], slopes[1][rates])
    assert not torch.equal(rounded[0], new[0])


def dead(given: Problem) -> Problem:
    """The problem with one coordinate of each parameter, and one whole parameter, unused."""
    weight, mix = ([t.clone() for t in tensors] for tensors in (given.weight, given.mix))
    for tensors in (weight, mix):
        for tensor in tensors:
            tensor.view(-1)[0] = 0
        tensors[-1].zero_()
    return given._replace(weight=weight, mix=mix)


@each_variant
@fresh_or_warm
def test_derivatives_are_finite_where_a_gradient_is_zero(row: Row, warm: bool) -> None:
    unrolled = Unrolled(row, warm, dead(problem(row)))
    gradient = unrolled.gradient()
    assert gradient.isfinite().all()
    assert gradient[: unrolled.weights].count_nonzero() > 0


LEARNING_RATES = [row for row in ONE_OF_EACH if row.settings == {"lr": row.settings["lr"]}]


@pytest.mark.parametrize("row", LEARNING_RATES, ids=[row.name for row in LEARNING_RATES])
def test_a_tensor_in_the_optimizers_groups_gets_its_gradient(row: Row) -> None:
    given = problem(row)
    slopes = []
    for inside in (True, False):
        lr = torch.tensor(row.settings["lr"], requires_grad=True)
        params = [nn.Parameter(p.clone(), i != FROZEN) for i, p in enumerate(given.start)]
        rule = optim.from_torch(row.kind(params, lr=lr if inside else row.settings["lr"]))
        hyper = None if inside else {"lr": lr}
        new, _ = rule_steps(rule, given.start, given, range(3), hyper)
        slopes.append(torch.autograd.grad(given.loss(new, 3), lr)[0])
    assert slopes[0] != 0
    assert torch.equal(*slopes)


# How a setting may be written. ------------------------------------------------------------------


STEPS = 3


class Written(NamedTuple):
    """A way to write a setting: how many values it has, which acts where, how it is given."""

    shape: Callable[[list[torch.Size]], tuple[int, ...]]
    acting: Callable[[Tensor, int, int, int], Tensor]
    """The values of a parameter, given group, parameter and time: a scalar or of its shape."""
    given: Callable[[Tensor, int], list[Any]]
    """One value per group."""


def _shapes() -> list[torch.Size]:
    return [torch.Size(shape) for shape in SHAPES]


def _sizes(shapes: list[torch.Size]) -> list[int]:
    return [shape.numel() for shape in shapes]


def _pieces(leaf: Tensor) -> list[Tensor]:
    return [p.view(s) for p, s in zip(leaf.split(_sizes(_shapes())), _shapes(), strict=True)]


WRITTEN = {
    "one per group": Written(
        shape=lambda shapes: (2,),
        acting=lambda leaf, group, param, time: leaf[group],
        given=lambda leaf, time: list(leaf.unbind()),
    ),
    "one per parameter, as a list": Written(
        shape=lambda shapes: (len(shapes),),
        acting=lambda leaf, group, param, time: leaf[param],
        given=lambda leaf, time: [list(leaf[:SPLIT].unbind()), list(leaf[SPLIT:].unbind())],
    ),
    "one per parameter, as a tensor": Written(
        shape=lambda shapes: (len(shapes),),
        acting=lambda leaf, group, param, time: leaf[param],
        given=lambda leaf, time: [leaf[:SPLIT], leaf[SPLIT:]],
    ),
    "one per element": Written(
        shape=lambda shapes: (sum(_sizes(shapes)),),
        acting=lambda leaf, group, param, time: _pieces(leaf)[param],
        given=lambda leaf, time: [_pieces(leaf)[:SPLIT], _pieces(leaf)[SPLIT:]],
    ),
    "per element, then per parameter": Written(
        shape=lambda shapes: (sum(_sizes(shapes)),),
        acting=lambda leaf, group, param, time: _pieces(leaf)[param] if time == 0 else leaf[param],
        given=lambda leaf, time: (
            [_pieces(leaf)[:SPLIT], _pieces(leaf)[SPLIT:]]
            if time == 0
            else [leaf[:SPLIT], leaf[SPLIT : len(SHAPES)]]
        ),
    ),
}


def leaves(rule: optim.Rule, written: Written) -> dict[str, list[Tensor]]:
    """A tensor of different values for each setting and component, near those of the rule."""
    random = torch.Generator().manual_seed(2)
    found = {}
    for name, values in rule.hyper.items():
        parts = values[0] if isinstance(values[0], tuple) else (values[0],)
        found[name] = []
        for value in parts:
            spread = torch.rand(written.shape(_shapes()), generator=random)
            near = value * (1 - 0.1 * spread) if value else 0.05 * spread
            found[name].append(near.requires_grad_())
    return found


def one_by_one(
    rule: optim.Rule, given: Problem, tensors: dict[str, list[Tensor]], written: Written
) -> list[Tensor]:
    """The same training in an explicit loop where every setting is a 0-d tensor.

    Each parameter is on its own, or each element where the settings are per element.
    """
    alone = optim.Rule(rule.family, (rule.groups[0],), (1,))
    params = list(given.start)
    elements = written.shape(_shapes()) == (sum(_sizes(_shapes())),)
    states: dict[tuple[int, int], Any] = {}
    for time in range(STEPS):
        grads = given.gradients(params, time)
        for i in [i for i, grad in enumerate(grads) if grad is not None]:
            shape, size = params[i].shape, params[i].numel()
            units = size if elements else 1
            split = params[i].reshape(units, -1), grads[i].reshape(units, -1)
            values = {
                name: [written.acting(p, int(i >= SPLIT), i, time).expand(shape) for p in parts]
                for name, parts in tensors.items()
            }
            new = []
            for j, (param, grad) in enumerate(zip(*split, strict=True)):
                hyper = {name: _one([v.reshape(-1)[j] for v in vs]) for name, vs in values.items()}
                state = states[i, j] if (i, j) in states else alone.init([param])
                (moved,), states[i, j] = alone.update([param], [grad], state, hyper)
                new.append(moved)
            params = _with(params, {i: torch.stack(new).view(shape)})
    return params


def _one(parts: list[Tensor]) -> list[Any]:
    return [tuple(parts) if len(parts) > 1 else parts[0]]


@pytest.mark.parametrize("row", VARIANTS, ids=[row.name for row in VARIANTS])
@pytest.mark.parametrize("way", WRITTEN)
def test_a_setting_may_be(row: Row, way: str) -> None:
    written, given = WRITTEN[way], problem(row)
    rule = optim.from_torch(by_torch(row, given)[0])
    tensors = leaves(rule, written)

    def hyper(time: int) -> dict[str, Any]:
        per_part = {
            name: [written.given(part, time) for part in parts] for name, parts in tensors.items()
        }
        return {
            name: [tuple(v) if len(v) > 1 else v[0] for v in zip(*parts, strict=True)]
            for name, parts in per_part.items()
        }

    flat = [part for parts in tensors.values() for part in parts]
    results = []
    for params in (
        rule_steps(rule, given.start, given, range(STEPS), hyper)[0],
        one_by_one(rule, given, tensors, written),
    ):
        slopes = torch.autograd.grad(given.loss(params, 3), flat, allow_unused=True)
        results.append((params, [torch.zeros(()) if s is None else s for s in slopes]))
    (params, slopes), (expected, expected_slopes) = results
    assert distance(params, expected) < EXACT
    for slope, reference in zip(slopes, expected_slopes, strict=True):
        assert torch.allclose(slope, reference, rtol=1e-9, atol=1e-12)


@each_variant
def test_numbers_given_again_change_nothing(row: Row) -> None:
    given = problem(row)
    rule = optim.from_torch(by_torch(row, given)[0])
    plain, _ = rule_steps(rule, given.start, given, range(STEPS))
    again, _ = rule_steps(rule, given.start, given, range(STEPS), rule.hyper)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_one_dimensional_tensor_gives_one_value_per_group() -> None:
    given = problem(ROWS[0])
    rule = optim.from_torch(by_torch(ROWS[0], given)[0])
    lr = torch.tensor([0.1, 0.2])
    listed, _ = rule_steps(rule, given.start, given, range(2), {"lr": list(lr.unbind())})
    bare, _ = rule_steps(rule, given.start, given, range(2), {"lr": lr})
    assert all(torch.equal(a, b) for a, b in zip(listed, bare, strict=True))


# Kinds of parameters. ---------------------------------------------------------------------------


def check_dtypes(row: Row, warm: bool, dtypes: list[torch.dtype], tolerance: float) -> None:
    given = problem(row, dtypes)
    optimizer, params = by_torch(row, given)
    first = WARM_STEPS if warm else 0
    torch_steps(optimizer, params, given, range(first))
    rule = optim.from_torch(optimizer)
    ours, state = rule_steps(rule, detached(params), given, range(first, first + 10))
    torch_steps(optimizer, params, given, range(first, first + 10))
    assert [p.dtype for p in ours] == dtypes
    assert distance(ours, params) < tolerance
    for slots, p in zip(state_by_parameter(rule.family, ours, state), params, strict=True):
        for name, value in optimizer.state.get(p, {}).items():
            if slots and name not in rule.family.counters and not row.one_group:
                assert (slots[name].shape, slots[name].dtype) == (value.shape, value.dtype)


COMPLEX = [row for row in ONE_OF_EACH if row.takes_complex]


@pytest.mark.parametrize("row", COMPLEX, ids=[row.name for row in COMPLEX])
@fresh_or_warm
def test_complex_parameters_move_as_in_torch(row: Row, warm: bool) -> None:
    c, r = torch.complex128, torch.float64
    check_dtypes(row, warm, [c, c, c, c, r], EXACT)


@each_variant
def test_mixed_dtypes_move_as_in_torch(row: Row) -> None:
    # The loss couples all parameters, so the rounding of the single ones reaches every other.
    single, double = torch.float32, torch.float64
    check_dtypes(row, True, [single, double, double, single, double], 1e-5)


@each_variant
def test_bfloat16_moves_about_as_in_torch(row: Row) -> None:
    # With 8 binary digits a weight is rounded by up to 2^-9 in each of 10 steps, and torch rounds
    # intermediate results that are not rounded here.
    check_dtypes(row, False, [torch.bfloat16] * 5, 10 * 2**-8)


PLAIN = [
    *(row for row in ELEMENTWISE if row.settings == {"lr": row.settings["lr"]}),
    *(row for row in ELEMENTWISE if row.settings == {"lr": 0.1, "momentum": 0.9}),
]
each_plain_row = pytest.mark.parametrize("row", PLAIN, ids=[row.name for row in PLAIN])


@each_plain_row
def test_empty_parameters_disturb_no_others(row: Row) -> None:
    params = [torch.ones(0), torch.ones(()), torch.ones(2), torch.ones(0, 3)]
    grads = [torch.full_like(p, 0.5) for p in params]
    expected = [nn.Parameter(p.clone()) for p in params]
    optimizer = row.kind(
        [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(expected)], **row.settings
    )
    rule = optim.from_torch(optimizer)
    for p, g in zip(expected, grads, strict=True):
        p.grad = g
    optimizer.step()
    rates = [torch.full_like(p, 0.1 * (i + 1)) for i, p in enumerate(params)]
    for hyper in (None, {"lr": rates}):
        new, state = rule.update(params, grads, rule.init(params), hyper)
        assert [p.shape for p in new] == [p.shape for p in params]
        assert distance(new[1:3], expected[1:3]) < EXACT
        rule.write_to(optimizer, state)


# Back into torch. -------------------------------------------------------------------------------


def check_write(row: Row, dtypes: list[torch.dtype] | None = None) -> None:
    given = problem(row, dtypes)
    alone, expected = by_torch(row, given)
    torch_steps(alone, expected, given, range(15))

    optimizer, params = by_torch(row, given)
    torch_steps(optimizer, params, given, range(5))
    rule = optim.from_torch(optimizer)
    ours, state = rule_steps(rule, detached(params), given, range(5, 10))
    target, params = by_torch(row, given)
    with torch.no_grad():
        for param, value in zip(params, ours, strict=True):
            param.copy_(value)
    rule.write_to(target, state)
    torch_steps(target, params, given, range(10, 15))
    assert distance(params, expected) < EXACT


@each_variant
def test_torch_goes_on_from_a_written_state(row: Row) -> None:
    check_write(row)


@pytest.mark.parametrize("row", COMPLEX, ids=[row.name for row in COMPLEX])
def test_torch_goes_on_from_a_written_complex_state(row: Row) -> None:
    check_write(row, [torch.complex128] * 4 + [torch.float64])


@each_variant
def test_torch_goes_on_from_a_state_before_any_step(row: Row) -> None:
    given = problem(row)
    alone, expected = by_torch(row, given)
    torch_steps(alone, expected, given, range(3))
    target, params = by_torch(row, given)
    rule = optim.from_torch(target)
    rule.write_to(target, rule.init(params))
    torch_steps(target, params, given, range(3))
    assert distance(params, expected) < EXACT


def test_a_state_is_written_in_the_dtypes_of_torch() -> None:
    torch.set_default_dtype(torch.float32)
    row = next(row for row in ROWS if row.kind is torch.optim.NAdam)
    given = problem(row)
    target, params = by_torch(row, given)
    rule = optim.from_torch(target)
    _, state = rule_steps(rule, detached(params), given, range(2))
    rule.write_to(target, state)
    torch_steps(target, params, given, range(2, 4))
    scalar = target.state[params[1]]
    assert scalar["exp_avg"].dtype == torch.float64
    assert scalar["mu_product"].dtype == scalar["step"].dtype == torch.float32


def test_settings_are_written_when_given() -> None:
    row = next(row for row in ROWS if row.kind is torch.optim.Adam)
    target, params = by_torch(row, problem(row))
    rule = optim.from_torch(target)
    betas = torch.tensor([0.8, 0.9], requires_grad=True)
    hyper = {"lr": [torch.tensor(0.3, requires_grad=True), 0.4], "betas": betas}
    rule.write_to(target, rule.init(params), hyper)
    assert [group["lr"] for group in target.param_groups] == [0.3, 0.4]
    assert target.param_groups[0]["betas"] == (0.8, 0.9)


# What is accepted. ------------------------------------------------------------------------------


@pytest.mark.parametrize("row", FLAGS, ids=[row.name for row in FLAGS])
def test_flags_of_the_implementation_change_nothing(row: Row) -> None:
    # torch can step with `capturable` on accelerators only, with `differentiable` on non-leaves.
    runs = not {"capturable", "differentiable"} & row.settings.keys()
    reference = row if runs else row._replace(settings={"lr": row.settings["lr"]})
    given = problem(row)
    rule = optim.from_torch(by_torch(row, given)[0])
    optimizer, params = by_torch(reference, given)
    torch_steps(optimizer, params, given, range(10))
    ours, _ = rule_steps(rule, given.start, given, range(10))
    assert distance(ours, params) < EXACT


SUBCLASSES = """
import torch
from innerloop import InnerLoopError, optim

for base in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon):
    class Plain(base):
        pass

    class Own(base):
        def step(self, closure=None):
            return super().step(closure)

    params = [torch.nn.Parameter(torch.ones(2, 2))]
    assert optim.from_torch(Plain(params)).family.name == base.__name__
    try:
        optim.from_torch(Own(params))
    except InnerLoopError as error:
        assert "register_optim" in str(error)
    else:
        raise AssertionError(base)
"""


def test_a_subclass_is_accepted_unless_it_has_its_own_step() -> None:
    # In a fresh process: the first instance of a class makes torch wrap the `step` of that class.
    done = subprocess.run([sys.executable, "-c", SUBCLASSES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_class_of_torch_is_here() -> None:
    kinds = {
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    kinds -= {torch.optim.Optimizer, torch.optim.SparseAdam}
    assert kinds == set(optim.FAMILIES) == {row.kind for row in ROWS}
    for kind, family in optim.FAMILIES.items():
        parameter = nn.Parameter(torch.ones(2, 2))
        found = set(kind([parameter]).defaults)
        flags = {"foreach", "fused", "capturable", "differentiable"}
        ours = {*family.settings, *family.options}
        assert found - flags - ours == set()
        assert ours - found <= {"ns_dtype", "decoupled_weight_decay", "maximize"}


def test_lbfgs_maximizes() -> None:
    """torch's class has the option since 2.15; by the rule it is the descent of minus the loss."""
    start, lr = [torch.tensor([1.0, -2.0])], torch.tensor(0.1, requires_grad=True)

    def evaluation(sign: int) -> Any:
        def evaluate(params: Any) -> Any:
            x = params[0]
            return sign * (x.cos().sum() + x.prod()), [sign * (x.prod() / x - x.sin())]

        return evaluate

    def trained(rule: Any, evaluate: Any) -> Any:
        params, _ = rule.update(
            start, evaluate(start)[1], rule.init(start), {"lr": lr}, evaluate=evaluate
        )
        return params[0]

    ascended = trained(optim.lbfgs(max_iter=3, maximize=True), evaluation(1))
    descended = trained(optim.lbfgs(max_iter=3), evaluation(-1))
    plain = trained(optim.lbfgs(max_iter=3), evaluation(1))
    assert torch.equal(ascended, descended) and not torch.allclose(ascended, plain)
    grads = [torch.autograd.grad(found.sum(), lr)[0] for found in (ascended, descended)]
    assert torch.equal(*grads)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it of every input.
@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.Muon])
def test_an_update_compiles_as_one_graph(kind: Any) -> None:
    params = [torch.randn(3, 2), torch.randn(2, 2), torch.randn(2, 4)]
    rule = optim.from_torch(kind([{"params": params[:1]}, {"params": params[1:], "lr": 0.3}]))
    grads = [p + 1 for p in params]
    state = rule.init(params)
    lr = torch.tensor(0.1, requires_grad=True)

    def total(update: Any) -> Tensor:
        new, after = update(params, grads, state, {"lr": [lr, 0.3]})
        new, _ = update(new, grads, after, {"lr": [lr, 0.3]})
        return sum(p.square().sum() for p in new)

    torch.compiler.reset()
    compiled = total(torch.compile(rule.update, backend="aot_eager", fullgraph=True))
    plain = total(rule.update)
    assert torch.allclose(compiled, plain, rtol=EXACT)
    slopes = [torch.autograd.grad(value, lr)[0] for value in (compiled, plain)]
    assert torch.allclose(*slopes, rtol=EXACT)


# Cost. ------------------------------------------------------------------------------------------


class Kernels(TorchDispatchMode):
    """Counts operations that compute something, views aside."""

    VIEWS = ("view", "select", "split", "split_with_sizes", "unbind", "expand", "detach", "slice")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in self.VIEWS
        return func(*args, **(kwargs or {}))


def kernels(row: Row, groups: int, learned: bool) -> int:
    """Of two updates of as many groups of one tensor each, all settings different, and backward."""
    params = [torch.linspace(-1, 1, 6).add(0.01 * i).requires_grad_() for i in range(groups)]
    rule = optim.from_torch(row.kind([{"params": [p]} for p in params], **row.settings))
    names = [name for name, values in rule.hyper.items() if not isinstance(values[0], tuple)]
    new, state, inputs = params, rule.init(params), list(params)
    counted = Kernels()
    for _ in range(2):
        numbers: list[Any] = [0.1 + 0.001 * i for i in range(groups)]
        hyper = {
            name: [torch.tensor(v, requires_grad=True) for v in numbers] if learned else numbers
            for name in names
        }
        grads = [p.detach().clone().requires_grad_() for p in params]
        inputs += grads + [v for values in hyper.values() for v in values if learned]
        with counted:
            new, state = rule.update(new, grads, state, hyper)
    with counted:
        torch.autograd.grad(torch.cat(new).sum(), inputs, allow_unused=True)
    return counted.count


@each_plain_row
@pytest.mark.parametrize("learned", [False, True], ids=["numbers", "tensors"])
def test_many_groups_cost_as_many_kernels_as_few(row: Row, learned: bool) -> None:
    assert kernels(row, 299, learned) == kernels(row, 10, learned)


# Errors. ----------------------------------------------------------------------------------------


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(InnerLoopError) as caught:
        call()
    assert all(part in str(caught.value) for part in ("Needed:", "Why:", "Write:"))
    return str(caught.value)


def adam_over(*shapes: tuple[int, ...]) -> tuple[optim.Rule, list[Tensor]]:
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    return optim.from_torch(torch.optim.Adam([{"params": [p]} for p in params])), params


WRONG_SETTINGS = {
    "unknown": ({"learning_rate": 0.1}, "Adam has no setting of that name"),
    "discrete": ({"amsgrad": True}, "discrete"),
    "too many groups": ({"lr": [0.1, 0.2, 0.3]}, "3 values for 'lr'"),
    "too many in a tensor": ({"lr": torch.ones(3)}, "3 values for 'lr'"),
    "one beta": ({"betas": 0.9}, "2 components"),
    "three betas": ({"betas": [(0.9, 0.9, 0.9)]}, "2 components"),
    "wrong shape": ({"lr": [torch.ones(4), 0.1]}, "shape (4,)"),
    "wrong count in a group": ({"lr": [[0.1, 0.2], 0.1]}, "2 values of 'lr'"),
    "text": ({"lr": "0.1"}, "a str as 'lr'"),
    "boolean": ({"lr": True}, "a bool as 'lr'"),
    "complex tensor": ({"lr": torch.ones((), dtype=torch.complex64)}, "complex64 as 'lr'"),
}


@pytest.mark.parametrize("case", WRONG_SETTINGS)
def test_a_wrong_setting_is_refused(case: str) -> None:
    hyper, message = WRONG_SETTINGS[case]
    rule, params = adam_over((3,), (2, 2))
    assert message in raised(lambda: rule.update(params, params, rule.init(params), hyper))


class Mine(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:
        pass


ONES, MATRIX, COMPLEX_MATRIX = torch.ones(2), torch.ones(2, 2), torch.ones(2, 2) + 0j

WRONG_PARAMETERS: dict[str, tuple[Callable[[], Any], str]] = {
    "SparseAdam": (lambda: torch.optim.SparseAdam([ONES]), "torch.optim.Adam"),
    "a class of one's own": (lambda: Mine([ONES], {}), "register_optim(Mine"),
    "complex to Adafactor": (lambda: torch.optim.Adafactor([COMPLEX_MATRIX]), "complex"),
    "complex to Muon": (lambda: torch.optim.Muon([COMPLEX_MATRIX]), "complex"),
}


@pytest.mark.parametrize("case", WRONG_PARAMETERS)
def test_an_optimizer_without_a_rule_is_refused(case: str) -> None:
    build_one, message = WRONG_PARAMETERS[case]
    params = [COMPLEX_MATRIX]
    assert message in raised(lambda: optim.from_torch(build_one()).init(params))


def loss_and_gradients(params: Any) -> Any:
    return params[0].sum(), params


SEARCH = optim.from_torch(torch.optim.LBFGS([ONES], line_search_fn="strong_wolfe"))
NAMED = {"a": ONES, "b": ONES}
WRONG_UPDATES: dict[str, tuple[optim.Rule, Any, Any, dict[str, Any], str]] = {
    "sparse": (optim.adam(), [ONES], [ONES.to_sparse()], {}, "sparse=False"),
    "too few gradients": (optim.adam(), [ONES, ONES], [ONES], {}, "1 gradients"),
    "other names": (optim.adam(), NAMED, {"a": ONES, "c": ONES}, {}, "other names"),
    "a name less": (optim.adam(), NAMED, {"a": ONES}, {}, "other names"),
    "a list for a mapping": (optim.adam(), NAMED, [ONES, ONES], {}, "other names"),
    "another shape": (optim.adam(), NAMED, {"a": ONES, "b": torch.ones(3)}, {}, "(3,)"),
    "a number": (optim.adam(), NAMED, {"a": ONES, "b": torch.ones(())}, {}, "()"),
    "another state": (optim.adam(), [ONES], [ONES], {"state": optim.sgd().init([ONES])}, "init"),
    "state of fewer": (optim.adam(), [ONES] * 2, [ONES] * 2, {"state": ()}, "rule.init"),
    "no state": (optim.adam(), [ONES], [ONES], {"state": None}, "rule.init"),
    "gradients alone": (optim.lbfgs(), [ONES], [ONES], {}, "evaluate="),
    "line search": (SEARCH, [ONES], [ONES], {"evaluate": loss_and_gradients}, "search_fn=None"),
    "eps": (optim.muon(), [MATRIX], [MATRIX], {"hyper": {"eps": [MATRIX]}}, "as a whole"),
    "ns_coefficients": (
        optim.muon(),
        [MATRIX],
        [MATRIX],
        {"hyper": {"ns_coefficients": [(MATRIX,) * 3]}},
        "as a whole",
    ),
    "beta2_decay": (
        optim.adafactor(),
        [MATRIX],
        [MATRIX],
        {"hyper": {"beta2_decay": [MATRIX]}},
        "as a whole",
    ),
}


@pytest.mark.parametrize("case", WRONG_UPDATES)
def test_a_wrong_update_is_refused(case: str) -> None:
    rule, params, grads, extra, message = WRONG_UPDATES[case]
    given = {"state": rule.init(params)} | extra
    assert message in raised(lambda: rule.update(params, grads, **given))


def test_wrong_parameters_are_refused() -> None:
    rule, params = adam_over((3,), (2,))
    assert "3 parameters to a rule for 2" in raised(lambda: rule.init([*params, params[0]]))
    assert "the shape (2,)" in raised(lambda: rule.init(params[::-1]))
    assert "from_torch" in raised(lambda: rule.init({"a": params[0], "b": params[1]}))
    assert "matrices" in raised(lambda: optim.muon().init([torch.ones(3)]))


def test_a_state_per_element_cannot_be_written() -> None:
    params = [nn.Parameter(torch.ones(3))]
    target = torch.optim.NAdam(params)
    rule = optim.from_torch(target)
    betas = (torch.tensor([0.9, 0.8, 0.7]), 0.9)
    _, state = rule.update(params, params, rule.init(params), {"betas": [betas]})
    assert "mu_product" in raised(lambda: rule.write_to(target, state))
    assert not target.state


# Structure: what belongs to what.


def test_gradients_are_matched_by_name():
    rule = optim.sgd(lr=1.0)
    params = {"a": torch.zeros(2), "b": torch.zeros(2)}
    new, _ = rule.update(params, {"b": torch.ones(2), "a": torch.zeros(2)}, rule.init(params))
    assert new["a"].tolist() == [0, 0]
    assert new["b"].tolist() == [-1, -1]


def two_rates(model):
    groups = [
        {"params": model[2].parameters(), "lr": 0.5},
        {"params": [model[0].weight], "lr": 0.001},
    ]
    return torch.optim.Adam(groups)


@pytest.mark.parametrize("warm", [0, 2])
def test_a_rule_that_knows_names_finds_each_parameters_settings_and_state(warm):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    x, optimizer = torch.randn(5, 3), two_rates(model)

    def torch_step():
        model.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(warm):
        torch_step()
    f = functional(model)
    rule = optim.from_torch(optimizer, f.params)
    params = {name: p.detach().clone().requires_grad_() for name, p in f.params.items()}
    state = rule.init(params)
    for _ in range(3):
        loss = f(params, x).square().mean()
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        params, state = rule.update(params, grads, state)
        torch_step()
    for name, param in model.named_parameters():
        torch.testing.assert_close(params[name], param, rtol=1e-12, atol=0)


def test_an_update_of_sgd_costs_few_calls() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    params = functional(model).params
    rule = optim.from_torch(torch.optim.SGD(model.parameters(), lr=0.1), params)
    state = rule.init(params)
    assert len(params) == 4
    assert python_calls(lambda: rule.update(params, params, state)) <= 15
    rule.update(params, params, state, checked=True)
    assert python_calls(lambda: rule.update(params, params, state, checked=True)) <= 13
    lr = {"lr": torch.tensor(0.1)}
    assert python_calls(lambda: rule.update(params, params, state, lr)) <= 26
