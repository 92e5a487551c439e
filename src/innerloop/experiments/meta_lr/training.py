"""Learning rates that are meta-learned while an ordinary training run goes on (section 5.1).

``innerloop meta-lr`` trains DenseNet-BC in three ways, with some seeds each: at a fixed rate, with
a schedule made by hand, and with a rate for each tensor that is learned after every epoch.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from innerloop.experiments.framework.command_line import (
    check_choice,
    check_device,
    check_seed,
    refuse,
)
from innerloop.experiments.framework.experiment import command
from innerloop.experiments.framework.parts import Parts
from innerloop.experiments.framework.ranks import local_device
from innerloop.experiments.meta_lr import images as _pictures
from innerloop.experiments.meta_lr.cell import ARMS, GROUPS, LEARNING, OPTIMIZERS, STRATEGIES, Cell

TRANSFORMS = ("none", "log", "softplus")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run; each is also a flag."""

    arms: Annotated[str, f"some of {','.join(ARMS)}"] = "fixed,multistep,meta"
    seeds: Annotated[int, "runs of each arm"] = 3
    epochs: Annotated[int, "epochs of each run"] = 300
    depth: Annotated[int, "layers of DenseNet-BC, 4 more than a multiple of 6"] = 100
    growth: Annotated[int, "channels that each layer adds"] = 12
    batch: Annotated[int, "pictures in a training batch"] = 64
    augment: Annotated[bool, "mirror pictures and shift them by up to 4 pixels"] = True
    optimizer: Annotated[str, f"one of {', '.join(OPTIMIZERS)}"] = "sgd"
    lr: Annotated[float | None, "learning rate at the start (0.1 for sgd, else 0.001)"] = None
    momentum: Annotated[float | None, "of sgd, by Nesterov (0.9)"] = None
    weight_decay: Annotated[float | None, "at the start (0.0001, adamw 0.01)"] = None
    learn: Annotated[str, "settings to learn, as lr,momentum,weight_decay"] = "lr"
    per: Annotated[str, "a value for each group or for each parameter"] = "group"
    groups: Annotated[str, "the optimizer's groups: tensor, part or one"] = "tensor"
    transform: Annotated[str | None, "learn the rate by none, log, softplus (none for sgd)"] = None
    meta_lr: Annotated[float, "learning rate of the meta-optimizer, Adam"] = 1e-3
    meta_lr_log: Annotated[
        float | None, "the same for what is learned by its log or logit (10 times that)"
    ] = None
    meta_steps: Annotated[int, "inner steps of a meta-update"] = 15
    meta_batch: Annotated[int, "pictures in a batch of the meta-update"] = 16
    val_batches: Annotated[int, "validation batches in the meta-loss"] = 10
    val_part: Annotated[float, "part of the training pictures kept for validation"] = 0.01
    warm: Annotated[bool, "inner steps begin with the optimizer's momentum"] = True
    backward: Annotated[str, f"one of {', '.join(STRATEGIES)}"] = "remat"
    shapes: Annotated[int, "synthetic training pictures, where no data is named"] = 10_000
    seed: Annotated[int, "the first seed; the same gives the same result"] = 0
    data: Annotated[Path | None, "folder or archive of CIFAR-10 (INNERLOOP_DATA)"] = None
    out: Annotated[Path, "folder of the run"] = Path("out/meta-lr")
    device: Annotated[str, "where to compute"] = "cpu"

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        check_seed(self.seed, self.seeds)
        check_device(self.device)

    def _check_choices(self) -> None:
        check_choice("optimizer", self.optimizer, tuple(OPTIMIZERS))
        check_choice("backward", self.backward, tuple(STRATEGIES))
        check_choice("per", self.per, ("group", "parameter"))
        check_choice("groups", self.groups, GROUPS)
        check_choice("transform", self.transform or "none", TRANSFORMS)
        named = {"arms": (self.arms, ARMS), "learn": (self.learn, _learnable(self.optimizer))}
        for name, (given, known) in named.items():
            words = _words(given)
            for word in words:
                check_choice(name, word, known)
            if len(set(words)) < len(words):
                refuse(name, given, "each name once")

    def _check_numbers(self) -> None:
        counts = ("seeds", "epochs", "growth", "meta_steps", "meta_batch", "val_batches")
        least = dict.fromkeys(counts, 1) | {"batch": 2, "shapes": 20}
        for name, low in least.items():
            if getattr(self, name) < low:
                refuse(name, getattr(self, name), f"at least {low}")
        for name, high in {"growth": 1000, "shapes": 1_000_000}.items():
            if getattr(self, name) > high:
                refuse(name, getattr(self, name), f"at most {high}")
        if self.depth < 10 or self.depth % 6 != 4:
            refuse("depth", self.depth, "4 more than a multiple of 6, as 10, 16, 22, 40 or 100")
        if self.momentum is not None and self.optimizer != "sgd":
            refuse("momentum", self.momentum, f"left out: {self.optimizer} is used without it")
        if not 0 <= self.chosen_momentum < 1:
            refuse("momentum", self.momentum, "from 0 to below 1")
        if not 0 < self.val_part < 1:
            refuse("val_part", self.val_part, "between 0 and 1")
        for name in ("lr", "weight_decay", "meta_lr", "meta_lr_log"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                refuse(name, value, "a number, 0 or above")
        if self.lr == 0:
            refuse("lr", self.lr, "above 0")
        for name in ("momentum", "weight_decay"):
            if name in self.learned and getattr(self, name) == 0:
                refuse(name, 0, "above 0, since it is learned")
        if self.transform is not None and "lr" not in self.learned:
            refuse("transform", self.transform, "left out, since lr is not learned")

    @property
    def learned(self) -> list[str]:
        return _words(self.learn)

    @property
    def chosen_arms(self) -> list[str]:
        return _words(self.arms)

    @property
    def chosen_momentum(self) -> float:
        return 0.9 if self.momentum is None else self.momentum

    @property
    def chosen_meta_lr_log(self) -> float:
        """By default a setting can go as far in its logarithm as a rate of 0.1 in 10 of its own."""
        return 10 * self.meta_lr if self.meta_lr_log is None else self.meta_lr_log

    @property
    def reads_data(self) -> bool:
        return True

    @property
    def milestones(self) -> tuple[int, int]:
        """Epochs after which the schedule made by hand divides the rate by 10."""
        return self.epochs // 2, 3 * self.epochs // 4


def _words(given: str) -> list[str]:
    return [word.strip() for word in given.split(",")]


def _learnable(optimizer: str) -> tuple[str, ...]:
    return OPTIMIZERS[optimizer].learnable


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    # Adam moves a rate by about its own rate in each update. With fewer updates than the paper's
    # 300 it needs larger ones to go as far.
    "quick": {"epochs": 15, "depth": 16, "meta_lr": 0.02, "shapes": 2000},
}


def configured(given: dict[str, Any], preset: str) -> Config:
    """The preset with what was written instead."""
    check_choice("preset", preset, tuple(PRESETS))
    return Config(**{**PRESETS[preset], **given})


class MetaLr(Parts):
    """All arms and seeds; a unit of work is one training step."""

    unit = "steps"

    def __init__(self, config: Config) -> None:
        config = dataclasses.replace(config, device=local_device(config.device))
        self.config = config
        loaded = _pictures.load(config.data, config.shapes, config.device)
        self.train, self.test, self._source = loaded
        self._digest = _pictures.digest(self.train, self.test)
        # Seed after seed: a run that is looked at half done has compared something.
        seeds = range(config.seed, config.seed + config.seeds)
        self.cells = [(arm, seed) for seed in seeds for arm in config.chosen_arms]
        pictures = self._pictures(config.seed)
        self.steps = math.ceil(len(pictures.train.labels) / config.batch)
        if learning := [arm for arm in config.chosen_arms if arm in LEARNING]:
            # What cannot be learned is refused now, not after the other arms have been trained.
            Cell(config, learning[0], config.seed, pictures, self.steps)
        super().__init__([config.epochs * self.steps] * len(self.cells))

    @property
    def source(self) -> str:
        return f"{self._source} ({self._digest})"

    def _pictures(self, seed: int) -> _pictures.Pictures:
        return _pictures.split(self.train, self.test, self.config.val_part, seed)

    def make(self, number: int) -> Cell:
        arm, seed = self.cells[number]
        return Cell(self.config, arm, seed, self._pictures(seed), self.steps)

    def result(self) -> dict[str, Any]:
        """Test errors of every arm after the last epoch, and over all epochs."""
        arms = {arm: self._arm(arm) for arm in self.config.chosen_arms}
        return {"data": self._source, "epochs": self.config.epochs, "arms": arms}

    def _arm(self, arm: str) -> dict[str, Any]:
        mine = [r for r in self.records if r["arm"] == arm]
        diverged = [r["seed"] for r in mine if "diverged" in r]
        whole = [r for r in mine if r["seed"] not in diverged]
        last = [r for r in whole if r["epoch"] == self.config.epochs]
        errors = [r["test_error"] for r in last]
        return {
            "errors": errors,
            "mean": _mean(errors),
            "deviation": statistics.stdev(errors) if len(errors) > 1 else None,
            "mean_over_epochs": _mean([r["test_error"] for r in whole]),
            "train_loss": _mean([r["train_loss"] for r in last]),
            "diverged": diverged,
            "skipped": sum("skipped" in r for r in mine),
        }

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        from innerloop.experiments.meta_lr import figures as _meta_lr_figures

        _meta_lr_figures.draw(self.records, folder)

    def told(self, result: dict[str, Any]) -> str:
        c = self.config
        lines = [
            f"DenseNet-BC(k={c.growth}, depth={c.depth}) with {c.optimizer}, {c.epochs} epochs, "
            f"{c.seeds} seeds, on {result['data']}, in {result['seconds']:.0f} s.",
            f"{'arm':<12}{'test error':>18}{'mean over epochs':>20}{'training loss':>16}  seeds",
        ]
        for arm, found in result["arms"].items():
            if found["diverged"]:
                lost = ", ".join(map(str, found["diverged"]))
                lines.append(f"{arm:<12}diverged with seed {lost}, left out")
            if found["skipped"]:
                lines.append(f"{arm:<12}{found['skipped']} meta-updates diverged and were left out")
            if not found["errors"]:
                continue
            spread = "" if found["deviation"] is None else f" ± {100 * found['deviation']:.2f}"
            error = f"{100 * found['mean']:.2f}{spread} %"
            over = f"{100 * found['mean_over_epochs']:.2f} %"
            each = ", ".join(f"{100 * e:.2f}" for e in found["errors"])
            lines.append(f"{arm:<12}{error:>18}{over:>20}{found['train_loss']:>16.3f}  {each}")
        return "\n".join(lines)


def _mean(values: list[float]) -> float | None:
    return statistics.mean(values) if values else None


def main(argv: Sequence[str] | None = None) -> int:
    return command("meta-lr", __doc__, Config, configured, MetaLr, argv, _NEXT)


_NEXT = (
    "Next, learn more of the optimizer: "
    "{innerloop} meta-lr --learn lr,momentum,weight_decay --out out/more"
)


if __name__ == "__main__":
    raise SystemExit(main())
