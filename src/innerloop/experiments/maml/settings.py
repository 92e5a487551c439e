"""Settings of ``innerloop maml``, and the presets of each dataset."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch

import innerloop as il
from innerloop import data, models
from innerloop.data.folder import LARGEST
from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.settings import (
    Bounds,
    Choice,
    Count,
    Device,
    Rate,
    Seed,
    Settings,
    refuse,
)

OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adagrad": torch.optim.Adagrad,
}
TASK_STRATEGIES = {"loop": il.tasks.loop, "threads": il.tasks.threads, "vmap": il.tasks.vmap}
STRATEGIES = {"tape": il.Tape, "remat": il.Remat, "binomial": il.Binomial}
PRECISIONS = {"float64": None, "float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_SCALED = ("folder", "cifar-fs")
_Many = Annotated[int, Bounds(1, 10**6)]
_Epochs = Annotated[int, Bounds(0)]
_Filters = Annotated[int, Bounds(1, 4096)]
_Size = Annotated[int, Bounds(1, LARGEST)]
_Nonfinite = Annotated[str, Choice(("stop", "skip"))]
_TasksBy = Annotated[str, Choice(tuple(TASK_STRATEGIES))]


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of a run; each is also a flag."""

    dataset: Annotated[str, Choice(data.NAMES)] = "glyphs"
    way: Annotated[int, Bounds(2), "classes of a task"] = 5
    shot: Annotated[Count, "labelled examples of each class"] = 1
    query: Annotated[Count, "examples of each class to be classified"] = 5
    model: Annotated[str, f"one of {', '.join(models.NAMES)}"] = "vgg"
    filters: Annotated[_Filters | None, "width of the model (its own default)"] = None
    inner_optim: Annotated[str, Choice(tuple(OPTIMIZERS))] = "sgd"
    inner_lr: Annotated[Rate, "learning rate of the inner optimizer, before it is learned"] = 0.1
    steps: Annotated[_Many, "inner steps"] = 5
    tasks: Annotated[_Many, "tasks in a meta-batch"] = 8
    iterations: Annotated[Count, "meta-updates"] = 5000
    epoch: Annotated[Count, "meta-updates between two validations"] = 500
    learn_rates: Annotated[bool, "learn a rate for each layer and step"] = True
    learn_betas: Annotated[bool, "learn the betas of inner Adam"] = False
    multi_step_epochs: Annotated[_Epochs, "epochs in which the loss of every step counts"] = 10
    first_order_epochs: Annotated[_Epochs, "epochs without second derivatives"] = 0
    meta_lr: Annotated[Rate, "learning rate of the outer Adam"] = 1e-3
    meta_lr_end: Annotated[Rate, "the same at the end of its cosine"] = 1e-5
    val_tasks: Annotated[Count, "validation tasks after each epoch"] = 200
    test_tasks: Annotated[int, Bounds(2), "test tasks at the end"] = 600
    ensemble: Annotated[Count, "best epochs whose predictions are averaged at the end"] = 1
    seed: Annotated[Seed, "the same seed gives the same result"] = 0
    data: Annotated[Path | None, "folder of the dataset (default: INNERLOOP_DATA)"] = None
    size: Annotated[_Size | None, "pixels to which images of a folder are resized"] = None
    out: Annotated[Path, "folder of the run"] = Path("out/maml")
    device: Annotated[str, Device(), "where to compute"] = "cpu"
    precision: Annotated[str, Choice(tuple(PRECISIONS)), "numbers of the inner loop"] = "float32"
    nonfinite: Annotated[_Nonfinite, "what to do at infinite meta-gradients"] = "stop"
    clip: Annotated[Rate | None, "largest norm of the meta-gradient (any)"] = None
    tasks_by: Annotated[_TasksBy, "how tasks run (in multi-step epochs: loop)"] = "vmap"
    backward: Annotated[str, Choice(tuple(STRATEGIES))] = "tape"

    PRESETS: ClassVar = {"quick": {}, "paper": {}}  # by dataset, below

    def check(self) -> None:
        models.check(self.model)
        if self.size is not None and self.dataset not in _SCALED:
            refuse("size", self.size, "left out", f"it is for --dataset {' and '.join(_SCALED)}")
        if self.meta_lr_end > self.meta_lr:
            refuse("meta_lr_end", self.meta_lr_end, f"at most the meta rate, {self.meta_lr}")
        if self.learn_betas and self.inner_optim != "adam":
            raise InnerLoopError(
                f"--learn-betas has no effect with --inner-optim {self.inner_optim}. It is for "
                "--inner-optim adam, whose betas the paper learns."
            )

    @property
    def reads_data(self) -> bool:
        return self.dataset != "glyphs"

    @property
    def epochs(self) -> int:
        return math.ceil(self.iterations / self.epoch)

    @classmethod
    def preset(cls, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The preset of the dataset, the model and the inner optimizer."""
        dataset, model = given.get("dataset", cls.dataset), given.get("model", cls.model)
        values = dict(_PRESETS[name]["folder" if dataset == "cifar-fs" else dataset])
        if model == "vgg" and dataset in _VGG_FILTERS:
            values["filters"] = _VGG_FILTERS[dataset]
        if model.startswith("densenet-bc-"):
            values.pop("filters", None)  # its name says how wide it is
        return values | _OF_OPTIMIZER.get(given.get("inner_optim", ""), {})


_OMNIGLOT = {"inner_lr": 0.1, "multi_step_epochs": 10}
_MINI = {"inner_lr": 0.01, "multi_step_epochs": 15, "query": 15}
_MINI_PAPER = {**_MINI, "iterations": 50_000, "tasks": 2, "val_tasks": 600, "ensemble": 5}
_MINI_QUICK = {**_MINI, "iterations": 1000, "epoch": 100, "tasks": 2} | {
    "multi_step_epochs": 2,
    "first_order_epochs": 0,
    "val_tasks": 100,
}
_VGG_FILTERS = {"mini-imagenet": 48, "folder": 48, "cifar-fs": 48}
_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {
        "glyphs": {**_OMNIGLOT, "iterations": 75_000},
        "omniglot": {**_OMNIGLOT, "iterations": 75_000, "val_tasks": 600, "ensemble": 5},
        "mini-imagenet": _MINI_PAPER,
        "folder": _MINI_PAPER,
    },
    "quick": {
        "glyphs": {**_OMNIGLOT, "filters": 16, "iterations": 300, "epoch": 100}
        | {"multi_step_epochs": 0, "first_order_epochs": 1, "val_tasks": 100},
        "omniglot": {**_OMNIGLOT, "tasks": 4, "iterations": 8000, "epoch": 250}
        | {"multi_step_epochs": 0, "first_order_epochs": 3, "ensemble": 5},
        "mini-imagenet": _MINI_QUICK,
        "folder": _MINI_QUICK,
    },
}


# The first step of a new RMSprop is ten times its rate, in every coordinate.
_OF_OPTIMIZER: dict[str, dict[str, Any]] = {
    "adam": {"learn_betas": True, "inner_lr": 0.01},
    "rmsprop": {"inner_lr": 0.001},
} | {name: {"inner_lr": 0.01} for name in ("adamw", "nadam", "radam", "adagrad")}
