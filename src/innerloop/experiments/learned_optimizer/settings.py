"""Settings of ``innerloop learned-optimizer``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar

from torch import nn

from innerloop.experiments.framework.settings import (
    Bounds,
    Choice,
    Count,
    Rate,
    Seed,
    Seeds,
    Settings,
    refuse,
)
from innerloop.experiments.learned_optimizer.problem import FAMILIES
from innerloop.learned import LSLR, LearnedOptimizer, LSTMOptimizer, MetaSGD, MLPOptimizer

OPTIMIZERS: dict[str, Callable[[nn.Module, int], LearnedOptimizer]] = {
    "lstm": lambda model, steps: LSTMOptimizer(),
    "mlp": lambda model, steps: MLPOptimizer(),
    "meta-sgd": lambda model, steps: MetaSGD(model),
    "lslr": lambda model, steps: LSLR(model, steps),
}


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of a run; each is also a flag."""

    problem: Annotated[str, Choice((*FAMILIES, "both"))] = "both"
    optimizer: Annotated[str, Choice(tuple(OPTIMIZERS))] = "lstm"
    by: Annotated[str, Choice(("truncated", "binomial", "pes")), "meta-training"] = "truncated"
    seeds: Annotated[Seeds, "meta-trainings of each kind"] = 5
    episodes: Annotated[Count, "training runs that a meta-training on quadratics sees"] = 48
    digits_episodes: Annotated[Count, "the same on digits"] = 24
    horizon: Annotated[Count, "steps of a training run"] = 100
    window: Annotated[Count, "steps of which the gradient is taken at a time (truncated, pes)"] = 20
    slots: Annotated[Count, "states kept (binomial)"] = 8
    samples: Annotated[int, Bounds(2), "evaluations of each part (pes)"] = 16
    sigma: Annotated[Rate, "size of the perturbations (pes)"] = 0.01
    tasks: Annotated[Count, "problems at a time on quadratics"] = 64
    digits_tasks: Annotated[Count, "the same on digits"] = 1
    meta_lr: Annotated[Rate, "learning rate of the outer Adam"] = 0.01
    clip: Annotated[Rate, "largest norm of a meta-gradient"] = 1.0
    first_order: Annotated[bool, "take inner gradients as constants"] = True
    longer: Annotated[Count, "steps of the longest comparison"] = 200
    held_out: Annotated[Count, "unseen problems for each seed"] = 128
    digits_held_out: Annotated[Count, "the same on digits"] = 16
    seed: Annotated[Seed, "the first seed; the same seed gives the same result"] = 0
    out: Annotated[Path, "folder of the run"] = Path("out/learned-optimizer")

    PRESETS: ClassVar = {
        "quick": {},
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
    }

    def check(self) -> None:
        if self.samples % 2:
            refuse("samples", self.samples, "even", "perturbations come in pairs")
        if self.horizon % self.window:
            refuse("window", self.window, f"a divisor of the horizon, {self.horizon}")
        if self.longer < self.horizon:
            refuse("longer", self.longer, f"at least the horizon, {self.horizon}")
        starts = FAMILIES["digits"].starts
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
