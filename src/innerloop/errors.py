"""The error classes. A message says: what you wrote, what is needed, why, what to write."""

from __future__ import annotations


class InnerLoopError(ValueError):
    """Something was asked for that cannot be done as written."""


class RequirementError(InnerLoopError):
    """A requirement of the paper (section 2.4) does not hold: there is no meta-gradient."""


class DivergedError(InnerLoopError):
    """An inner loss is NaN, or a meta-update would step along what is not finite."""


def four_part(wrote: str, needed: str, why: str, write: str) -> str:
    """Join the parts of a message: what you wrote, what is needed, why, what to write instead."""
    return f"{wrote} Needed: {needed} Why: {why} Write: {write}"


def refusal(wrote: str, needed: str, why: str, write: str) -> InnerLoopError:
    """An error with the message of :func:`four_part`, to be raised."""
    return InnerLoopError(four_part(wrote, needed, why, write))


class NotBatchableError(InnerLoopError):
    """Something that cannot be done for all tasks at once; a loop over the tasks can."""
