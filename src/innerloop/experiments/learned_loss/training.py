"""Learned losses of all problems and seeds, and the comparison with the task's own."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from innerloop.experiments.framework.parts import Parts
from innerloop.experiments.learned_loss import figures
from innerloop.experiments.learned_loss.cell import Cell
from innerloop.experiments.learned_loss.problem import PROBLEMS
from innerloop.experiments.learned_loss.settings import Config


class LearningLosses(Parts):
    """A cell for each problem and seed, one after another."""

    def __init__(self, config: Config) -> None:
        self.config = config
        super().__init__([Cell.units(config, name) for name, _ in config.cells])

    def make(self, number: int) -> Cell:
        return Cell(self.config, *self.config.cells[number])

    def result(self) -> dict[str, Any]:
        names = dict.fromkeys(name for name, _ in self.config.cells)
        return {name: self._summary(name) for name in names}

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
        figures.draw(self, folder, result)

    def describe(self, result: dict[str, Any]) -> str:
        lines = []
        for name in dict.fromkeys(name for name, _ in self.config.cells):
            lines += self._table(name, result[name])
        return "\n".join(lines)

    def _table(self, name: str, found: dict[str, Any]) -> list[str]:
        c = self.config
        # At its best: with the rate and clip that were the best on other tasks.
        rows = {
            f"learned loss, {c.steps} steps": "learned_short",
            f"task's loss at its best, {c.steps} steps": "task_short",
            f"learned loss, {c.horizon} steps": "learned_long",
            f"task's loss at its best, {c.horizon} steps": "task_long",
        }
        times = "1 seed" if c.seeds == 1 else f"{c.seeds} seeds"
        momentum = f"momentum {c.momentum:g}" if c.momentum else "no momentum"
        measured = f"{PROBLEMS[name].measured} on held-out tasks, SGD, {momentum}, {times}"
        lines = [f"{name}: {measured}"]
        for name, key in rows.items():
            mean, spread = found["mean"][key], found["spread"][key]
            value = "diverged" if mean is None else f"{mean:.4f}"
            if mean is not None and c.seeds > 1:
                value += f" ± {spread:.4f}"
            lines.append(f"  {name:50} {value}")
        for steps, key in ((c.steps, "steps_needed_short"), (c.horizon, "steps_needed")):
            needed = ", ".join(_count_text(n, c.horizon) for n in found[key])
            about = f"steps of the learned loss to what the task's loss has after {steps}, by seed"
            lines.append(f"  {about}: {needed}")
        if skipped := sum(found["skipped"]):
            lines.append(f"  {skipped} meta-updates were left out: nets diverged in them")
        return lines


def _of_all(function: Callable[[list[Any]], float], values: list[float | None]) -> float | None:
    """None if any diverged."""
    return None if None in values else function(values)


def _spread(values: list[float]) -> float:
    """Standard deviation over seeds."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _count_text(needed: int | None, horizon: int) -> str:
    return f"not within {horizon}" if needed is None else str(needed)
