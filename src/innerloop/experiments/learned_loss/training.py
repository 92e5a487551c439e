"""Learned losses of all problems and seeds, and the comparison with the task's own."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from innerloop.experiments.framework.parts import Parts
from innerloop.experiments.framework.tables import plus_minus, table
from innerloop.experiments.learned_loss import figures
from innerloop.experiments.learned_loss.cell import Cell
from innerloop.experiments.learned_loss.problem import PROBLEMS
from innerloop.experiments.learned_loss.settings import Config


class LearningLosses(Parts):
    """A cell for each problem and seed, one after another."""

    def __init__(self, config: Config) -> None:
        self.config = config
        problems = [config.of(name) for name, _ in config.cells]
        super().__init__([p.iterations + len(p.settings) + 1 for p in problems])

    def make(self, number: int) -> Cell:
        return Cell(self.config, *self.config.cells[number])

    def result(self) -> dict[str, Any]:
        return {name: self._summary(name) for name in self.config.names}

    def _summary(self, name: str) -> dict[str, Any]:
        c = self.config
        found = [r for r in self.records if r["problem"] == name]
        errors = {
            "learned_short": [r["learned"][c.steps] for r in found],
            "learned_long": [r["learned"][c.horizon] for r in found],
            "task_short": [r["task_short"] for r in found],
            "task_long": [r["task"][c.horizon] for r in found],
        }
        return {
            "seeds": [r["seed"] for r in found],
            "steps_needed": [r["steps_needed"] for r in found],
            "steps_needed_short": [r["steps_needed_short"] for r in found],
            "settings": [r["setting"] for r in found],
            "errors": errors,
            "skipped": [r["skipped"] for r in found],
            "mean": {key: _of_all(statistics.fmean, values) for key, values in errors.items()},
            "spread": {key: _of_all(_spread, values) for key, values in errors.items()},
        }

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        figures.draw(self, folder)

    def describe(self, result: dict[str, Any]) -> str:
        return "\n".join(
            self._describe(name, found) for name, found in result.items() if name in PROBLEMS
        )

    def _describe(self, name: str, found: dict[str, Any]) -> str:
        c, rows = self.config, []
        # At its best: with the rate and clip that were the best on other tasks.
        for steps, which in ((c.steps, "short"), (c.horizon, "long")):
            for loss, about in (("learned", "learned loss"), ("task", "task's loss at its best")):
                mean, spread = (found[what][f"{loss}_{which}"] for what in ("mean", "spread"))
                value = "diverged"
                if mean is not None:
                    value = plus_minus(mean, spread if c.seeds > 1 else None, 4)
                rows.append([f"  {about}, {steps} steps", value])
        times = "1 seed" if c.seeds == 1 else f"{c.seeds} seeds"
        momentum = f"momentum {c.momentum:g}" if c.momentum else "no momentum"
        measured = f"{PROBLEMS[name].measured} on held-out tasks, SGD, {momentum}, {times}"
        lines = [f"{name}: {measured}", table(rows)]
        for steps, key in ((c.steps, "steps_needed_short"), (c.horizon, "steps_needed")):
            counts = (f"not within {c.horizon}" if n is None else str(n) for n in found[key])
            about = f"steps of the learned loss to what the task's loss has after {steps}, by seed"
            lines.append(f"  {about}: {', '.join(counts)}")
        if skipped := sum(found["skipped"]):
            lines.append(f"  {skipped} meta-updates were left out: nets diverged in them")
        return "\n".join(lines)


def _of_all(function: Callable[[list[Any]], float], values: list[float | None]) -> float | None:
    """None if any diverged."""
    return None if None in values else function(values)


def _spread(values: list[float]) -> float:
    """Standard deviation over seeds."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
