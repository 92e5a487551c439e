"""Hyperparameters learned by the gradient of the validation loss, against random search.

``innerloop hyperopt`` searches weight decays, label smoothing, augmentations, weights of training
points or of tasks, with the same compute and in the same range each way, over several seeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import innerloop as il
from innerloop.experiments.framework.command_line import check_choice, check_seed, refuse
from innerloop.experiments.framework.experiment import command
from innerloop.experiments.framework.parts import Part, Parts
from innerloop.experiments.hyperopt import summary
from innerloop.experiments.hyperopt.cell import Cell, References
from innerloop.experiments.hyperopt.points import DATASETS, pictures, split
from innerloop.experiments.hyperopt.problem import RANGES, Problem, build
from innerloop.experiments.meta_lr.images import digest

BACKWARD = ("tape", "remat", "binomial")
_SLOTS = 8


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run; each is also a flag."""

    what: Annotated[str, f"what is searched, one of {', '.join(RANGES)}"] = "weight-decay"
    dataset: Annotated[str, f"one of {', '.join(DATASETS)}"] = "digits"
    train: Annotated[int, "training points"] = 60
    val: Annotated[int, "validation points, by which hyperparameters are chosen"] = 300
    noise: Annotated[float, "share of the training labels that are wrong"] = 0.0
    labelled: Annotated[int, "for task-weights: training points whose class is known"] = 40
    width: Annotated[int, "units of a hidden layer, or filters of a convolution"] = 64
    steps: Annotated[int, "steps of one training"] = 60
    batch: Annotated[int, "points of a step; all of them if they are fewer"] = 100
    inner_lr: Annotated[float, "learning rate of the training"] = 0.05
    momentum: Annotated[float, "its momentum"] = 0.9
    scouts: Annotated[int, "trainings at random points, to start the gradient at the best"] = 30
    starts: Annotated[
        int, "how many of the best share half of the updates; the rest go on from the best of all"
    ] = 2
    updates: Annotated[int, "updates of the hyperparameters by their gradient"] = 40
    meta_lr: Annotated[
        float, "rate of their Adam at the start, on logarithms; falls to a tenth"
    ] = 1.0
    backward: Annotated[str, f"one of {', '.join(BACKWARD)}"] = "tape"
    meta_cost: Annotated[int | None, "trainings that an update counts as (passes over the net)"] = (
        None
    )
    seeds: Annotated[int, "repetitions, each with data and a net of its own"] = 5
    seed: Annotated[int, "the first of them; the same seed gives the same result"] = 0
    data: Annotated[Path | None, "folder of CIFAR-10 (default: INNERLOOP_DATA)"] = None
    out: Annotated[Path, "folder of the run"] = Path("out/hyperopt")

    def __post_init__(self) -> None:
        check_choice("what", self.what, tuple(RANGES))
        check_choice("dataset", self.dataset, DATASETS)
        check_choice("backward", self.backward, BACKWARD)
        check_seed(self.seed, self.seeds)
        if self.what == "task-weights" and self.dataset != "digits":
            refuse("dataset", self.dataset, "digits with task-weights: the tasks are about digits")
        least = dict.fromkeys(("train", "val", "labelled", "width", "steps", "batch"), 1)
        least |= {"scouts": 0, "starts": 1, "updates": 1, "seeds": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                refuse(name, getattr(self, name), f"at least {low}")
        for name in ("inner_lr", "meta_lr"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                refuse(name, getattr(self, name), "a number above 0")
        for name in ("noise", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                refuse(name, getattr(self, name), "from 0 to below 1")
        if self.what == "task-weights" and self.labelled > self.train:
            refuse("labelled", self.labelled, f"at most the training points, {self.train}")
        if self.starts > max(self.scouts, 1):
            refuse("starts", self.starts, f"at most the scouts, {self.scouts}, or 1")
        if self.starts > 1 and self.each < 1:
            refuse("starts", self.starts, f"at most half of the updates, {self.updates}")
        if self.meta_cost is not None and self.meta_cost < 1:
            refuse("meta_cost", self.meta_cost, "at least 1")

    @property
    def reads_data(self) -> bool:
        return self.dataset == "cifar10"

    @property
    def cost(self) -> int:
        """How many trainings an update counts as.

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
        """What each trial of the gradient counts as: scouts, updates, the point they end at."""
        return [1] * self.scouts + [self.cost] * self.updates + [1]

    @property
    def arms(self) -> dict[str, int]:
        """Units of work of each way to search, for one seed."""
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
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
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


def configured(given: dict[str, Any], preset: str) -> Config:
    """The preset of the dataset and of what is searched, with what was written instead."""
    dataset, what = given.get("dataset", Config.dataset), given.get("what", Config.what)
    check_choice("preset", preset, tuple(PRESETS))
    check_choice("dataset", dataset, DATASETS)
    check_choice("what", what, tuple(RANGES))
    own = _OF_WHAT[what]
    if dataset == "cifar10":
        own = {name: value for name, value in own.items() if name == "noise"}
    values = {**PRESETS[preset][dataset], **own, **given}
    if "starts" not in given:  # fewer scouts or updates have fewer of them
        names = ("starts", "scouts", "updates")
        starts, scouts, updates = (values.get(name, getattr(Config, name)) for name in names)
        values["starts"] = max(1, min(starts, scouts, updates // 2))
    return Config(**values)


class Search(Parts):
    """All ways to search with all seeds, one trial after the other."""

    unit = "trials"

    def __init__(self, config: Config) -> None:
        self.config = config
        self._pictures = pictures(config.dataset, config.data)
        self._digest = digest(*(part for part in self._pictures if part is not None))
        self._problems: dict[int, Problem] = {}
        seeds = range(config.seed, config.seed + config.seeds)
        self.cells = [(seed, arm) for seed in seeds for arm in config.arms]
        self.problem(config.seed)  # sizes that cannot be are refused before any work
        super().__init__([config.arms[arm] for _, arm in self.cells])

    @property
    def source(self) -> str:
        return f"{self.config.dataset} ({self._digest})"

    def make(self, number: int) -> Part:
        seed, arm = self.cells[number]
        if arm == "references":
            own = self.problem(seed)
            return References(self.config, own, seed, lambda parts: self.build(seed, parts))
        return Cell(self.config, self.problem(seed), seed, arm)

    def split(self, seed: int) -> Any:
        c = self.config
        return split(*self._pictures, train=c.train, val=c.val, noise=c.noise, seed=seed)

    def build(self, seed: int, parts: Any) -> Problem:
        """Training on these parts with this seed's net and order."""
        c = self.config
        strategies = {"tape": il.Tape(), "remat": il.Remat(), "binomial": il.Binomial(_SLOTS)}
        return build(
            c.what,
            parts,
            seed=seed,
            width=c.width,
            steps=c.steps,
            batch=c.batch,
            lr=c.inner_lr,
            momentum=c.momentum,
            labelled=c.labelled,
            backward=strategies[c.backward],
        )

    def problem(self, seed: int) -> Problem:
        if seed not in self._problems:
            self._problems = {seed: self.build(seed, self.split(seed))}
        return self._problems[seed]

    def result(self) -> dict[str, Any]:
        return summary.summary(self.config, self.records, self.problem(self.config.seed))

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        from innerloop.experiments.hyperopt import figures as _hyperopt_figures

        _hyperopt_figures.draw(self.config, self.records, result, folder)

    def told(self, result: dict[str, Any]) -> str:
        return summary.told(self.config, result)


def main(argv: Sequence[str] | None = None) -> int:
    return command("hyperopt", __doc__, Config, configured, Search, argv, _NEXT)


_NEXT = (
    "Next, learn which labels are wrong: {innerloop} hyperopt --what example-weights --out out/w"
)


if __name__ == "__main__":
    raise SystemExit(main())
