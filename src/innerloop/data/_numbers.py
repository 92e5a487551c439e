"""Whole numbers that users give: Python's, NumPy's or torch's."""

from __future__ import annotations

import operator
from typing import Any

from innerloop.errors import InnerLoopError, four_part

SEEDS = (-(2**63), 2**64 - 1)  # what torch's generators take


def as_index(value: Any) -> int | None:
    """Return a whole number as an int, and None for anything else; truth values are no numbers."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Return a whole number in a range as an int, or refuse it."""
    number = as_index(value)
    if number is None or number < least or (most is not None and number > most):
        upwards = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InnerLoopError(
            four_part(
                f"You gave {name}={value!r}.",
                f"a whole number, {upwards}.",
                "a fraction, a text or a number outside has no meaning here.",
                f"for example {name}=5.",
            )
        )
    return number
