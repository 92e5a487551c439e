"""MAML on sinusoid regression, against a net pre-trained without meta-learning.

A task is one sine wave, amplitude in [0.1, 5] and phase in [0, pi], seen through ten support
points. Both nets start from the same weights, see the same tasks and take the same number of
outer updates. The first is trained so that a few gradient steps on the support points make it
fit that sine (MAML, Finn et al. 2017), and the learning rate of these steps is learned with it. The
second is trained to predict all sines at once. Then both adapt to sines they have never seen, the
second with the rate that suits it best.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

import innerloop as il
from innerloop.experiments.framework.command_line import check_choice, refuse
from innerloop.experiments.framework.experiment import Experiment, command
from innerloop.experiments.framework.ranks import ALONE, Ranks
from innerloop.experiments.sine.problem import (
    HIGH,
    LOW,
    Sines,
    build_net,
    draw_sines,
    squared_error,
)

REPORTED_STEPS = (0, 1, 5, 10)
# The pre-trained net adapts with the best of these, chosen for each number of steps.
RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
CHOICE_SINES = 50
# Keep the held-out sines, and those on which a rate is chosen, apart from each other and from the
# training sines of every seed a person would type.
HELD_OUT_SEED = 1_000_003
CHOICE_SEED = 2_000_003
MAML, PRETRAINED = "MAML", "pre-trained"
_WAY = il.tasks.vmap()  # one way always: each rounds differently


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run; each is also a flag."""

    seed: Annotated[int, "the same seed gives the same result"] = 0
    iterations: Annotated[int, "outer updates of each net"] = 1200
    tasks: Annotated[int, "sines in an outer update"] = 4
    steps: Annotated[int, "inner gradient steps while meta-learning"] = 1
    inner_lr: Annotated[float, "learning rate of the inner SGD, before it is learned"] = 0.02
    meta_lr: Annotated[float, "learning rate of the outer Adam"] = 0.005
    held_out: Annotated[int, "unseen sines in the final comparison"] = 200
    out: Annotated[Path, "folder of the run"] = Path("out/sine")

    def __post_init__(self) -> None:
        if not 0 <= self.seed < HELD_OUT_SEED:
            refuse("seed", self.seed, f"from 0 to {HELD_OUT_SEED - 1}")
        for name in ("iterations", "tasks", "steps", "held_out"):
            least = 3 if name == "held_out" else 1
            if getattr(self, name) < least:
                refuse(name, getattr(self, name), f"at least {least}")
        for name in ("inner_lr", "meta_lr"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                refuse(name, value, "a number above 0")


# MAML's own experiment took 70000 updates of 25 tasks.
PRESETS: dict[str, dict[str, Any]] = {"paper": {"iterations": 70_000, "tasks": 25}, "quick": {}}


def configured(given: dict[str, Any], preset: str) -> Config:
    """The preset with what was written instead."""
    check_choice("preset", preset, tuple(PRESETS))
    return Config(**{**PRESETS[preset], **given})


# The inner loop that adapts a net, for each number of steps it is to take.
Adapter = Callable[[int], il.InnerLoop]


class Comparison(Experiment):
    """Updates of the one net, then of the other, then both on unseen sines."""

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
        optimizer.zero_grad()
        loss.backward()
        self.ranks.sum_gradients([p for group in optimizer.param_groups for p in group["params"]])
        optimizer.step()
        return self.ranks.summed(loss.detach()).item()

    def state_dict(self) -> dict[str, Any]:
        return {
            "inner": self.inner.state_dict(),
            "meta": self.meta.state_dict(),
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "running": self.running,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("inner", "meta", "net", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.generator.set_state(state["generator"])
        self.running = state["running"]

    def unseen(self, first: int, count: int) -> Sines:
        """Sines that are in no training, judged on a grid."""
        grid = torch.linspace(LOW, HIGH, 100, dtype=torch.float32).unsqueeze(1)
        generator = torch.Generator().manual_seed(self.config.seed + first)
        return draw_sines(generator, count, query=grid)

    def adapters(self) -> tuple[dict[str, Adapter], dict[int, float]]:
        """How each net adapts, and the best rates of the second."""
        adapter, best = with_best_rates(self.net, self.unseen(CHOICE_SEED, CHOICE_SINES))
        return {MAML: lambda steps: self.inner, PRETRAINED: adapter}, best

    def result(self) -> dict[str, Any]:
        sines = self.unseen(HELD_OUT_SEED, self.config.held_out)
        adapters, best = self.adapters()
        return {
            "mean_squared_error": {n: evaluate(a, sines) for n, a in adapters.items()},
            "learning_rate": {MAML: self.inner.hyper["lr"].item(), PRETRAINED: best},
        }

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        from innerloop.experiments.sine import figures as _sine_figures

        sines = self.unseen(HELD_OUT_SEED, self.config.held_out)
        adapters, _ = self.adapters()
        ready = {n: lambda s, steps, a=a: predict(a, s, steps) for n, a in adapters.items()}
        figure = _sine_figures.draw_fits(ready, _sine_figures.small_middle_large(sines))
        figure.savefig(folder / "fits.png", dpi=130)

    def told(self, result: dict[str, Any]) -> str:
        found, c = result["mean_squared_error"], self.config
        lines = [f"Mean squared error on {c.held_out} unseen sines, ± half the 95 % interval"]
        lines.append(f"{'':18}" + "".join(f"{name:>18}" for name in found))
        for k, steps in enumerate(REPORTED_STEPS):
            cells = [f"{r['mean'][k]:.3f} ± {r['interval'][k]:.3f}" for r in found.values()]
            name = f"after {steps}" if steps else "before adaptation"
            lines.append(f"{name:18}" + "".join(f"{cell:>18}" for cell in cells))
        learned, best = result["learning_rate"].values()
        said = ", ".join(f"{rate:g} (after {steps})" for steps, rate in best.items())
        lines.append(
            f"Learning rates: MAML learned {learned:.4f}, starting from {c.inner_lr:g}. The "
            f"pre-trained net got the best of {len(RATES)} for each number of steps, chosen on "
            f"other sines: {said}."
        )
        return "\n".join(lines)


def learner(config: Config) -> il.InnerLoop:
    """Initial weights, and a rate, from which some steps of SGD are to fit any sine."""
    net = build_net(config.seed)
    return il.InnerLoop(
        net,
        torch.optim.SGD(net.parameters(), lr=config.inner_lr),
        squared_error,
        # By its logarithm: the rate stays positive, and Adam's steps are relative to its size.
        learn={"init": True, "lr": il.Learn(transform="log")},
        backward=il.Remat(),
    )


def predict(adapter: Adapter, sines: Sines, steps: int) -> Tensor:
    """The predictions at the query points after some gradient steps. [tasks, points, 1]"""
    with torch.no_grad():
        # Before the first step all tasks have one model.
        adapted = adapter(steps).adapt([sines.support] * steps, tasks=_WAY if steps else False)
        return adapted(sines.query[0])


def errors(adapter: Adapter, sines: Sines, steps: int) -> Tensor:
    """The mean squared error of each sine after some gradient steps. [tasks]"""
    return (predict(adapter, sines, steps) - sines.query[1]).square().mean(dim=(1, 2)).double()


def with_best_rates(net: nn.Module, sines: Sines) -> tuple[Adapter, dict[int, float]]:
    """Adapt a net, for each number of steps, with the rate that is best on these sines."""
    loops = {
        rate: il.InnerLoop(net, torch.optim.SGD(net.parameters(), lr=rate), squared_error, learn=())
        for rate in RATES
    }
    best = {}
    for steps in filter(None, REPORTED_STEPS):
        found = {rate: _mean(lambda _, r=rate: loops[r], sines, steps) for rate in RATES}
        best[steps] = min(found, key=found.__getitem__)
    return lambda steps: loops[best.get(steps, RATES[0])], best


def _mean(adapter: Adapter, sines: Sines, steps: int) -> float:
    """The mean error, infinite where adaptation diverges."""
    try:
        mean = errors(adapter, sines, steps).mean().item()
    except il.InnerLoopError:
        return math.inf
    return mean if math.isfinite(mean) else math.inf


def evaluate(adapter: Adapter, sines: Sines) -> dict[str, list[float]]:
    """The error for each number of steps, with the half-width of its 95 % interval."""
    error = torch.stack([errors(adapter, sines, steps) for steps in REPORTED_STEPS])
    half_width = 1.96 * error.std(dim=1) / math.sqrt(error.shape[1])
    return {"mean": error.mean(dim=1).tolist(), "interval": half_width.tolist()}


def main(argv: Sequence[str] | None = None) -> int:
    # Such small tensors gain nothing from more threads, and one thread makes sums reproducible.
    torch.set_num_threads(1)
    return command("sine", __doc__, Config, configured, Comparison, argv, _NEXT)


_NEXT = "Next, learn to adapt in five steps: {innerloop} sine --steps 5 --out out/sine-5"


if __name__ == "__main__":
    raise SystemExit(main())
