"""Settings of ``innerloop hyperopt``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import innerloop as il
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


class Range(NamedTuple):
    """The range in which hyperparameters are searched, on a logarithmic scale."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)


RANGES = {
    "weight-decay": Range(1e-5, 1.0),
    "label-smoothing": Range(1e-3, 0.8),
    "augmentation": Range(1e-2, 1.0),
    "example-weights": Range(1e-3, 1.0),
    "task-weights": Range(1e-3, 10.0),
}
_SLOTS = 8
STRATEGIES = {"tape": il.Tape(), "remat": il.Remat(), "binomial": il.Binomial(_SLOTS)}
_Fraction = Annotated[float, Bounds(0, 1, below=True)]


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of a run; each is also a flag."""

    what: Annotated[str, Choice(tuple(RANGES)), "hyperparameters"] = "weight-decay"
    dataset: Annotated[str, Choice(("digits", "cifar10"))] = "digits"
    train: Annotated[Count, "training points"] = 60
    val: Annotated[Count, "validation points, by which hyperparameters are chosen"] = 300
    noise: Annotated[_Fraction, "share of the training labels that are wrong"] = 0.0
    labelled: Annotated[Count, "for task-weights: training points whose class is known"] = 40
    width: Annotated[Count, "units of a hidden layer, or filters of a convolution"] = 64
    steps: Annotated[Count, "steps of one training"] = 60
    batch: Annotated[Count, "points of a step; all of them if they are fewer"] = 100
    inner_lr: Annotated[Rate, "learning rate of the training"] = 0.05
    momentum: Annotated[_Fraction, "its momentum"] = 0.9
    scouts: Annotated[int, Bounds(0), "trainings at random points before the gradient"] = 30
    starts: Annotated[Count, "the best of these, which share half of the updates"] = 2
    updates: Annotated[Count, "updates of the hyperparameters by their gradient"] = 40
    meta_lr: Annotated[Rate, "rate of their Adam, on logarithms; falls to a tenth"] = 1.0
    backward: Annotated[str, Choice(tuple(STRATEGIES))] = "tape"
    meta_cost: Annotated[Count | None, "trainings that an update counts as (passes)"] = None
    seeds: Annotated[Seeds, "repetitions, each with data and a net of its own"] = 5
    seed: Annotated[Seed, "the first of them; the same seed gives the same result"] = 0
    data: Annotated[Path | None, "folder of CIFAR-10 (default: INNERLOOP_DATA)"] = None
    out: Annotated[Path, "folder of the run"] = Path("out/hyperopt")

    PRESETS: ClassVar = {"quick": {}, "paper": {}}  # by dataset, below

    def check(self) -> None:
        if self.what == "task-weights" and self.dataset != "digits":
            refuse(
                "dataset", self.dataset, "digits with task-weights", "the tasks are about digits"
            )
        if self.what == "task-weights" and self.labelled > self.train:
            refuse("labelled", self.labelled, f"at most the training points, {self.train}")
        if self.starts > max(self.scouts, 1):
            refuse("starts", self.starts, f"at most the scouts, {self.scouts}, or 1")
        if self.starts > 1 and self.each < 1:
            refuse("starts", self.starts, f"at most half of the updates, {self.updates}")

    @classmethod
    def preset(cls, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The preset of the dataset and of the hyperparameters."""
        dataset, what = given.get("dataset", cls.dataset), given.get("what", cls.what)
        own = _OF_WHAT[what]
        if dataset == "cifar10":
            own = {name: value for name, value in own.items() if name == "noise"}
        values = {**_PRESETS[name][dataset], **own}
        chosen = {**values, **given}
        starts, scouts, updates = (
            chosen.get(name, getattr(cls, name)) for name in ("starts", "scouts", "updates")
        )
        # Fewer scouts or updates have fewer starts.
        return values | {"starts": max(1, min(starts, scouts, updates // 2))}

    @property
    def reads_data(self) -> bool:
        return self.dataset == "cifar10"

    @property
    def cost(self) -> int:
        """The number of trainings that an update counts as.

        A pass back counts as two forward, so a step as three. The update goes through all steps,
        and then back through their forward and backward, which is twice as much: three in all.
        ``remat`` takes every step once more, ``binomial`` r times, C(slots + r, r) >= steps.
        """
        if self.meta_cost is not None:
            return self.meta_cost
        again = 0 if self.backward == "tape" else 1
        if self.backward == "binomial":
            while math.comb(_SLOTS + again, again) < self.steps:
                again += 1
        return 3 + again

    @property
    def each(self) -> int:
        """Updates from each of several starts; from a single one they all are."""
        return self.updates if self.starts == 1 else self.updates // 2 // self.starts

    @property
    def costs(self) -> list[int]:
        """The cost of each trial of the gradient: scouts, updates, the point they end at."""
        return [1] * self.scouts + [self.cost] * self.updates + [1]

    @property
    def arms(self) -> dict[str, int]:
        """Units of work of each method, for one seed."""
        trials = sum(self.costs)
        arms = {"references": 1, "gradient": len(self.costs), "random": trials}
        # Equal weights for all points are those of a plain training: nothing to search.
        return arms if self.what == "example-weights" else arms | {"shared": trials}


_OF_WHAT: dict[str, dict[str, Any]] = {
    "weight-decay": {},
    "label-smoothing": {"noise": 0.2, "train": 200},
    "augmentation": {},
    # Of hundreds of numbers no random draw is a good start.
    "example-weights": {"noise": 0.4, "train": 300, "val": 200, "meta_lr": 0.6}
    | {"scouts": 0, "starts": 1, "updates": 30},
    "task-weights": {"train": 300},
}
_CIFAR: dict[str, Any] = {"train": 500, "val": 500, "width": 16, "batch": 50, "steps": 80}
_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "quick": {
        "digits": {},
        "cifar10": _CIFAR | {"scouts": 8, "starts": 1, "updates": 10, "seeds": 3},
    },
    "paper": {
        "digits": {"steps": 200, "updates": 100},
        "cifar10": _CIFAR
        | {"train": 4000, "val": 1000, "width": 32, "steps": 500, "updates": 100}
        | {"backward": "binomial"},
    },
}
