"""An optimizer that is learned from one seed, and then compared with tuned ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import innerloop as il
from innerloop.estimate import evolution
from innerloop.experiments.framework.parts import Part
from innerloop.experiments.learned_optimizer import tuned
from innerloop.experiments.learned_optimizer.problem import Family, draw_problems
from innerloop.experiments.learned_optimizer.settings import OPTIMIZERS, Config

_HELD_OUT_SEED = 2_000_003
_FINAL = 0.05  # of the meta rate, at the end of its cosine


class Cell(Part):
    """Episodes of meta-training on one family of problems, then the comparison.

    Between episodes nothing is carried over but what is ``saved``.
    """

    saved = ("learned", "meta", "generator")

    def __init__(
        self,
        config: Config,
        problem: str,
        family: Family,
        seed: int,
        rates: Callable[[], dict[str, Any]],
    ) -> None:
        """``config`` is that of the problem; ``rates`` finds those of the tuned optimizers."""
        self.config, self.problem, self.family, self.seed = config, problem, family, seed
        self.rates = rates
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.learned = OPTIMIZERS[config.optimizer](family.model, config.horizon).float()
        self.generator = torch.Generator().manual_seed(seed)
        cut = il.Truncated(config.window, carry=True)
        self.inner = il.InnerLoop(
            family.model,
            self.learned,
            family.loss,
            learn=(),
            backward=il.Binomial(config.slots) if config.by == "binomial" else cut,
            first_order=config.first_order,
            tasks=il.tasks.vmap(),
        )
        self.meta = torch.optim.Adam(self.learned.parameters(), lr=config.meta_lr)
        self.evolution = evolution(
            self.inner, samples=config.samples, sigma=config.sigma, persistent=True, seed=seed
        )
        self.drawn: dict[str, list[float]] = {}
        """The curves of the figure."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"evolution": self.evolution.state_dict()["generator"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        fresh = self.evolution.state_dict()
        self.evolution.load_state_dict({**fresh, "generator": state["evolution"]})

    def outcome(self) -> dict[str, Any]:
        return {"rates": self.rates(), "curves": self.drawn}

    def advance(self, unit: int, records: list[dict[str, Any]]) -> dict[str, str]:
        shown = {"problem": self.problem, "seed": str(self.seed)}
        if unit < self.config.episodes:
            return shown | {"loss": f"{self.episode(unit):.3f}"}
        losses = self._compare()
        records.append({"problem": self.problem, "seed": self.seed, "losses": losses})
        return shown

    # --- meta-training ------------------------------------------------------------------------

    def episode(self, number: int) -> float:
        """Training runs of new problems from their start to the horizon; returns their mean loss.

        Infinite if one diverges: the rest of the episode is lost, and nothing else.
        """
        c = self.config
        self.family.begin(self.generator)
        batches = self.family.draw(self.generator, c.tasks, c.horizon, unseen=False)
        self.inner.restart()
        self.evolution.restart()
        decay = 0.5 * (1 + math.cos(math.pi * number / c.episodes))
        self.meta.param_groups[0]["lr"] = c.meta_lr * (_FINAL + (1 - _FINAL) * decay)
        length = c.horizon if c.by == "binomial" else c.window
        total = 0.0
        for start in range(0, c.horizon, length):
            self.meta.zero_grad()
            loss = self._loss(batches[start : start + length])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.learned.parameters(), c.clip)
            if not norm.isfinite():
                return math.inf
            self.meta.step()
            total += loss.item()
        return total / (c.horizon // length)

    def _loss(self, batches: list[Any]) -> Tensor:
        if self.config.by == "pes":
            return self.evolution(batches, batches[-1]).mean()
        return self.inner.adapt(batches).losses.mean()

    # --- comparison ---------------------------------------------------------------------------

    @torch.no_grad()
    def curves(self, batches: list[Any]) -> Tensor:
        """The loss before each step with the learned optimizer. [tasks, steps]"""
        inner = il.InnerLoop(self.family.model, self.learned, self.family.loss, learn=())
        return inner.adapt(batches, tasks=il.tasks.vmap()).losses

    def _compare(self) -> dict[str, Any]:
        """The losses of each optimizer, by horizon and metric."""
        c, family, rates = self.config, self.family, self.rates()
        tried = {
            kind: sorted({rate for by in own.values() for rate in by.values()})
            for kind, own in rates.items()
        }
        found: dict[str, list[Tensor]] = {kind: [] for kind in (c.optimizer, *tried)}
        seed, tasks = _HELD_OUT_SEED + self.seed, c.held_out // family.starts
        for batches in draw_problems(family, c.held_out, c.longer + 1, seed, unseen=True):
            found[c.optimizer].append(self.curves(batches)[None])
            for kind, own in tried.items():
                found[kind].append(tuned.curves(kind, own, family, batches, tasks))
        # [rates, steps] each
        means = {kind: torch.cat(known, 1).mean(1) for kind, known in found.items()}

        def chosen(kind: str, horizon: int, metric: str) -> Tensor:
            """The curve with the rate that is best by the metric at the horizon."""
            if kind not in tried:
                return means[kind][0]
            return means[kind][tried[kind].index(rates[kind][str(horizon)][metric])]

        # The curve that is drawn: with the rate that is best for the training horizon.
        self.drawn = {kind: chosen(kind, c.horizon, "mean").tolist() for kind in means}
        return {
            kind: {
                str(h): {m: tuned.measure(chosen(kind, h, m), h, m).item() for m in tuned.METRICS}
                for h in c.horizons
            }
            for kind in means
        }
