"""Meta-training and pre-training on sines, and the comparison of both nets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import innerloop as il
from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.experiment import Experiment
from innerloop.experiments.framework.figures import save
from innerloop.experiments.framework.ranks import ALONE, Ranks
from innerloop.experiments.framework.settings import refuse
from innerloop.experiments.framework.tables import plus_minus, table
from innerloop.experiments.sine import figures
from innerloop.experiments.sine.problem import (
    HIGH,
    LOW,
    Sines,
    build_net,
    draw_sines,
    squared_error,
)
from innerloop.experiments.sine.settings import CHOICE_SEED, HELD_OUT_SEED, Config

STEPS = (0, 1, 5, 10)
"""Numbers of steps after which the error is reported."""
# The pre-trained net adapts with the best of these, chosen for each number of steps.
RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
CHOICE_SINES = 50
MAML, PRETRAINED = "MAML", "pre-trained"
_WAY = il.tasks.vmap()  # one task strategy always: each rounds differently

# The inner loop that adapts a net, for each number of steps.
Loops = dict[int, il.InnerLoop]


class Comparison(Experiment):
    """Updates of the one net, then of the other, then both on unseen sines."""

    saved = ("inner", "meta", "net", "optimizer", "generator", "running")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.inner = learner(config)
        self.meta = torch.optim.Adam(self.inner.parameters(), lr=config.meta_lr)
        self.net = build_net(config.seed)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=config.meta_lr)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.running = math.nan
        self.ranks: Ranks = ALONE

    def share(self, ranks: Ranks) -> None:
        """Each process takes some of the sines of an update."""
        if self.config.tasks < ranks.size:
            refuse("tasks", self.config.tasks, f"at least one for each of {ranks.size} processes")
        self.ranks = ranks

    @property
    def total(self) -> int:
        return 2 * self.config.iterations

    def advance(self) -> dict[str, str]:
        if self.done == self.config.iterations:
            # The second net sees the sines that the first one saw.
            self.generator.manual_seed(self.config.seed)
            self.running = math.nan
        sines = draw_sines(self.generator, self.config.tasks).tasks(
            self.ranks.share(self.config.tasks)
        )
        first = self.done < self.config.iterations
        loss = self._meta_learn(sines) if first else self._pretrain(sines)
        self.running = loss if math.isnan(self.running) else 0.98 * self.running + 0.02 * loss
        return {"net": MAML if first else PRETRAINED, "loss": f"{self.running:.3f}"}

    def _meta_learn(self, sines: Sines) -> float:
        train = [sines.support] * self.config.steps
        loss = self.inner(train, sines.query, tasks=_WAY).mean()
        return self._step(self.meta, loss, len(sines.support[0]))

    def _pretrain(self, sines: Sines) -> float:
        x, y = map(torch.cat, zip(sines.support, sines.query, strict=True))
        return self._step(self.optimizer, squared_error(self.net, (x, y)), len(sines.support[0]))

    def _step(self, optimizer: torch.optim.Optimizer, mean: Tensor, own: int) -> float:
        """One step, by this process's mean over its own sines and those of the others."""
        loss = mean * (own / self.config.tasks)
        total = self.ranks.sum(loss.detach()).item()
        if not math.isfinite(total):
            raise InnerLoopError(
                f"The loss is {total} after {self.done} updates: training diverged. Try a smaller "
                f"learning rate than --inner-lr {self.config.inner_lr} or --meta-lr "
                f"{self.config.meta_lr}."
            )
        optimizer.zero_grad()
        loss.backward()
        self.ranks.sum_gradients([p for group in optimizer.param_groups for p in group["params"]])
        optimizer.step()
        return total

    def unseen(self, first: int, count: int) -> Sines:
        """Sines that are in no training, with query points on a grid."""
        grid = torch.linspace(LOW, HIGH, 100, dtype=torch.float32).unsqueeze(1)
        generator = torch.Generator().manual_seed(self.config.seed + first)
        return draw_sines(generator, count, query=grid)

    def loops(self) -> tuple[dict[str, Loops], dict[int, float]]:
        """The inner loops of each net, and the best rates of the second."""
        pretrained, best = with_best_rates(self.net, self.unseen(CHOICE_SEED, CHOICE_SINES))
        return {MAML: dict.fromkeys(STEPS, self.inner), PRETRAINED: pretrained}, best

    def result(self) -> dict[str, Any]:
        sines = self.unseen(HELD_OUT_SEED, self.config.held_out)
        loops, best = self.loops()
        return {
            "mean_squared_error": {name: evaluate(own, sines) for name, own in loops.items()},
            "learning_rate": {MAML: self.inner.hyper["lr"].item(), PRETRAINED: best},
        }

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        sines = figures.small_middle_large(self.unseen(HELD_OUT_SEED, self.config.held_out))
        loops, _ = self.loops()
        fits = {
            name: {steps: predict(own[steps], sines, steps) for steps in figures.STYLES}
            for name, own in loops.items()
        }
        save(figures.draw_fits(fits, sines), folder / "fits.png")

    def describe(self, result: dict[str, Any]) -> str:
        found, c = result["mean_squared_error"], self.config
        rows = [["", *found]]
        for k, steps in enumerate(STEPS):
            name = f"after {steps}" if steps else "before adaptation"
            rows.append(
                [name] + [plus_minus(r["mean"][k], r["interval"][k]) for r in found.values()]
            )
        learned, best = result["learning_rate"].values()
        rates = ", ".join(f"{rate:g} (after {steps})" for steps, rate in best.items())
        return (
            f"Mean squared error on {c.held_out} unseen sines, ± half the 95 % interval\n"
            f"{table(rows)}\n"
            f"Learning rates: MAML learned {learned:.4f}, starting from {c.inner_lr:g}. The "
            f"pre-trained net got the best of {len(RATES)} for each number of steps, chosen on "
            f"other sines: {rates}."
        )


def learner(config: Config) -> il.InnerLoop:
    """Learns initial weights and a rate from which a few steps of SGD fit any sine."""
    net = build_net(config.seed)
    return il.InnerLoop(
        net,
        torch.optim.SGD(net.parameters(), lr=config.inner_lr),
        squared_error,
        # By its logarithm: the rate stays positive, and Adam's steps are relative to its size.
        learn={"init": True, "lr": il.Learn(transform="log")},
        backward=il.Remat(),
    )


@torch.no_grad()
def predict(inner: il.InnerLoop, sines: Sines, steps: int) -> Tensor:
    """The predictions at the query points after some gradient steps. [tasks, points, 1]"""
    # Before the first step all tasks have one model.
    adapted = inner.adapt([sines.support] * steps, tasks=_WAY if steps else False)
    return adapted(sines.query[0])


def errors(inner: il.InnerLoop, sines: Sines, steps: int) -> Tensor:
    """The mean squared error of each sine after some gradient steps. [tasks]"""
    return (predict(inner, sines, steps) - sines.query[1]).square().mean(dim=(1, 2)).double()


def with_best_rates(net: nn.Module, sines: Sines) -> tuple[Loops, dict[int, float]]:
    """For each number of steps, the inner loop whose rate is best on these sines, and its rate."""
    tried = {
        rate: il.InnerLoop(net, torch.optim.SGD(net.parameters(), lr=rate), squared_error, learn=())
        for rate in RATES
    }
    loops, best = {0: tried[RATES[0]]}, {}
    for steps in STEPS[1:]:
        means = torch.stack([errors(inner, sines, steps).mean() for inner in tried.values()])
        best[steps] = RATES[int(means.nan_to_num(math.inf).argmin())]
        loops[steps] = tried[best[steps]]
    return loops, best


def evaluate(loops: Loops, sines: Sines) -> dict[str, list[float]]:
    """The error for each number of steps, with the half-width of its 95 % interval."""
    error = torch.stack([errors(loops[steps], sines, steps) for steps in STEPS])
    half_width = 1.96 * error.std(dim=1) / math.sqrt(error.shape[1])
    return {"mean": error.mean(dim=1).tolist(), "interval": half_width.tolist()}
