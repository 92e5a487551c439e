"""Checks of the models' arguments."""

from __future__ import annotations

import operator
from typing import Any

from innerloop.errors import InnerLoopError, refusal


def check_counts(**given: Any) -> list[int]:
    """Return positive integers as ints; refuse the first argument that is none."""
    return [_check_count(name, value) for name, value in given.items()]


def check_size(size: Any, least: int, model: str) -> None:
    """Refuse images that the model's pooling would shrink to nothing."""
    (number,) = check_counts(size=size)
    if number < least:
        raise _too_small(size, least, model)


def _check_count(name: str, value: Any) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise _no_count(name, value)
    return number


def _no_count(name: str, value: Any) -> InnerLoopError:
    return refusal(
        f"You gave {name}={value!r}.",
        "a whole number, at least 1.",
        "it is the size of a layer.",
        f"for example {name}=5.",
    )


def _too_small(size: Any, least: int, model: str) -> InnerLoopError:
    return refusal(
        f"You gave size={size} to {model}.",
        f"images of at least {least} by {least} pixels.",
        "each pooling halves them, and nothing would be left.",
        f"size={least} or more, or a model without pooling: mlp.",
    )
