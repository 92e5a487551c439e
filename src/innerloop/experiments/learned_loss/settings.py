"""Settings of ``innerloop learned-loss``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar

from innerloop.experiments.framework.settings import (
    Bounds,
    Choice,
    Count,
    Rate,
    Seeds,
    Settings,
    refuse,
)
from innerloop.experiments.learned_loss.problem import PROBLEMS
from innerloop.learned.losses import FORMS

_BOTH = "both"


def _each(about: str, field: str) -> str:
    """Help with the default of each problem."""
    values = (f"{name}: {getattr(problem, field):g}" for name, problem in PROBLEMS.items())
    return f"{about} ({', '.join(values)})"


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of a run; each is also a flag."""

    problem: Annotated[str, Choice((*PROBLEMS, _BOTH))] = _BOTH
    seeds: Annotated[Seeds, "repetitions of everything"] = 3
    iterations: Annotated[Count | None, _each("meta-updates of a loss", "iterations")] = None
    tasks: Annotated[Count, "tasks in a meta-update"] = 16
    steps: Annotated[Count, "inner steps that a loss is learned for"] = 20
    horizon: Annotated[Count, "steps of the task's own loss in the comparison"] = 100
    form: Annotated[str, Choice(FORMS), "output of the network"] = "weighted"
    read_step: Annotated[bool, "the learned loss reads the number of the step"] = True
    read_input: Annotated[bool, "on sines the learned loss reads x, and waves of x"] = True
    moments: Annotated[
        int, Bounds(0), "on sines, if it reads x: weighted mean errors that it squares"
    ] = 16
    centered: Annotated[bool, "on digits it may leave a part of the mean logits out"] = True
    inner_lr: Annotated[Rate | None, _each("learning rate of the learned loss", "rate")] = None
    inner_clip: Annotated[
        Annotated[float, Bounds(0, above=True, infinite=True)] | None,
        _each("longest gradient with it", "clip"),
    ] = None
    momentum: Annotated[float, Bounds(0, 1, below=True), "of SGD, with either loss"] = 0.0
    meta_lr: Annotated[Rate | None, _each("rate of the outer Adam at first", "meta_rate")] = None
    clip: Annotated[Rate | None, _each("longest meta-gradient", "meta_clip")] = None
    held_out: Annotated[Count, "held-out tasks, each with initial weights of its own"] = 200
    seed: Annotated[int, Bounds(0, 1000), "the first seed: the same seed gives the same result"] = 0
    out: Annotated[Path, "folder of the run"] = Path("out/learned-loss")

    PRESETS: ClassVar = {
        "quick": {"seeds": 2},
        "paper": {"seeds": 5, "iterations": 2000, "tasks": 16, "held_out": 500},
    }

    def check(self) -> None:
        if self.steps > self.horizon:
            refuse("steps", self.steps, f"at most the horizon, {self.horizon}")

    @property
    def cells(self) -> list[tuple[str, int]]:
        names = tuple(PROBLEMS) if self.problem == _BOTH else (self.problem,)
        return [(name, self.seed + k) for name in names for k in range(self.seeds)]
