"""Random state and autocast: recorded, and restored where a step is computed again."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Devices = tuple[torch.device, ...]


def devices_of(leaves: Iterable[Any]) -> Devices:
    """The accelerators on which some tensors live, each with a generator of its own."""
    found = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    return tuple(device for device in found if device.type not in ("cpu", "meta"))


class Randomness:
    """The random state of the CPU and of some devices at one moment.

    Nothing is read from a device: the state of its generator is kept on the host.
    """

    def __init__(self, devices: Devices, previous: Randomness | None = None) -> None:
        self.cpu = torch.default_generator.get_state()
        self.others = [(d, torch.get_device_module(d).get_rng_state(d)) for d in devices]
        self.key = _bytes(self.cpu)
        if previous is not None and self.key == previous.key:
            # A long run of steps without random numbers keeps one state, not thousands.
            self.cpu, self.key = previous.cpu, previous.key

    def set(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.others:
            torch.get_device_module(device).set_rng_state(state, device)

    def is_now(self) -> bool:
        """True if the random state of the CPU has not changed since."""
        return _bytes(torch.get_rng_state()) == self.key

    @property
    def states(self) -> list[torch.Tensor]:
        return [self.cpu, *(state for _, state in self.others)]


def _bytes(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def seed_generators(devices: Devices, seed: int) -> None:
    """Seed the generators of the CPU and of these devices, and of no others."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        module = torch.get_device_module(device)
        with module.device(device):
            module.manual_seed(seed)


@contextlib.contextmanager
def restore_randomness(devices: Devices) -> Iterator[None]:
    """Restores the random state after the block."""
    before = Randomness(devices)
    try:
        yield
    finally:
        before.set()


class Autocast:
    """The autocast settings of the moment it was made.

    Inside, casts of weights are not cached: the cache would keep a cast of every step's weights
    until the user's autocast block ends.
    """

    def __init__(self, devices: Devices) -> None:
        kinds = {"cpu", *(device.type for device in devices)}
        self.settings = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        ]

    def restore(self) -> AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        for kind, dtype, enabled in self.settings:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                )
        return stack


class Draws:
    """The random state of Python and of NumPy at one moment."""

    def __init__(self) -> None:
        self._python = random.getstate()
        module = sys.modules.get("numpy")
        self._numpy = None if module is None else module.random
        self._state = None if self._numpy is None else self._numpy.get_state(legacy=False)

    def undo(self) -> bool:
        """Restore the state; True if numbers were drawn since."""
        drawn = random.getstate() != self._python
        if drawn:
            random.setstate(self._python)
        if self._numpy is not None and self._state is not None:
            now = self._numpy.get_state(legacy=False)
            if not _is_same(now, self._state):
                self._numpy.set_state(self._state)
                drawn = True
        return drawn


def _is_same(state: Any, other: Any) -> bool:
    """Compares two states of a NumPy generator: dictionaries of numbers, names and an array."""
    if isinstance(state, dict):
        return all(_is_same(value, other[name]) for name, value in state.items())
    return bytes(state) == bytes(other) if hasattr(state, "tobytes") else state == other
