"""The order of visits: by Griewank and Walther's formula, and as the strategies make them."""

import functools
from collections.abc import Iterable
from math import comb
from typing import Any

import pytest
import torch
from torch import Tensor

import innerloop as il
from innerloop.backward.orders import (
    Action,
    Advance,
    Drop,
    Keep,
    Load,
    Reverse,
    binomial,
    every,
)

LENGTHS = [1, 2, 5, 10, 35, 36, 200]
SLOTS = [1, 2, 3, 8, 300]
each_size = pytest.mark.parametrize(
    ("steps", "slots"), [(steps, slots) for steps in LENGTHS for slots in SLOTS]
)


class Visit:
    """A schedule followed without tensors, with everything counted that it may not exceed."""

    def __init__(self, actions: Iterable[Action], steps: int) -> None:
        self.kept: set[int] = set()
        self.most = self.advanced = 0
        self.reversed: list[int] = []
        at: int | None = 0
        for action in actions:
            if isinstance(action, Keep):
                assert at == action.at
                self.kept.add(action.at)
                self.most = max(self.most, len(self.kept))
            elif isinstance(action, Drop):
                self.kept.remove(action.at)
            elif isinstance(action, Load):
                assert action.at in self.kept
                at = action.at
            elif isinstance(action, Advance):
                assert at == action.start < action.stop <= steps
                self.advanced += action.stop - action.start
                at = action.stop
            else:
                assert at == action.start < action.stop
                self.reversed += reversed(range(action.start, action.stop))
                at = None
        assert self.reversed == list(reversed(range(steps)))


@functools.cache
def fewest(steps: int, slots: int) -> int:
    """The fewest advances, by trying every place for the next kept state."""
    if steps == 1:
        return 0
    if slots == 1:
        return steps * (steps - 1) // 2
    return min(
        first + fewest(steps - first, slots - 1) + fewest(first, slots) for first in range(1, steps)
    )


def griewank(steps: int, slots: int) -> int:
    """r l - β(s + 1, r - 1) with β(s, r) = C(s + r, s) and the least r for which β(s, r) >= l."""
    r = next(r for r in range(steps) if comb(slots + r, slots) >= steps)
    return r * steps - (comb(slots + r, slots + 1) if r else 0)


@each_size
def test_binomial_makes_as_few_advances_as_griewanks_formula(steps: int, slots: int) -> None:
    visit = Visit(binomial(steps, slots), steps)
    assert visit.advanced == griewank(steps, slots)
    assert visit.most <= slots


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6])
def test_the_formula_is_the_minimum(slots: int) -> None:
    for steps in range(1, 41):
        assert griewank(steps, slots) == fewest(steps, slots)
        assert Visit(binomial(steps, slots), steps).advanced == fewest(steps, slots)


def test_binomial_visits_ten_steps_with_three_slots_as_published() -> None:
    """The example of Griewank and Walther (2000): states 0, 4 and 7 first, 15 advances in all."""
    assert list(binomial(10, 3)) == [
        *(Keep(0), Advance(0, 4), Keep(4), Advance(4, 7), Keep(7)),
        *(Advance(7, 9), Reverse(9, 10), Load(7), Advance(7, 8), Reverse(8, 9)),
        *(Load(7), Reverse(7, 8), Drop(7)),
        *(Load(4), Advance(4, 5), Keep(5), Advance(5, 6), Reverse(6, 7)),
        *(Load(5), Reverse(5, 6), Drop(5), Load(4), Reverse(4, 5), Drop(4)),
        *(Load(0), Advance(0, 1), Keep(1), Advance(1, 2), Keep(2), Advance(2, 3), Reverse(3, 4)),
        *(Load(2), Reverse(2, 3), Drop(2), Load(1), Reverse(1, 2), Drop(1)),
        *(Load(0), Reverse(0, 1)),
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("steps", [1, 2, 6, 7, 8, 20])
def test_every_keeps_one_state_in_so_many(steps: int, size: int) -> None:
    visit = Visit(every(steps, size), steps)
    assert visit.most == -(-steps // size)
    assert visit.advanced < steps


# As the strategies make them. -------------------------------------------------------------------


class Counting:
    """A step on a scalar that notes which steps are taken, in order."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def __call__(self, state: il.State, meta: il.Meta, batch: Tensor) -> tuple[il.State, Tensor]:
        self.taken.append(state.time)
        w = state.params["w"]
        new = w - meta.opt["lr"] * torch.sin(w * batch)
        return state._replace(params={"w": new}, time=state.time + 1), w


def visits(steps: int, backward: Any) -> tuple[list[int], list[int]]:
    """The steps taken by the unroll, and those taken by its backward pass."""
    step, w = Counting(), torch.tensor(1.0, requires_grad=True)
    meta = il.Meta(opt={"lr": torch.tensor(0.1, requires_grad=True)})
    batches = list(torch.randn(steps))
    state, _ = il.unroll(step, il.State({"w": w}), meta, batches, backward=backward)
    before = list(step.taken)
    state.params["w"].backward()
    return before, step.taken[len(before) :]


@pytest.mark.parametrize("steps", [1, 2, 5, 10, 23])
def test_remat_takes_every_step_once_more_but_the_last(steps: int) -> None:
    """The walk back begins with the last step, so its graph is kept from the first time."""
    before, after = visits(steps, il.Remat())
    assert before == list(range(steps))
    assert after == list(reversed(range(steps - 1)))


def test_for_several_tasks_the_last_step_is_taken_once_more_as_well() -> None:
    """Its graph would otherwise be held for every task at once."""
    before, after = visits(5, il.Remat().for_tasks(2))
    assert before == [0, 1, 2, 3, 4]
    assert after == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("steps", [1, 2, 4, 5, 10, 23])
def test_remat_in_segments_takes_every_segment_once_more_but_the_last(steps: int) -> None:
    before, after = visits(steps, il.Remat(every=4))
    assert before == list(range(steps))
    starts = list(reversed(range(0, steps, 4)))
    assert after == [t for s in starts[1:] for t in range(s, s + 4)]


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("steps", [1, 2, 5, 10, 23])
def test_binomial_takes_no_more_steps_than_its_schedule(steps: int, slots: int) -> None:
    """Each step once with a graph, and as many without as the formula has."""
    before, after = visits(steps, il.Binomial(slots))
    assert before == list(range(steps))
    assert len(before) + len(after) == griewank(steps, slots) + steps
    assert set(before[-1:] + after) == set(range(steps))


def test_tape_and_forward_take_every_step_once() -> None:
    for backward in (il.Tape(), il.Forward()):
        before, after = visits(7, backward)
        assert sorted(before + after) == list(range(7))
