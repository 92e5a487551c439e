"""Finite differences of L_val along a direction, and how far they can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.diagnose.report import Difference

# Tried in this order until one is good enough: multiples of the usual best width.
_WIDTHS = (1.0, 1 / 16, 16.0, 1 / 256)


class Noise(NamedTuple):
    """How exactly L_val is known: its value, its rounding, and how far it repeats."""

    value: float
    eps: float
    spread: float

    @property
    def size(self) -> float:
        return 4 * self.eps * abs(self.value) + self.spread


class Quotient(NamedTuple):
    slope: float
    uncertainty: float
    width: float


def compared(
    evaluate: Callable[[], float],
    noise: Noise,
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    seed: int,
) -> Difference:
    """Move ``params`` along one direction and compare the change of L_val with ``grads``.

    The direction is partly that of the gradient, so that the change is far above rounding, and
    partly random, so that a missing part of the gradient shows.
    """
    scales = [_scale(p) for p in params]
    along, slope = _direction(params, grads, scales, seed)
    count = sum(p.numel() for p in params)
    usual = noise.eps ** (1 / 3) * math.sqrt(count)
    best: Quotient | None = None
    for factor in _WIDTHS:
        found = _quotient(evaluate, noise, params, along, usual * factor)
        if best is None or not best.uncertainty <= found.uncertainty:
            best = found
        if best.uncertainty <= 0.01 * max(abs(best.slope), abs(slope)):
            break
    assert best is not None
    return _judged(best, slope, noise, best.width / math.sqrt(count))


def _judged(best: Quotient, slope: float, noise: Noise, width: float) -> Difference:
    uncertain = best.uncertainty
    if not math.isfinite(uncertain) or not math.isfinite(slope):
        return Difference("not judged", None, width, why="L_val or its gradient is not finite")
    influence = abs(best.slope) > 10 * uncertain
    if slope == 0:
        verdict = "differs" if influence else "agrees"
        return Difference(verdict, 1.0 if influence else None, width, influence)
    size = max(abs(best.slope), abs(slope))
    error = abs(best.slope - slope) / size
    if uncertain > 0.1 * size:
        digits = max(0, round(-math.log10(noise.eps)))
        why = f"L_val has about {digits} digits, too few for a difference as small as here" + (
            "" if digits > 12 else "; inner.double() and batches in float64 have more"
        )
        return Difference("not judged", error, width, influence, why)
    tolerance = max(5 * uncertain / size, 1e-5, 100 * noise.eps ** (2 / 3))
    return Difference("agrees" if error <= tolerance else "differs", error, width, influence)


def _quotient(
    evaluate: Callable[[], float],
    noise: Noise,
    params: Sequence[Tensor],
    along: Sequence[Tensor],
    width: float,
) -> Quotient:
    """A central difference; its uncertainty by rounding and by another of half the width."""
    wide, narrow = (
        (_moved(evaluate, params, along, h) - _moved(evaluate, params, along, -h)) / (2 * h)
        for h in (width, width / 2)
    )
    uncertainty = abs(wide - narrow) + 2 * noise.size / width
    if not math.isfinite(uncertainty):
        uncertainty = math.inf
    return Quotient(narrow + (narrow - wide) / 3, uncertainty, width)


def _moved(
    evaluate: Callable[[], float], params: Sequence[Tensor], along: Sequence[Tensor], by: float
) -> float:
    """L_val with the parameters moved; they get their own memory back."""
    before = [p.data for p in params]
    try:
        for p, data, v in zip(params, before, along, strict=True):
            p.data = data + (by * v).to(data.dtype)
        return evaluate()
    finally:
        for p, data in zip(params, before, strict=True):
            p.data = data


def _direction(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], scales: Sequence[float], seed: int
) -> tuple[list[Tensor], float]:
    """A direction in the parameters' own units, and the gradient's slope along it."""
    generator = torch.Generator().manual_seed(seed)
    chance = [
        torch.randn(p.shape, dtype=_wide(p.dtype), generator=generator).to(p.device) for p in params
    ]
    ascent = [
        torch.zeros_like(r) if g is None else g.detach().to(r.dtype) * s
        for g, r, s in zip(grads, chance, scales, strict=True)
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
