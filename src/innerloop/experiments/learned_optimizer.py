"""Learned optimizers against tuned ones, on quadratics and on a network that learns digits.

``innerloop learned-optimizer`` meta-trains an optimizer for each seed, and lets it train problems
it has not seen, for as many steps as it was trained for and for longer. SGD, Adam and RMSprop do
the same with the rate of a fine grid that is best on problems of meta-training, chosen for each
horizon and each metric by itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from innerloop.experiments import _tuned
from innerloop.experiments._command_line import check_choice, refuse
from innerloop.experiments._experiment import Experiment, command
from innerloop.experiments._meta_trained import BY, KINDS, MetaTraining
from innerloop.experiments._optimizees import FAMILIES, Family

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


class Comparison(Experiment):
    """For each problem: rates are tuned; then, for each seed, an optimizer is learned and judged.

    A unit of work is the tuning, one episode of a meta-training, or one comparison.
    """

    unit = "episodes"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.families = {name: FAMILIES[name]() for name in config.problems}
        self.rates: dict[str, Any] = {}
        """The best ones: problem, optimizer, horizon, metric -> rate."""
        self.cells: list[dict[str, Any]] = []
        """What finished comparisons found."""
        self.training: MetaTraining | None = None
        self.plan = [unit for name in config.problems for unit in self._units(name)]

    def _units(self, problem: str) -> list[tuple[str, int, int]]:
        """(problem, seed, episode), with -1 for what comes before and after the episodes."""
        c = self.config
        episodes = c.of(problem).episodes
        return [
            (problem, -1, 0),
            *((problem, s, e) for s in range(c.seeds) for e in (*range(episodes), -1)),
        ]

    @property
    def total(self) -> int:
        return len(self.plan)

    def advance(self) -> dict[str, str]:
        problem, seed, episode = self.plan[self.done]
        family = self.families[problem]
        if seed < 0:
            self.rates[problem] = self._tuned(family, self.config.of(problem))
            return {"problem": problem}
        training = self._training(problem, seed)
        if episode < 0:
            self._compare(problem, seed, training)
            self.training = None
            return {"problem": problem, "seed": str(seed)}
        loss = training.episode(episode)
        return {"problem": problem, "seed": str(seed), "loss": f"{loss:.3f}"}

    def _training(self, problem: str, seed: int) -> MetaTraining:
        if self.training is None:
            own = self.config.of(problem)
            family = self.families[problem]
            self.training = MetaTraining(family, own, own.episodes, self.config.seed + seed)
        return self.training

    def _problems(self, family: Family, config: Config, seed: int, unseen: bool) -> Any:
        """Batches of as many problems as a comparison has, some for each start of the model."""
        generator = torch.Generator().manual_seed(seed)
        tasks = config.held_out // family.starts
        for _ in range(family.starts):
            family.begin(generator)
            yield family.draw(generator, tasks, config.longer + 1, unseen)

    def _tuned(self, family: Family, config: Config) -> dict[str, Any]:
        seed, tasks = _TUNE_SEED + config.seed, config.held_out // family.starts
        found: dict[str, list[Tensor]] = {kind: [] for kind in _tuned.KINDS}
        for batches in self._problems(family, config, seed, unseen=False):
            for kind, known in found.items():
                known.append(_tuned.curves(kind, _tuned.RATES, family, batches, tasks))
        return {k: _tuned.best_rates(torch.cat(v, 1), config.horizons) for k, v in found.items()}

    def _compare(self, problem: str, seed: int, training: MetaTraining) -> None:
        config, family = self.config.of(problem), self.families[problem]
        chosen = {k: _distinct(self.rates[problem][k]) for k in _tuned.KINDS}
        found: dict[str, list[Tensor]] = {k: [] for k in (config.optimizer, *chosen)}
        held_out = _HELD_OUT_SEED + config.seed + seed
        for batches in self._problems(family, config, held_out, unseen=True):
            found[config.optimizer].append(training.curves(batches)[None])
            tasks = config.held_out // family.starts
            for kind, rates in chosen.items():
                found[kind].append(_tuned.curves(kind, rates, family, batches, tasks))
        # [rates, steps] each
        means = {kind: torch.cat(known, 1).mean(1) for kind, known in found.items()}
        cell = {"problem": problem, "seed": config.seed + seed}
        cell |= {"losses": {k: self._judged(problem, k, m) for k, m in means.items()}}
        curves = {k: self._curve(problem, k, m).tolist() for k, m in means.items()}
        self.cells.append(cell | {"curves": curves})
        self.records.append({"iteration": len(self.cells), **cell})

    def _judged(self, problem: str, kind: str, means: Tensor) -> dict[str, dict[str, float]]:
        return {
            str(h): {
                metric: _tuned.measured(self._of(problem, kind, means, h, metric), h, metric).item()
                for metric in _tuned.METRICS
            }
            for h in self.config.horizons
        }

    def _curve(self, problem: str, kind: str, means: Tensor) -> Tensor:
        """The curve that is drawn: with the rate that is best for the training horizon."""
        return self._of(problem, kind, means, self.config.horizon, "mean")

    def _of(self, problem: str, kind: str, means: Tensor, horizon: int, metric: str) -> Tensor:
        """The curve with the rate that is best by a metric at a horizon. [steps]"""
        if kind not in _tuned.KINDS:
            return means[0]
        rates = self.rates[problem][kind]
        return means[_distinct(rates).index(rates[str(horizon)][metric])]

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        training = None if self.training is None else self.training.state_dict()
        return {"rates": self.rates, "cells": self.cells, "training": training}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates, self.cells = state["rates"], state["cells"]
        if state["training"] is not None:
            problem, seed, _ = self.plan[self.done]
            self._training(problem, seed).load_state_dict(state["training"])

    # --- the end ------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        summary = {problem: self._summary(problem) for problem in self.config.problems}
        return {
            "optimizer": self.config.optimizer,
            "summary": summary,
            "rates": self.rates,
            "rate_grid": [min(_tuned.RATES), max(_tuned.RATES), len(_tuned.RATES)],
            "cells": self.cells,
        }

    def _summary(self, problem: str) -> dict[str, Any]:
        """Mean and spread over seeds: optimizer, horizon, metric."""
        cells = [cell["losses"] for cell in self.cells if cell["problem"] == problem]
        adam = [cell["adam"] for cell in cells]
        return {
            kind: {
                h: {m: _spread([c[kind][h][m] for c in cells], [a[h][m] for a in adam]) for m in by}
                for h, by in cells[0][kind].items()
            }
            for kind in cells[0]
        }

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        from innerloop.experiments import _learned_optimizer_figures

        _learned_optimizer_figures.draw(self.config, folder, result)

    def told(self, result: dict[str, Any]) -> str:
        from innerloop.experiments import _learned_optimizer_figures

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


_NEXT = "Next, learn a network in the LSTM's place: innerloop learned-optimizer --optimizer mlp"


if __name__ == "__main__":
    raise SystemExit(main())
