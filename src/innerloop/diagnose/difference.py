"""Finite differences of L_val along a direction, and their comparison with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.diagnose import advice
from innerloop.diagnose.report import Difference
from innerloop.diagnose.runs import MetaParameter

# Multiples of the usual best width, tried in this order until one is precise enough.
_WIDTHS = (1.0, 1 / 16, 16.0, 1 / 256)

Evaluate = Callable[[Sequence[Tensor]], float]
"""Computes L_val; it is given the tensors that are moved."""
Group = Sequence[MetaParameter]
Grads = Mapping[str, Tensor | None]


class Noise(NamedTuple):
    """The precision of L_val: its value, the rounding of its dtype, its spread when repeated."""

    value: float
    eps: float
    spread: float

    @property
    def size(self) -> float:
        return 4 * self.eps * abs(self.value) + self.spread


class Quotient(NamedTuple):
    """The change of L_val along a direction, divided by the way."""

    slope: float
    uncertainty: float
    width: float


def compare_all(
    evaluate: Evaluate, noise: Noise, params: Group, grads: Grads, checks: int, exact: bool
) -> dict[str, Difference]:
    """The comparison of every gradient, by name.

    Of more than ``checks`` parameters, those of a part are moved together; if such a group differs,
    each of it is moved by itself, unless the gradient is approximate anyway (not ``exact``).
    """
    found: dict[str, Difference] = {}
    for group in _groups(params, grads, checks):
        result = compare(evaluate, noise, group, grads)
        if exact and result.verdict == "differs" and len(group) > 1:
            found |= {p.name: compare(evaluate, noise, [p], grads) for p in group}
            continue
        if (others := len(group) - 1) > 0:
            result = result._replace(why=f"together with {others} other{'s' * (others > 1)}")
        found |= {p.name: result for p in group}
    return found


def _groups(params: Group, grads: Grads, checks: int) -> Sequence[Group]:
    """Each parameter by itself, or those of a part together if there are too many.

    Parameters without a gradient are not mixed with others: the group could only differ.
    """
    if len(params) <= checks:
        return [[p] for p in params]
    parts: dict[tuple[str, bool], list[MetaParameter]] = {}
    for p in params:
        grad = grads.get(p.name)
        parts.setdefault((p.part, grad is not None and bool(grad.any())), []).append(p)
    return list(parts.values())


def compare(evaluate: Evaluate, noise: Noise, group: Group, grads: Grads) -> Difference:
    """Moves a group along one direction and compares the change of L_val with the gradient."""
    along, slope = _direction(group, grads)
    size = math.sqrt(sum(p.tensor.numel() for p in group))
    best = Quotient(0.0, math.inf, noise.eps ** (1 / 3) * size)
    for factor in _WIDTHS:
        width = noise.eps ** (1 / 3) * size * factor
        found = _quotient(evaluate, noise, group, along, width)
        if found.uncertainty < best.uncertainty:
            best = found
        if best.uncertainty <= 0.01 * max(abs(best.slope), abs(slope)):
            break
    return _judge(best, slope, noise, best.width / size)


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
    evaluate: Evaluate, noise: Noise, group: Group, along: Sequence[Tensor], width: float
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


def _evaluate_at(evaluate: Evaluate, group: Group, along: Sequence[Tensor], by: float) -> float:
    """L_val with the parameters moved; NaN if it cannot be computed there."""
    tensors = [p.tensor for p in group]
    before = [t.data for t in tensors]
    try:
        for tensor, data, v in zip(tensors, before, along, strict=True):
            tensor.data = data + (by * v).to(data)
        return evaluate(tensors)
    except Exception:
        # The parameter left its range, as a beta above 1. A smaller width may do.
        return math.nan
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


def _direction(group: Group, grads: Grads) -> tuple[list[Tensor], float]:
    """A direction in the parameters' own units, and the slope of the gradient along it.

    It is partly that of the gradient, so that the change is far above rounding, and partly random,
    so that a missing part of the gradient shows.
    """
    scales = [_scale(p.tensor) for p in group]
    slopes = []
    for p, scale in zip(group, scales, strict=True):
        grad = grads.get(p.name)
        slopes.append(_flatten(torch.zeros_like(p.tensor) if grad is None else grad) * scale)
    ascent = torch.cat(slopes)
    length = ascent.norm()
    generator = torch.Generator().manual_seed(len(group))
    unit = torch.randn(ascent.shape, dtype=ascent.dtype, generator=generator)
    if 0 < length < math.inf:
        uphill = ascent / length
        unit = unit - unit.dot(uphill) * uphill
        rest = unit.norm()
        unit = 0.8 * uphill + 0.6 * unit / rest if rest > 1e-8 else uphill
    unit = unit / unit.norm()
    parts = unit.split([_flatten(p.tensor).numel() for p in group])
    along = [_shape_as(part * s, p.tensor) for part, s, p in zip(parts, scales, group, strict=True)]
    return along, float(ascent.dot(unit))


def _scale(param: Tensor) -> float:
    """The typical size of a parameter's elements; 1 where all are zero."""
    size = float(param.detach().abs().double().square().mean().sqrt())
    return size if 0 < size < math.inf else 1.0


def _flatten(tensor: Tensor) -> Tensor:
    """The real numbers of a tensor, in double precision on the CPU."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().cpu().double().flatten()


def _shape_as(numbers: Tensor, like: Tensor) -> Tensor:
    """The inverse of :func:`_flatten`."""
    if like.is_complex():
        return torch.view_as_complex(numbers.view(*like.shape, 2))
    return numbers.view(like.shape)
