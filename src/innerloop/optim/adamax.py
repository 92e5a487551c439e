"""Adamax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop.optim.family import Family, Packed, Slots, add_scaled, average, regularize
from innerloop.optim.rule import Rule


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    slots, e, h = packed.slots, packed.spread, packed.hyper
    beta1, beta2 = h["betas"]
    params, grads = regularize(packed)
    step = slots["step"] + 1
    first = average(slots["exp_avg"], grads, e(beta1))
    largest = torch.maximum(e(beta2) * slots["exp_inf"], grads.abs() + e(h["eps"]))
    rate = h["lr"] / (1 - beta1**step)
    new = {"step": step, "exp_avg": first, "exp_inf": largest}
    return add_scaled(params, first / largest, e(-rate)), new


ADAMAX = Family(
    torch_class=torch.optim.Adamax,
    settings={"lr": 1, "betas": 2, "eps": 1, "weight_decay": 1},
    options={"maximize": False},
    buffers=("exp_avg", "exp_inf"),
    update=_update,
)


def adamax(
    lr: Any = 2e-3,
    betas: Any = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0,
    *,
    maximize: bool = False,
) -> Rule:
    r"""Adamax, Adam with the infinity norm (Kingma and Ba, 2015).

    With gradient :math:`g` at step :math:`t`, ``betas`` = (β₁, β₂), ``lr`` = α, ``eps`` = ε and
    ``weight_decay`` = λ::

        g ← g + λ θ
        m ← β₁ m + (1 - β₁) g
        u ← max(β₂ u, |g| + ε)
        θ ← θ - α / (1 - β₁ᵗ) · m / u

    >>> rule = adamax(lr=0.1)
    >>> params = [torch.tensor([1.0, 1.0])]
    >>> params, state = rule.update(params, [torch.tensor([3.0, 0.0])], rule.init(params))
    >>> params
    [tensor([0.9000, 1.0000])]
    """
    return Rule(ADAMAX, (locals(),))
