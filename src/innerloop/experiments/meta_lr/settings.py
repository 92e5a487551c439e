"""Settings of ``innerloop meta-lr``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import torch

import innerloop as il
from innerloop.experiments.framework.settings import (
    Bounds,
    Choice,
    Count,
    Device,
    Rate,
    Seed,
    Seeds,
    Settings,
    refuse,
    split_words,
)

LEARNING = ("meta", "discarded")
ARMS = ("fixed", "multistep", *LEARNING)
STRATEGIES = {"remat": il.Remat, "tape": il.Tape, "binomial": il.Binomial, "auto": il.Auto}
_NotNegative = Annotated[float, Bounds(0)]
_Momentum = Annotated[float, Bounds(0, 1, below=True)]
_Transform = Annotated[str, Choice(("none", "log", "softplus"))]
_Share = Annotated[float, Bounds(0, 1, above=True, below=True)]


class Kind(NamedTuple):
    """An optimizer: how it is made, what it starts with, and what of it can be learned."""

    make: Callable[..., torch.optim.Optimizer]
    lr: float
    weight_decay: float
    learnable: tuple[str, ...]
    transform: str
    """Transform of the rate: a step of the meta-optimizer is too large for small rates."""


OPTIMIZERS = {
    "sgd": Kind(torch.optim.SGD, 0.1, 1e-4, ("lr", "momentum", "weight_decay"), "none"),
    "adam": Kind(torch.optim.Adam, 1e-3, 1e-4, ("lr", "betas", "weight_decay", "eps"), "log"),
    "adamw": Kind(torch.optim.AdamW, 1e-3, 1e-2, ("lr", "betas", "weight_decay", "eps"), "log"),
    "rmsprop": Kind(torch.optim.RMSprop, 1e-3, 1e-4, ("lr", "alpha", "weight_decay", "eps"), "log"),
}


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of a run; each is also a flag."""

    arms: Annotated[str, Choice(ARMS, several=True)] = "fixed,multistep,meta"
    seeds: Annotated[Seeds, "runs of each arm"] = 3
    epochs: Annotated[Count, "epochs of each run"] = 300
    depth: Annotated[int, "layers of DenseNet-BC, 4 more than a multiple of 6"] = 100
    growth: Annotated[int, Bounds(1, 1000), "channels that each layer adds"] = 12
    batch: Annotated[int, Bounds(2), "images in a training batch"] = 64
    augment: Annotated[bool, "mirror images and shift them by up to 4 pixels"] = True
    optimizer: Annotated[str, Choice(tuple(OPTIMIZERS))] = "sgd"
    lr: Annotated[Rate | None, "learning rate at the start (0.1 for sgd, else 0.001)"] = None
    momentum: Annotated[_Momentum | None, "of sgd, by Nesterov (0.9)"] = None
    weight_decay: Annotated[_NotNegative | None, "at the start (0.0001, adamw 0.01)"] = None
    learn: Annotated[str, "settings to learn, as lr,momentum,weight_decay"] = "lr"
    per: Annotated[str, Choice(("group", "parameter")), "what has a value of its own"] = "group"
    groups: Annotated[str, Choice(("tensor", "part", "one")), "the optimizer's groups"] = "tensor"
    transform: Annotated[_Transform | None, "of the learned rate (none for sgd, else log)"] = None
    meta_lr: Annotated[_NotNegative, "rate of the outer Adam, tenfold for logarithms"] = 1e-3
    meta_steps: Annotated[Count, "inner steps of a meta-update"] = 15
    meta_batch: Annotated[Count, "images in a batch of the meta-update"] = 16
    val_batches: Annotated[Count, "validation batches in the meta-loss"] = 10
    val_part: Annotated[_Share, "part of the training images kept for validation"] = 0.01
    warm: Annotated[bool, "inner steps begin with the optimizer's momentum"] = True
    backward: Annotated[str, Choice(tuple(STRATEGIES))] = "remat"
    shapes: Annotated[int, Bounds(20, 10**6), "synthetic images, without data"] = 10_000
    seed: Annotated[Seed, "the first seed; the same gives the same result"] = 0
    data: Annotated[Path | None, "folder or archive of CIFAR-10 (INNERLOOP_DATA)"] = None
    out: Annotated[Path, "folder of the run"] = Path("out/meta-lr")
    device: Annotated[str, Device(), "where to compute"] = "cpu"

    PRESETS: ClassVar = {
        # Adam moves a rate by about its own rate in each update. With fewer updates than the
        # paper's 300 it needs larger ones to go as far.
        "quick": {"epochs": 15, "depth": 16, "meta_lr": 0.02, "shapes": 2000},
        "paper": {},
    }

    def check(self) -> None:
        Choice(OPTIMIZERS[self.optimizer].learnable, several=True).check("learn", self.learn)
        if self.depth < 10 or self.depth % 6 != 4:
            refuse("depth", self.depth, "4 more than a multiple of 6, as 10, 16, 22, 40 or 100")
        if self.momentum is not None and self.optimizer != "sgd":
            refuse("momentum", self.momentum, "left out", f"{self.optimizer} is used without it")
        for name in ("momentum", "weight_decay"):
            if name in self.learned and getattr(self, name) == 0:
                refuse(name, 0, "above 0", "it is learned")
        if self.transform is not None and "lr" not in self.learned:
            refuse("transform", self.transform, "left out", "lr is not learned")

    @property
    def learned(self) -> list[str]:
        return split_words(self.learn)

    @property
    def chosen_arms(self) -> list[str]:
        return split_words(self.arms)

    @property
    def chosen_momentum(self) -> float:
        return 0.9 if self.momentum is None else self.momentum

    @property
    def reads_data(self) -> bool:
        return True

    @property
    def milestones(self) -> tuple[int, int]:
        """Epochs after which the schedule made by hand divides the rate by 10."""
        return self.epochs // 2, 3 * self.epochs // 4
