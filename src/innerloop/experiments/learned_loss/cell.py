"""One loss: learned on the tasks of a problem, then compared with the task's own."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import innerloop as il
from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.parts import Part
from innerloop.experiments.learned_loss.problem import Measure, Tasks
from innerloop.experiments.learned_loss.settings import Config
from innerloop.learned import LearnedLoss

# Apart from each other, and from the training tasks and weights of every seed.
_HELD_OUT, _CHOICE = 1_000_000_003, 2_000_000_003
_FLOOR = 0.05  # below this a loss counts as none: its logarithm would be all that is learned
# Torch reads 32 bits of it: each of 1000 seeds may use 636,928 initial weights.
_SEEDS_APART = 10_000_000_000


class _Displaced(nn.Module):
    """A net whose weights are those it is handed with its input, plus its own, which begin at 0.

    Tasks that are run together share what a net begins with. So each has its own initial weights.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        with torch.no_grad():
            for weight in net.parameters():
                weight.zero_()

    def forward(self, given: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        x, start = given
        moved = {name: start[name] + weight for name, weight in self.net.named_parameters()}
        return functional_call(self.net, moved, (x,))


class Measured(nn.Module):
    """A loss on the first part of a batch, with a measure of the net on the second."""

    def __init__(self, loss: Any, measure: Measure) -> None:
        super().__init__()
        self.loss, self.measure = loss, measure

    def forward(self, model: nn.Module, batch: tuple[Any, tuple[Tensor, Tensor]]) -> Any:
        loss = self.loss(model, batch[0])
        # A net whose loss is not finite has no finite error either, not even a count. The loss
        # itself is made finite: what was measured before is needed, and a NaN would end the run.
        seen = self.measure(model, batch[1]) + 0 * loss.detach()
        return loss.nan_to_num(), seen


class Cell(Part):
    """Meta-updates, then one unit for each rate of the task's loss, then the comparison."""

    saved = ("criterion", "before", "meta", "generator", "skipped", "tuned")

    def __init__(self, config: Config, name: str, seed: int) -> None:
        self.config, self.name, self.seed = config, name, seed
        self.problem = config.of(name)
        self.read = self.problem.read if config.read_input else None
        self.criterion = self._criterion()
        measured = Measured(self.criterion, self.problem.task_loss)
        self.inner = self._loop(measured, self.problem.rate, self.problem.clip)
        self.meta = torch.optim.Adam(self.inner.parameters(), lr=self.problem.meta_rate)
        self.generator = torch.Generator().manual_seed(seed)
        self.skipped = 0
        """Updates left out, as training or its gradient was not finite."""
        self.before = self.outcome()
        """The loss before its last update, which is undone if nets diverge after it."""
        self.tuned: list[list[float]] = []
        """Errors of the task's loss after steps and horizon, for each of the problem's settings."""

    def _criterion(self) -> LearnedLoss:
        c = self.config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return LearnedLoss(
                self.problem.targets,
                form=c.form,
                extras=0 if self.read is None else len(self.read(torch.zeros(1))),
                moments=0 if self.read is None else c.moments,
                centered=c.centered and self.problem.targets == "classes",
                steps=c.steps if c.read_step else 0,
                dtype=torch.float32,
            )

    def _loop(self, loss: Measured, rate: float, clip: float) -> il.InnerLoop:
        net = _Displaced(self.problem.build(0))
        sgd = torch.optim.SGD(net.parameters(), lr=rate, momentum=self.config.momentum)
        # Without it a loss that is learned soon tears some net apart, and no gradient is left.
        clipped = il.clip_norm(clip)
        return il.InnerLoop(net, sgd, loss, learn=(), grad_transform=clipped, tasks=il.tasks.vmap())

    def outcome(self) -> dict[str, Any]:
        return copy.deepcopy(self.criterion.state_dict())

    # --- work ---------------------------------------------------------------------------------

    def advance(self, unit: int, records: list[dict[str, Any]]) -> dict[str, str]:
        settings = self.problem.settings
        place = unit - self.problem.iterations
        if place < 0:
            shown = {"loss": f"{self._update(unit):.3f}"}
        elif place < len(settings):
            rate, clip = settings[place]
            found = self._errors(self.problem.task_loss, rate, clip, _CHOICE)
            self.tuned.append([found[self.config.steps], found[self.config.horizon]])
            shown = {"rate": f"{rate:g}", "clip": f"{clip:g}"}
        else:
            records.append(self._compare())
            shown = {"steps needed": str(records[-1]["steps_needed"])}
        return {"problem": self.name, "seed": str(self.seed)} | shown

    def _update(self, number: int) -> float:
        c, problem = self.config, self.problem
        cosine = 1 + math.cos(math.pi * number / problem.iterations)
        self.meta.param_groups[0]["lr"] = problem.meta_rate * cosine / 2
        tasks = self._draw_tasks(self.generator, c.tasks, number * c.tasks + 1)
        self.meta.zero_grad()
        # Measured over the later half of the steps: the last alone says little about the first. By
        # the logarithm, so that a few tasks with large losses are not all that counts.
        late = self._measure(self.inner, tasks, c.steps)[:, c.steps // 2 + 1 :].mean(1)
        loss = (late + _FLOOR).log().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.criterion.parameters(), problem.meta_clip)
        # A loss that overflows has no gradient, which is finite.
        if loss.isfinite() and norm.isfinite():
            self.before = self.outcome()
            self.meta.step()
        else:
            self.criterion.load_state_dict(self.before)
            self.skipped += 1
        return late.mean().item()

    def _draw_tasks(self, generator: torch.Generator, count: int, first: int) -> Tasks:
        """Tasks whose inputs come with initial weights, of the seeds from ``first`` on."""
        support, query = self.problem.draw(generator, count, first == _HELD_OUT)
        nets = [self.problem.build(self.seed * _SEEDS_APART + first + k) for k in range(count)]
        start, _ = torch.func.stack_module_state(nets)
        start = {name: weight.detach() for name, weight in start.items()}
        return Tasks(((support[0], start), support[1]), ((query[0], start), query[1]))

    def _measure(self, inner: il.InnerLoop, tasks: Tasks, steps: int) -> Tensor:
        """Measurements after 0, 1, … steps. [tasks, steps + 1]"""
        # It is measured before each step, so one more step for the last.
        train = [(self._batch(tasks.support, step), tasks.query) for step in range(steps + 1)]
        return inner.adapt(train, tasks=True).aux

    def _batch(self, examples: tuple[Any, Tensor], step: int) -> tuple[Any, ...]:
        """The examples with what the learned loss reads in a step."""
        x, y = examples
        extras = () if self.read is None else self.read(x[0])
        return (x, y, *extras, step) if self.config.read_step else (x, y, *extras)

    def _errors(self, loss: Any, rate: float, clip: float, first: int) -> list[float]:
        """The error after 0, 1, … steps, in the mean over tasks and their initial weights.

        Infinite from the step on at which any net diverges.
        """
        generator = torch.Generator().manual_seed(first + self.seed)
        tasks = self._draw_tasks(generator, self.config.held_out, first)
        inner = self._loop(Measured(loss, self.problem.error), rate, clip)
        with torch.no_grad():
            seen = self._measure(inner, tasks, self.config.horizon).mean(0)
        return seen.nan_to_num(math.inf, math.inf).tolist()

    def _compare(self) -> dict[str, Any]:
        c = self.config
        learned = self._errors(self.criterion, self.problem.rate, self.problem.clip, _HELD_OUT)
        short_setting, short = self._best(0, c.steps)
        setting, task = self._best(1, c.horizon)
        tuned = zip(self.problem.settings, self.tuned, strict=True)
        return {
            "problem": self.name,
            "seed": self.seed,
            "skipped": self.skipped,
            "learned": [_in_json(error) for error in learned],
            "task": task,
            "task_short": short[c.steps],
            "setting": setting,
            "setting_short": short_setting,
            "tuned": [[*pair, *map(_in_json, errors)] for pair, errors in tuned],
            "steps_needed": _steps_to(learned, task[c.horizon]),
            "steps_needed_short": _steps_to(learned, short[c.steps]),
        }

    def _best(self, place: int, steps: int) -> tuple[tuple[float, float], list[float]]:
        """The best rate and clip on other tasks that do not diverge on the held-out ones either."""
        found = zip(self.problem.settings, self.tuned, strict=True)
        for setting, _ in sorted(found, key=lambda pair: pair[1][place]):
            errors = self._errors(self.problem.task_loss, *setting, _HELD_OUT)
            if math.isfinite(errors[steps]):
                return setting, errors
        raise InnerLoopError(f"The task's loss diverged on {self.name} with every rate.")


def _steps_to(learned: list[float], error: float) -> int | None:
    """Steps of the learned loss to this error."""
    return next((k for k, found in enumerate(learned) if found <= error), None)


def _in_json(error: float) -> float | None:
    return error if math.isfinite(error) else None
