"""One loss: learned on the tasks of a problem, then compared with the task's own."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

import innerloop as il
from innerloop.errors import DivergedError, InnerLoopError
from innerloop.experiments._learned_loss_problems import PROBLEMS, Tasks
from innerloop.experiments._parts import Part
from innerloop.learned import LearnedLoss

# Apart from each other, and from the training tasks and weights of every seed.
_HELD_OUT, _CHOICE = 1_000_003, 2_000_003
_INITS, _CHOICE_INITS = 5, 2
_SEEDS_APART = 100_000  # weights that one seed may use


def step_numbers(config: Any, step: int) -> list[float]:
    """1 for this step and 0 for the others; steps beyond those learned count as the last."""
    at = min(step, config.steps - 1)
    return [float(k == at) for k in range(config.steps)] if config.read_step else []


class Cell(Part):
    """Meta-updates, then one unit for each rate of the task's loss, then the comparison."""

    def __init__(self, config: Any, name: str, seed: int) -> None:
        self.config, self.name, self.seed = config, name, seed
        self.problem = PROBLEMS[name]
        self.rate = self.problem.rate if config.inner_lr is None else config.inner_lr
        self.reads_input = config.read_input and name == "sines"
        self.criterion = self._criterion()
        self.inner = self._loop(self.problem.build(0), self.rate, self.criterion)
        self.meta = torch.optim.Adam(self.inner.parameters(), lr=config.meta_lr)
        self.generator = torch.Generator().manual_seed(seed)
        self.skipped = 0
        """Updates left out, as training or its gradient was not finite."""
        self.tuned: dict[str, list[float]] = {}
        """Errors of the task's loss at steps and horizon, by rate."""

    @staticmethod
    def units(config: Any, name: str) -> int:
        return config.iterations + len(PROBLEMS[name].rates) + 1

    def _criterion(self) -> LearnedLoss:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            extras = len(step_numbers(self.config, 0)) + int(self.reads_input)
            return LearnedLoss(
                self.problem.targets, form=self.config.form, extras=extras, dtype=torch.float32
            )

    def _loop(self, net: nn.Module, rate: float, loss: Any) -> il.InnerLoop:
        sgd = torch.optim.SGD(net.parameters(), lr=rate, momentum=self.config.momentum)
        judge = self.problem.task_loss
        return il.InnerLoop(net, sgd, loss, learn=(), val_loss=judge, tasks=il.tasks.vmap())

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "criterion": self.criterion.state_dict(),
            "meta": self.meta.state_dict(),
            "generator": self.generator.get_state(),
            "skipped": self.skipped,
            "tuned": self.tuned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.criterion.load_state_dict(state["criterion"])
        self.meta.load_state_dict(state["meta"])
        self.generator.set_state(state["generator"])
        self.skipped, self.tuned = state["skipped"], state["tuned"]

    def kept(self) -> dict[str, Any]:
        return copy.deepcopy(self.criterion.state_dict())

    # --- work ---------------------------------------------------------------------------------

    def advance(self, unit: int, records: list[dict[str, Any]]) -> dict[str, str]:
        place, rates = unit - self.config.iterations, self.problem.rates
        if place < 0:
            shown = {"loss": f"{self._update(unit):.3f}"}
        elif place < len(rates):
            self.tuned[str(rates[place])] = self._tune(rates[place])
            shown = {"rate": f"{rates[place]:g}"}
        else:
            records.append(self._compare())
            shown = {"steps needed": str(records[-1]["steps_needed"]["same"])}
        return {"problem": self.name, "seed": str(self.seed)} | shown

    def _update(self, number: int) -> float:
        c = self.config
        weights = self.problem.build(self.seed * _SEEDS_APART + number + 1)
        self.inner.model.load_state_dict(weights.state_dict())
        self.meta.param_groups[0]["lr"] = (
            c.meta_lr * (1 + math.cos(math.pi * number / c.iterations)) / 2
        )
        tasks = self.problem.draw(self.generator, c.tasks, False)
        train = [self.batch(tasks.support, step) for step in range(c.steps)]
        self.meta.zero_grad()
        try:
            loss = self.inner(train, tasks.query, tasks=True).mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.criterion.parameters(), c.clip)
        except DivergedError:
            loss = norm = torch.tensor(math.nan)
        if norm.isfinite():
            self.meta.step()
        else:
            self.skipped += 1
        return loss.item()

    def batch(self, examples: tuple[Tensor, Tensor], step: int) -> tuple[Any, ...]:
        """The examples with the extras of a step."""
        x, y = examples
        told = step_numbers(self.config, step)
        return x, y, *told, *([x] if self.reads_input else [])

    def _tune(self, rate: float) -> list[float]:
        """Each number of steps by itself: a rate may do for few and diverge later."""
        numbers = (self.config.steps, self.config.horizon)
        loss = self.problem.task_loss
        return [self._errors(loss, rate, _CHOICE, _CHOICE_INITS, n)[-1] for n in numbers]

    def _errors(self, loss: Any, rate: float, first: int, inits: int, steps: int) -> list[float]:
        """As below; infinite if training diverges."""
        try:
            found = self.errors(loss, rate, first, inits, steps)
        except DivergedError:
            found = [math.inf]
        return found if all(map(math.isfinite, found)) else [math.inf] * (steps + 1)

    def errors(self, loss: Any, rate: float, first: int, inits: int, steps: int) -> list[float]:
        """The error after 0, 1, … steps, in the mean over tasks and initial weights."""
        generator = torch.Generator().manual_seed(first + self.seed)
        each = []
        for k in range(inits):
            net = self.problem.build(first + self.seed * _SEEDS_APART + k)
            tasks = self.problem.draw(generator, self.config.held_out, first == _HELD_OUT)
            each.append(self._watched(net, loss, rate, tasks, steps))
        return torch.stack(each).mean(0).tolist()

    def _watched(self, net: nn.Module, loss: Any, rate: float, tasks: Tasks, steps: int) -> Tensor:
        """[steps + 1]"""
        error = self.problem.error

        def watched(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            return loss(model, batch[0]), error(model, batch[1]).detach()

        # Seen before each step, and one more step for the last.
        train = [(self.batch(tasks.support, step), tasks.query) for step in range(steps + 1)]
        with torch.no_grad():
            seen = self._loop(net, rate, watched).adapt(train, tasks=True).aux
        return seen.mean(0)

    def _compare(self) -> dict[str, Any]:
        c = self.config
        own = self.problem.task_loss
        learned = self._errors(self.criterion, self.rate, _HELD_OUT, _INITS, c.horizon)
        same = self._errors(own, self.rate, _HELD_OUT, _INITS, c.horizon)
        short_rate, short = self._best(0, c.steps)
        rate, task = self._best(1, c.horizon)
        return {
            "problem": self.name,
            "seed": self.seed,
            "skipped": self.skipped,
            "learned": [_in_json(error) for error in learned],
            "same": [_in_json(error) for error in same],
            "task": task,
            "task_short": short[-1],
            "rate": rate,
            "rate_short": short_rate,
            "tuned": {r: [_in_json(e) for e in errors] for r, errors in self.tuned.items()},
            "steps_needed": {
                "same": _needed(learned, same[-1]),
                "task": _needed(learned, task[-1]),
            },
        }

    def _best(self, place: int, steps: int) -> tuple[float, list[float]]:
        """The best rate on other tasks that does not diverge on the held-out ones either."""
        for rate in sorted(self.tuned, key=lambda r: self.tuned[r][place]):
            own = self.problem.task_loss
            found = self._errors(own, float(rate), _HELD_OUT, _INITS, steps)
            if math.isfinite(found[-1]):
                return float(rate), found
        raise InnerLoopError(f"The task's loss diverged on {self.name} with every rate.")


def _needed(learned: list[float], error: float) -> int | None:
    """Steps of the learned loss to this error."""
    return next((k for k, found in enumerate(learned) if found <= error < math.inf), None)


def _in_json(error: float) -> float | None:
    return error if math.isfinite(error) else None
