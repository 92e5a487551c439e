"""Settings of ``innerloop learned-loss``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, ClassVar

from innerloop.experiments.framework.settings import (
    Bounds,
    Choice,
    Count,
    Rate,
    Seeds,
    Settings,
    refuse,
)
from innerloop.experiments.learned_loss.problem import PROBLEMS, Problem
from innerloop.learned.losses import FORMS

_Clip = Annotated[float, Bounds(0, above=True, infinite=True)]


def _each(about: str, field: str) -> str:
    """Help with the default of each problem."""
    values = (f"{name}: {getattr(problem, field):g}" for name, problem in PROBLEMS.items())
    return f"{about} ({', '.join(values)})"


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of a run; each is also a flag."""

    problem: Annotated[str, Choice((*PROBLEMS, "both"))] = "both"
    seeds: Annotated[Seeds, "repetitions of everything"] = 3
    iterations: Annotated[Count | None, _each("meta-updates of a loss", "iterations")] = None
    tasks: Annotated[Count, "tasks in a meta-update"] = 16
    steps: Annotated[Count, "inner steps that a loss is learned for"] = 20
    horizon: Annotated[Count, "steps of the task's own loss in the comparison"] = 100
    form: Annotated[str, Choice(FORMS), "output of the network"] = "weighted"
    read_step: Annotated[bool, "the learned loss reads the number of the step"] = True
    read_input: Annotated[bool, "on sines the learned loss reads x, and waves of x"] = True
    moments: Annotated[int, Bounds(0), "weighted mean errors that it squares, if it reads x"] = 16
    centered: Annotated[bool, "on digits it may leave a part of the mean logits out"] = True
    inner_lr: Annotated[Rate | None, _each("learning rate of the learned loss", "rate")] = None
    inner_clip: Annotated[_Clip | None, _each("longest gradient with it", "clip")] = None
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
    def names(self) -> tuple[str, ...]:
        """The problems."""
        return tuple(PROBLEMS) if self.problem == "both" else (self.problem,)

    @property
    def cells(self) -> list[tuple[str, int]]:
        return [(name, self.seed + k) for name in self.names for k in range(self.seeds)]

    def of(self, name: str) -> Problem:
        """The problem with the settings that were given in place of its own."""
        given = {
            "iterations": self.iterations,
            "rate": self.inner_lr,
            "clip": self.inner_clip,
            "meta_rate": self.meta_lr,
            "meta_clip": self.clip,
        }
        chosen: dict[str, Any] = {name: v for name, v in given.items() if v is not None}
        return dataclasses.replace(PROBLEMS[name], **chosen)
