"""Nothing is timed before all sides have computed the same thing, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from workloads import Case, Evidence

TOLERANCE = 1e-8


class DisagreementError(Exception):
    """Two sides of a workload computed different numbers, so their times mean nothing."""


def _distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """||ours - theirs|| / ||theirs|| over all tensors together; not finite if any entry is not.

    Not tensor by tensor: some gradients (a bias in front of a BatchNorm) are zero but for
    rounding, and have no relative error.
    """
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return float("inf")
    a = torch.cat([t.flatten() for t in ours])
    b = torch.cat([t.flatten() for t in theirs])
    return float((a - b).norm() / b.norm())


def _compare(
    name: str, sides: tuple[str, str], ours: Evidence, theirs: Evidence, tolerance: float
) -> float:
    if ours.keys() != theirs.keys():
        raise DisagreementError(f"{name}: {sides[0]} gave {[*ours]}, {sides[1]} {[*theirs]}")
    worst = 0.0
    for kind in theirs:
        distance = _distance(ours[kind], theirs[kind])
        if not distance <= tolerance:
            raise DisagreementError(
                f"{name}: {kind} of {sides[0]} and {sides[1]} differ by {distance:.1e} relative "
                f"in float64 (allowed: {tolerance:.0e}). Nothing was timed: times of different "
                f"computations cannot be compared."
            )
        worst = max(worst, distance)
    return worst


def check(name: str, cases: dict[str, Case], tolerance: float = TOLERANCE) -> float:
    """Hold every side to the last one. Returns the largest relative difference."""
    *others, reference = cases
    theirs = cases[reference].evidence()
    return max(
        _compare(name, (side, reference), cases[side].evidence(), theirs, tolerance)
        for side in others
    )
