"""Learned optimizers against tuned ones, on quadratics and on a network that learns digits.

``innerloop learned-optimizer`` meta-trains an optimizer for each seed, and lets it train problems
it has not seen, for as many steps as it was trained for and for longer. SGD, Adam and RMSprop do
the same with the rate of a fine grid that is best on problems of meta-training, chosen for each
horizon and each metric by itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from innerloop.experiments.framework.command_line import check_choice, check_seed, refuse
from innerloop.experiments.framework.experiment import command
from innerloop.experiments.framework.parts import Part, Parts
from innerloop.experiments.learned_optimizer import tuned as _tuned
from innerloop.experiments.learned_optimizer.cell import BY, KINDS, MetaTraining
from innerloop.experiments.learned_optimizer.problem import FAMILIES, Family

_TUNE_SEED, _HELD_OUT_SEED = 1_000_003, 2_000_003
PROBLEMS = (*FAMILIES, "both")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run; each is also a flag."""

    problem: Annotated[str, f"one of {', '.join(PROBLEMS)}"] = "both"
    optimizer: Annotated[str, f"one of {', '.join(KINDS)}"] = "lstm"
    by: Annotated[str, f"how it is meta-trained, one of {', '.join(BY)}"] = "truncated"
    seeds: Annotated[int, "meta-trainings of each kind"] = 5
    episodes: Annotated[int, "training runs that a meta-training on quadratics sees"] = 48
    digits_episodes: Annotated[int, "the same on digits"] = 24
    horizon: Annotated[int, "steps of a training run"] = 100
    window: Annotated[int, "steps of which the gradient is taken at a time (truncated, pes)"] = 20
    slots: Annotated[int, "states kept (binomial)"] = 8
    samples: Annotated[int, "evaluations of each part (pes)"] = 16
    sigma: Annotated[float, "size of the perturbations (pes)"] = 0.01
    tasks: Annotated[int, "problems at a time on quadratics"] = 64
    digits_tasks: Annotated[int, "the same on digits"] = 1
    meta_lr: Annotated[float, "learning rate of the outer Adam"] = 0.01
    clip: Annotated[float, "largest norm of a meta-gradient"] = 1.0
    first_order: Annotated[bool, "take inner gradients as constants"] = True
    longer: Annotated[int, "steps of the longest comparison"] = 200
    held_out: Annotated[int, "unseen problems for each seed"] = 128
    digits_held_out: Annotated[int, "the same on digits"] = 16
    seed: Annotated[int, "the first seed; the same seed gives the same result"] = 0
    out: Annotated[Path, "folder of the run"] = Path("out/learned-optimizer")

    def __post_init__(self) -> None:
        check_choice("problem", self.problem, PROBLEMS)
        check_choice("optimizer", self.optimizer, tuple(KINDS))
        check_choice("by", self.by, BY)
        check_seed(self.seed, self.seeds)
        least = {"seed": 0, "samples": 2}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low = least.get(field.name, 1)
            if type(value) is int and value < low:
                refuse(field.name, value, f"at least {low}")
        for name in ("sigma", "meta_lr", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                refuse(name, value, "a number above 0")
        if self.samples % 2:
            refuse("samples", self.samples, "even: perturbations come in pairs")
        if self.horizon % self.window:
            refuse("window", self.window, f"a divisor of the horizon, {self.horizon}")
        if self.longer < self.horizon:
            refuse("longer", self.longer, f"at least the horizon, {self.horizon}")
        starts = max(FAMILIES[name].starts for name in self.problems)
        if "digits" in self.problems and self.digits_held_out % starts:
            refuse("digits_held_out", self.digits_held_out, f"a multiple of {starts}")

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(FAMILIES) if self.problem == "both" else (self.problem,)

    @property
    def horizons(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.horizon, self.longer)))

    def of(self, problem: str) -> Config:
        """The settings as they are for one problem."""
        if problem != "digits":
            return self
        own = {"episodes": self.digits_episodes, "tasks": self.digits_tasks}
        return dataclasses.replace(self, **own, held_out=self.digits_held_out)


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "episodes": 2000,
        "digits_episodes": 1000,
        "tasks": 128,
        "digits_tasks": 4,
        "meta_lr": 3e-3,
        "longer": 1000,
        "held_out": 512,
        "digits_held_out": 64,
    },
    "quick": {},
}


def configured(given: dict[str, Any], preset: str) -> Config:
    """The preset with what was written instead."""
    check_choice("preset", preset, tuple(PRESETS))
    return Config(**{**PRESETS[preset], **given})


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

    def kept(self) -> dict[str, Any]:
        return {"rates": self.experiment.rates(self.problem), "curves": self.curves}

    def advance(self, unit: int, records: list[dict[str, Any]]) -> dict[str, str]:
        shown = {"problem": self.problem, "seed": str(self.seed)}
        if unit < self.config.episodes:
            return shown | {"loss": f"{self.training.episode(unit):.3f}"}
        records.append(self._compared())
        return shown

    def _compared(self) -> dict[str, Any]:
        config, family = self.config, self.family
        rates = self.experiment.rates(self.problem)
        chosen = {k: _distinct(rates[k]) for k in _tuned.KINDS}
        found: dict[str, list[Tensor]] = {k: [] for k in (config.optimizer, *chosen)}
        for batches in problems(family, config, _HELD_OUT_SEED + self.seed, unseen=True):
            found[config.optimizer].append(self.training.curves(batches)[None])
            tasks = config.held_out // family.starts
            for kind, own in chosen.items():
                found[kind].append(_tuned.curves(kind, own, family, batches, tasks))
        # [rates, steps] each
        means = {kind: torch.cat(known, 1).mean(1) for kind, known in found.items()}
        # The curve that is drawn: with the rate that is best for the training horizon.
        drawn = {k: _of(rates, k, m, config.horizon, "mean") for k, m in means.items()}
        self.curves = {kind: curve.tolist() for kind, curve in drawn.items()}
        losses = {kind: self._judged(rates, kind, m) for kind, m in means.items()}
        return {"problem": self.problem, "seed": self.seed, "losses": losses}

    def _judged(self, rates: Any, kind: str, means: Tensor) -> dict[str, dict[str, float]]:
        return {
            str(h): {
                metric: _tuned.measured(_of(rates, kind, means, h, metric), h, metric).item()
                for metric in _tuned.METRICS
            }
            for h in self.config.horizons
        }


def _of(rates: Any, kind: str, means: Tensor, horizon: int, metric: str) -> Tensor:
    """The curve with the rate that is best by a metric at a horizon. [steps]"""
    if kind not in _tuned.KINDS:
        return means[0]
    return means[_distinct(rates[kind]).index(rates[kind][str(horizon)][metric])]


class Comparison(Parts):
    """For each problem and seed, an optimizer is learned and judged beside tuned ones.

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
        for (name, _), kept in zip(self.cells, self.kept, strict=True):
            if name == problem and kept:
                return kept["rates"]
        if problem not in self._rates:
            config, family = self.config.of(problem), self.families[problem]
            seed, tasks = _TUNE_SEED + config.seed, config.held_out // family.starts
            found: dict[str, list[Tensor]] = {kind: [] for kind in _tuned.KINDS}
            for batches in problems(family, config, seed, unseen=False):
                for kind, known in found.items():
                    known.append(_tuned.curves(kind, _tuned.RATES, family, batches, tasks))
            self._rates[problem] = {
                k: _tuned.best_rates(torch.cat(v, 1), config.horizons) for k, v in found.items()
            }
        return self._rates[problem]

    # --- the end ------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        summary = {problem: self._summary(problem) for problem in self.config.problems}
        cells = [
            {"problem": r["problem"], "seed": r["seed"], "losses": r["losses"]}
            | {"curves": kept["curves"]}
            for r, kept in zip(self.records, self.kept, strict=True)
        ]
        return {
            "optimizer": self.config.optimizer,
            "summary": summary,
            "rates": {problem: self.rates(problem) for problem in self.config.problems},
            "rate_grid": [min(_tuned.RATES), max(_tuned.RATES), len(_tuned.RATES)],
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
        from innerloop.experiments.learned_optimizer import figures as _learned_optimizer_figures

        _learned_optimizer_figures.draw(self.config, folder, result)

    def told(self, result: dict[str, Any]) -> str:
        from innerloop.experiments.learned_optimizer import figures as _learned_optimizer_figures

        return _learned_optimizer_figures.table(self.config, result)


def _distinct(rates: dict[str, dict[str, float]]) -> list[float]:
    return sorted({rate for by in rates.values() for rate in by.values()})


def _spread(values: list[float], adam: list[float]) -> dict[str, Any]:
    found = torch.tensor(values, dtype=torch.float64)
    deviation = found.std().item() if len(values) > 1 else 0.0
    better = sum(a < b for a, b in zip(values, adam, strict=True))
    return {"mean": found.mean().item(), "deviation": deviation, "seeds_below_adam": better}


def main(argv: Sequence[str] | None = None) -> int:
    about = __doc__
    return command("learned-optimizer", about, Config, configured, Comparison, argv, _NEXT)


_NEXT = "Next, learn a network in the LSTM's place: {innerloop} learned-optimizer --optimizer mlp"


if __name__ == "__main__":
    raise SystemExit(main())
