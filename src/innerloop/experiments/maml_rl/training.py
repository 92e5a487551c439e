"""Policies of all seeds, and their returns on held-out tasks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import innerloop as il
from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.parts import Part, Parts
from innerloop.experiments.maml_rl import figures
from innerloop.experiments.maml_rl.problem import WORLDS
from innerloop.experiments.maml_rl.settings import TEST_SEED, Config
from innerloop.policies import expected_return

_LARGEST = 10.0  # norm of the meta-gradient: an unlucky estimate shall not undo many others


def halved_later(step: int) -> float:
    """The first step is taken at the full rate, those after it at half of it, as MAML does."""
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
            schedule=halved_later,
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
            records.append(self._record())
        return {"seed": str(self.seed), f"after {c.steps} steps": f"{self.earned[-1]:.2f}"}

    def _record(self) -> dict[str, Any]:
        returns = self.returns()
        spread = returns.std(1) / math.sqrt(returns.shape[1])
        return {
            "seed": self.seed,
            "returns": returns.mean(1).tolist(),
            "intervals": (1.96 * spread).tolist(),
            "better": (returns[1] > returns[0]).double().mean().item(),
            "rates": self.inner.hyper["lr"].tolist(),
        }

    def update(self) -> float:
        """One outer step on a meta-batch; the loss before it."""
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
            adapted = self.policies(train[:steps], c.test_tasks)
            own = [self.world.sample(p, _of(val, t)) for t, p in enumerate(adapted)]
            rows.append(torch.stack([found.rewards.sum(-1).mean() for found in own]))
        return torch.stack(rows).double()

    def outcome(self) -> dict[str, Any]:
        return self.state_dict()


def _of(batch: tuple[Tensor, ...], task: int) -> tuple[Tensor, ...]:
    return tuple(part[task] for part in batch)


class Training(Parts):
    """All seeds, one after another."""

    def __init__(self, config: Config) -> None:
        self.config = config
        super().__init__([config.iterations] * config.seeds)

    def make(self, number: int) -> Learner:
        return Learner(self.config, self.config.seed + number)

    @property
    def curves(self) -> list[list[float]]:
        """For each seed, the return after adaptation at every update."""
        return [outcome["earned"] for outcome in self.outcomes]

    @property
    def learner(self) -> Learner:
        """The last one, as it ended."""
        learner = self.make(self.config.seeds - 1)
        learner.load_state_dict(self.outcomes[-1])
        return learner

    def result(self) -> dict[str, Any]:
        keys = ("seed", "returns", "intervals", "better")
        each = [{name: record[name] for name in keys} for record in self.records]
        table = torch.tensor([record["returns"] for record in each], dtype=torch.float64)
        return {
            "world": self.config.world,
            "seeds": each,
            "mean": table.mean(0).tolist(),
            "improved_in_every_seed": bool((table[:, 1] > table[:, 0]).all()),
        }

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        figures.draw(self, folder, result)

    def describe(self, result: dict[str, Any]) -> str:
        c = self.config
        steps = [f"{s} step{'s' * (s > 1)}" for s in range(1, figures.MEASURED + 1)]
        lines = [_line("seed", ["before", *steps])]
        for one in result["seeds"]:
            pairs = zip(one["returns"], one["intervals"], strict=True)
            lines.append(_line(one["seed"], [f"{r:.2f} ± {i:.2f}" for r, i in pairs]))
        lines.append(_line("mean", [f"{r:.2f}" for r in result["mean"]]))
        every = "in every seed" if result["improved_in_every_seed"] else "NOT in every seed"
        return (
            f"{c.world}: return on {c.test_tasks} held-out tasks for each seed, ± half the 95 % "
            f"interval over tasks\n" + "\n".join(lines) + "\n"
            f"After one step it is higher than before {every}. {c.seeds} x {c.iterations} updates "
            f"in {result['seconds']:.0f} s."
        )


def _line(first: object, cells: list[str]) -> str:
    return f"{first!s:>6}" + "".join(f"{cell:>16}" for cell in cells)
