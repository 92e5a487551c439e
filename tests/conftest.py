"""Settings that every test shares.

They hold for the files in this folder only. The doctests in `src` run as a reader would run
them: in a fresh torch, with its default dtype float32, so they print what a user would see.
"""

import pytest
import torch
from hypothesis import settings

import hostile

# The same examples on every run and machine; no time limit per example, since a first call into
# torch is slow and two workers share two cores.
settings.register_profile("innerloop", derandomize=True, deadline=None)
settings.load_profile("innerloop")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Sums are then taken in the same order everywhere, and workers do not fight for cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def float64_and_seed():
    """Gradients are compared in float64, from the same random numbers each time."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def pytest_terminal_summary(terminalreporter):
    if hostile.TRIED:
        terminalreporter.write_line(hostile.summary())
