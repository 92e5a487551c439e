"""One run of MAML++, from its settings to the accuracy on test tasks."""

from __future__ import annotations

import copy
import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from innerloop import data, models
from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.experiment import Experiment
from innerloop.experiments.framework.ranks import Ranks, local_device
from innerloop.experiments.framework.settings import refuse
from innerloop.experiments.maml import figures
from innerloop.experiments.maml.learner import FewShot, step_weights
from innerloop.experiments.maml.settings import Config

_TEST_SEED, _VAL_SEED = 2_000_003, 1_000_003


def load_images(config: Config, device: str = "cpu") -> data.Splits:
    """The images of a run."""
    scaled = {} if config.size is None else {"size": config.size}
    return data.load(config.dataset, root=config.data, seed=config.seed, device=device, **scaled)


class Training(Experiment):
    """One run from its configuration to its result."""

    saved = ("learner", "schedule", "sampler", "losses", "shown", "best")

    def __init__(self, config: Config, splits: data.Splits | None = None) -> None:
        """Reads the data of the settings, unless its ``splits`` are given."""
        self.config = config
        device = local_device(config.device)
        self.splits = splits = load_images(config, device) if splits is None else splits
        shape = splits.train.pixels.shape
        if shape[-2] != shape[-1]:
            raise InnerLoopError(
                f"The images are {shape[-2]} high and {shape[-1]} wide. Needed are square ones, "
                "since a model is built for one size. Crop them, or write --size 84 to resize "
                "the images of a folder."
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = models.build(
                config.model,
                in_channels=shape[1],
                classes=config.way,
                size=shape[-1],
                filters=config.filters,
            ).to(device, torch.float64 if config.precision == "float64" else torch.float32)
        self.learner = FewShot(model, config, device)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.learner.meta_optimizer, config.epochs, config.meta_lr_end
        )
        for name, images in splits._asdict().items():  # too few classes are refused at once
            try:
                self.build_sampler(images, 1, 0)
            except InnerLoopError as error:
                raise InnerLoopError(f"The {name} split cannot be used. {error}") from error
        self.sampler = self.build_sampler(splits.train, config.tasks, config.seed)
        self.losses: list[float] = []
        """Of the epoch under way, without those that are not finite."""
        self.shown: dict[str, str] = {}
        self.best: list[dict[str, Any]] = []
        """The best epochs with their learned parameters, best first."""

    @property
    def total(self) -> int:
        return self.config.iterations

    @property
    def source(self) -> str:
        return ", ".join(images.digest for images in self.splits)

    def share(self, ranks: Ranks) -> None:
        for name in ("tasks", "val_tasks", "test_tasks"):
            count = getattr(self.config, name)
            if count < ranks.size:
                refuse(name, count, f"at least one for each of {ranks.size} processes")
        self.learner.outer.ranks = ranks

    def build_sampler(self, images: Any, tasks: int, seed: int) -> Any:
        c = self.config
        return data.Sampler(images, way=c.way, shot=c.shot, query=c.query, tasks=tasks, seed=seed)

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        own = {"random": torch.get_rng_state(), "source": self.source}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["source"] != self.source:
            raise InnerLoopError(
                "The images are not those that the run was started with: accuracies before and "
                "after could not be compared. Put the old ones back, or name their folder with "
                "--data."
            )
        super().load_state_dict(state)
        torch.set_rng_state(state["random"])
        kinds = {"epoch": int, "val_accuracy": float, "learned": dict}
        for epoch in (*self.records, *self.best):  # another form would be noticed hours later
            if not all(type(epoch[name]) is kind for name, kind in kinds.items()):
                raise TypeError("its epochs are of another form")

    # --- work ---------------------------------------------------------------------------------

    def advance(self) -> dict[str, str]:
        c = self.config
        epoch = self.done // c.epoch
        weights = step_weights(c.steps, epoch, c.multi_step_epochs)
        began = time.perf_counter()
        loss = self.learner.update(self.sampler.sample(), weights, epoch < c.first_order_epochs)
        rate = c.tasks / (time.perf_counter() - began)
        if not math.isfinite(loss) and c.nonfinite == "stop":
            raise InnerLoopError(
                f"The loss is {loss} after {self.done} updates: training diverged. "
                f"Try a smaller --inner-lr or --meta-lr than {c.inner_lr} and {c.meta_lr}."
            )
        if math.isfinite(loss):
            self.losses.append(loss)
        self.shown |= {"loss": f"{loss:.3f}", "tasks/s": f"{rate:.1f}"}
        if self.done + 1 in (c.iterations, (epoch + 1) * c.epoch):
            self._end_epoch(epoch)
        return self.shown

    def _end_epoch(self, epoch: int) -> None:
        c = self.config
        iteration = self.done + 1
        self.learner.diverged = 0
        accuracies = self.accuracies(self.splits.val, c.val_tasks, _VAL_SEED)
        record = {
            "epoch": epoch + 1,
            "iteration": iteration,
            "train_loss": sum(self.losses) / len(self.losses) if self.losses else None,
            "val_accuracy": accuracies.mean().item(),
            "meta_lr": self.schedule.get_last_lr()[0],
            "skipped": self.learner.outer.skipped,
            "diverged": self.learner.diverged,
            "learned": self.learner.settings,
        }
        self.records.append(record)
        self.losses = []
        self.shown["val"] = f"{100 * record['val_accuracy']:.1f} %"
        self._keep_best(record)
        with warnings.catch_warnings():
            # It expects a step before: in this epoch all may have been left out.
            warnings.simplefilter("ignore", UserWarning)
            self.schedule.step()

    def _keep_best(self, record: dict[str, Any]) -> None:
        learned = {n: t.clone() for n, t in self.learner.inner.state_dict().items()}
        moments = copy.deepcopy(self.learner.meta_optimizer.state_dict())
        entry = {"epoch": record["epoch"], "val_accuracy": record["val_accuracy"]}
        best = [*self.best, entry | {"learned": learned, "moments": moments}]
        # Of equals, the later one.
        best.sort(key=lambda e: (-e["val_accuracy"], -e["epoch"]))
        self.best = best[: self.config.ensemble]

    def probabilities(self, images: Any, tasks: int, seed: int) -> tuple[Tensor, Tensor]:
        """Predictions for tasks that are the same each time, and the labels."""
        sampler = self.build_sampler(images, min(tasks, self.config.tasks), seed)
        predicted, labels = [], []
        while (left := tasks - sum(map(len, predicted))) > 0:
            episode = sampler.sample()
            predicted.append(self.learner.probabilities(episode, left))
            labels.append(episode.query[1])
        return torch.cat(predicted)[:tasks], torch.cat(labels)[:tasks]

    def accuracies(self, images: Any, tasks: int, seed: int) -> Tensor:
        """[tasks]"""
        predicted, labels = self.probabilities(images, tasks, seed)
        return (predicted.argmax(-1) == labels).double().mean(-1)

    def result(self) -> dict[str, Any]:
        """The accuracy on test tasks, of the best epochs by validation.

        Leaves the learner as it was in the best of these.
        """
        c = self.config
        self.learner.diverged = 0
        total: Tensor | None = None
        labels = torch.empty(0)
        for entry in reversed(self.best):
            self.learner.inner.load_state_dict(entry["learned"])
            self.learner.meta_optimizer.load_state_dict(entry["moments"])
            predicted, labels = self.probabilities(self.splits.test, c.test_tasks, _TEST_SEED)
            total = predicted if total is None else total + predicted
        assert total is not None
        each = (total.argmax(-1) == labels).double().mean(-1)
        interval = 1.96 * each.std() / math.sqrt(len(each))
        return {
            "accuracy": each.mean().item(),
            "interval": interval.item(),
            "test_tasks": len(each),
            "epoch": self.best[0]["epoch"],
            "epochs": [entry["epoch"] for entry in self.best],
            "val_accuracy": self.best[0]["val_accuracy"],
            "iterations": self.done,
            "skipped": self.learner.outer.skipped,
            "diverged": self.learner.diverged,
            "pictures": {name: len(p.pixels) for name, p in self.splits._asdict().items()},
        }

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        figures.draw(self, folder, result)

    def describe(self, result: dict[str, Any]) -> str:
        c = self.config
        skipped = f" Left out: {result['skipped']} updates." if result["skipped"] else ""
        diverged = result["diverged"]
        if diverged:
            skipped += f" Guesses, since adaptation diverged: {diverged} in {len(result['epochs'])}"
            skipped += f" times {result['test_tasks']} tasks."
        return (
            f"{c.dataset}, {c.way}-way {c.shot}-shot, {c.model} + {c.inner_optim}: "
            f"{100 * result['accuracy']:.2f} % ± {100 * result['interval']:.2f} on "
            f"{result['test_tasks']} test tasks, after {result['iterations']} updates in "
            f"{result['seconds']:.0f} s (chance: {100 / c.way:.0f} %).{skipped}"
        )
