"""Stochastic gradient descent, with momentum and Nesterov's form of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop.optim.family import (
    Family,
    Packed,
    Slots,
    add_scaled,
    ascent,
    count,
    decayed,
    off,
)
from innerloop.optim.rule import Rule


def _fresh(params: Tensor, group: Mapping[str, Any]) -> Slots:
    if off(group["momentum"]):
        return {}
    return {"momentum_buffer": torch.zeros_like(params), "started": count()}


def _read(state: Slots) -> Slots:
    buffer = state.get("momentum_buffer")
    if buffer is None:
        return {}
    return {"momentum_buffer": buffer, "started": count() + 1}


def _write(slots: Slots) -> Slots:
    if "started" not in slots or slots["started"] == 0:
        return {}
    return {"momentum_buffer": slots["momentum_buffer"]}


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    params, slots, e, h = packed.params, packed.slots, packed.spread, packed.hyper
    grads = decayed(packed, ascent(packed))
    momentum = h["momentum"]
    if not off(momentum):
        slots = slots or _fresh(params, h)
        gain = 1.0
        if not off(h["dampening"]):
            # The first gradient enters the buffer undamped, and every one while momentum is 0.
            gain = 1 - h["dampening"] * slots["started"] * (momentum != 0)
        buffer = add_scaled(e(momentum) * slots["momentum_buffer"], grads, e(gain))
        slots = {"momentum_buffer": buffer, "started": torch.ones_like(slots["started"])}
        grads = add_scaled(grads, buffer, e(momentum)) if packed.options["nesterov"] else buffer
    return add_scaled(params, grads, e(-h["lr"])), slots


def _update_each(
    params: list[Tensor], grads: list[Tensor], hyper: Mapping[str, Any], options: Mapping[str, Any]
) -> list[Tensor] | None:
    """The update without momentum; not with settings for single elements."""
    momentum = hyper["momentum"]
    if isinstance(momentum, Tensor) or momentum != 0:
        return None
    rates = _one_for_each(hyper["lr"], params)
    decays = _one_for_each(hyper["weight_decay"], params)
    if rates is None or decays is None:
        return None
    new = []
    for param, grad, lr, decay in zip(params, grads, rates, decays, strict=True):
        if options.get("maximize", False):
            grad = -grad
        if isinstance(decay, Tensor) or decay != 0:
            grad = add_scaled(grad, param, decay)
        if isinstance(lr, Tensor):
            new.append((param + -lr * grad).to(param.dtype))
        else:
            new.append(torch.add(param, grad, alpha=-lr))
    return new


def _one_for_each(setting: Any, params: list[Tensor]) -> Sequence[Any] | None:
    """The setting of each parameter, ``None`` if it has one for each element."""
    if not isinstance(setting, Tensor):
        return [setting] * len(params)
    if not all(map(Tensor.dim, params)):
        return None  # The setting would promote a parameter without dimensions to its own dtype.
    if setting.dim() == 0:
        return [setting] * len(params)
    return setting.unbind() if setting.shape == (len(params),) else None


SGD = Family(
    torch_class=torch.optim.SGD,
    settings={"lr": 1, "momentum": 1, "dampening": 1, "weight_decay": 1},
    options={"nesterov": False, "maximize": False},
    fresh=_fresh,
    read=_read,
    write=_write,
    scalars=frozenset({"started"}),
    update=_update,
    update_each=_update_each,
    linear=True,
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
    group = {
        "lr": lr,
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
    }
    return Rule(SGD, (group,))
