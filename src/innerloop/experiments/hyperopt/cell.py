"""Parts of a search: one method with one seed."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

import innerloop as il
from innerloop.errors import DivergedError, InnerLoopError
from innerloop.experiments.framework.parts import Part
from innerloop.experiments.hyperopt.problem import Problem, measure_references
from innerloop.experiments.hyperopt.settings import Config


class References(Part):
    """Trainings that a seed's search is compared with. A single unit, so it has no state."""

    def __init__(self, config: Config, problem: Problem, seed: int) -> None:
        self.config, self.problem, self.seed = config, problem, seed

    def advance(self, unit: int, records: list[dict[str, Any]]) -> dict[str, str]:
        found = measure_references(self.config, self.problem, self.seed)
        losses = [row["val_loss"] for row in found.values() if isinstance(row, dict)]
        if not all(map(math.isfinite, losses)):
            raise InnerLoopError(
                f"The training diverged in the references of seed {self.seed}: the validation "
                f"losses are {losses}. Try a smaller --inner-lr than {self.config.inner_lr}."
            )
        records.append({"seed": self.seed, "arm": "references", **found})
        return {"seed": str(self.seed)}


class Cell(Part):
    """One method with one seed."""

    saved = ("values", "best", "raw", "meta", "cpu")

    def __init__(self, config: Config, problem: Problem, seed: int, arm: str) -> None:
        self.config, self.problem, self.seed, self.arm = config, problem, seed, arm
        self.values: list[float] = []
        """The validation loss of each trial."""
        self.best: torch.Tensor | None = None
        """Hyperparameters of the least of them."""
        self.raw: torch.Tensor | None = None
        """Hyperparameters that the gradient has reached."""
        self.meta = self._build_adam()
        self.cpu: list[float] = []
        """Seconds of the processor for each trial."""

    def advance(self, unit: int, records: list[dict[str, Any]]) -> dict[str, str]:
        began = time.process_time()
        value = self.trial(unit)
        self.cpu.append(time.process_time() - began)
        if unit == self.config.arms[self.arm] - 1:
            records.append(self._record())
        return {"seed": str(self.seed), "arm": self.arm, "val": f"{value:.3f}"}

    def trial(self, number: int) -> float:
        """One training, and its validation loss."""
        update = number - self.config.scouts
        if self.arm == "gradient" and 0 <= update < self.config.updates:
            tried, value = self._update(update)
        else:
            # After the updates: the point that the last of them has led to.
            tried = self._draw(number) if self.raw is None else self.raw
            value = self.problem.value(tried)
        value = value if math.isfinite(value) else math.inf
        if value < min(self.values, default=math.inf):
            self.best = tried
        self.values.append(value)
        return value

    def _draw(self, number: int) -> torch.Tensor:
        """Random hyperparameters, by the seed and the trial alone: scouts are a random search."""
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + number)
        return self.problem.draw(generator, shared=self.arm == "shared")

    def _update(self, number: int) -> tuple[torch.Tensor, float]:
        """The loss at the present hyperparameters, which then follow its gradient."""
        c, problem = self.config, self.problem
        several = number < c.each * c.starts
        if self.raw is None or (number <= c.each * c.starts and number % c.each == 0):
            self.raw = self._start(number // c.each if several else None)
            self.meta = self._build_adam()
        tried = self.raw
        problem.set(tried)
        since = number % c.each if several else number
        self.meta.param_groups[0]["lr"] = c.meta_lr * (1 - 0.9 * since / c.updates)
        try:
            (loss,) = il.meta_update(problem.inner, problem.batches, problem.split.val, self.meta)
        except DivergedError:
            # A bad trial, as in the random search. It goes on from halfway back to the best one.
            self.raw = tried if self.best is None else (tried + self.best) / 2
            return tried, math.inf
        problem.clamp()
        self.raw = problem.raw.detach().clone()
        return tried, loss.item()

    def _build_adam(self) -> torch.optim.Adam:
        return torch.optim.Adam([self.problem.raw], betas=(0.8, 0.9))

    def _start(self, place: int | None) -> torch.Tensor:
        """The scout in this place, from the best on; without a place, the best of all trials."""
        scouts = self.values[: self.config.scouts]
        if place is None or not scouts:
            return self.problem.start if self.best is None else self.best
        number = sorted(range(len(scouts)), key=scouts.__getitem__)[place]
        return self._draw(number)

    def _record(self) -> dict[str, Any]:
        if self.best is None:
            raise InnerLoopError(
                f"Every training of the {self.arm} search diverged. Try a smaller --inner-lr than "
                f"{self.config.inner_lr}."
            )
        self.problem.set(self.best)
        return {
            "seed": self.seed,
            "arm": self.arm,
            **self.problem.measure(),
            "cpu": self.cpu,
            "trials": len(self.values),
            "least": least_so_far(self.values),
            "numbers": self.best.exp().tolist(),
        }


def least_so_far(values: list[float]) -> list[float | None]:
    """The best validation loss after each trial; ``None`` as long as all have diverged.

    >>> least_so_far([math.inf, 2.0, 3.0, 1.0])
    [None, 2.0, 2.0, 1.0]
    """
    found = [min(values[: k + 1]) for k in range(len(values))]
    return [value if math.isfinite(value) else None for value in found]
