"""Hyperparameters learned by the gradient of the validation loss, against random search.

``innerloop hyperopt`` searches weight decays, label smoothing, augmentations, weights of training
points or of tasks, with the same compute and in the same range each way, over several seeds.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch

import innerloop as il
from innerloop.errors import InnerLoopError
from innerloop.experiments import _hyperopt_summary as summary
from innerloop.experiments._command_line import check_choice, refuse
from innerloop.experiments._experiment import Experiment, command
from innerloop.experiments._hyperopt_data import DATASETS, pictures, split
from innerloop.experiments._hyperopt_problem import RANGES, Problem, build, measured, references

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
    updates: Annotated[int, "updates of the hyperparameters by their gradient"] = 30
    meta_lr: Annotated[
        float, "rate of their Adam at the start, on logarithms; falls to a tenth"
    ] = 0.6
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
        if self.what == "task-weights" and self.dataset != "digits":
            refuse("dataset", self.dataset, "digits with task-weights: the tasks are about digits")
        least = dict.fromkeys(("train", "val", "labelled", "width", "steps", "batch"), 1)
        least |= {"updates": 1, "seeds": 1, "seed": 0}
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
        if self.meta_cost is not None and self.meta_cost < 1:
            refuse("meta_cost", self.meta_cost, "at least 1")

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
    def arms(self) -> dict[str, int]:
        """Units of work of each way to search, for one seed."""
        trials = self.updates * self.cost
        arms = {"references": 1, "gradient": self.updates, "random": trials}
        # Equal weights for all points are those of a plain training: nothing to search.
        return arms if self.what == "example-weights" else arms | {"shared": trials}


_OF_WHAT: dict[str, dict[str, Any]] = {
    "weight-decay": {},
    "label-smoothing": {"noise": 0.2, "train": 200},
    "augmentation": {},
    "example-weights": {"noise": 0.4, "train": 300, "val": 200},
    "task-weights": {"train": 300},
}
_CIFAR: dict[str, Any] = {"train": 500, "val": 500, "width": 16, "batch": 50, "steps": 80}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "quick": {"digits": {}, "cifar10": _CIFAR | {"updates": 10, "seeds": 3}},
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
    return Config(**{**PRESETS[preset][dataset], **own, **given})


@dataclasses.dataclass
class Cell:
    """One way to search with one seed, under way."""

    values: list[float] = dataclasses.field(default_factory=list)
    """The validation loss of each trial."""
    best: torch.Tensor | None = None
    """Hyperparameters of the least of them."""
    raw: torch.Tensor | None = None
    """Where the gradient has led."""
    meta: dict[str, Any] | None = None
    """State of its optimizer."""
    cpu: float = 0.0
    """Seconds of the processor."""


class Search(Experiment):
    """All ways to search with all seeds, one trial after the other."""

    unit = "trials"

    def __init__(self, config: Config) -> None:
        self.config = config
        self._pictures = pictures(config.dataset, config.data)
        self._problems: dict[int, Problem] = {}
        self.cell = Cell()
        self.problem(config.seed)  # sizes that cannot be are refused before any work

    @property
    def total(self) -> int:
        return self.config.seeds * sum(self.config.arms.values())

    def place(self, unit: int) -> tuple[int, str, int]:
        """The seed, the way to search, and the number of the trial."""
        seed, rest = divmod(unit, sum(self.config.arms.values()))
        for arm, count in self.config.arms.items():
            if rest < count:
                return self.config.seed + seed, arm, rest
            rest -= count
        raise AssertionError

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

    def state_dict(self) -> dict[str, Any]:
        return vars(self.cell)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cell = Cell(**state)

    # --- work ---------------------------------------------------------------------------------

    def advance(self) -> dict[str, str]:
        seed, arm, trial = self.place(self.done)
        problem = self.problem(seed)
        if arm == "references":
            found = references(self.config.what, problem, lambda parts: self.build(seed, parts))
            self.records.append({"seed": seed, "arm": arm, **found})
            return {"seed": str(seed)}
        if trial == 0:
            self.cell = Cell()
        began = time.process_time()
        value = self._trial(problem, seed, arm, trial)
        self.cell.cpu += time.process_time() - began
        if trial == self.config.arms[arm] - 1:
            self.records.append(self._record(problem, seed, arm))
        return {"seed": str(seed), "arm": arm, "val": f"{value:.3f}"}

    def _trial(self, problem: Problem, seed: int, arm: str, trial: int) -> float:
        """One training, and its validation loss."""
        cell = self.cell
        if arm == "gradient":
            tried, value = self._update(problem, trial)
        else:
            # The draws depend on the seed and the trial alone.
            generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + trial)
            tried = problem.draw(generator, shared=arm == "shared")
            value = problem.value(tried)
        value = value if math.isfinite(value) else math.inf
        if value < min(cell.values, default=math.inf):
            cell.best = tried
        cell.values.append(value)
        return value

    def _update(self, problem: Problem, trial: int) -> tuple[torch.Tensor, float]:
        """The loss at the present hyperparameters, which then follow its gradient."""
        c, cell = self.config, self.cell
        tried = problem.start if cell.raw is None else cell.raw
        problem.set(tried)
        meta = torch.optim.Adam([problem.raw], betas=(0.8, 0.9))
        if cell.meta is not None:
            meta.load_state_dict(cell.meta)
        meta.param_groups[0]["lr"] = c.meta_lr * (1 - 0.9 * trial / c.updates)
        (loss,) = il.meta_update(problem.inner, problem.batches, problem.split.val, meta)
        if not (loss.isfinite() and problem.raw.isfinite().all()):
            raise InnerLoopError(
                f"The validation loss or its gradient is not finite after {trial} updates: the "
                f"training diverged. Try a smaller --inner-lr than {c.inner_lr}."
            )
        problem.clamp()
        cell.raw, cell.meta = problem.raw.detach().clone(), meta.state_dict()
        return tried, loss.item()

    def _record(self, problem: Problem, seed: int, arm: str) -> dict[str, Any]:
        cell = self.cell
        if cell.best is None:
            raise InnerLoopError(
                f"Every training of the {arm} search diverged. Try a smaller --inner-lr than "
                f"{self.config.inner_lr}."
            )
        problem.set(cell.best)
        return {
            "seed": seed,
            "arm": arm,
            **measured(problem),
            "cpu": cell.cpu,
            "trials": len(cell.values),
            "least": summary.least_so_far(cell.values),
            "numbers": cell.best.exp().tolist(),
        }

    def result(self) -> dict[str, Any]:
        return summary.summary(self.config, self.records, self.problem(self.config.seed))

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        from innerloop.experiments import _hyperopt_figures

        _hyperopt_figures.draw(self.config, self.records, result, folder)

    def told(self, result: dict[str, Any]) -> str:
        return summary.told(self.config, result)


def main(argv: Sequence[str] | None = None) -> int:
    return command("hyperopt", __doc__, Config, configured, Search, argv, _NEXT)


_NEXT = "Next, learn which labels are wrong: innerloop hyperopt --what example-weights --out out/w"


if __name__ == "__main__":
    raise SystemExit(main())
