"""Inner learning-rate schedules: a function of the step, or a scheduler of ``torch.optim``."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from innerloop import _tree
from innerloop.errors import InnerLoopError, four_part

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
    """The effect of a schedule on a group's settings at each step from now on.

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
            return {**hyper, "lr": [_scale(value, self._factor(time)) for value in hyper["lr"]]}
        present, new = self.row(time), dict(hyper)
        for name in self.moving & hyper.keys():
            values = [group[name] for group in present]
            if name in learned or name in given:
                before = self.base if name in learned else self.row(0)
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

    def row(self, time: int) -> list[dict[str, Any]]:
        """The settings of each group at a step."""
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


_AHEAD = 50  # steps of a schedule that are looked at
# The numbers that a scheduler keeps in groups, and those it holds as lists over groups.
_IN_GROUPS = {
    **dict.fromkeys(("initial_lr", "max_lr", "min_lr", "swa_lr"), "lr"),
    **dict.fromkeys(("base_momentum", "max_momentum"), "momentum"),
}
_IN_LISTS = {
    **dict.fromkeys(("base_lrs", "max_lrs"), "lr"),
    **dict.fromkeys(("base_momentums", "max_momentums"), "momentum"),
}


def rebase(schedule: Any, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    """Have a scheduler go on from other settings than those it was built with.

    Rates and momenta that it holds, of its own or in the groups of its optimizer, move in
    proportion to the settings, which are numbers for each group.
    """
    factors = [_changes(old, new) for old, new in zip(before, after, strict=True)]
    for group, factor in zip(schedule.optimizer.param_groups, factors, strict=True):
        for name in _IN_GROUPS.keys() & group.keys():
            group[name] *= factor[_IN_GROUPS[name]]
    for one in _all(schedule):
        for name in _IN_LISTS.keys() & vars(one).keys():
            pairs = zip(getattr(one, name), factors, strict=True)
            setattr(one, name, [value * factor[_IN_LISTS[name]] for value, factor in pairs])
        if hasattr(one, "eta_min"):
            one.eta_min *= factors[0]["lr"]


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, float]:
    """The factors by which the rate and the momentum of a group have changed."""
    factors = {"lr": 1.0, "momentum": 1.0}
    for name, value in new.items():
        kind, start = name, old[name]
        if name == "betas":
            kind, start, value = "momentum", start[0], value[0]
        if kind in factors and start:
            factors[kind] = value / start
    return factors


def follows(schedule: Any, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> bool:
    """True if a scheduler, rebased, takes the settings where a loop that learned them does."""
    learned = {name: [group[name] for group in after] for name in after[0]}
    old, twin = Factors(schedule, before), _twin(schedule)
    rebase(twin, before, after)
    for name, values in old.apply(learned, learned, (), 0).items():
        for group, value in zip(twin.optimizer.param_groups, values, strict=True):
            group[name] = value
    new = Factors(twin, after)
    for time in range(_AHEAD):
        try:
            wanted, found = old.apply(learned, learned, (), time), new.row(time)
        except (ValueError, IndexError):
            return time > 0  # The schedule is over.
        for name, values in wanted.items():
            if not _close([group[name] for group in found], values):
                return False
    return True


def _all(schedule: Any) -> list[Any]:
    """A scheduler and those that it is made of."""
    parts = getattr(schedule, "_schedulers", ())
    return [schedule, *(one for part in parts for one in _all(part))]


def _close(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list | tuple):
        return all(map(_close, found, wanted))
    return math.isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-12)


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that are numbers; a group may hold other things of the user's."""
    found = {name: _number(value) for name, value in group.items() if name != "params"}
    return {name: value for name, value in found.items() if not isinstance(value, Tensor)}


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    return tuple(map(_number, value)) if isinstance(value, list | tuple) else value


def _scale(value: Any, factor: Any) -> Any:
    """A setting of one group in any of its forms, times a factor."""
    if isinstance(value, list | tuple):
        return type(value)(_scale(part, factor) for part in value)
    return value * factor


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
    return _scale(value, now / base)


def _components(value: Any, count: int) -> Any:
    return value.unbind() if isinstance(value, Tensor) and value.shape[:1] == (count,) else value


def _twin(scheduler: Any) -> Any:
    """The scheduler over a stand-in for its optimizer, which has the groups but no parameters."""
    original = scheduler.optimizer
    stand_in = object.__new__(type(original))
    groups = [{**group, "params": []} for group in original.param_groups]
    vars(stand_in).update(
        param_groups=copy.deepcopy(_tree.map(_tree.detach, groups)),
        state={},
        defaults=dict(original.defaults),
    )
    return copy.deepcopy(scheduler, {id(original): stand_in})
