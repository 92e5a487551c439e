"""Integers that users pass: of Python, NumPy or torch."""

from __future__ import annotations

import operator
from typing import Any

from innerloop.data.refusals import refusal
from innerloop.errors import InnerLoopError

SEEDS = (-(2**63), 2**64 - 1)  # the range of torch's generators


def as_integer(value: Any) -> int | None:
    """Return an integer of any library as an int, and None for anything else, bool included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_integer(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Return an integer in a range as an int; refuse anything else."""
    number = as_integer(value)
    if number is None or number < least or (most is not None and number > most):
        raise _not_an_integer(name, value, least, most)
    return number


def _not_an_integer(name: str, value: Any, least: int, most: int | None) -> InnerLoopError:
    bounds = f"at least {least}" if most is None else f"from {least} to {most}"
    return refusal(
        f"You gave {name}={value!r}.",
        f"a whole number, {bounds}.",
        "a fraction, a string or a number outside that range has no meaning here.",
        f"for example {name}=5.",
    )
