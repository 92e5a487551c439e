"""How many cores a compiled program runs on: what it is faster on, found out when it is made."""

import time

import pytest
import torch

from innerloop.compiled._program import Recorded, _alone

INPUT = torch.linspace(0.0, 1.0, 5)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def slower_on(threads):
    """A program that takes longer on so many threads."""

    def program(x):
        time.sleep(0.004 if torch.get_num_threads() == threads else 0.001)
        return [x + 1]

    return program


@pytest.fixture
def recorded():
    return Recorded(lambda x: [x + 1], [INPUT])


def test_one_core_if_that_is_faster(recorded):
    assert recorded._is_faster_alone(slower_on(2))
    assert not recorded._is_faster_alone(slower_on(1))
    assert torch.get_num_threads() == 2


def test_alike_is_no_reason(recorded):
    assert not recorded._is_faster_alone(slower_on(7))


def test_long_programs_are_tried_once(recorded):
    calls = []

    def long(x):
        calls.append(torch.get_num_threads())
        time.sleep(0.06 if torch.get_num_threads() == 2 else 0.0)
        return [x + 1]

    assert not recorded._is_faster_alone(long)
    assert sorted(calls) == [1, 2]


def test_with_one_thread_nothing_is_tried(recorded):
    torch.set_num_threads(1)
    assert not recorded._is_faster_alone(lambda x: pytest.fail("was called"))


def test_the_callers_threads_come_back():
    seen = []

    def program(x):
        seen.append(torch.get_num_threads())
        if x.isnan().any():
            raise ValueError("not a number")
        return [x + 1]

    assert torch.equal(_alone(program)(INPUT)[0], INPUT + 1)
    with pytest.raises(ValueError, match="not a number"):
        _alone(program)(INPUT * float("nan"))
    assert seen == [1, 1]
    assert torch.get_num_threads() == 2
