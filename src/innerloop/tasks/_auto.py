"""The fastest way, found by trying."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop._ambient import devices_of, preserved
from innerloop._mapped import NotBatchableError
from innerloop.tasks._loop import loop
from innerloop.tasks._threads import threads
from innerloop.tasks._vmap import vmap
from innerloop.tasks._way import Ended, Way

_SHORT = 0.5  # seconds: shorter trials are repeated


class Trial(NamedTuple):
    """What one way took for forward and backward, or why it cannot be used."""

    way: Way
    seconds: float | None
    why: str = ""


@dataclasses.dataclass
class auto(Way):
    """Try every way on the first call that asks for a gradient, then stay with the fastest.

    ``print(way)`` says what was chosen and why. Until then, and without gradients, it is a loop.
    """

    chosen: Way | None = None
    trials: tuple[Trial, ...] = ()

    def run(self, tasks: Any) -> Ended:
        if self.chosen is None and tasks.count > 1 and tasks.value and torch.is_grad_enabled():
            self._choose(tasks)
        return (self.chosen or loop()).run(tasks)

    def _choose(self, tasks: Any) -> None:
        ways: list[Way] = [loop(), vmap()]
        if tasks.device.type == "cpu" and torch.get_num_threads() > 1:
            ways.append(threads())
        inputs, expected = tasks.inputs, []
        trials = []
        for way in ways:
            trial = _tried(way, tasks, inputs, expected)
            if trial is None:
                return
            trials.append(trial)
        self.trials = tuple(trials)
        self.chosen = min((t for t in trials if t.seconds is not None), key=lambda t: t.seconds).way

    def __str__(self) -> str:
        if self.chosen is None:
            return "auto(): nothing tried yet"
        lines = [f"auto(): {self.chosen} was the fastest on the first call"]
        for way, seconds, why in self.trials:
            shown = f"not used: {why}" if seconds is None else f"{1e3 * seconds:.2f} ms"
            lines.append(f"  {way!s:<32} {shown}")
        return "\n".join(lines)


def _tried(way: Way, tasks: Any, inputs: list[Tensor], expected: list[Tensor]) -> Trial | None:
    """Time one way. The first one, the loop, leaves what the others must find in ``expected``.

    ``None`` if no gradient can be asked for.
    """
    best: float | None = None
    for _ in range(2):
        if best is not None and best > _SHORT:
            break
        start = time.perf_counter()
        with preserved(devices_of(inputs)):
            before = torch.get_rng_state()
            try:
                losses, why = _losses(way, tasks)
            except NotBatchableError as error:
                losses, why = None, str(error)
            if losses is None:
                return Trial(way, None, why)
            if not inputs or not losses.requires_grad:
                return None
            random = not torch.equal(before, torch.get_rng_state())
            torch.autograd.grad(losses.sum(), inputs, allow_unused=True)
            _synchronize(tasks.device)
        took = time.perf_counter() - start
        best = took if best is None else min(best, took)
        if not expected:
            expected.append(losses.detach())
        elif not random and not _agree(losses, expected[0]):
            return Trial(way, None, "it gave other losses than the loop")
    return Trial(way, best)


def _losses(way: Way, tasks: Any) -> tuple[Tensor | None, str]:
    if isinstance(way, threads):
        ended, why = way.tried(tasks)
        return (None, why) if ended is None else (ended.losses, "")
    ended = way.tried(tasks) if isinstance(way, vmap) else way.run(tasks)
    return ended.losses, ""


def _agree(losses: Tensor, expected: Tensor) -> bool:
    """Whether two ways found the same, as far as training for many steps lets rounding grow."""
    tolerance = {8: 1e-6, 4: 1e-2}.get(losses.dtype.itemsize, 1e-1)
    return torch.allclose(losses, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
