"""All arms and seeds of ``innerloop meta-lr``, and their test errors."""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

from innerloop.experiments.framework.parts import Parts
from innerloop.experiments.framework.ranks import local_device
from innerloop.experiments.framework.tables import plus_minus, table
from innerloop.experiments.meta_lr import figures, problem
from innerloop.experiments.meta_lr.cell import Cell
from innerloop.experiments.meta_lr.settings import LEARNING, Config


class MetaLr(Parts):
    """All arms and seeds; a unit of work is one training step."""

    unit = "steps"

    def __init__(self, config: Config) -> None:
        config = dataclasses.replace(config, device=local_device(config.device))
        self.config = config
        loaded = problem.load(config.data, config.shapes, config.device)
        self.train, self.test, self._source = loaded
        self._digest = problem.digest(self.train, self.test)
        # Seed after seed: a run that is looked at half done has compared something.
        seeds = range(config.seed, config.seed + config.seeds)
        self.cells = [(arm, seed) for seed in seeds for arm in config.chosen_arms]
        split = self._split(config.seed)
        self.steps = math.ceil(len(split.train.labels) / config.batch)
        if learning := [arm for arm in config.chosen_arms if arm in LEARNING]:
            # What cannot be learned is refused now, not after the other arms have been trained.
            Cell(config, learning[0], config.seed, split, self.steps)
        super().__init__([config.epochs * self.steps] * len(self.cells))

    @property
    def source(self) -> str:
        return f"{self._source} ({self._digest})"

    def _split(self, seed: int) -> problem.Split:
        return problem.split(self.train, self.test, self.config.val_part, seed)

    def make(self, number: int) -> Cell:
        arm, seed = self.cells[number]
        return Cell(self.config, arm, seed, self._split(seed), self.steps)

    def result(self) -> dict[str, Any]:
        """Test errors of every arm after the last epoch, and over all epochs."""
        arms = {arm: self._arm(arm) for arm in self.config.chosen_arms}
        return {"data": self._source, "epochs": self.config.epochs, "arms": arms}

    def _arm(self, arm: str) -> dict[str, Any]:
        mine = [r for r in self.records if r["arm"] == arm]
        diverged = [r["seed"] for r in mine if "diverged" in r]
        whole = [r for r in mine if r["seed"] not in diverged]
        last = [r for r in whole if r["epoch"] == self.config.epochs]
        errors = [r["test_error"] for r in last]
        return {
            "errors": errors,
            "mean": _mean(errors),
            "deviation": statistics.stdev(errors) if len(errors) > 1 else None,
            "mean_over_epochs": _mean([r["test_error"] for r in whole]),
            "train_loss": _mean([r["train_loss"] for r in last]),
            "diverged": diverged,
            "skipped": sum("skipped" in r for r in mine),
        }

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        figures.draw(self.records, folder)

    def describe(self, result: dict[str, Any]) -> str:
        c = self.config
        rows = [["arm", "test error", "mean over epochs", "training loss", "seeds"]]
        remarks = []
        for arm, found in result["arms"].items():
            if found["diverged"]:
                lost = ", ".join(map(str, found["diverged"]))
                remarks.append(f"{arm} diverged with seed {lost}, left out")
            if found["skipped"]:
                remarks.append(f"{arm}: {found['skipped']} meta-updates diverged and were left out")
            if found["errors"]:
                deviation = found["deviation"]
                spread = None if deviation is None else 100 * deviation
                error = plus_minus(100 * found["mean"], spread, 2, " %")
                over = f"{100 * found['mean_over_epochs']:.2f} %"
                each = ", ".join(f"{100 * e:.2f}" for e in found["errors"])
                rows.append([arm, error, over, f"{found['train_loss']:.3f}", each])
        head = (
            f"DenseNet-BC(k={c.growth}, depth={c.depth}) with {c.optimizer}, {c.epochs} epochs, "
            f"{c.seeds} seeds, on {result['data']}, in {result['seconds']:.0f} s."
        )
        return "\n".join([head, table(rows), *remarks])


def _mean(values: list[float]) -> float | None:
    return statistics.mean(values) if values else None
