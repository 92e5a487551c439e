"""Every rule against `torch.optim`, and every derivative against finite differences."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from optimizers import FLAGS, ROWS, Row, build
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from innerloop import InnerLoopError, optim
from innerloop.optim._rule import unpacked

EXACT = 1e-12
"""Relative distance to torch's trajectory: some hundred roundings in float64, over 20 steps."""

WARM_STEPS = 5
FROZEN, IDLE = 2, 3
"""Positions of the parameter that is frozen, and of the one that some losses do not use."""
SPLIT = 3
SHAPES = [(3, 2), (), (2,), (3,), (2, 4)]
MATRICES = [(3, 2), (3, 3), (2, 2), (2, 3), (2, 4)]

each_row = pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
fresh_or_warm = pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
ELEMENTWISE = [row for row in ROWS if row.elementwise]
each_elementwise_row = pytest.mark.parametrize(
    "row", ELEMENTWISE, ids=[row.name for row in ELEMENTWISE]
)


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
            _real(torch.zeros(shape, dtype=dtype)).new_empty(
                _real(torch.zeros(shape, dtype=dtype)).shape, dtype=torch.float64
            ).uniform_(low, high, generator=random)
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
    gap = max((a.detach() - b.detach()).abs().max().item() for a, b in zip(actual, expected))
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
def test_trajectory_of_muon_in_float64(
    row: Row, warm: bool, smooth_muon: dict[str, Any]
) -> None:
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
        averages = [slots.get("ax") for slots in unpacked(self.rule.family, params, state)]
        result = self.given.loss(params, 11)
        if any(average is not None for average in averages):
            used = [p if a is None else a for p, a in zip(params, averages, strict=True)]
            result = result + self.given.loss(used, 11)
        return result

    def gradient(self) -> Tensor:
        point = self.point.requires_grad_()
        return torch.autograd.grad(self(point), point)[0]

    def widths(self) -> Tensor:
        """The step of the difference for each coordinate: small against what it varies over."""
        widths = [1e-3] * self.weights
        for name, _, _, value in self.settings:
            if name in ("betas", "rho", "alpha") and value < 1:
                widths.append(1e-2 * (1 - value))
            elif name in ("eps", "step_sizes") and self._scales_with(name, value):
                widths.append(3e-3 * value)
            else:
                widths.append(1e-4 * max(1.0, abs(value)))
        return torch.tensor(widths)

    def _scales_with(self, name: str, value: float) -> bool:
        """Whether the setting is compared with, or added to, something of its own size."""
        kind = self.rule.family.torch_class
        return value > 0 and kind in (torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Rprop)

    def differences(self) -> Tensor:
        """Central differences of fourth order along every coordinate, all in one batch."""
        point, widths = self.point, self.widths()
        shifts = torch.diag(widths)
        points = torch.cat([point + k * shifts for k in (1, -1, 2, -2)])
        if self.rule.family.layout == "whole":
            values = torch.stack([self(p) for p in points]).detach()
        else:
            batched = _Batched(*self.given)
            values = torch.func.vmap(lambda p: self(p, batched))(points)
        plus, minus, plus2, minus2 = values.chunk(4)
        return (8 * (plus - minus) - (plus2 - minus2)) / (12 * widths)


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
    actual, expected = unrolled.gradient(), unrolled.differences()
    # Rounding of the loss over the width of the difference: what a derivative of 0 may look like.
    noise = 1e-15 * unrolled(unrolled.point).abs() / unrolled.widths() + 1e-12
    error = ((actual - expected).abs() - 10 * noise).clamp(min=0) / expected.abs()
    wrong = {
        name: (a.item(), e.item())
        for name, a, e, bad in zip(
            unrolled.names, actual, expected, error.nan_to_num(0) > 1e-6, strict=True
        )
        if bad
    }
    assert not wrong
    assert actual.isfinite().all()


@each_row
@fresh_or_warm
def test_derivatives_are_finite_differences(
    row: Row, warm: bool, smooth_muon: dict[str, Any]
) -> None:
    check_derivatives(Unrolled(row, warm, **(smooth_muon if row.matrices_only else {})))
