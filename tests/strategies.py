"""The table of strategies, and how close two results of the same computation must be."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
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


Tensors = Iterable[Tensor]
"""The outcome of a test: compared with the outcome of the same test under the tape."""


def as_tape(test: Callable[..., Tensors]) -> Callable[..., None]:
    """Decorator: runs a test under each of `EXACT` and under the tape, from the same seed.

    The test returns tensors, which must be the same.
    """
    return _compared(test, refused=None)


def as_tape_or_refused(name: str) -> Callable[..., Callable[..., None]]:
    """Decorator: the same for a tensor that Forward cannot follow and refuses by `name`."""
    return functools.partial(_compared, refused=name)


def _compared(test: Callable[..., Tensors], refused: str | None) -> Callable[..., None]:
    @pytest.mark.parametrize("backward", EXACT, ids=repr)
    @functools.wraps(test)
    def compared(backward: Any, **given: Any) -> None:
        def outcome(strategy: Any) -> list[Tensor]:
            torch.manual_seed(0)
            return list(test(backward=strategy, **given))

        if refused is not None and isinstance(backward, il.Forward):
            with pytest.raises(il.RequirementError, match=refused):
                outcome(backward)
        else:
            assert_same(outcome(backward), outcome(il.Tape()))

    return compared
