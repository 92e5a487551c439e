"""Learned optimizers of all problems and seeds, compared with tuned ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from innerloop.experiments.framework.figures import save
from innerloop.experiments.framework.parts import Parts
from innerloop.experiments.framework.tables import table
from innerloop.experiments.learned_optimizer import figures, tuned
from innerloop.experiments.learned_optimizer.cell import Cell
from innerloop.experiments.learned_optimizer.figures import NAMES
from innerloop.experiments.learned_optimizer.problem import FAMILIES, draw_problems
from innerloop.experiments.learned_optimizer.settings import Config

_TUNE_SEED = 1_000_003


class Comparison(Parts):
    """For each problem and seed, an optimizer is learned and compared with tuned ones.

    A unit of work is one episode of a meta-training, or one comparison.
    """

    unit = "episodes"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.families = {name: FAMILIES[name]() for name in config.problems}
        seeds = range(config.seed, config.seed + config.seeds)
        self.cells = [(name, seed) for name in config.problems for seed in seeds]
        self._rates: dict[str, Any] = {}
        super().__init__([config.of(name).episodes + 1 for name, _ in self.cells])

    def make(self, number: int) -> Cell:
        problem, seed = self.cells[number]
        config, family = self.config.of(problem), self.families[problem]
        return Cell(config, problem, family, seed, lambda: self.rates(problem))

    def rates(self, problem: str) -> dict[str, Any]:
        """The best ones, which depend on no seed: optimizer, horizon, metric -> rate."""
        for (name, _), kept in zip(self.cells, self.outcomes, strict=True):
            if name == problem and kept:
                return kept["rates"]
        if problem not in self._rates:
            c, family = self.config.of(problem), self.families[problem]
            seed, tasks = _TUNE_SEED + c.seed, c.held_out // family.starts
            found: dict[str, list[Tensor]] = {kind: [] for kind in tuned.OPTIMIZERS}
            for batches in draw_problems(family, c.held_out, c.longer + 1, seed, unseen=False):
                for kind, known in found.items():
                    known.append(tuned.curves(kind, tuned.RATES, family, batches, tasks))
            self._rates[problem] = {
                k: tuned.best_rates(torch.cat(v, 1), c.horizons) for k, v in found.items()
            }
        return self._rates[problem]

    def result(self) -> dict[str, Any]:
        cells = [
            {"problem": r["problem"], "seed": r["seed"], "losses": r["losses"]}
            | {"curves": kept["curves"]}
            for r, kept in zip(self.records, self.outcomes, strict=True)
        ]
        return {
            "optimizer": self.config.optimizer,
            "summary": {problem: self._summary(problem) for problem in self.config.problems},
            "rates": {problem: self.rates(problem) for problem in self.config.problems},
            "rate_grid": [min(tuned.RATES), max(tuned.RATES), len(tuned.RATES)],
            "cells": cells,
        }

    def _summary(self, problem: str) -> dict[str, Any]:
        """Mean and spread over seeds: optimizer, horizon, metric."""
        cells = [record["losses"] for record in self.records if record["problem"] == problem]
        adam = [cell["adam"] for cell in cells]
        return {
            kind: {
                h: {m: _spread([c[kind][h][m] for c in cells], [a[h][m] for a in adam]) for m in by}
                for h, by in cells[0][kind].items()
            }
            for kind in cells[0]
        }

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        for problem in self.config.problems:
            figure = figures.draw_curves(self.config, problem, result)
            save(figure, folder / f"{problem}.png")

    def describe(self, result: dict[str, Any]) -> str:
        c, lines = self.config, []
        heads = [f"{what} {h} steps" for h in c.horizons for what in ("mean over", "after")]
        for problem, summary in result["summary"].items():
            rows = [["", *heads]]
            for kind, by in summary.items():
                cells = [by[str(h)][m] for h in c.horizons for m in tuned.METRICS]
                rows.append([NAMES[kind], *map(_mean_text, cells)])
            below = summary[c.optimizer][str(c.horizon)]["mean"]["seeds_below_adam"]
            lines += [
                f"{problem}, unseen: loss, mean and deviation over {c.seeds} seeds",
                table(rows),
                f"{NAMES[c.optimizer]} is below tuned Adam, in the mean over the training horizon, "
                f"in {below} of {c.seeds} seeds.",
                "",
            ]
        return "\n".join([*lines, f"{result['seconds']:.0f} s."])


def _spread(values: list[float], adam: list[float]) -> dict[str, Any]:
    found = torch.tensor(values, dtype=torch.float64)
    deviation = found.std().item() if len(values) > 1 else 0.0
    better = sum(a < b for a, b in zip(values, adam, strict=True))
    return {"mean": found.mean().item(), "deviation": deviation, "seeds_below_adam": better}


def _mean_text(cell: dict[str, Any]) -> str:
    """A mean over seeds; if any diverged to infinity there is none."""
    mean, deviation = cell["mean"], cell["deviation"]
    return f"{mean:.4g} ± {deviation:.2g}" if math.isfinite(mean) else "diverged"
