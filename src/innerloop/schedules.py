"""Inner learning-rate schedules: a function of the step, or a scheduler of ``torch.optim``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from innerloop.errors import InnerLoopError, four_part
from innerloop.learn import scaled

Schedule = Callable[[int], Any] | lr_scheduler.LRScheduler


def check_schedule(schedule: Any, optimizer: Any) -> None:
    """Refuse what cannot be an inner schedule."""
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        raise InnerLoopError(
            four_part(
                "You gave a ReduceLROnPlateau as the inner schedule.",
                "a schedule that is a function of the step.",
                "it follows a metric by comparisons, which have no derivative.",
                "another scheduler, or schedule=lambda step: factor.",
            )
        )
    scheduled = isinstance(schedule, lr_scheduler.LRScheduler)
    if scheduled and schedule.optimizer is not optimizer:
        raise InnerLoopError(
            four_part(
                "You gave a scheduler of another optimizer.",
                "a scheduler built over the inner optimizer.",
                "it says what becomes of each of its parameter groups.",
                f"schedule={type(schedule).__name__}(optimizer, ...) with the same optimizer.",
            )
        )
    if not scheduled and not callable(schedule):
        raise InnerLoopError(
            four_part(
                f"You gave schedule={schedule!r}.",
                "a function of the step that returns a factor, or a torch.optim.lr_scheduler.",
                "it multiplies the learning rate of every step.",
                "schedule=lambda step: 0.9 ** step.",
            )
        )


def start_values(optimizer: torch.optim.Optimizer, schedule: Any) -> list[dict[str, Any]]:
    """Each group's settings, a scheduled learning rate as it was before the schedule."""
    groups = [dict(group) for group in optimizer.param_groups]
    if isinstance(schedule, lr_scheduler.LRScheduler):
        for group in groups:
            group["lr"] = group.get("initial_lr", group["lr"])
    return groups


class Factors:
    """What a schedule does to a group's settings at each step from now on."""

    def __init__(self, schedule: Any) -> None:
        self.function = None if isinstance(schedule, lr_scheduler.LRScheduler) else schedule
        self.rows: list[list[dict[str, Any]]] = []
        if self.function is None:
            self.twin = _twin(schedule)
            self.base = start_values(schedule.optimizer, schedule)

    def apply(self, hyper: dict[str, Any], learned: Mapping[str, Any], time: int) -> dict[str, Any]:
        """``hyper``, a list over groups for each setting, as the schedule leaves it."""
        if self.function is not None:
            factor = self.function(time)
            if not isinstance(factor, int | float | Tensor) or isinstance(factor, bool):
                raise InnerLoopError(
                    four_part(
                        f"Your schedule returned {factor!r} at step {time}.",
                        "a number, the factor of the learning rate.",
                        "it multiplies the rate of every group.",
                        "schedule=lambda step: 0.9 ** step.",
                    )
                )
            return {**hyper, "lr": [scaled(value, factor) for value in hyper["lr"]]}
        present = self._row(time)
        new = dict(hyper)
        for name in _changing(present, self.base):
            if name not in hyper:
                continue
            values = [group[name] for group in present]
            if name in learned:
                pairs = zip(hyper[name], values, self.base, strict=True)
                values = [_relative(value, now, base[name]) for value, now, base in pairs]
            new[name] = values
        return new

    def _row(self, time: int) -> list[dict[str, Any]]:
        while len(self.rows) <= time:
            if self.rows:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.twin.step()
            self.rows.append([dict(group) for group in self.twin.optimizer.param_groups])
        return self.rows[time]


def _changing(present: list[dict[str, Any]], base: list[dict[str, Any]]) -> set[str]:
    return {
        name
        for now, before in zip(present, base, strict=True)
        for name in before
        if name != "params" and _differs(now[name], before[name])
    } | {"lr"}


def _differs(a: Any, b: Any) -> bool:
    return bool(a != b) if not isinstance(a, Tensor) else not torch.equal(a, torch.as_tensor(b))


def _relative(value: Any, now: Any, base: Any) -> Any:
    """A learned value moved in proportion, as the schedule moved the one it started from."""
    if isinstance(now, list | tuple):
        parts = zip(value, now, base, strict=True)
        return tuple(_relative(v, n, b) for v, n, b in parts)
    if float(base) == 0.0:
        return value
    return scaled(value, float(now) / float(base))


def _twin(scheduler: Any) -> Any:
    """The scheduler over a stand-in for its optimizer, which has the groups but no parameters."""
    original = scheduler.optimizer
    stand_in = object.__new__(type(original))
    vars(stand_in).update(
        param_groups=[
            {k: copy.deepcopy(_plain(v)) if k != "params" else [] for k, v in group.items()}
            for group in original.param_groups
        ],
        state={},
        defaults=dict(original.defaults),
        step=_counted,
        _opt_called=True,
    )
    return copy.deepcopy(scheduler, {id(original): stand_in})


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _counted() -> None:
    """What a stand-in's ``step`` is: schedulers look whether it has been called."""


_counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
