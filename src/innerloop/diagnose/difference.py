"""Finite differences of L_val along a direction, and their comparison with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.diagnose import advice
from innerloop.diagnose.report import Difference

# Multiples of the usual best width, tried in this order until one is precise enough.
_WIDTHS = (1.0, 1 / 16, 16.0, 1 / 256)

Evaluate = Callable[[], float]


class Noise(NamedTuple):
    """The precision of L_val: its value, the rounding of its dtype, its spread when repeated."""

    value: float
    eps: float
    spread: float

    @property
    def size(self) -> float:
        return 4 * self.eps * abs(self.value) + self.spread


class Movable(NamedTuple):
    """A meta-parameter that is moved, and its gradient."""

    name: str
    part: str
    tensor: Tensor
    grad: Tensor | None

    @property
    def has_gradient(self) -> bool:
        return self.grad is not None and bool(self.grad.any())


class Quotient(NamedTuple):
    slope: float
    uncertainty: float
    width: float


def compare_all(
    evaluate: Callable[[Sequence[Tensor]], float],
    noise: Noise,
    params: Sequence[Movable],
    checks: int,
    exact: bool,
) -> dict[str, Difference]:
    """The comparison of every gradient, by name.

    ``evaluate`` computes L_val and is given the tensors that are moved. Of more than ``checks``
    parameters, those of a part are moved together; a group that differs is halved until the ones
    that do are found, unless the gradient is approximate anyway (not ``exact``).
    """
    found: dict[str, Difference] = {}
    waiting = _groups(params, checks)
    while waiting:
        group = waiting.pop()
        moved = [p.tensor for p in group]
        result = compare(lambda moved=moved: evaluate(moved), noise, group)
        if exact and result.verdict == "differs" and len(group) > 1:
            middle = len(group) // 2
            waiting += [group[:middle], group[middle:]]
            continue
        if len(group) > 1:
            result = result._replace(why=advice.moved_together(len(group)))
        found |= {p.name: result for p in group}
    return found


def _groups(params: Sequence[Movable], checks: int) -> list[Sequence[Movable]]:
    """Each parameter by itself; if these are too many, the largest parts as groups.

    Parameters without a gradient are not mixed with others: the group could only differ.
    """
    parts: dict[tuple[str, bool], list[Movable]] = {}
    for p in params:
        parts.setdefault((p.part, p.has_gradient), []).append(p)
    count = len(params)
    groups: list[Sequence[Movable]] = []
    for part in sorted(parts.values(), key=len, reverse=True):
        if count > checks:
            groups.append(part)
            count -= len(part) - 1
        else:
            groups += [[p] for p in part]
    return groups


def compare(evaluate: Evaluate, noise: Noise, group: Sequence[Movable]) -> Difference:
    """Moves a group along one direction and compares the change of L_val with the gradient."""
    along, slope = _direction(group)
    count = sum(p.tensor.numel() for p in group)
    usual = noise.eps ** (1 / 3) * math.sqrt(count)
    best = Quotient(0.0, math.inf, usual)
    for factor in _WIDTHS:
        found = _quotient(evaluate, noise, group, along, usual * factor)
        if found.uncertainty < best.uncertainty:
            best = found
        if best.uncertainty <= 0.01 * max(abs(best.slope), abs(slope)):
            break
    return _judge(best, slope, noise, best.width / math.sqrt(count))


def _judge(best: Quotient, slope: float, noise: Noise, width: float) -> Difference:
    uncertain = best.uncertainty
    if not math.isfinite(uncertain) or not math.isfinite(slope):
        return Difference("not judged", None, width, why=advice.VALUE_NOT_FINITE)
    influence = abs(best.slope) > 10 * uncertain
    if slope == 0:
        verdict = "differs" if influence else "agrees"
        return Difference(verdict, 1.0 if influence else None, width, influence)
    size = max(abs(best.slope), abs(slope))
    error = abs(best.slope - slope) / size
    if uncertain > 0.1 * size:
        return Difference("not judged", error, width, influence, advice.too_few_digits(noise.eps))
    tolerance = max(5 * uncertain / size, 1e-5, 100 * noise.eps ** (2 / 3))
    return Difference("agrees" if error <= tolerance else "differs", error, width, influence)


def _quotient(
    evaluate: Evaluate,
    noise: Noise,
    group: Sequence[Movable],
    along: Sequence[Tensor],
    width: float,
) -> Quotient:
    """A central difference; its uncertainty by rounding and by another of half the width."""
    wide, narrow = (
        (_evaluate_at(evaluate, group, along, h) - _evaluate_at(evaluate, group, along, -h))
        / (2 * h)
        for h in (width, width / 2)
    )
    uncertainty = abs(wide - narrow) + 2 * noise.size / width
    if not math.isfinite(uncertainty):
        uncertainty = math.inf
    return Quotient(narrow + (narrow - wide) / 3, uncertainty, width)


def _evaluate_at(
    evaluate: Evaluate, group: Sequence[Movable], along: Sequence[Tensor], by: float
) -> float:
    """L_val with the parameters moved; NaN if it cannot be computed there."""
    before = [p.tensor.data for p in group]
    try:
        for p, data, v in zip(group, before, along, strict=True):
            p.tensor.data = data + (by * v).to(data.dtype)
        return evaluate()
    except Exception:
        # The parameter left its range, as a beta above 1. A smaller width may do.
        return math.nan
    finally:
        for p, data in zip(group, before, strict=True):
            p.tensor.data = data


def _direction(group: Sequence[Movable]) -> tuple[list[Tensor], float]:
    """A direction in the parameters' own units, and the slope of the gradient along it.

    It is partly that of the gradient, so that the change is far above rounding, and partly random,
    so that a missing part of the gradient shows.
    """
    generator = torch.Generator().manual_seed(len(group))
    scales = [_scale(p.tensor) for p in group]
    chance = [
        torch.randn(p.tensor.shape, dtype=_wide(p.tensor.dtype), generator=generator).to(
            p.tensor.device
        )
        for p in group
    ]
    ascent = [
        torch.zeros_like(r) if p.grad is None else p.grad.detach().to(r.dtype) * s
        for p, r, s in zip(group, chance, scales, strict=True)
    ]
    length = math.sqrt(_dot(ascent, ascent))
    if 0 < length < math.inf:
        ascent = [a / length for a in ascent]
        overlap = _dot(ascent, chance)
        chance = [r - overlap * a for r, a in zip(chance, ascent, strict=True)]
        rest = math.sqrt(_dot(chance, chance))
        weight = 0.6 / rest if rest > 1e-8 else 0.0
        chance = [0.8 * a + weight * r for a, r in zip(ascent, chance, strict=True)]
    norm = math.sqrt(_dot(chance, chance))
    unit = [r / norm for r in chance]
    slope = length * _dot(ascent, unit) if length else 0.0
    return [u * s for u, s in zip(unit, scales, strict=True)], slope


def _scale(param: Tensor) -> float:
    """The typical size of a parameter's elements; 1 where all are zero."""
    size = float(param.detach().abs().double().square().mean().sqrt())
    return size if 0 < size < math.inf else 1.0


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return sum(float((x.conj() * y).sum().real) for x, y in zip(a, b, strict=True))
