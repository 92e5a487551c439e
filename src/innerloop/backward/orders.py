"""In which order steps are visited again. Pure Python: nothing here knows of tensors.

A schedule is a sequence of actions on one working state, which starts as state 0:

- ``Keep(at)`` stores the working state, which is state ``at``;
- ``Advance(start, stop)`` takes the steps ``start, …, stop - 1`` without a graph;
- ``Reverse(start, stop)`` takes them with a graph and pulls the gradient back from ``stop`` to
  ``start``; the working state is used up;
- ``Load(at)`` makes a kept state the working one, ``Drop(at)`` forgets it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import comb
from typing import NamedTuple


class Keep(NamedTuple):
    at: int


class Drop(NamedTuple):
    at: int


class Load(NamedTuple):
    at: int


class Advance(NamedTuple):
    start: int
    stop: int


class Reverse(NamedTuple):
    start: int
    stop: int


Action = Keep | Drop | Load | Advance | Reverse


def every(steps: int, size: int) -> Iterator[Action]:
    """Keeps the state before every ``size`` steps, and visits each segment once more."""
    starts = range(0, steps, size)
    for start in starts:
        yield Keep(start)
        if start != starts[-1]:
            yield Advance(start, start + size)
    yield Reverse(starts[-1], steps)
    for start in reversed(starts[:-1]):
        yield Load(start)
        yield Reverse(start, start + size)


def binomial(steps: int, slots: int) -> Iterator[Action]:
    """Keeps at most ``slots`` states, state 0 among them, with the fewest possible advances.

    Griewank and Walther, "Algorithm 799: Revolve", 2000.
    """
    yield Keep(0)
    yield from _reverse_steps(0, steps, slots)


def _reverse_steps(start: int, stop: int, slots: int) -> Iterator[Action]:
    """Reverse the steps from ``start``, whose state is the working one and in one of the slots."""
    while stop - start > 1:
        middle = start + _split(stop - start, slots)
        yield Advance(start, middle)
        if slots > 1:
            yield Keep(middle)
            yield from _reverse_steps(middle, stop, slots - 1)
            yield Drop(middle)
        else:
            yield Reverse(middle, stop)
        yield Load(start)
        stop = middle
    yield Reverse(start, stop)


def _split(length: int, slots: int) -> int:
    """The number of steps to advance before the next state is kept."""
    if slots == 1:
        return length - 1
    r = repetitions(length, slots)
    # Both parts must be doable with as few repetitions: the left one with r - 1, the right with r.
    return max(comb(slots + r - 2, slots), length - comb(slots + r - 1, slots - 1), 1)


def repetitions(steps: int, slots: int) -> int:
    """The least r with ``C(slots + r, slots) >= steps``: how often a step is advanced at most."""
    r = 0
    while comb(slots + r, slots) < steps:
        r += 1
    return r


def advances(steps: int, slots: int) -> int:
    """The number of steps that a binomial order advances: Griewank's ``r l - C(s + r, r - 1)``."""
    r = repetitions(steps, slots)
    return r * steps - (comb(slots + r, r - 1) if r else 0)
