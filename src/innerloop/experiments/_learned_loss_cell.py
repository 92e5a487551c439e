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
from innerloop.experiments._learned_loss_problems import PROBLEMS, Measure, Tasks
from innerloop.experiments._parts import Part
from innerloop.learned import LearnedLoss

# Apart from each other, and from the training tasks and weights of every seed.
_HELD_OUT, _CHOICE = 1_000_000_003, 2_000_000_003
_PLACES = 5.0  # the weight of x at the start: its places are to be told apart beside the steps
_SEEDS_APART = 10_000_000_000  # initial weights that one seed may use


def step_numbers(config: Any, step: int) -> list[float]:
    """1 for this step and 0 for the others; steps beyond those learned count as the last."""
    at = min(step, config.steps - 1)
    return [float(k == at) for k in range(config.steps)] if config.read_step else []


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


class _Watched(nn.Module):
    """A loss on the first part of a batch, which also says how the net does on the second."""

    def __init__(self, loss: Any, measure: Measure) -> None:
        super().__init__()
        self.loss, self.measure = loss, measure

    def forward(self, model: nn.Module, batch: tuple[Any, tuple[Tensor, Tensor]]) -> Any:
        loss = self.loss(model, batch[0])
        # A net whose loss is not finite has no finite error either, not even a count. The loss
        # itself is made finite: what was seen before is wanted, and a NaN would end the run.
        seen = self.measure(model, batch[1]) + 0 * loss.detach()
        return loss.nan_to_num(), seen


class Cell(Part):
    """Meta-updates, then one unit for each rate of the task's loss, then the comparison."""

    def __init__(self, config: Any, name: str, seed: int) -> None:
        self.config, self.name, self.seed = config, name, seed
        self.problem = PROBLEMS[name]
        self.rate = self.problem.rate if config.inner_lr is None else config.inner_lr
        self.clip = self.problem.clip if config.inner_clip is None else config.inner_clip
        self.meta_rate = self.problem.meta_rate if config.meta_lr is None else config.meta_lr
        self.reads_input = config.read_input and name == "sines"
        self.criterion = self._criterion()
        watched = _Watched(self.criterion, self.problem.task_loss)
        self.inner = self._loop(self.rate, watched)
        self.meta = torch.optim.Adam(self.inner.parameters(), lr=self.meta_rate)
        self.generator = torch.Generator().manual_seed(seed)
        self.skipped = 0
        """Updates left out, as training or its gradient was not finite."""
        self.before = self.kept()
        """The loss before its last update, which is undone if nets diverge after it."""
        self.tuned: dict[str, list[float]] = {}
        """Errors of the task's loss at steps and horizon, by rate."""

    @staticmethod
    def units(config: Any, name: str) -> int:
        return config.iterations + len(PROBLEMS[name].rates) + 1

    def _criterion(self) -> LearnedLoss:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            criterion = LearnedLoss(
                self.problem.targets,
                form=self.config.form,
                extras=len(step_numbers(self.config, 0)) + int(self.reads_input),
                moments=self.config.moments if self.reads_input else 0,
                dtype=torch.float32,
            )
        if criterion.moments is not None:
            first = criterion.moments[0]
            assert isinstance(first, nn.Linear)
            with torch.no_grad():
                first.weight[:, -1] *= _PLACES
        return criterion

    def _loop(self, rate: float, loss: _Watched) -> il.InnerLoop:
        net = _Displaced(self.problem.build(0))
        sgd = torch.optim.SGD(net.parameters(), lr=rate, momentum=self.config.momentum)
        # Without it a loss that is learned soon tears some net apart, and no gradient is left.
        clipped = il.clip_norm(self.clip)
        return il.InnerLoop(net, sgd, loss, learn=(), grad_transform=clipped, tasks=il.tasks.vmap())

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "criterion": self.criterion.state_dict(),
            "before": self.before,
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
        self.before = state["before"]

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
            shown = {"steps needed": str(records[-1]["steps_needed"])}
        return {"problem": self.name, "seed": str(self.seed)} | shown

    def _update(self, number: int) -> float:
        c = self.config
        self.meta.param_groups[0]["lr"] = (
            self.meta_rate * (1 + math.cos(math.pi * number / c.iterations)) / 2
        )
        tasks = self._begun(self.generator, c.tasks, number * c.tasks + 1)
        self.meta.zero_grad()
        # Judged over the later half of the steps: the last alone says little about the first.
        loss = self._seen(self.inner, tasks, c.steps)[:, c.steps // 2 + 1 :].mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.criterion.parameters(), c.clip)
        # A loss that overflows has no gradient, which is finite.
        if loss.isfinite() and norm.isfinite():
            self.before = self.kept()
            self.meta.step()
        else:
            self.criterion.load_state_dict(self.before)
            self.skipped += 1
        return loss.item()

    def _begun(self, generator: torch.Generator, count: int, first: int) -> Tasks:
        """Tasks whose inputs come with initial weights, of the seeds from ``first`` on."""
        support, query = self.problem.draw(generator, count, first == _HELD_OUT)
        nets = [self.problem.build(self.seed * _SEEDS_APART + first + k) for k in range(count)]
        start, _ = torch.func.stack_module_state(nets)
        start = {name: weight.detach() for name, weight in start.items()}
        return Tasks(((support[0], start), support[1]), ((query[0], start), query[1]))

    def _seen(self, inner: il.InnerLoop, tasks: Tasks, steps: int) -> Tensor:
        """What was measured after 0, 1, … steps. [tasks, steps + 1]"""
        # It is measured before each step, so one more step for the last.
        train = [(self._batch(tasks.support, step), tasks.query) for step in range(steps + 1)]
        return inner.adapt(train, tasks=True).aux

    def _batch(self, examples: tuple[Any, Tensor], step: int) -> tuple[Any, ...]:
        """The examples with the extras of a step."""
        x, y = examples
        told = step_numbers(self.config, step)
        return x, y, *told, *([x[0]] if self.reads_input else [])

    def _tune(self, rate: float) -> list[float]:
        found = self._errors(self.problem.task_loss, rate, _CHOICE)
        return [found[self.config.steps], found[self.config.horizon]]

    def _errors(self, loss: Any, rate: float, first: int) -> list[float]:
        """The error after 0, 1, … steps, in the mean over tasks and their initial weights.

        Infinite from the step on at which any net diverges.
        """
        generator = torch.Generator().manual_seed(first + self.seed)
        tasks = self._begun(generator, self.config.held_out, first)
        inner = self._loop(rate, _Watched(loss, self.problem.error))
        with torch.no_grad():
            seen = self._seen(inner, tasks, self.config.horizon).mean(0)
        return seen.nan_to_num(math.inf, math.inf).tolist()

    def _compare(self) -> dict[str, Any]:
        c = self.config
        learned = self._errors(self.criterion, self.rate, _HELD_OUT)
        rate_short, short = self._best(0, c.steps)
        rate, task = self._best(1, c.horizon)
        return {
            "problem": self.name,
            "seed": self.seed,
            "skipped": self.skipped,
            "learned": [_in_json(error) for error in learned],
            "task": task,
            "task_short": short[c.steps],
            "rate": rate,
            "rate_short": rate_short,
            "tuned": {r: [_in_json(e) for e in errors] for r, errors in self.tuned.items()},
            "steps_needed": _needed(learned, task[c.horizon]),
        }

    def _best(self, place: int, steps: int) -> tuple[float, list[float]]:
        """The best rate on other tasks that does not diverge on the held-out ones either."""
        for rate in sorted(self.tuned, key=lambda r: self.tuned[r][place]):
            own = self.problem.task_loss
            found = self._errors(own, float(rate), _HELD_OUT)
            if math.isfinite(found[steps]):
                return float(rate), found
        raise InnerLoopError(f"The task's loss diverged on {self.name} with every rate.")


def _needed(learned: list[float], error: float) -> int | None:
    """Steps of the learned loss to this error."""
    return next((k for k, found in enumerate(learned) if found <= error), None)


def _in_json(error: float) -> float | None:
    return error if math.isfinite(error) else None
