"""Policies of all seeds, and their returns on held-out tasks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import innerloop as il
from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.figures import save
from innerloop.experiments.framework.parts import Part, Parts
from innerloop.experiments.framework.tables import plus_minus, table
from innerloop.experiments.maml_rl import figures
from innerloop.experiments.maml_rl.problem import WORLDS
from innerloop.experiments.maml_rl.settings import TEST_SEED, Config
from innerloop.policies import Episodes, expected_return

_LARGEST = 10.0  # norm of the meta-gradient: an unlucky estimate shall not undo many others


def halve_later_rates(step: int) -> float:
    """Factor of the rate: 1 for the first step and 1/2 for those after it, as in MAML."""
    return 1.0 if step == 0 else 0.5


class Learner(Part):
    """A policy in a family of worlds, the inner loop that adapts it, the meta-optimizer."""

    saved = ("inner", "meta_optimizer", "generator", "earned")

    def __init__(self, config: Config, seed: int) -> None:
        self.config, self.seed = config, seed
        self.world = WORLDS[config.world](config.horizon)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy = self.world.policy(config.hidden).to(torch.float32)
        # By their logarithm: rates stay positive, and change by factors.
        rates = il.Learn(per="parameter", transform="log")
        self.inner = il.InnerLoop(
            self.policy,
            torch.optim.SGD(self.policy.parameters(), lr=config.inner_lr),
            self.loss,
            learn={"init": True, "lr": rates},
            schedule=halve_later_rates,
            tasks=self.world.task_strategy(),
        )
        self.meta_optimizer = torch.optim.Adam(self.inner.parameters(), lr=config.meta_lr)
        self.generator = torch.Generator().manual_seed(seed)
        self.earned: list[float] = []
        """After adaptation, at every update."""

    def loss(self, policy: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Minus the surrogate of episodes sampled with these weights; and their mean return."""
        c = self.config
        found = self.world.sample(policy, batch)
        scaled = found._replace(rewards=self.world.scale * found.rewards)
        value = expected_return(policy, scaled, discount=c.discount, decay=c.decay)
        return -value, found.rewards.sum(-1).mean()

    def batches(
        self, tasks: Tensor, count: int, generator: torch.Generator, episodes: int | None = None
    ) -> list[tuple[Tensor, ...]]:
        """The randomness of that many samples of episodes in each task."""
        number = episodes or self.config.episodes
        return [self.world.batch(self.policy, tasks, number, generator) for _ in range(count)]

    def advance(self, unit: int, records: list[dict[str, Any]]) -> dict[str, str]:
        c, loss = self.config, self.update()
        if not math.isfinite(loss):
            raise InnerLoopError(
                f"The loss of seed {self.seed} is {loss}: training diverged. Try a smaller "
                f"--inner-lr or --meta-lr than {c.inner_lr} and {c.meta_lr}."
            )
        self.earned.append(-loss / self.world.scale)
        if unit + 1 == c.iterations:
            returns = self.returns()
            spread = returns.std(1) / math.sqrt(returns.shape[1])
            found = {"seed": self.seed, "returns": returns.mean(1).tolist()}
            found["intervals"] = (1.96 * spread).tolist()
            found["better"] = (returns[1] > returns[0]).double().mean().item()
            records.append(found | {"rates": self.inner.hyper["lr"].tolist()})
        return {"seed": str(self.seed), f"after {c.steps} steps": f"{self.earned[-1]:.2f}"}

    def update(self) -> float:
        """One outer step on a meta-batch; returns the loss before it."""
        tasks = self.world.tasks(self.config.tasks, self.generator)
        *train, val = self.batches(tasks, self.config.steps + 1, self.generator)
        self.meta_optimizer.zero_grad()
        loss = self.inner(train, val, tasks=True).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.inner.parameters(), _LARGEST)
        self.meta_optimizer.step()
        return loss.item()

    @torch.no_grad()
    def policies(self, train: list[tuple[Tensor, ...]], count: int) -> list[nn.Module]:
        """The policy of each task, after one step for each batch."""
        if not train:
            return [self.policy] * count
        return [one.module for one in self.inner.adapt(train, tasks=True).each]

    def returns(self) -> Tensor:
        """On held-out tasks, before adaptation and after each of its steps. [steps + 1, tasks]"""
        c, made = self.config, torch.Generator().manual_seed(self.seed + TEST_SEED)
        tasks = self.world.tasks(c.test_tasks, made)
        train = self.batches(tasks, figures.MEASURED, made)
        rows = []
        for steps in range(figures.MEASURED + 1):
            (val,) = self.batches(tasks, 1, made, c.test_episodes)
            policies = self.policies(train[:steps], c.test_tasks)
            found = self.sample(policies, val)
            rows.append(torch.stack([episodes.rewards.sum(-1).mean() for episodes in found]))
        return torch.stack(rows).double()

    def sample(self, policies: list[nn.Module], batch: tuple[Tensor, ...]) -> list[Episodes]:
        """The episodes of each task with its own policy."""
        each = zip(*batch, strict=True)
        return [self.world.sample(p, own) for p, own in zip(policies, each, strict=True)]

    def outcome(self) -> dict[str, Any]:
        return self.state_dict()


class Training(Parts):
    """All seeds, one after another."""

    def __init__(self, config: Config) -> None:
        self.config = config
        super().__init__([config.iterations] * config.seeds)

    def make(self, number: int) -> Learner:
        return Learner(self.config, self.config.seed + number)

    def result(self) -> dict[str, Any]:
        keys = ("seed", "returns", "intervals", "better")
        each = [{name: record[name] for name in keys} for record in self.records]
        returns = torch.tensor([record["returns"] for record in each], dtype=torch.float64)
        return {
            "world": self.config.world,
            "seeds": each,
            "mean": returns.mean(0).tolist(),
            "improved_in_every_seed": bool((returns[:, 1] > returns[:, 0]).all()),
        }

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        save(figures.draw_returns(result), folder / "returns.png")
        curves = [outcome["earned"] for outcome in self.outcomes]
        save(figures.draw_curves(curves, self.config.seed), folder / "training.png")
        learner = self.make(self.config.seeds - 1)
        learner.load_state_dict(self.outcomes[-1])
        save(figures.draw_episodes(learner), folder / "episodes.png")

    def describe(self, result: dict[str, Any]) -> str:
        c = self.config
        steps = [f"{s} step{'s' * (s > 1)}" for s in range(1, figures.MEASURED + 1)]
        rows = [["seed", "before", *steps]]
        for one in result["seeds"]:
            cells = zip(one["returns"], one["intervals"], strict=True)
            rows.append([str(one["seed"]), *(plus_minus(*cell, digits=2) for cell in cells)])
        rows.append(["mean", *(f"{mean:.2f}" for mean in result["mean"])])
        every = "in every seed" if result["improved_in_every_seed"] else "NOT in every seed"
        return (
            f"{c.world}: return on {c.test_tasks} held-out tasks for each seed, ± half the 95 % "
            f"interval over tasks\n{table(rows)}\n"
            f"After one step it is higher than before {every}. {c.seeds} x {c.iterations} updates "
            f"in {result['seconds']:.0f} s."
        )
