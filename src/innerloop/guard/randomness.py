"""What surrounds a computation and must be the same when it is done again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from innerloop.errors import InnerLoopError, four_part

Devices = tuple[torch.device, ...]


def devices_of(leaves: Iterable[Any]) -> Devices:
    """The accelerators on which some tensors live; they have random numbers of their own."""
    found = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    return tuple(device for device in found if device.type not in ("cpu", "meta"))


class Unwritten:
    """Tensors that must not be written to in place before a backward has used them."""

    def __init__(self) -> None:
        # Weakly: a batch that was made for one step is not to be kept for this.
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def add(self, leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not leaf.is_inference():
                known = self._versions.get(id(leaf))
                if known is None or known[0]() is not leaf:
                    self._versions[id(leaf)] = (weakref.ref(leaf), leaf._version)

    def check(self) -> None:
        """Raise an error if one was written to since it was added."""
        for reference, version in self._versions.values():
            tensor = reference()
            if tensor is not None and tensor._version != version:
                raise written(tensor)


def written(tensor: Tensor) -> InnerLoopError:
    """The error for a tensor that was written to too early."""
    return InnerLoopError(
        four_part(
            f"A tensor of shape {tuple(tensor.shape)} (a weight, a setting or part of a batch) "
            "was written to in place between the forward and the backward.",
            "the values the inner loop ran with.",
            "the backward computes its steps a second time from them.",
            "backward() before optimizer.step() or before reusing a buffer, or a .clone() of what "
            "is overwritten.",
        )
    )


class Randomness:
    """The random state of the CPU and of some devices at one moment."""

    def __init__(self, devices: Devices, previous: Randomness | None = None) -> None:
        self.cpu = torch.get_rng_state()
        self.others = [(d, torch.get_device_module(d).get_rng_state(d)) for d in devices]
        if previous is not None and torch.equal(self.cpu, previous.cpu):
            # A long run of steps without random numbers keeps one state, not thousands.
            self.cpu = previous.cpu

    def set(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.others:
            torch.get_device_module(device).set_rng_state(state, device)

    @property
    def states(self) -> list[torch.Tensor]:
        return [self.cpu, *(state for _, state in self.others)]


def seeded(devices: Devices, seed: int) -> None:
    """Start the random numbers of the CPU and of these devices anew, and of no others."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        module = torch.get_device_module(device)
        with module.device(device):
            module.manual_seed(seed)


@contextlib.contextmanager
def preserved(devices: Devices) -> Iterator[None]:
    """Whatever the block does to the random state, it is afterwards as it was."""
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

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self.settings:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                    )
            yield
