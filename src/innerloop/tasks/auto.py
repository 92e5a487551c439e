"""The fastest way, found by trying."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop.errors import NotBatchableError
from innerloop.guard.randomness import Draws, Randomness, devices_of, restore_randomness
from innerloop.tasks.batched import first_line
from innerloop.tasks.corrections import NoGenerators
from innerloop.tasks.loop import loop
from innerloop.tasks.threads import threads
from innerloop.tasks.vmap import vmap
from innerloop.tasks.way import Ended, Way

_SHORT = 2.0  # seconds: shorter trials are repeated, since a first one also fills caches


class Trial(NamedTuple):
    """The time of one way for forward and backward, or the reason why it cannot be used."""

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

    def run(self, tasks: Any, warn: bool = True) -> Ended:
        asked = torch.is_grad_enabled() and tasks.inputs
        if self.chosen is None and tasks.count > 1 and asked:
            self._choose(tasks)
        return (self.chosen or loop()).run(tasks, warn)

    def _choose(self, tasks: Any) -> None:
        expected: list[Tensor] = []
        first = _try(loop(), tasks, expected)
        if first is None:
            return
        others: list[Way] = [vmap()]
        if tasks.device.type == "cpu" and torch.get_num_threads() > 1:
            others.append(threads())
        if first.seconds is None:
            # Not even the loop repeats itself: no other way can be compared to it.
            self.chosen = loop()
            self.trials = tuple(Trial(way, None, first.why) for way in others)
            return
        trials = [first, *(_try(way, tasks, expected) or Trial(way, None) for way in others)]
        timed = [(t.seconds, k) for k, t in enumerate(trials) if t.seconds is not None]
        self.chosen, self.trials = trials[min(timed)[1]].way, tuple(trials)

    def __str__(self) -> str:
        if self.chosen is None:
            return "auto(): nothing tried yet"
        lines = [f"auto(): {self.chosen} was the fastest on the first call"]
        for way, seconds, why in self.trials:
            shown = f"not used: {why}" if seconds is None else f"{1e3 * seconds:.2f} ms"
            lines.append(f"  {way!s:<32} {shown}")
        return "\n".join(lines)


def _try(way: Way, tasks: Any, expected: list[Tensor]) -> Trial | None:
    """Times one way. The first one, the loop, leaves what the others must find in ``expected``.

    ``None`` if no gradient can be asked for.
    """
    is_loop = isinstance(way, loop)
    seconds: list[float] = []
    while len(seconds) < 2 and sum(seconds) <= _SHORT:
        # Trials must not use up a generator.
        generators = NoGenerators() if is_loop else contextlib.nullcontext()
        with restore_randomness(devices_of(tasks.inputs)), generators:
            before, draws, start = Randomness(()), Draws(), time.perf_counter()
            try:
                losses = way.attempt(tasks).losses
                if losses is None or not losses.requires_grad:
                    return None
                # What was computed before the call has to outlast the trials.
                grads = torch.autograd.grad(
                    losses.sum(),
                    tasks.inputs,
                    retain_graph=True,
                    materialize_grads=True,
                )
                _synchronize(tasks.device)
            except (RuntimeError, TypeError, ValueError) as error:
                # The loop has worked, or would have raised the same.
                if is_loop and not isinstance(error, NotBatchableError):
                    raise
                return Trial(way, None, first_line(error))
            seconds.append(time.perf_counter() - start)
            is_random = draws.undo() or not before.is_now()
        found = [losses.detach(), *grads]
        if not expected:
            expected += found
        elif not is_random and not _agree(found, expected):
            return Trial(way, None, "it gave another result than the loop")
    return Trial(way, min(seconds))


def _agree(found: list[Tensor], expected: list[Tensor]) -> bool:
    """True if two ways found the same, as far as training for many steps lets rounding grow."""
    # A gradient that is zero but for rounding is measured by the others.
    largest = max(map(_norm, expected[1:]))
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        tolerance = {8: 1e-6, 4: 1e-2}.get(b.dtype.itemsize, 1e-1)
        scale = _norm(b) + (1e-3 * largest if i else 1e-6)
        if not torch.equal(a.isnan(), b.isnan()) or _norm(a - b) > tolerance * scale:
            return False
    return True


def _norm(tensor: Tensor) -> float:
    return tensor.nan_to_num().norm().item()


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
