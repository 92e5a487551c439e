"""Settings of ``innerloop maml``: what they may be, and the presets of each dataset."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

from innerloop import data, models
from innerloop.data.folder import LARGEST
from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.command_line import (
    check_choice,
    check_device,
    check_seed,
    refuse,
)
from innerloop.experiments.maml.learner import INNER, STRATEGIES, WAYS
from innerloop.experiments.maml.outer import NONFINITE, PRECISIONS

DATASETS = data.NAMES
_DENSE = "densenet-bc-"
_SCALED = ("folder", "cifar-fs")
_MOST_FILTERS, _MOST = 4096, 10**6


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run; each is also a flag."""

    dataset: Annotated[str, f"one of {', '.join(DATASETS)}"] = "glyphs"
    way: Annotated[int, "classes of a task"] = 5
    shot: Annotated[int, "labelled examples of each class"] = 1
    query: Annotated[int, "examples of each class to be classified"] = 5
    model: Annotated[str, f"one of {', '.join(models.NAMES)}"] = "vgg"
    filters: Annotated[int | None, "width of the model (its own default)"] = None
    inner_optim: Annotated[str, f"one of {', '.join(INNER)}"] = "sgd"
    inner_lr: Annotated[float, "learning rate of the inner optimizer, before it is learned"] = 0.1
    steps: Annotated[int, "inner steps"] = 5
    tasks: Annotated[int, "tasks in a meta-batch"] = 8
    iterations: Annotated[int, "meta-updates"] = 5000
    epoch: Annotated[int, "meta-updates between two validations"] = 500
    learn_rates: Annotated[bool, "learn a rate for each layer and step"] = True
    learn_betas: Annotated[bool, "learn the betas of inner Adam"] = False
    multi_step_epochs: Annotated[int, "epochs in which the loss after every step counts"] = 10
    first_order_epochs: Annotated[int, "epochs without second derivatives"] = 0
    meta_lr: Annotated[float, "learning rate of the outer Adam"] = 1e-3
    meta_lr_end: Annotated[float, "the same at the end of its cosine"] = 1e-5
    val_tasks: Annotated[int, "validation tasks after each epoch"] = 200
    test_tasks: Annotated[int, "test tasks at the end"] = 600
    ensemble: Annotated[int, "best epochs whose predictions are averaged at the end"] = 1
    seed: Annotated[int, "the same seed gives the same result"] = 0
    data: Annotated[Path | None, "folder of the dataset (default: INNERLOOP_DATA)"] = None
    size: Annotated[int | None, "pixels to which pictures of a folder are scaled (none are)"] = None
    out: Annotated[Path, "folder of the run"] = Path("out/maml")
    device: Annotated[str, "where to compute"] = "cpu"
    precision: Annotated[str, f"of the inner loop, one of {', '.join(PRECISIONS)}"] = "float32"
    nonfinite: Annotated[str, "stop at infinite meta-gradients, or skip and count them"] = "stop"
    clip: Annotated[float | None, "largest norm of the meta-gradient (any)"] = None
    tasks_by: Annotated[str, f"one of {', '.join(WAYS)} (multi-step epochs: loop)"] = "vmap"
    backward: Annotated[str, f"one of {', '.join(STRATEGIES)}"] = "tape"

    def __post_init__(self) -> None:
        check_choice("dataset", self.dataset, DATASETS)
        models.check(self.model)
        check_choice("inner_optim", self.inner_optim, tuple(INNER))
        check_choice("tasks_by", self.tasks_by, tuple(WAYS))
        check_choice("backward", self.backward, tuple(STRATEGIES))
        check_choice("precision", self.precision, tuple(PRECISIONS))
        check_choice("nonfinite", self.nonfinite, NONFINITE)
        if self.filters is not None and not 1 <= self.filters <= _MOST_FILTERS:
            refuse("filters", self.filters, f"from 1 to {_MOST_FILTERS}")
        if self.size is not None and self.dataset not in _SCALED:
            refuse("size", self.size, f"left out: it is for --dataset {' and '.join(_SCALED)}")
        if self.size is not None and not 1 <= self.size <= LARGEST:
            refuse("size", self.size, f"from 1 to {LARGEST}")
        least = dict.fromkeys(("shot", "query", "steps", "tasks", "iterations"), 1)
        least |= {"way": 2, "epoch": 1, "multi_step_epochs": 0, "first_order_epochs": 0}
        least |= {"val_tasks": 1, "test_tasks": 2, "ensemble": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                refuse(name, getattr(self, name), f"at least {low}")
        for name in ("tasks", "steps"):
            if getattr(self, name) > _MOST:
                refuse(name, getattr(self, name), f"at most {_MOST}")
        for name in ("inner_lr", "meta_lr", "meta_lr_end", "clip"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                refuse(name, value, "a number above 0")
        if self.meta_lr_end > self.meta_lr:
            refuse("meta_lr_end", self.meta_lr_end, f"at most the meta rate, {self.meta_lr}")
        if self.learn_betas and self.inner_optim != "adam":
            raise InnerLoopError(
                f"--learn-betas cannot be with --inner-optim {self.inner_optim}. It is for "
                "--inner-optim adam, whose betas the paper learns."
            )
        check_seed(self.seed)
        check_device(self.device)

    @property
    def reads_data(self) -> bool:
        return self.dataset != "glyphs"

    @property
    def epochs(self) -> int:
        return math.ceil(self.iterations / self.epoch)


_OMNIGLOT = {"inner_lr": 0.1, "multi_step_epochs": 10}
_MINI = {"inner_lr": 0.01, "multi_step_epochs": 15, "query": 15}
_VGG_FILTERS = {"mini-imagenet": 48, "folder": 48, "cifar-fs": 48}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {
        "glyphs": {**_OMNIGLOT, "iterations": 75_000},
        "omniglot": {**_OMNIGLOT, "iterations": 75_000, "val_tasks": 600, "ensemble": 5},
        "mini-imagenet": {
            **_MINI,
            "iterations": 50_000,
            "tasks": 2,
            "val_tasks": 600,
            "ensemble": 5,
        },
        "folder": {**_MINI, "iterations": 50_000, "tasks": 2, "val_tasks": 600, "ensemble": 5},
    },
    "quick": {
        "glyphs": {**_OMNIGLOT, "filters": 16, "iterations": 300, "epoch": 100}
        | {"multi_step_epochs": 0, "first_order_epochs": 1, "val_tasks": 100},
        "omniglot": {**_OMNIGLOT, "tasks": 4, "iterations": 8000, "epoch": 250}
        | {"multi_step_epochs": 0, "first_order_epochs": 3, "ensemble": 5},
        "mini-imagenet": {**_MINI, "iterations": 1000, "epoch": 100, "tasks": 2}
        | {"multi_step_epochs": 2, "first_order_epochs": 0, "val_tasks": 100},
        "folder": {**_MINI, "iterations": 1000, "epoch": 100, "tasks": 2}
        | {"multi_step_epochs": 2, "first_order_epochs": 0, "val_tasks": 100},
    },
}


# The first step of a new RMSprop is ten times its rate, in every coordinate.
_OF_OPTIMIZER: dict[str, dict[str, Any]] = {
    "adam": {"learn_betas": True, "inner_lr": 0.01},
    "rmsprop": {"inner_lr": 0.001},
} | {name: {"inner_lr": 0.01} for name in ("adamw", "nadam", "radam", "adagrad")}


def configured(given: dict[str, Any], preset: str) -> Config:
    """The preset of the dataset with what was written instead."""
    dataset = given.get("dataset", Config.dataset)
    check_choice("preset", preset, tuple(PRESETS))
    check_choice("dataset", dataset, DATASETS)
    values = dict(PRESETS[preset]["folder" if dataset == "cifar-fs" else dataset])
    model = given.get("model", Config.model)
    if model == "vgg" and dataset in _VGG_FILTERS:
        values["filters"] = _VGG_FILTERS[dataset]
    if model.startswith(_DENSE):
        values.pop("filters", None)  # its name says how wide it is
    values |= _OF_OPTIMIZER.get(given.get("inner_optim", ""), {})
    return Config(**{**values, **given})
