"""Few-shot classification by MAML++, over models and inner optimizers.

``innerloop maml`` trains, keeps everything in a folder, and ends with the accuracy on test tasks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from innerloop import data, models
from innerloop.errors import InnerLoopError
from innerloop.experiments._command_line import check_choice, check_device, check_seed, refuse
from innerloop.experiments._experiment import Experiment, command
from innerloop.experiments._few_shot import INNER, STRATEGIES, WAYS, FewShot, step_weights
from innerloop.experiments._outer import NONFINITE, PRECISIONS
from innerloop.experiments._ranks import Ranks, local_device

DATASETS = data.NAMES
_DENSE = "densenet-bc-"
_DENSE_OF_ANY_SIZE = re.compile(rf"{_DENSE}\d{{1,4}}-\d{{1,4}}")
_MOST_FILTERS, _MOST = 4096, 10**6
_TEST_SEED, _VAL_SEED = 2_000_003, 1_000_003


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
    out: Annotated[Path, "folder of the run"] = Path("out/maml")
    device: Annotated[str, "where to compute"] = "cpu"
    precision: Annotated[str, f"of the inner loop, one of {', '.join(PRECISIONS)}"] = "float32"
    nonfinite: Annotated[str, "stop at infinite meta-gradients, or skip and count them"] = "stop"
    clip: Annotated[float | None, "largest norm of the meta-gradient (any)"] = None
    tasks_by: Annotated[str, f"one of {', '.join(WAYS)} (multi-step epochs: loop)"] = "vmap"
    backward: Annotated[str, f"one of {', '.join(STRATEGIES)}"] = "tape"

    def __post_init__(self) -> None:
        check_choice("dataset", self.dataset, DATASETS)
        if not _DENSE_OF_ANY_SIZE.fullmatch(self.model):  # the model checks growth and depth
            check_choice("model", self.model, models.NAMES)
        check_choice("inner_optim", self.inner_optim, tuple(INNER))
        check_choice("tasks_by", self.tasks_by, tuple(WAYS))
        check_choice("backward", self.backward, tuple(STRATEGIES))
        check_choice("precision", self.precision, tuple(PRECISIONS))
        check_choice("nonfinite", self.nonfinite, NONFINITE)
        if self.filters is not None and not 1 <= self.filters <= _MOST_FILTERS:
            refuse("filters", self.filters, f"from 1 to {_MOST_FILTERS}")
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
                f"--learn-betas cannot be with --inner-optim {self.inner_optim}, which has none. "
                "It is for --inner-optim adam."
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


@contextlib.contextmanager
def _said_of(what: str) -> Iterator[None]:
    try:
        yield
    except InnerLoopError as error:
        raise InnerLoopError(f"{what}. {error}") from error


class Training(Experiment):
    """One run from its configuration to its result."""

    def __init__(self, config: Config, splits: data.Splits | None = None) -> None:
        """With the data of the settings, or with ``splits`` that were read already."""
        self.config = config
        device = local_device(config.device)
        if splits is None:
            splits = data.load(config.dataset, root=config.data, seed=config.seed, device=device)
        self.splits = splits
        shape = splits.train.pixels.shape
        if shape[-2] != shape[-1]:
            raise InnerLoopError(
                f"The pictures are {shape[-2]} high and {shape[-1]} wide. Needed are square ones, "
                "since a model is built for one size. Cut or scale them."
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
        self.learner = FewShot(
            model,
            inner_optim=config.inner_optim,
            inner_lr=config.inner_lr,
            steps=config.steps,
            learn_rates=config.learn_rates,
            learn_betas=config.learn_betas,
            meta_lr=config.meta_lr,
            tasks_by=config.tasks_by,
            backward=config.backward,
            precision=config.precision,
            nonfinite=config.nonfinite,
            clip=config.clip,
            device=device,
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.learner.meta_optimizer, config.epochs, config.meta_lr_end
        )
        for name, images in self._named_splits:  # too few classes are noticed before any work
            with _said_of(f"The {name} split cannot be used"):
                self._sampler(images, 1, 0)
        self.sampler = self._sampler(splits.train, config.tasks, config.seed)
        self.losses: list[float] = []
        """Of the epoch under way, without those that are not finite."""
        self.shown: dict[str, str] = {}
        self.best: list[dict[str, Any]] = []
        """The best epochs with their learned parameters, best first."""

    @property
    def _named_splits(self) -> list[tuple[str, data.Images]]:
        return [(name, getattr(self.splits, name)) for name in ("train", "val", "test")]

    @property
    def total(self) -> int:
        return self.config.iterations

    @property
    def source(self) -> str:
        return ", ".join(images.digest for _, images in self._named_splits)

    def share(self, ranks: Ranks) -> None:
        if self.config.tasks < ranks.size:
            refuse("tasks", self.config.tasks, f"at least one for each of {ranks.size} processes")
        for name in ("val_tasks", "test_tasks"):
            if getattr(self.config, name) < ranks.size:
                refuse(name, getattr(self.config, name), f"one for each process, {ranks.size}")
        self.learner.outer.ranks = ranks

    def _sampler(self, images: Any, tasks: int, seed: int) -> Any:
        c = self.config
        return data.Sampler(images, way=c.way, shot=c.shot, query=c.query, tasks=tasks, seed=seed)

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        learner = self.learner
        return {
            "learner": learner.inner.state_dict(),
            "meta_optimizer": learner.meta_optimizer.state_dict(),
            "outer": learner.outer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "sampler": self.sampler.state_dict(),
            "random": torch.get_rng_state(),
            "losses": self.losses,
            "shown": self.shown,
            "best": self.best,
            "measured": self._measured,
        }

    @property
    def _measured(self) -> dict[str, str]:
        """The pictures that are only measured, by their checksums; the sampler knows its own."""
        return {name: images.digest for name, images in self._named_splits if name != "train"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, digest in self._measured.items():
            if state["measured"][name] != digest:
                raise InnerLoopError(
                    f"The {name} pictures are not those that the run was started with: accuracies "
                    "before and after could not be compared. Put the old ones back, or name their "
                    "folder with --data."
                )
        self.learner.inner.load_state_dict(state["learner"])
        self.learner.meta_optimizer.load_state_dict(state["meta_optimizer"])
        self.learner.outer.load_state_dict(state["outer"])
        self.schedule.load_state_dict(state["schedule"])
        self.sampler.load_state_dict(state["sampler"])
        torch.set_rng_state(state["random"])
        self.losses, self.shown, self.best = state["losses"], state["shown"], state["best"]
        for entry in self.best:  # one of another form would be noticed hours later
            if not (type(entry["epoch"]) is int and type(entry["val_accuracy"]) is float):
                raise TypeError("its best epochs are none")
            if entry["learned"].keys() != state["learner"].keys() or not entry["moments"]:
                raise ValueError("its best epochs are of another learner")
        if not all(type(loss) is float for loss in self.losses):
            raise TypeError("its losses are no numbers")
        for record in self.records:
            kinds = {"epoch": int, "iteration": int, "val_accuracy": float, "learned": dict}
            if not all(type(record[name]) is kind for name, kind in kinds.items()):
                raise TypeError("its records are of another form")

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
        """What the learner says of the same tasks each time, and the labels."""
        sampler = self._sampler(images, min(tasks, self.config.tasks), seed)
        said, labels = [], []
        while sum(map(len, said)) < tasks:
            episode = sampler.sample()
            said.append(self.learner.probabilities(episode))
            labels.append(episode.query[1])
        return torch.cat(said)[:tasks], torch.cat(labels)[:tasks]

    def accuracies(self, images: Any, tasks: int, seed: int) -> Tensor:
        """[tasks]"""
        said, labels = self.probabilities(images, tasks, seed)
        return (said.argmax(-1) == labels).double().mean(-1)

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
            said, labels = self.probabilities(self.splits.test, c.test_tasks, _TEST_SEED)
            total = said if total is None else total + said
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
            "pictures": {name: len(images.pixels) for name, images in self._named_splits},
        }

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        from innerloop.experiments import _few_shot_figures

        _few_shot_figures.draw(self, folder, result)

    def told(self, result: dict[str, Any]) -> str:
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


def main(argv: Sequence[str] | None = None) -> int:
    return command("maml", __doc__, Config, configured, Training, argv, _NEXT)


_NEXT = "Next, try another inner optimizer: innerloop maml --inner-optim adam --out out/adam"


if __name__ == "__main__":
    raise SystemExit(main())
