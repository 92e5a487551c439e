"""RMSprop, also centered and with momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop._numerics import safe_sqrt
from innerloop.optim.family import Family, Packed, Slots, add_scaled, average, off, regularize
from innerloop.optim.rule import Rule


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    slots, e, h = packed.slots, packed.spread, packed.hyper
    alpha, momentum = e(h["alpha"]), e(h["momentum"])
    params, grads = regularize(packed)
    square = average(slots["square_avg"], grads * grads, alpha)
    new = {**slots, "step": slots["step"] + 1, "square_avg": square}
    if packed.options["centered"]:
        new["grad_avg"] = mean = average(slots["grad_avg"], grads, alpha)
        square = square - mean * mean
    scaled = grads / (safe_sqrt(square) + e(h["eps"]))
    if not off(momentum):
        if "momentum_buffer" in slots:
            scaled = momentum * slots["momentum_buffer"] + scaled
        new["momentum_buffer"] = scaled
    return add_scaled(params, scaled, e(-h["lr"])), new


RMSPROP = Family(
    torch_class=torch.optim.RMSprop,
    settings={"lr": 1, "alpha": 1, "eps": 1, "weight_decay": 1, "momentum": 1},
    options={"centered": False, "maximize": False},
    buffers=("square_avg", "momentum_buffer", "grad_avg"),
    only_with={"momentum_buffer": "momentum", "grad_avg": "centered"},
    update=_update,
)


def rmsprop(
    lr: Any = 1e-2,
    alpha: Any = 0.99,
    eps: Any = 1e-8,
    weight_decay: Any = 0,
    momentum: Any = 0,
    centered: bool = False,
    *,
    maximize: bool = False,
) -> Rule:
    r"""RMSprop (Tieleman and Hinton, 2012; centered: Graves, 2013).

    With gradient :math:`g`, ``lr`` = γ, ``alpha`` = α, ``eps`` = ε, ``weight_decay`` = λ and
    ``momentum`` = μ::

        g ← g + λ θ
        v ← α v + (1 - α) g²
        a ← α a + (1 - α) g          (centered: v - a² stands for v below)
        b ← μ b + g / (√v + ε)
        θ ← θ - γ b

    A momentum given as a tensor always keeps its buffer, so it gets its gradient even at 0. Where a
    gradient has been exactly zero, √v has derivative 0, which is the limit.

    >>> rule = rmsprop(lr=0.1, alpha=0.75)
    >>> params = [torch.tensor([1.0, 1.0])]
    >>> params, state = rule.update(params, [torch.tensor([3.0, 0.0])], rule.init(params))
    >>> params
    [tensor([0.8000, 1.0000])]
    """
    return Rule(RMSPROP, (locals(),))
