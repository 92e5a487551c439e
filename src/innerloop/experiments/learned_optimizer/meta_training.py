"""An optimizer while it is learned, on problems of one family."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import innerloop as il
from innerloop.errors import DivergedError
from innerloop.estimate import evolution
from innerloop.experiments.framework.state import Resumable
from innerloop.experiments.learned_optimizer.problem import Family
from innerloop.learned import LSLR, LearnedOptimizer, LSTMOptimizer, MetaSGD, MLPOptimizer

KINDS: dict[str, Callable[[nn.Module, int], LearnedOptimizer]] = {
    "lstm": lambda model, steps: LSTMOptimizer(),
    "mlp": lambda model, steps: MLPOptimizer(),
    "meta-sgd": lambda model, steps: MetaSGD(model),
    "lslr": lambda model, steps: LSLR(model, steps),
}
BY = ("truncated", "binomial", "pes")
_FINAL = 0.05  # of the meta rate, at the end of its cosine


class MetaTraining(Resumable):
    """The learned optimizer, the inner loop that it is trained in, and the meta-optimizer.

    Between episodes nothing else is carried over.
    """

    saved = ("learned", "meta", "generator")

    def __init__(self, family: Family, config: Any, episodes: int, seed: int) -> None:
        self.family, self.config, self.episodes = family, config, episodes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.learned = KINDS[config.optimizer](family.model, config.horizon).float()
        self.generator = torch.Generator().manual_seed(seed)
        self.inner = il.InnerLoop(
            family.model,
            self.learned,
            family.loss,
            learn=(),
            backward=_strategy(config),
            first_order=config.first_order,
            tasks=il.tasks.vmap(),
        )
        self.meta = torch.optim.Adam(self.learned.parameters(), lr=config.meta_lr)
        self.evolution = evolution(
            self.inner, samples=config.samples, sigma=config.sigma, persistent=True, seed=seed
        )

    def episode(self, number: int) -> float:
        """Training runs of new problems from their start to the horizon; their mean loss."""
        c = self.config
        self.family.begin(self.generator)
        batches = self.family.draw(self.generator, c.tasks, c.horizon, unseen=False)
        self.inner.restart()
        self.evolution.restart()
        decay = 0.5 * (1 + math.cos(math.pi * number / self.episodes))
        for group in self.meta.param_groups:
            group["lr"] = c.meta_lr * (_FINAL + (1 - _FINAL) * decay)
        length = c.horizon if c.by == "binomial" else c.window
        parts = [batches[i : i + length] for i in range(0, c.horizon, length)]
        try:
            return sum(self._update(part) for part in parts) / len(parts)
        except DivergedError:  # the rest of the episode is lost, and nothing else
            return math.inf

    def _update(self, batches: list[Any]) -> float:
        self.meta.zero_grad()
        loss = self._loss(batches)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.learned.parameters(), self.config.clip)
        if not norm.isfinite():
            raise DivergedError("The meta-gradient is not finite.")
        self.meta.step()
        return loss.item()

    def _loss(self, batches: list[Any]) -> Tensor:
        if self.config.by == "pes":
            return self.evolution(batches, batches[-1]).mean()
        return self.inner.adapt(batches).losses.mean()

    def curves(self, batches: list[Any]) -> Tensor:
        """The loss before each step; infinite if a training diverges. [tasks, steps]"""
        inner = il.InnerLoop(self.family.model, self.learned, self.family.loss, learn=())
        try:
            with torch.no_grad():
                return inner.adapt(batches, tasks=il.tasks.vmap()).losses
        except DivergedError:
            return torch.full((len(batches[0][0]), len(batches)), math.inf)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"evolution": self.evolution.state_dict()["generator"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        fresh = self.evolution.state_dict()
        self.evolution.load_state_dict({**fresh, "generator": state["evolution"]})


def _strategy(config: Any) -> Any:
    if config.by == "binomial":
        return il.Binomial(config.slots)
    return il.Truncated(config.window, carry=True)
