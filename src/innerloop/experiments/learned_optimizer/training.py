"""Learned optimizers of all problems and seeds, compared with tuned ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from innerloop.experiments.framework.parts import Part, Parts
from innerloop.experiments.learned_optimizer import figures, tuned
from innerloop.experiments.learned_optimizer.meta_training import MetaTraining
from innerloop.experiments.learned_optimizer.problem import FAMILIES, Family
from innerloop.experiments.learned_optimizer.settings import Config

_TUNE_SEED, _HELD_OUT_SEED = 1_000_003, 2_000_003


def problems(family: Family, config: Config, seed: int, unseen: bool) -> Iterator[Any]:
    """Batches of as many problems as a comparison has, some for each start of the model."""
    generator = torch.Generator().manual_seed(seed)
    tasks = config.held_out // family.starts
    for _ in range(family.starts):
        family.begin(generator)
        yield family.draw(generator, tasks, config.longer + 1, unseen)


class Cell(Part):
    """An optimizer that is learned from one seed, and then compared."""

    def __init__(self, experiment: Comparison, problem: str, seed: int) -> None:
        self.experiment, self.problem, self.seed = experiment, problem, seed
        self.config, self.family = experiment.config.of(problem), experiment.families[problem]
        self.training = MetaTraining(self.family, self.config, self.config.episodes, seed)
        self.curves: dict[str, list[float]] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.training.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.training.load_state_dict(state)

    def outcome(self) -> dict[str, Any]:
        return {"rates": self.experiment.rates(self.problem), "curves": self.curves}

    def advance(self, unit: int, records: list[dict[str, Any]]) -> dict[str, str]:
        shown = {"problem": self.problem, "seed": str(self.seed)}
        if unit < self.config.episodes:
            return shown | {"loss": f"{self.training.episode(unit):.3f}"}
        records.append(self._compare())
        return shown

    def _compare(self) -> dict[str, Any]:
        config, family = self.config, self.family
        rates = self.experiment.rates(self.problem)
        chosen = {k: _distinct(rates[k]) for k in tuned.KINDS}
        found: dict[str, list[Tensor]] = {k: [] for k in (config.optimizer, *chosen)}
        for batches in problems(family, config, _HELD_OUT_SEED + self.seed, unseen=True):
            found[config.optimizer].append(self.training.curves(batches)[None])
            tasks = config.held_out // family.starts
            for kind, own in chosen.items():
                found[kind].append(tuned.curves(kind, own, family, batches, tasks))
        # [rates, steps] each
        means = {kind: torch.cat(known, 1).mean(1) for kind, known in found.items()}
        # The curve that is drawn: with the rate that is best for the training horizon.
        drawn = {k: _of(rates, k, m, config.horizon, "mean") for k, m in means.items()}
        self.curves = {kind: curve.tolist() for kind, curve in drawn.items()}
        losses = {kind: self._measure(rates, kind, m) for kind, m in means.items()}
        return {"problem": self.problem, "seed": self.seed, "losses": losses}

    def _measure(self, rates: Any, kind: str, means: Tensor) -> dict[str, dict[str, float]]:
        return {
            str(h): {
                metric: tuned.measure(_of(rates, kind, means, h, metric), h, metric).item()
                for metric in tuned.METRICS
            }
            for h in self.config.horizons
        }


def _of(rates: Any, kind: str, means: Tensor, horizon: int, metric: str) -> Tensor:
    """The curve with the rate that is best by a metric at a horizon. [steps]"""
    if kind not in tuned.KINDS:
        return means[0]
    return means[_distinct(rates[kind]).index(rates[kind][str(horizon)][metric])]


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
        return Cell(self, problem, seed)

    def rates(self, problem: str) -> dict[str, Any]:
        """The best ones, which depend on no seed: optimizer, horizon, metric -> rate."""
        for (name, _), kept in zip(self.cells, self.outcomes, strict=True):
            if name == problem and kept:
                return kept["rates"]
        if problem not in self._rates:
            config, family = self.config.of(problem), self.families[problem]
            seed, tasks = _TUNE_SEED + config.seed, config.held_out // family.starts
            found: dict[str, list[Tensor]] = {kind: [] for kind in tuned.KINDS}
            for batches in problems(family, config, seed, unseen=False):
                for kind, known in found.items():
                    known.append(tuned.curves(kind, tuned.RATES, family, batches, tasks))
            self._rates[problem] = {
                k: tuned.best_rates(torch.cat(v, 1), config.horizons) for k, v in found.items()
            }
        return self._rates[problem]

    # --- the end ------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        summary = {problem: self._summary(problem) for problem in self.config.problems}
        cells = [
            {"problem": r["problem"], "seed": r["seed"], "losses": r["losses"]}
            | {"curves": kept["curves"]}
            for r, kept in zip(self.records, self.outcomes, strict=True)
        ]
        return {
            "optimizer": self.config.optimizer,
            "summary": summary,
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
        figures.draw(self.config, folder, result)

    def describe(self, result: dict[str, Any]) -> str:
        return figures.table(self.config, result)


def _distinct(rates: dict[str, dict[str, float]]) -> list[float]:
    return sorted({rate for by in rates.values() for rate in by.values()})


def _spread(values: list[float], adam: list[float]) -> dict[str, Any]:
    found = torch.tensor(values, dtype=torch.float64)
    deviation = found.std().item() if len(values) > 1 else 0.0
    better = sum(a < b for a, b in zip(values, adam, strict=True))
    return {"mean": found.mean().item(), "deviation": deviation, "seeds_below_adam": better}
