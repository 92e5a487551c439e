"""All methods on all problems of ``innerloop estimate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from innerloop.experiments.estimate import figures
from innerloop.experiments.estimate.cell import Cell
from innerloop.experiments.estimate.problem import draw_search
from innerloop.experiments.estimate.settings import Config
from innerloop.experiments.framework.parts import Parts
from innerloop.experiments.framework.tables import plus_minus, table


class Comparison(Parts):
    """All methods on all problems, one meta-update after another."""

    unit = "meta-updates"

    def __init__(self, config: Config) -> None:
        self.config = config
        seeds = range(config.seed, config.seed + config.seeds)
        self.cells = [(seed, arm) for seed in seeds for arm in config.names]
        super().__init__([config.updates] * len(self.cells))

    def make(self, number: int) -> Cell:
        c, (seed, arm) = self.config, self.cells[number]
        return Cell(c, arm, seed, draw_search(seed, c.characters, c.common, c.rare, c.noise))

    def result(self) -> dict[str, Any]:
        """By arm, over seeds; ``start`` is before anything is learned."""
        ends = {"start": self._of(self.config.names[0], 0)}
        ends |= {arm: self._of(arm, self.config.updates) for arm in self.config.names}
        return {"arms": {arm: _summary(found) for arm, found in ends.items()}}

    def _of(self, arm: str, update: int) -> list[dict[str, Any]]:
        return [r for r in self.records if r["arm"] == arm and r["update"] == update]

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        figures.draw(self.records, folder)

    def describe(self, result: dict[str, Any]) -> str:
        c, rows = self.config, [["learned by", "test F1", "cross-entropy", "accuracy"]]
        for arm, found in result["arms"].items():
            rows.append([arm, *(plus_minus(f["mean"], f["deviation"]) for f in found.values())])
        return (
            f"{table(rows)}\n"
            f"Mean and deviation over {c.seeds} seeds, after {c.updates} meta-updates; "
            f"{result['seconds']:.0f} s. Start: all weights 1, learning rate {c.inner_lr}."
        )


def _summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric in ("f1", "cross_entropy", "accuracy"):
        values = torch.tensor([r[metric] for r in records], dtype=torch.float64)
        deviation = values.std().item() if len(values) > 1 else 0.0
        found[metric] = {
            "mean": values.mean().item(),
            "deviation": deviation,
            "each": values.tolist(),
        }
    return found
