"""All methods on all problems of ``innerloop estimate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from innerloop.experiments.estimate import figures
from innerloop.experiments.estimate import problem as rare
from innerloop.experiments.estimate.cell import Cell
from innerloop.experiments.estimate.settings import Config
from innerloop.experiments.framework.parts import Parts


class Comparison(Parts):
    """All methods on all problems, one meta-update after another."""

    unit = "meta-updates"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.cells = [(s, arm) for s in range(config.seeds) for arm in config.names]
        self._known: tuple[int, rare.Search] | None = None
        super().__init__([config.updates] * len(self.cells))

    def _problem(self, seed: int) -> rare.Search:
        c = self.config
        if self._known is None or self._known[0] != seed:
            self._known = seed, rare.search(seed, c.characters, c.common, c.rare, c.noise)
        return self._known[1]

    def make(self, number: int) -> Cell:
        seed, arm = self.cells[number]
        seed += self.config.seed
        return Cell(self.config, arm, seed, self._problem(seed))

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
        lines = [f"{'learned by':<12}{'test F1':>18}{'cross-entropy':>18}{'accuracy':>18}"]
        for arm, found in result["arms"].items():
            shown = [f"{found[m]['mean']:.3f} ± {found[m]['deviation']:.3f}" for m in _METRICS]
            lines.append(f"{arm:<12}" + "".join(f"{text:>18}" for text in shown))
        c = self.config
        lines.append(
            f"Mean and deviation over {c.seeds} seeds, after {c.updates} meta-updates; "
            f"{result['seconds']:.0f} s. Start: all weights 1, learning rate {c.inner_lr}."
        )
        return "\n".join(lines)


_METRICS = ("f1", "cross_entropy", "accuracy")


def _summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric in _METRICS:
        values = torch.tensor([r[metric] for r in records], dtype=torch.float64)
        deviation = values.std().item() if len(values) > 1 else 0.0
        each = values.tolist()
        found[metric] = {"mean": values.mean().item(), "deviation": deviation, "each": each}
    return found
