"""The table of strategies, and how close two results of the same computation must be."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

import innerloop as il

EXACT = [il.Remat(every=2), il.Binomial(1), il.Forward()]
"""Those that give the tape's gradient: segments of several steps, reloaded states, tangents.

The orders of visits are proved in `test_schedules.py`, and `test_strategies.py` runs further ones.
"""

ALL = [il.Tape(), *EXACT]
REVERSE = ALL[:-1]

SAME = 1e-10
"""Relative distance between two orders of the same operations, in float64."""


def apart(actual: Tensor, expected: Tensor) -> float:
    """The distance over the norm of `expected`; 0 where both are 0, not finite where one is not."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = (t.detach().to(wide) for t in (actual, expected))
    gap = (actual - expected).norm()
    return 0.0 if gap == 0 else (gap / expected.norm()).item()


def assert_same(
    actual: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float = SAME
) -> None:
    """Tensor by tensor; a tensor of zeros must be met by zeros."""
    for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape
        assert a.dtype == e.dtype
        assert apart(a, e) <= tolerance, (number, a, e)


def assert_right_or_refused(
    found: Callable[[], Sequence[Tensor]], expected: Sequence[Tensor], name: str
) -> None:
    """Never silently wrong: the expected tensors, or an error that says the name."""
    try:
        actual = found()
    except il.RequirementError as error:
        assert name in str(error), error
        return
    assert_same(actual, expected)
