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
from innerloop.experiments._outer import Outer

INNER = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}
WAYS = {"loop": il.tasks.loop, "threads": il.tasks.threads, "vmap": il.tasks.vmap}
STRATEGIES = {"tape": il.Tape, "remat": il.Remat, "binomial": il.Binomial}


def step_weights(steps: int, epoch: int, epochs: int) -> list[float]:
    """How much the loss after each inner step counts: all alike at first, in the end the last.

    As MAML++ anneals them over its first epochs.

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


def measured(model: nn.Module, batch: Sequence[Tensor]) -> Any:
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
            model, self.optimizer, measured, learn=learn, backward=STRATEGIES[backward]()
        )
        self.meta_optimizer = torch.optim.Adam(self.inner.parameters(), lr=meta_lr)
        self.outer = Outer(self.meta_optimizer, **outer)
        self.way = WAYS[tasks_by]()

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
        self.outer.step(loss, lambda: self.blame(own))
        return ranks.summed(loss.detach()).item()

    def blame(self, episode: Episode) -> str:
        """The task, step and tensor in which numbers stop being finite."""
        names = [
            n for n, p in self.inner.named_parameters() if p.grad is not None and _broken(p.grad)
        ]
        where = "all inner losses are finite"
        for task in range(len(episode.support.y)):
            if step := self._diverges(episode.tasks(slice(task, task + 1))):
                where = f"the inner loss of task {task + 1} is not finite in step {step}"
                break
        return f"{where}; the gradient is broken for {', '.join(names) or 'no tensor here'}"

    @torch.no_grad()
    def _diverges(self, task: Episode) -> int | None:
        """In which step, if it does."""
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
    def probabilities(self, episode: Episode) -> Tensor:
        """What the adapted models say of the queries. [tasks, queries, way]"""
        self._warm()
        ranks, total = self.outer.ranks, len(episode.support.y)
        own = episode.tasks(ranks.share(total)).to(self.dtype)
        with self.outer.autocast():
            adapted = self.inner.adapt([tuple(own.support)] * self.steps, tasks=self.way)
            said = adapted(own.query.x).to(self.dtype).softmax(-1)
        return ranks.assembled(said, total)

    @property
    def settings(self) -> dict[str, list[Any]]:
        """The learned settings as numbers."""
        return {
            name: torch.stack(list(v)).tolist() if isinstance(v, tuple) else v.tolist()
            for name, v in self.inner.hyper.items()
        }

    def _warm(self) -> None:
        """Inner Adam starts from the outer Adam's statistics, as the paper does."""
        if not isinstance(self.optimizer, torch.optim.Adam):
            return
        for p in self.model.parameters():
            known = self.meta_optimizer.state.get(p)
            if known:
                self.optimizer.state[p] = {name: value.clone() for name, value in known.items()}


def _broken(value: Tensor) -> bool:
    return not bool(value.isfinite().all())
