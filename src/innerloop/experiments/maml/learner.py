"""A few-shot learner: a model, the inner loop that adapts it, and the optimizer of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import innerloop as il
from innerloop.data import Episode
from innerloop.errors import DivergedError
from innerloop.experiments.maml.outer import Outer

INNER: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adagrad": torch.optim.Adagrad,
}
WAYS = {"loop": il.tasks.loop, "threads": il.tasks.threads, "vmap": il.tasks.vmap}
STRATEGIES = {"tape": il.Tape, "remat": il.Remat, "binomial": il.Binomial}


def step_weights(steps: int, epoch: int, epochs: int) -> list[float]:
    """Weights of the losses after each inner step: equal at first, in the end only the last.

    MAML++ anneals them over its first epochs.

    >>> step_weights(2, epoch=0, epochs=10)
    [0.5, 0.5]
    >>> step_weights(2, epoch=10, epochs=10)
    [0.0, 1.0]
    """
    if epoch >= epochs:
        return [0.0] * (steps - 1) + [1.0]
    even, least = 1 / steps, 0.03 / steps
    fallen = epoch * even / epochs
    early = max(even - fallen, least)
    last = min(even + (steps - 1) * fallen, 1 - (steps - 1) * least)
    return [early] * (steps - 1) + [last]


def task_loss(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    """Cross-entropy on the support set; with a query set in the batch, there as well."""
    x, y, *query = batch
    loss = cross_entropy(model(x), y)
    return (loss, cross_entropy(model(query[0]), query[1])) if query else loss


class FewShot:
    """MAML++: initial weights and the inner optimizer's settings, learned by Adam."""

    def __init__(
        self,
        model: nn.Module,
        *,
        inner_optim: str,
        inner_lr: float,
        steps: int,
        learn_rates: bool,
        learn_betas: bool,
        meta_lr: float,
        tasks_by: str,
        backward: str,
        **outer: Any,
    ) -> None:
        self.model, self.steps = model, steps
        self.dtype = next(model.parameters()).dtype
        # A group for each tensor: layers learn at rates of their own.
        groups = [{"params": [p]} for p in model.parameters()]
        self.optimizer = INNER[inner_optim](groups, lr=inner_lr)
        learn: dict[str, Any] = {"init": True}
        if learn_rates:
            # MAML++ has a rate for each layer and step; with Adam the paper has one for each group.
            adaptive = inner_optim == "adam"
            learn["lr"] = il.Learn() if adaptive else il.Learn(("group", "step"), steps=steps)
        if learn_betas:
            learn["betas"] = il.Learn(transform="logit")
        self.inner = il.InnerLoop(
            model, self.optimizer, task_loss, learn=learn, backward=STRATEGIES[backward]()
        )
        self.meta_optimizer = torch.optim.Adam(self.inner.parameters(), lr=meta_lr)
        self.outer = Outer(self.meta_optimizer, **outer)
        self.way = WAYS[tasks_by]()
        self.diverged = 0
        """Tasks whose adaptation ended in NaN, among those that were only measured."""

    def update(self, episode: Episode, weights: Sequence[float], first_order: bool) -> float:
        """One outer step on a meta-batch; the loss before it."""
        self.inner.first_order = first_order
        self._warm()
        ranks, total = self.outer.ranks, len(episode.support.y)
        own = episode.tasks(ranks.share(total)).to(self.dtype)
        try:
            with self.outer.autocast():
                loss = self.loss(own, weights) * (len(own.support.y) / total)
        except DivergedError:
            # Not an end yet: the outer step has to say what becomes of it, on all processes.
            loss = math.nan * torch.stack([p.sum() for p in self.inner.parameters()]).sum()
        self.outer.step(loss, lambda: self.blame(own, ranks.share(total).start))
        return ranks.sum(loss.detach()).item()

    def blame(self, episode: Episode, first: int = 0) -> str:
        """The task, step and tensor in which numbers stop being finite, of all processes."""
        own = self._diverging(episode, first)
        verdicts = [v.decode() for v in self.outer.ranks.gather((own or "-").encode())]
        if found := [verdict for verdict in verdicts if verdict != "-"]:
            return found[0]
        names = [n for n, p in self.inner.named_parameters() if _broken(p.grad)]
        return f"all inner losses are finite; the gradient is not, for {', '.join(names)}"

    def _diverging(self, episode: Episode, first: int) -> str | None:
        for task in range(len(episode.support.y)):
            one = episode.tasks(slice(task, task + 1))
            if step := self._diverges(one):
                where = f"the inner loss of task {first + task + 1} is not finite in step {step}"
                return f"{where}, {self._weights_before(one, step)}"
        return None

    @torch.no_grad()
    def _weights_before(self, task: Episode, step: int) -> str:
        """The largest of the weights that the loss of this step is taken with."""
        model = self.model
        if step > 1:
            with self.outer.autocast():
                train = [tuple(task.support)] * (step - 1)
                model = self.inner.adapt(train, tasks=il.tasks.loop()).each[0].module
        largest = {
            n: p.abs().max().nan_to_num(math.inf).item() for n, p in model.named_parameters()
        }
        name = max(largest, key=largest.__getitem__)
        return f"with weights as large as {largest[name]:.1e}, in {name}"

    @torch.no_grad()
    def _diverges(self, task: Episode) -> int | None:
        """The step in which adaptation diverges; ``None`` if it does not."""
        for step in range(1, self.steps + 1):
            try:
                with self.outer.autocast():
                    adapted = self.inner.adapt([tuple(task.support)] * step, tasks=il.tasks.loop())
            except DivergedError:
                return step
            if _broken(adapted.losses):
                return step
        return None

    def loss(self, episode: Episode, weights: Sequence[float]) -> Tensor:
        """The weighted query losses after each step, meaned over the tasks."""
        if all(w == 0 for w in weights[:-1]):
            train = [tuple(episode.support)] * self.steps
            return self.inner(train, tuple(episode.query), tasks=self.way).mean()
        batch = (*episode.support, *episode.query)
        adapted = self.inner.adapt([batch] * self.steps, tasks=il.tasks.loop())
        logits, labels = adapted(episode.query.x), episode.query.y
        last = cross_entropy(logits.flatten(0, 1), labels.flatten())
        # The query loss in step j is taken before that step: after j of them.
        after = [*adapted.aux.mean(0)[1:], last]
        return sum((w * v for w, v in zip(weights, after, strict=True)), last.new_zeros(()))

    @torch.no_grad()
    def probabilities(self, episode: Episode, measured: int | None = None) -> Tensor:
        """Predictions of the adapted models for the queries. [tasks, queries, way]

        A task that diverges gets equal probabilities; of the first ``measured`` tasks, these are
        counted in ``diverged``.
        """
        self._warm()
        ranks, total = self.outer.ranks, len(episode.support.y)
        own = episode.tasks(ranks.share(total)).to(self.dtype)
        try:
            predicted = self._predict(own)
        except DivergedError:
            each = range(len(own.support.y))
            predicted = torch.cat([self._predict_task(own, task) for task in each])
        predicted = ranks.assemble(predicted, total)
        broken = ~predicted.isfinite().flatten(1).all(1)
        predicted[broken] = 1 / predicted.shape[-1]
        self.diverged += int(broken[:measured].sum())
        return predicted

    def _predict(self, episode: Episode) -> Tensor:
        with self.outer.autocast():
            adapted = self.inner.adapt([tuple(episode.support)] * self.steps, tasks=self.way)
            return adapted(episode.query.x).to(self.dtype).softmax(-1)

    def _predict_task(self, episode: Episode, task: int) -> Tensor:
        """Predictions of the model adapted to one of the tasks; NaN if it diverges."""
        one = episode.tasks(slice(task, task + 1))
        try:
            return self._predict(one)
        except DivergedError:
            way = int(one.query.y.max()) + 1
            return one.query.x.new_full((*one.query.y.shape, way), math.nan)

    @property
    def settings(self) -> dict[str, list[Any]]:
        """The learned settings as numbers."""
        return {
            name: torch.stack(list(v)).tolist() if isinstance(v, tuple) else v.tolist()
            for name, v in self.inner.hyper.items()
        }

    def _warm(self) -> None:
        """Inner Adam starts from the outer Adam's statistics, as the paper does."""
        if type(self.optimizer) is not torch.optim.Adam:  # AdamW is a subclass
            return
        for p in self.model.parameters():
            self.optimizer.state.pop(p, None)  # of another epoch, if this one has none
            if known := self.meta_optimizer.state.get(p):
                self.optimizer.state[p] = {name: value.clone() for name, value in known.items()}


def _broken(value: Tensor | None) -> bool:
    return value is not None and not bool(value.isfinite().all())
