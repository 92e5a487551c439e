"""One method to learn the loss of a rare character's search, on one problem."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli

import innerloop as il
from innerloop import estimate
from innerloop.experiments.estimate import problem as rare
from innerloop.experiments.framework.parts import Part

_TEST_SEED = 1_000_003


class Cell(Part):
    """One method on one problem."""

    saved = ("inner", "meta_optimizer", "generator", "evolved", "f1")

    def __init__(self, config: Any, arm: str, seed: int, problem: rare.Search) -> None:
        self.config, self.arm, self.seed, self.problem = config, arm, seed, problem
        self.f1 = 0.0
        """At the last test."""
        model = nn.Linear(problem.train.features.shape[1], 1, dtype=torch.float32)
        for p in model.parameters():
            nn.init.zeros_(p)
        self.inner = il.InnerLoop(
            model,
            torch.optim.SGD(model.parameters(), lr=config.inner_lr, momentum=0.9),
            rare.WeightedLoss(config.characters),
            learn={"lr": il.Learn(transform="log")},
            val_loss=self._val_loss,
        )
        self.meta_optimizer = torch.optim.Adam(self.inner.parameters(), lr=config.meta_lr)
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)  # for the draws of reinforce
        # The one difference: what stands in the place of the inner loop.
        self.evolved = estimate.evolution(
            self.inner, samples=config.samples, sigma=config.sigma, seed=seed
        )

    def _val_loss(self, model: nn.Module, val: rare.Images) -> Tensor:
        if self.arm == "proxy":
            return rare.cross_entropy(model, val)
        if self.arm == "evolution":
            return rare.f1_loss(model, val)
        law = Bernoulli(logits=rare.logits(model, val))
        return estimate.reinforce(
            law, lambda drawn: 1 - rare.f1(drawn, val.target), samples=self.config.samples
        )

    def advance(self, unit: int, records: list[dict[str, Any]]) -> dict[str, str]:
        c, done = self.config, unit + 1
        if unit == 0:
            records.append(self._record(0))
        loss = self.update()
        if done == c.updates or done % c.every == 0:
            records.append(self._record(done))
        self.f1 = records[-1]["f1"] if records else self.f1
        shown = {"seed": str(self.seed), "by": self.arm, "loss": f"{loss:.3f}"}
        return shown | {"test F1": f"{self.f1:.3f}"}

    def _record(self, update: int) -> dict[str, Any]:
        learned = {
            "lr": self.inner.hyper["lr"].item(),
            "weights": self.inner.loss.log_weights.exp().tolist(),  # type: ignore[union-attr]
        }
        where = {"iteration": update, "arm": self.arm, "seed": self.seed, "update": update}
        return where | self.test() | {"learned": learned}

    def update(self) -> float:
        """One meta-update; the validation loss before it."""
        measured = self.evolved if self.arm == "evolution" else self.inner
        self.meta_optimizer.zero_grad()
        loss = measured(self._batches(self.generator), self.problem.val)
        loss.backward()
        self.meta_optimizer.step()
        return loss.item()

    def _batches(self, generator: torch.Generator) -> list[rare.Images]:
        c = self.config
        return self.problem.train.draw_batches(c.steps, c.batch, generator)

    @torch.no_grad()
    def test(self) -> dict[str, Any]:
        """Mean metrics of some models that are trained with the learned settings."""
        found, test = [], self.problem.test
        for number in range(self.config.trained):
            generator = torch.Generator().manual_seed(_TEST_SEED + number)
            model = self.inner.adapt(self._batches(generator)).module
            predicted = rare.logits(model, test) > 0
            right = (predicted == test.target).float().mean()
            entropy = rare.cross_entropy(model, test)
            found.append(torch.stack([rare.f1(predicted, test.target), entropy, right]))
        f1, entropy, accuracy = torch.stack(found).double().mean(0).tolist()
        return {"f1": f1, "cross_entropy": entropy, "accuracy": accuracy}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"random": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        torch.set_rng_state(state["random"])
