"""A loss that is learned, so that a net trained with it is good after few steps (ML³).

``innerloop learned-loss`` learns one on sines and one on handwritten digits. Every task starts from
random weights. Then nets are trained on held-out tasks by SGD with clipped gradients: with the
learned loss, and with the task's own (squared error, cross-entropy) at the best of ten pairs of
learning rate and clip, chosen on other tasks: a constant factor could do no more. It tells how many
steps the learned loss needs for what the task's own reaches. Neither has momentum by default, which
does much for the task's own loss: compare --momentum 0.9.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from innerloop.experiments.framework.command_line import check_choice, check_seed, refuse
from innerloop.experiments.framework.experiment import command
from innerloop.experiments.framework.parts import Parts
from innerloop.experiments.learned_loss.cell import Cell
from innerloop.experiments.learned_loss.problem import PROBLEMS
from innerloop.learned.losses import FORMS

_BOTH = "both"


def _each(said: str, field: str) -> str:
    """With what it is for each problem."""
    values = (f"{name}: {getattr(problem, field):g}" for name, problem in PROBLEMS.items())
    return f"{said} ({', '.join(values)})"


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run; each is also a flag."""

    problem: Annotated[str, f"one of {', '.join(PROBLEMS)}, {_BOTH}"] = _BOTH
    seeds: Annotated[int, "how often all is repeated"] = 3
    iterations: Annotated[int | None, _each("meta-updates of a loss", "iterations")] = None
    tasks: Annotated[int, "tasks in a meta-update"] = 16
    steps: Annotated[int, "inner steps that a loss is learned for"] = 20
    horizon: Annotated[int, "steps of the task's own loss in the comparison"] = 100
    form: Annotated[str, f"what the network says: {', '.join(FORMS)}"] = "weighted"
    read_step: Annotated[bool, "the learned loss is told which step it is"] = True
    read_input: Annotated[bool, "on sines the learned loss is told x, and waves of x"] = True
    moments: Annotated[int, "on sines, if it is told x: weighted mean errors that it squares"] = 16
    centered: Annotated[bool, "on digits it may leave a part of the mean logits out"] = True
    inner_lr: Annotated[float | None, _each("learning rate of the learned loss", "rate")] = None
    inner_clip: Annotated[float | None, _each("longest gradient with it", "clip")] = None
    momentum: Annotated[float, "of SGD, with either loss"] = 0.0
    meta_lr: Annotated[float | None, _each("rate of the outer Adam at first", "meta_rate")] = None
    clip: Annotated[float | None, _each("longest meta-gradient", "meta_clip")] = None
    held_out: Annotated[int, "held-out tasks, each with initial weights of its own"] = 200
    seed: Annotated[int, "the first seed: the same seed gives the same result"] = 0
    out: Annotated[Path, "folder of the run"] = Path("out/learned-loss")

    def __post_init__(self) -> None:
        check_choice("problem", self.problem, (*PROBLEMS, _BOTH))
        check_choice("form", self.form, FORMS)
        for name in ("seeds", "iterations", "tasks", "steps", "horizon", "held_out"):
            value = getattr(self, name)
            if value is not None and value < 1:
                refuse(name, getattr(self, name), "at least 1")
        if self.moments < 0:
            refuse("moments", self.moments, "at least 0")
        check_seed(self.seed, self.seeds)
        if self.seed > 1000:
            refuse("seed", self.seed, "from 0 to 1000")
        if self.steps > self.horizon:
            refuse("steps", self.steps, f"at most the horizon, {self.horizon}")
        if self.inner_clip is not None and not self.inner_clip > 0:
            refuse("inner_clip", self.inner_clip, "a number above 0, or inf")
        for name in ("inner_lr", "meta_lr", "clip"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                refuse(name, value, "a number above 0")
        if not 0 <= self.momentum < 1:
            refuse("momentum", self.momentum, "at least 0 and below 1")

    @property
    def cells(self) -> list[tuple[str, int]]:
        names = tuple(PROBLEMS) if self.problem == _BOTH else (self.problem,)
        return [(name, self.seed + k) for name in names for k in range(self.seeds)]


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"seeds": 5, "iterations": 2000, "tasks": 16, "held_out": 500},
    "quick": {"seeds": 2},
}


def configured(given: dict[str, Any], preset: str) -> Config:
    """The preset with what was written instead."""
    check_choice("preset", preset, tuple(PRESETS))
    return Config(**{**PRESETS[preset], **given})


class LearningLosses(Parts):
    """A cell for each problem and seed, one after another."""

    def __init__(self, config: Config) -> None:
        self.config = config
        super().__init__([Cell.units(config, name) for name, _ in config.cells])

    def make(self, number: int) -> Cell:
        return Cell(self.config, *self.config.cells[number])

    def result(self) -> dict[str, Any]:
        names = dict.fromkeys(name for name, _ in self.config.cells)
        return {name: self._summary(name) for name in names}

    def _summary(self, name: str) -> dict[str, Any]:
        c = self.config
        found = [r for r in self.records if r["problem"] == name]
        errors = {
            "learned_short": [r["learned"][c.steps] for r in found],
            "learned_long": [r["learned"][c.horizon] for r in found],
            "task_short": [r["task_short"] for r in found],
            "task_long": [r["task"][c.horizon] for r in found],
        }
        return {
            "seeds": [r["seed"] for r in found],
            "steps_needed": [r["steps_needed"] for r in found],
            "steps_needed_short": [r["steps_needed_short"] for r in found],
            "settings": [r["setting"] for r in found],
            "errors": errors,
            "skipped": [r["skipped"] for r in found],
            "mean": {key: _of_all(statistics.fmean, values) for key, values in errors.items()},
            "spread": {key: _of_all(_spread, values) for key, values in errors.items()},
        }

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        from innerloop.experiments.learned_loss import figures as _learned_loss_figures

        _learned_loss_figures.draw(self, folder, result)

    def told(self, result: dict[str, Any]) -> str:
        lines = []
        for name in dict.fromkeys(name for name, _ in self.config.cells):
            lines += self._table(name, result[name])
        return "\n".join(lines)

    def _table(self, name: str, found: dict[str, Any]) -> list[str]:
        c = self.config
        # At its best: with the rate and clip that were the best on other tasks.
        rows = {
            f"learned loss, {c.steps} steps": "learned_short",
            f"task's loss at its best, {c.steps} steps": "task_short",
            f"learned loss, {c.horizon} steps": "learned_long",
            f"task's loss at its best, {c.horizon} steps": "task_long",
        }
        times = "1 seed" if c.seeds == 1 else f"{c.seeds} seeds"
        momentum = f"momentum {c.momentum:g}" if c.momentum else "no momentum"
        measured = f"{PROBLEMS[name].measured} on held-out tasks, SGD, {momentum}, {times}"
        lines = [f"{name}: {measured}"]
        for said, key in rows.items():
            mean, spread = found["mean"][key], found["spread"][key]
            told = "diverged" if mean is None else f"{mean:.4f}"
            if mean is not None and c.seeds > 1:
                told += f" ± {spread:.4f}"
            lines.append(f"  {said:50} {told}")
        for steps, key in ((c.steps, "steps_needed_short"), (c.horizon, "steps_needed")):
            needed = ", ".join(_counted(n, c.horizon) for n in found[key])
            said = f"steps of the learned loss to what the task's loss has after {steps}, by seed"
            lines.append(f"  {said}: {needed}")
        if skipped := sum(found["skipped"]):
            lines.append(f"  {skipped} meta-updates were left out: nets diverged in them")
        return lines


def _of_all(made: Callable[[list[Any]], float], values: list[float | None]) -> float | None:
    """None if any diverged."""
    return None if None in values else made(values)


def _spread(values: list[float]) -> float:
    """Standard deviation over seeds."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _counted(needed: int | None, horizon: int) -> str:
    return f"not within {horizon}" if needed is None else str(needed)


def main(argv: Sequence[str] | None = None) -> int:
    return command("learned-loss", __doc__, Config, configured, LearningLosses, argv, _NEXT)


_NEXT = (
    "Next, see what a loss without hints learns: {innerloop} learned-loss --no-read-step "
    "--no-read-input --out out/plain"
)


if __name__ == "__main__":
    raise SystemExit(main())
