"""Adadelta."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop._numerics import safe_sqrt
from innerloop.optim.family import Family, Packed, Slots, add_scaled, average, regularize
from innerloop.optim.rule import Rule


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    slots, e, h = packed.slots, packed.spread, packed.hyper
    rho, eps = e(h["rho"]), e(h["eps"])
    params, grads = regularize(packed)
    square = average(slots["square_avg"], grads * grads, rho)
    delta = safe_sqrt(slots["acc_delta"] + eps) / safe_sqrt(square + eps) * grads
    new = {
        "step": slots["step"] + 1,
        "square_avg": square,
        "acc_delta": average(slots["acc_delta"], delta * delta, rho),
    }
    return add_scaled(params, delta, e(-h["lr"])), new


ADADELTA = Family(
    torch_class=torch.optim.Adadelta,
    settings={"lr": 1, "rho": 1, "eps": 1, "weight_decay": 1},
    options={"maximize": False},
    buffers=("square_avg", "acc_delta"),
    update=_update,
)


def adadelta(
    lr: Any = 1.0,
    rho: Any = 0.9,
    eps: Any = 1e-6,
    weight_decay: Any = 0,
    *,
    maximize: bool = False,
) -> Rule:
    r"""Adadelta (Zeiler, 2012).

    With gradient :math:`g`, ``lr`` = α, ``rho`` = ρ, ``eps`` = ε and ``weight_decay`` = λ::

        g ← g + λ θ
        v ← ρ v + (1 - ρ) g²
        δ ← √(u + ε) / √(v + ε) · g
        u ← ρ u + (1 - ρ) δ²
        θ ← θ - α δ

    >>> rule = adadelta(lr=1.0, eps=0.1)
    >>> params = [torch.tensor([1.0, 1.0])]
    >>> params, state = rule.update(params, [torch.tensor([3.0, 0.0])], rule.init(params))
    >>> params
    [tensor([0.0513, 1.0000])]
    """
    return Rule(ADADELTA, (locals(),))
