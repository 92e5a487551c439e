"""Learned settings of an optimizer: their granularity, their range, their values at each step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from innerloop import _tree
from innerloop.errors import InnerLoopError, four_part
from innerloop.guard import refusals
from innerloop.optim import Rule, from_torch
from innerloop.optim.settings import (
    check_name,
    merge_settings,
    plain_settings,
    write_settings,
)
from innerloop.step.schedules import Factors, follows, rebase

_PER = ("group", "parameter", "element", "step")
_TRANSFORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "log": (torch.exp, torch.log),
    "logit": (torch.sigmoid, torch.logit),
    "softplus": (nn.functional.softplus, lambda y: y + torch.log(-torch.expm1(-y))),
}


@dataclass(frozen=True)
class Learn:
    """Granularity and range of one learned setting.

    ``per`` says what has a value of its own: any of ``"group"``, ``"parameter"``, ``"element"`` and
    ``"step"``, or several. With ``"step"``, ``steps`` is the number of steps. ``transform`` keeps
    the value in its range by learning another number: ``"log"`` and ``"softplus"`` for what is
    above 0, ``"logit"`` for what is between 0 and 1, or a pair of functions, from the learned
    number to the setting and back.

    >>> Learn(per=("parameter", "step"), steps=5, transform="log").per
    ('parameter', 'step')
    """

    per: str | tuple[str, ...] = "group"
    steps: int | None = None
    transform: str | tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None

    def __post_init__(self) -> None:
        sequence = isinstance(self.per, list | tuple | set)
        per = tuple(self.per) if sequence else (self.per,)
        object.__setattr__(self, "per", per)
        unknown = [name for name in per if name not in _PER]
        spatial = [name for name in per if name != "step"]
        if unknown or len(spatial) > 1 or len(set(per)) != len(per):
            raise InnerLoopError(
                four_part(
                    f"You wrote Learn(per={self.per!r}).",
                    "one of 'group', 'parameter' and 'element', 'step', or one of the former with "
                    "'step'.",
                    "a finer one of the first three includes the coarser ones.",
                    "Learn(per=('parameter', 'step'), steps=5).",
                )
            )
        steps = self.steps
        counted = isinstance(steps, int) and not isinstance(steps, bool) and steps > 0
        if not (counted if "step" in per else steps is None):
            raise InnerLoopError(
                four_part(
                    f"You wrote Learn(per={self.per!r}, steps={self.steps!r}).",
                    "steps, a whole number above 0, with per='step', and no steps without it.",
                    "there is one value for each step.",
                    "Learn(per=('group', 'step'), steps=5).",
                )
            )
        given: Any = self.transform
        known = given is None or (isinstance(given, str) and given in _TRANSFORMS)
        pair = isinstance(given, tuple) and len(given) == 2 and all(map(callable, given))
        if not (known or pair):
            raise InnerLoopError(
                four_part(
                    f"You wrote Learn(transform={self.transform!r}).",
                    f"one of {', '.join(map(repr, _TRANSFORMS))}, a pair of functions, or None.",
                    "it takes the learned number to the setting, and back.",
                    "Learn(transform='log') for a learning rate.",
                )
            )

    @property
    def over(self) -> str:
        """The unit that has its own value within one step."""
        return next((name for name in self.per if name != "step"), "group")

    def forward(self, raw: Tensor) -> Tensor:
        """The setting, given the learned number."""
        return raw if self.transform is None else self._pair[0](raw)

    def inverse(self, name: str, value: Tensor) -> Tensor:
        """The learned number, given the setting; refuses one that does not lead back to it."""
        if self.transform is None:
            return value
        forward, inverse = self._pair
        raw = inverse(value)
        back = forward(raw) if isinstance(raw, Tensor) else raw
        wrong = value.reshape(-1)
        if all(isinstance(t, Tensor) and t.shape == value.shape for t in (raw, back)):
            tolerance = 1e-4 if value.dtype == torch.float32 else 1e-8
            same = torch.isclose(back, value.to(back.dtype), rtol=tolerance, atol=1e-12)
            wrong = wrong[~(same & raw.isfinite()).reshape(-1)]
        if wrong.numel():
            raise InnerLoopError(
                four_part(
                    f"You learn {name!r} with transform={self.transform!r}, and the optimizer has "
                    f"the value {wrong[0].item():g}.",
                    "a value inside the transform's range, and an inverse that belongs to it.",
                    "the transform does not map the inverse of this value back to it.",
                    f"torch.optim...(..., {name}=...) with a value inside, or another transform.",
                )
            )
        return raw

    @property
    def _pair(self) -> Any:
        if isinstance(self.transform, str):
            return _TRANSFORMS[self.transform]
        return self.transform


def check_steps(how: Mapping[str, Learn], steps: int) -> None:
    """Refuse more steps than some setting has values for, before the first is taken."""
    for name, learn in how.items():
        if learn.steps is not None and steps > learn.steps:
            raise InnerLoopError(
                four_part(
                    f"You learn {name!r} per step for {learn.steps} steps and take {steps}.",
                    "a value for every step.",
                    "there is none for the others.",
                    f"Learn(per='step', steps={steps}) or more, or fewer batches.",
                )
            )


def parse_learn(learn: Any) -> tuple[bool, dict[str, Learn]]:
    """True if the initial weights are learned; and how each learned setting is."""
    if isinstance(learn, str):
        learn = (learn,)
    if not isinstance(learn, Mapping):
        if not isinstance(learn, Sequence | set | frozenset):
            raise InnerLoopError(_not_a_choice(learn))
        learn = dict.fromkeys(learn, True)
    init, chosen = False, {}
    for name, how in learn.items():
        if how is True:
            how = Learn()
        if not isinstance(name, str) or not (how is False or isinstance(how, Learn)):
            raise InnerLoopError(_not_a_choice({name: how}))
        if name == "init":
            if how not in (False, Learn()):
                raise InnerLoopError(_not_a_choice({name: how}))
            init = how is not False
        elif how is not False:
            chosen[name] = how
    return init, chosen


def _not_a_choice(found: Any) -> str:
    return four_part(
        f"You gave learn={found!r}.",
        "names of what is learned, or a mapping from names to True, False or innerloop.Learn(...).",
        "'init' is learned or not; each setting has a granularity and a range.",
        "learn=('init', 'lr') or learn={'init': True, 'lr': il.Learn(per='parameter')}.",
    )


def learned_parameters(
    rule: Rule, how: Mapping[str, Learn], params: Sequence[Tensor], start: Sequence[Mapping]
) -> nn.ParameterDict:
    """The learned numbers of every setting, starting from the values in ``start``, by group."""
    found = nn.ParameterDict()
    sizes = rule.sizes or (len(params),)
    for name, learn in how.items():
        check_name(rule.family, name)
        values = [_as_value(rule, name, group[name], params) for group in start]
        found[name] = _initial(name, learn, values, sizes, params)
    return found


def _as_value(rule: Rule, name: str, value: Any, params: Sequence[Tensor]) -> Tensor:
    if value is None or (isinstance(value, tuple) and None in value):
        raise InnerLoopError(
            four_part(
                f"You learn {name!r}, and {rule.family.name} has {value!r} there.",
                "a number to start from.",
                "None means a default that torch chooses by dtype.",
                f"torch.optim.{rule.family.name}(..., {name}=...) with numbers.",
            )
        )
    dtypes = [p.real.dtype for p in params]
    return torch.tensor(value, dtype=functools.reduce(torch.promote_types, dtypes, torch.float32))


def _initial(
    name: str,
    learn: Learn,
    values: Sequence[Tensor],
    sizes: Sequence[int],
    params: Sequence[Tensor],
) -> Any:
    """[steps, groups or parameters, components], or a list of [steps, components, *shape]."""
    # The inverse is checked by its values: on the host, before they go where the weights are.
    raw = [learn.inverse(name, value).to(params[0].device) for value in values]
    of_each = [value for value, size in zip(raw, sizes, strict=True) for _ in range(size)]

    def by_step(tensor: Tensor) -> nn.Parameter:
        if learn.steps is not None:
            tensor = tensor.expand(learn.steps, *tensor.shape)
        return nn.Parameter(tensor.clone())

    if learn.over == "element":
        full = [
            value.reshape([*value.shape, *[1] * p.dim()]).expand([*value.shape, *p.shape])
            for value, p in zip(of_each, params, strict=True)
        ]
        return nn.ParameterList([by_step(tensor) for tensor in full])
    return by_step(torch.stack(raw if learn.over == "group" else of_each))


def natural_values(how: Mapping[str, Learn], found: nn.ParameterDict) -> dict[str, Any]:
    """The settings in their own units, out of the learned numbers."""
    return {
        name: [learn.forward(raw) for raw in found[name]]
        if learn.over == "element"
        else learn.forward(found[name])
        for name, learn in how.items()
    }


@dataclass(frozen=True)
class StepSettings:
    """``settings(opt, time)``: the settings of one step, out of φ_opt and the schedule."""

    rule: Rule
    learned: Mapping[str, Learn]
    factors: Any = None
    """The schedule's factors of the learning rate, if there is a schedule."""

    def __call__(self, opt: Mapping[str, Any], time: int) -> Mapping[str, Any]:
        hyper = {**opt, **{name: self._by_group(name, opt[name], time) for name in self.learned}}
        if self.factors is None:
            return hyper
        groups = len(self.rule.groups)
        every = {**self.rule.hyper, **hyper}
        listed = {n: v if isinstance(v, list) else [v] * groups for n, v in every.items()}
        return self.factors.apply(listed, self.learned, opt, time)

    def _by_group(self, name: str, value: Any, time: int) -> list[Any]:
        """One learned setting as the rule takes it: one value for each group, at one step."""
        learn, arity = self.learned[name], self.rule.family.settings[name]
        sizes = self.rule.sizes or ()
        if learn.steps is not None:
            value = _tree.map(lambda t: t[time], value)
        if learn.over == "group":
            return list(value.unbind())
        if learn.over == "parameter":
            parts = value.split(list(sizes))
            return [tuple(part.unbind(1)) if arity > 1 else part for part in parts]
        rest = iter(value)
        groups = [[next(rest) for _ in range(size)] for size in sizes]
        if arity == 1:
            return groups
        return [tuple([t[k] for t in group] for k in range(arity)) for group in groups]


def write_learned(
    learned: Mapping[str, Learn],
    values: Mapping[str, Any],
    own: torch.optim.Optimizer,
    target: torch.optim.Optimizer,
    schedule: Any,
    base: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Put the values of learned settings into ``target``, an optimizer with the groups of ``own``.

    ``base`` are the settings that the learned ones started from, and the result is what they start
    from afterwards, as a schedule moves them in proportion.
    """
    for name, learn in learned.items():
        if learn.steps is not None:
            raise refusals.one_value_per_step(name)
    rule, expected = from_torch(target), from_torch(own)
    if rule.family is not expected.family or rule.sizes != expected.sizes:
        raise refusals.other_groups(expected, rule)
    shapes = [[p.shape for p in group["params"]] for group in target.param_groups]

    def numbers(factors: Factors | None) -> list[dict[str, Any]]:
        hyper = StepSettings(rule, learned, factors)(values, 0)
        plain = plain_settings(rule.family, merge_settings(rule.family, rule.groups, shapes, hyper))
        return [{name: group[name] for name in learned} for group in plain]

    start = numbers(None)
    now = start
    if isinstance(schedule, LRScheduler):
        now = numbers(Factors(schedule, base))
        if target is not own:
            # Its rates at this moment; the scheduler is that of the loop's own optimizer.
            write_settings(target, now)
            return base
        if not follows(schedule, base, start):
            raise refusals.scheduler_with_own_numbers(schedule)
        rebase(schedule, base, start)
    write_settings(target, now)
    return [{**old, **new} for old, new in zip(base, start, strict=True)]
