"""Inner learning-rate schedules: a function of the step, or a scheduler of ``torch.optim``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
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
    if not scheduled and (isinstance(schedule, type) or not callable(schedule)):
        raise InnerLoopError(
            four_part(
                f"You gave schedule={schedule!r}.",
                "a function of the step that returns a factor, or a torch.optim.lr_scheduler.",
                "it multiplies the learning rate of every step.",
                "schedule=lambda step: 0.9 ** step.",
            )
        )


def start_values(optimizer: torch.optim.Optimizer, schedule: Any) -> list[dict[str, Any]]:
    """Each group's settings as numbers, a scheduled learning rate as before the schedule."""
    groups = [_numbers(group) for group in optimizer.param_groups]
    if isinstance(schedule, lr_scheduler.LRScheduler):
        for group in groups:
            group["lr"] = group.get("initial_lr", group["lr"])
    return groups


class Factors:
    """What a schedule does to a group's settings at each step from now on.

    ``base`` are the settings that learned ones started from: they move in proportion.
    """

    def __init__(self, schedule: Any, base: list[dict[str, Any]]) -> None:
        self.function = None if isinstance(schedule, lr_scheduler.LRScheduler) else schedule
        self.base = base
        self.rows: list[list[dict[str, Any]]] = []
        if self.function is None:
            self.twin = _twin(schedule)
            self.moving = {"lr"}

    def apply(
        self, hyper: dict[str, Any], learned: Collection[str], given: Collection[str], time: int
    ) -> dict[str, Any]:
        """``hyper``, a list over groups for each setting, as the schedule leaves it.

        ``learned`` started from the base; ``given`` are tensors of the optimizer as they are now.
        """
        if self.function is not None:
            return {**hyper, "lr": [scaled(value, self._factor(time)) for value in hyper["lr"]]}
        present, new = self._row(time), dict(hyper)
        for name in self.moving & hyper.keys():
            values = [group[name] for group in present]
            if name in learned or name in given:
                before = self.base if name in learned else self._row(0)
                parts = zip(hyper[name], values, before, strict=True)
                values = [_relative(name, v, now, start[name]) for v, now, start in parts]
            new[name] = values
        return new

    def _factor(self, time: int) -> Any:
        assert self.function is not None
        factor = self.function(time)
        if isinstance(factor, int | float | Tensor) and not isinstance(factor, bool):
            return factor
        raise InnerLoopError(
            four_part(
                f"Your schedule returned {factor!r} at step {time}.",
                "a number, the factor of the learning rate.",
                "it multiplies the rate of every group.",
                "schedule=lambda step: 0.9 ** step.",
            )
        )

    def _row(self, time: int) -> list[dict[str, Any]]:
        while len(self.rows) <= time:
            if self.rows:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.twin.step()
            row = [_numbers(group) for group in self.twin.optimizer.param_groups]
            for group, first in zip(row, self.rows[0] if self.rows else self.base, strict=True):
                self.moving |= {name for name in first if group.get(name) != first[name]}
            self.rows.append(row)
        return self.rows[time]


def rebase(schedule: Any, optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """Have a scheduler start from other learning rates than those it was built with."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if "initial_lr" in group:
            group["initial_lr"] = rate
    for one in (schedule, *getattr(schedule, "_schedulers", ())):
        if hasattr(one, "base_lrs"):
            one.base_lrs = list(rates)


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that are numbers; a group may hold other things of the user's."""
    found = {name: _number(value) for name, value in group.items() if name != "params"}
    return {name: value for name, value in found.items() if not isinstance(value, Tensor)}


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.detach().clone()
    return tuple(map(_number, value)) if isinstance(value, list | tuple) else value


def _relative(name: str, value: Any, now: Any, base: Any) -> Any:
    """A value moved in proportion, as the schedule moved the one it started from."""
    if isinstance(now, tuple):
        parts = zip(_components(value, len(now)), now, base, strict=True)
        return tuple(_relative(name, v, n, b) for v, n, b in parts)
    if now == base:
        return value
    if base == 0:
        raise InnerLoopError(
            four_part(
                f"Your schedule moves {name!r}, which is learned and started from 0.",
                "a value other than 0 to start from.",
                "a learned setting moves in proportion to where it started.",
                f"another {name!r} in the optimizer, or do not learn it.",
            )
        )
    return scaled(value, now / base)


def _components(value: Any, count: int) -> Any:
    return value.unbind() if isinstance(value, Tensor) and value.shape[:1] == (count,) else value


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
