"""One training run of the learning-rate experiment: one arm, one seed, epoch after epoch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import innerloop as il
from innerloop.errors import DivergedError
from innerloop.experiments.framework.parts import Part
from innerloop.experiments.meta_lr.problem import Split, batch, draw_rows, stream
from innerloop.experiments.meta_lr.settings import LEARNING, OPTIMIZERS, STRATEGIES, Config
from innerloop.models import DenseNetBC

_TEST_BATCH = 250
# Settings other than the rate stay in their range.
_RANGES = {"momentum": "logit", "betas": "logit", "alpha": "logit"}
_RANGES |= {"weight_decay": "log", "eps": "log"}


def loss(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(given[0]), given[1])


def mean_loss(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The meta-loss: the mean over validation batches, each normalized by itself."""
    return torch.stack([loss(model, given) for given in batches]).mean()


def parameter_groups(model: DenseNetBC, how: str) -> list[dict[str, Any]]:
    """One group for each tensor, for each part of the model, or one of all.

    >>> model = DenseNetBC(growth=12, depth=100)
    >>> [len(parameter_groups(model, how)) for how in ("tensor", "part", "one")]
    [299, 53, 1]
    """
    if how == "one":
        return [{"params": list(model.parameters())}]
    if how == "tensor":
        return [{"params": [p]} for p in model.parameters()]
    parts = [list(part.parameters()) for part in (*model.features, model.linear)]
    return [{"params": params} for params in parts if params]


class Cell(Part):
    """A model in training. ``config`` is that of the experiment, ``steps`` those of an epoch."""

    saved = ("loss", "error", "diverged", "model", "optimizer")

    def __init__(self, config: Config, arm: str, seed: int, images: Split, steps: int) -> None:
        self.config, self.arm, self.seed, self.images = config, arm, seed, images
        self.steps = steps
        self.error: float | None = None
        """On the test images, after the last epoch."""
        self.diverged = False
        """Then nothing more is done."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = DenseNetBC(growth=config.growth, depth=config.depth)
        # This order of the pixels is the faster one for convolutions on a CPU.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = model.to(config.device, torch.float32)
        self.optimizer = self._optimizer()
        self.loss = 0.0
        """Sum over the epoch under way."""
        self.inner: il.InnerLoop | None = None
        if arm in LEARNING:
            self.inner = self._inner()
            self.meta_optimizer = self._meta_optimizer(self.inner)
            self.saved = (*self.saved, "inner", "meta_optimizer")

    def _optimizer(self) -> torch.optim.Optimizer:
        c = self.config
        kind = OPTIMIZERS[c.optimizer]
        lr = kind.lr if c.lr is None else c.lr
        decay = kind.weight_decay if c.weight_decay is None else c.weight_decay
        options: dict[str, Any] = {"lr": lr, "weight_decay": decay}
        if c.optimizer == "sgd":
            options |= {"momentum": c.chosen_momentum, "nesterov": c.chosen_momentum > 0}
        # An optimizer keeps one number per group, so what has its own value has its own group.
        how = "tensor" if c.per == "parameter" else c.groups
        return kind.make(parameter_groups(self.model, how), **options)

    def _inner(self) -> il.InnerLoop:
        c = self.config
        learn = {name: il.Learn(transform=_transform(c, name)) for name in c.learned}
        # Without warm state the inner loop has an optimizer of its own, which never takes a step.
        optimizer = self.optimizer if c.warm else self._optimizer()
        strategy = STRATEGIES[c.backward]()
        return il.InnerLoop(
            self.model, optimizer, loss, learn=learn, backward=strategy, val_loss=mean_loss
        )

    def _meta_optimizer(self, inner: il.InnerLoop) -> torch.optim.Optimizer:
        """Adam, with ten times the rate for what is learned by its logarithm.

        So a setting goes as far in its logarithm as a rate of 0.1 in ten times its own size.
        """
        groups = []
        for name, p in inner.settings.named_parameters():
            plain = inner.learned[name.split(".")[0]].transform is None
            groups.append({"params": [p], "lr": self.config.meta_lr * (1 if plain else 10)})
        return torch.optim.Adam(groups)

    # --- work ---------------------------------------------------------------------------------

    def advance(self, unit: int, records: list[dict[str, Any]]) -> dict[str, str]:
        epoch, number = divmod(unit, self.steps)
        shown = {"run": f"{self.arm} {self.seed}"}
        if self.diverged:
            return shown | {"loss": "diverged"}
        try:
            shown["loss"] = f"{self.step(epoch, number):.3f}"
            if number + 1 == self.steps:
                records.append(self.end_epoch(epoch))
                self.error = records[-1]["test_error"]
        except DivergedError as error:
            self.diverged = True
            found = {"arm": self.arm, "seed": self.seed, "epoch": epoch + 1}
            records.append(found | {"diverged": str(error)})
        return shown if self.error is None else shown | {"error": f"{100 * self.error:.1f} %"}

    def step(self, epoch: int, number: int) -> float:
        """One ordinary step on the batch of this number in this epoch."""
        c, train = self.config, self.images.train
        order = torch.randperm(len(train.labels), generator=stream(self.seed, "order", epoch))
        rows = order[number * c.batch : (number + 1) * c.batch]
        chance = stream(self.seed, "augmentation", epoch, number) if c.augment else None
        self.optimizer.zero_grad()
        value = loss(self.model, batch(train, rows, self.images, chance))
        value.backward()
        self.optimizer.step()
        self.loss += value.item()
        self._check(value.item(), epoch)
        return value.item()

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        """Meta-update or schedule; the record of the epoch."""
        found: dict[str, Any] = {"arm": self.arm, "seed": self.seed, "epoch": epoch + 1}
        found |= {"train_loss": self.loss / self.steps, "test_error": self.test_error(epoch)}
        self.loss = 0.0
        if self.inner is not None:
            try:
                found["meta_loss"] = self._meta_update(self.inner, epoch)
            except DivergedError as error:  # the training that goes on is untouched
                found["skipped"] = str(error)
            found["learned"] = {n: v.tolist() for n, v in self.inner.hyper.items()}
        elif self.arm == "multistep":
            for group in self.optimizer.param_groups:
                group["lr"] /= 10 ** self.config.milestones.count(epoch + 1)
        return found

    def _meta_update(self, inner: il.InnerLoop, epoch: int) -> float:
        """Algorithm 1 once, from where training is; the learned settings are used from now on."""
        train, val = self.meta_batches(epoch)
        value = il.meta_update(inner, train, val, self.meta_optimizer)[0].item()
        if "lr" in inner.learned and inner.learned["lr"].transform is None:
            # A rate below 0 would climb the loss.
            inner.settings["lr"].data.clamp_(min=0)
        if self.arm == "meta":
            inner.write_to(self.optimizer)
        return value

    def meta_batches(self, epoch: int) -> tuple[list[Any], list[Any]]:
        """Small augmented training batches for the inner steps, and plain validation batches."""
        c, p = self.config, self.images
        chance = stream(self.seed, "meta", epoch)
        rows = draw_rows(len(p.train.labels), c.meta_batch, c.meta_steps, chance)
        train = [batch(p.train, r, p, chance if c.augment else None) for r in rows]
        rows = draw_rows(len(p.val.labels), c.meta_batch, c.val_batches, chance)
        return train, [batch(p.val, r, p, None) for r in rows]

    @torch.no_grad()
    def test_error(self, epoch: int) -> float:
        """The share of test images that are misclassified, with running statistics."""
        self.model.eval()
        test, wrong = self.images.test, 0
        for rows in torch.arange(len(test.labels)).split(_TEST_BATCH):
            images, labels = batch(test, rows, self.images, None)
            predicted = self.model(images)
            # The last step may be the one that diverged; argmax would make classes of NaN.
            self._check(predicted.sum().item(), epoch)
            wrong += int((predicted.argmax(1) != labels).sum())
        self.model.train()
        return wrong / len(test.labels)

    def _check(self, value: float, epoch: int) -> None:
        if not math.isfinite(value):
            raise DivergedError(
                f"A loss or prediction is {value} in epoch {epoch + 1} of arm {self.arm}, "
                f"seed {self.seed}: training diverged. Try a smaller --lr or --meta-lr."
            )


def _transform(config: Config, name: str) -> str | None:
    if name != "lr":
        return _RANGES[name]
    chosen = config.transform or OPTIMIZERS[config.optimizer].transform
    return None if chosen == "none" else chosen
