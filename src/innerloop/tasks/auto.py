"""The fastest way, found by trying."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop.errors import NotBatchableError
from innerloop.guard import closures, graph
from innerloop.guard.randomness import Draws, Randomness, devices_of, restore_randomness
from innerloop.tasks.batched import first_line
from innerloop.tasks.corrections import NoGenerators, OrderError
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

    def run(self, tasks: Any) -> Ended:
        if self.chosen is None and tasks.count > 1 and tasks.value and torch.is_grad_enabled():
            self._choose(tasks)
        return (self.chosen or loop()).run(tasks)

    def _choose(self, tasks: Any) -> None:
        ways: list[Way] = [loop(), vmap()]
        if tasks.device.type == "cpu" and torch.get_num_threads() > 1:
            ways.append(threads())
        inputs = tasks.inputs
        expected: list[Tensor | None] = []
        trials = []
        try:
            for way in ways:
                trial = _try(way, tasks, inputs, expected)
                if trial is None:
                    return
                trials.append(trial)
        except OrderError as error:
            # Trials must not use up a generator.
            self.chosen, self.trials = loop(), tuple(Trial(w, None, str(error)) for w in ways[1:])
            return
        self.trials = tuple(trials)
        timed = [(t.seconds, k) for k, t in enumerate(trials) if t.seconds is not None]
        # Not even the loop repeats itself if the loss counts its calls: no other way can be judged.
        self.chosen = trials[min(timed)[1]].way if trials[0].seconds is not None else loop()

    def __str__(self) -> str:
        if self.chosen is None:
            return "auto(): nothing tried yet"
        lines = [f"auto(): {self.chosen} was the fastest on the first call"]
        for way, seconds, why in self.trials:
            shown = f"not used: {why}" if seconds is None else f"{1e3 * seconds:.2f} ms"
            lines.append(f"  {way!s:<32} {shown}")
        return "\n".join(lines)


def _try(way: Way, tasks: Any, inputs: list[Tensor], expected: list[Tensor | None]) -> Trial | None:
    """Time one way. The first one, the loop, leaves what the others must find in ``expected``.

    ``None`` if no gradient can be asked for.
    """
    best: float | None = None
    for _ in range(2):
        if best is not None and best > _SHORT:
            break
        drawn, since = Draws(), graph.now()
        start = time.perf_counter()
        with restore_randomness(devices_of(inputs)):
            before = Randomness(())
            try:
                losses, why = _losses(way, tasks)
                if losses is None:
                    return Trial(way, None, why)
                if not inputs or not losses.requires_grad:
                    return None
                random = drawn.undo() or not before.is_now()
                total = losses.sum()
                # What was computed before the call has to outlast the trials.
                keep = bool(closures.closed_over([total], [], since)[1])
                grads = torch.autograd.grad(total, inputs, retain_graph=keep, allow_unused=True)
                _synchronize(tasks.device)
            except NotBatchableError as error:
                return Trial(way, None, str(error))
            except (RuntimeError, TypeError, ValueError) as error:
                # The loop has worked, or would have raised the same.
                if isinstance(way, loop):
                    raise
                return Trial(way, None, f"{type(error).__name__}: {first_line(error)}")
        took = time.perf_counter() - start
        best = took if best is None else min(best, took)
        found: list[Tensor | None] = [losses.detach(), *grads]
        if not expected:
            expected += found
        elif not random and not _agree(found, expected):
            return Trial(way, None, "it gave another result than the loop")
    return Trial(way, best)


def _losses(way: Way, tasks: Any) -> tuple[Tensor | None, str]:
    if isinstance(way, threads):
        ended, why = way.run_parallel(tasks)
        return (None, why) if ended is None else (ended.losses, "")
    if isinstance(way, vmap):
        return way.run_batched(tasks).losses, ""
    with NoGenerators():
        return way.run(tasks).losses, ""


def _agree(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    """Whether two ways found the same, as far as training for many steps lets rounding grow."""
    pairs = list(zip(found, expected, strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        return False
    there = [(a, b) for a, b in pairs if a is not None and b is not None]
    # A gradient that is zero but for rounding is measured by the others.
    largest = max(b.nan_to_num().norm().item() for _, b in there[1:]) if there[1:] else 0.0
    for i, (a, b) in enumerate(there):
        tolerance = {8: 1e-6, 4: 1e-2}.get(b.dtype.itemsize, 1e-1)
        scale = b.nan_to_num().norm().item() + (1e-3 * largest if i else 1e-6)
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        if (a - b).nan_to_num().norm().item() > tolerance * scale:
            return False
    return True


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
