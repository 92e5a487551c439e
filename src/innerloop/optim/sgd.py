"""Stochastic gradient descent, with momentum and Nesterov's form of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop.optim.family import Family, Group, Packed, Slots, add_scaled, count, off, regularize
from innerloop.optim.rule import Rule


def _read(state: Slots) -> Slots:
    buffer = state.get("momentum_buffer")
    return {} if buffer is None else {"momentum_buffer": buffer, "started": count(1.0)}


def _write(slots: Slots) -> Slots:
    if "started" not in slots or slots["started"] == 0:
        return {}
    return {"momentum_buffer": slots["momentum_buffer"]}


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    slots, e, h = packed.slots, packed.spread, packed.hyper
    params, grads = regularize(packed)
    momentum = h["momentum"]
    if not off(momentum):
        slots = slots or SGD.fresh(params, h)
        gain = 1.0
        if not off(h["dampening"]):
            # The first gradient enters the buffer undamped, and every one while momentum is 0.
            gain = 1 - h["dampening"] * slots["started"] * (momentum != 0)
        buffer = add_scaled(e(momentum) * slots["momentum_buffer"], grads, e(gain))
        slots = {"momentum_buffer": buffer, "started": torch.ones_like(slots["started"])}
        grads = add_scaled(grads, buffer, e(momentum)) if packed.options["nesterov"] else buffer
    return add_scaled(params, grads, e(-h["lr"])), slots


def _descend(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], groups: Sequence[Group]
) -> list[Tensor] | None:
    """The update without momentum: so few operations that packing would cost more."""
    new, compiling = [], torch.compiler.is_compiling()
    for param, grad, group in zip(params, grads, groups, strict=True):
        lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        if isinstance(momentum, Tensor) or momentum != 0:
            return None
        if grad is None:
            new.append(param)
            continue
        if group.get("maximize", False):
            grad = -grad
        if isinstance(decay, Tensor) or decay != 0:
            grad = add_scaled(grad, param, decay)
        if compiling or isinstance(lr, Tensor):  # as in add_scaled
            moved = param + -lr * grad
        else:
            moved = param.add(grad, alpha=-lr)
        # Settings in double precision promote a parameter without dimensions.
        new.append(moved if moved.dtype is param.dtype else moved.to(param.dtype))
    return new


SGD = Family(
    torch_class=torch.optim.SGD,
    settings={"lr": 1, "momentum": 1, "dampening": 1, "weight_decay": 1},
    options={"nesterov": False, "maximize": False},
    buffers=("momentum_buffer",),
    counters={"started": 0.0},
    only_with={"momentum_buffer": "momentum", "started": "momentum"},
    read=_read,
    write=_write,
    update=_update,
    update_each=_descend,
)


def sgd(
    lr: Any = 1e-3,
    momentum: Any = 0,
    dampening: Any = 0,
    weight_decay: Any = 0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
) -> Rule:
    r"""Stochastic gradient descent.

    With gradient :math:`g`, rate ``lr`` = α, ``momentum`` = μ, ``dampening`` = δ and
    ``weight_decay`` = λ::

        g ← g + λ θ
        b ← μ b + (1 - δ) g          (b ← g at the first step)
        d ← g + μ b  if nesterov  else  b
        θ ← θ - α d

    A momentum given as a tensor always keeps its buffer, so it gets its gradient even at 0.

    >>> rule = sgd(lr=0.1, momentum=0.9)
    >>> params = [torch.tensor([1.0])]
    >>> params, state = rule.update(params, [torch.tensor([2.0])], rule.init(params))
    >>> params
    [tensor([0.8000])]
    """
    return Rule(SGD, (locals(),))
