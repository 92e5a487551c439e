"""Adam and AdamW."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from innerloop._numerics import safe_sqrt
from innerloop.optim.family import Family, Packed, Slots, add_scaled, average, regularize
from innerloop.optim.rule import Rule


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    slots, e, h = packed.slots, packed.spread, packed.hyper
    beta1, beta2 = h["betas"]
    params, grads = regularize(packed)
    step = slots["step"] + 1
    first = average(slots["exp_avg"], grads, e(beta1))
    second = average(slots["exp_avg_sq"], grads * grads, e(beta2))
    new = {"step": step, "exp_avg": first, "exp_avg_sq": second}
    if packed.options["amsgrad"]:
        new["max_exp_avg_sq"] = second = torch.maximum(slots["max_exp_avg_sq"], second)
    scale = 1 / (1 - beta2**step).sqrt()
    denominator = safe_sqrt(second) * e(scale) + e(h["eps"])
    return add_scaled(params, first / denominator, e(-h["lr"] / (1 - beta1**step))), new


ADAM = Family(
    torch_class=torch.optim.Adam,
    settings={"lr": 1, "betas": 2, "eps": 1, "weight_decay": 1},
    options={"amsgrad": False, "maximize": False, "decoupled_weight_decay": False},
    buffers=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    only_with={"max_exp_avg_sq": "amsgrad"},
    update=_update,
)
ADAMW = replace(
    ADAM,
    torch_class=torch.optim.AdamW,
    options={**ADAM.options, "decoupled_weight_decay": True},
)


def adam(
    lr: Any = 1e-3,
    betas: Any = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> Rule:
    r"""Adam (Kingma and Ba, 2015).

    With gradient :math:`g` at step :math:`t`, ``betas`` = (β₁, β₂), ``lr`` = α, ``eps`` = ε and
    ``weight_decay`` = λ::

        g ← g + λ θ                  (decoupled: θ ← (1 - α λ) θ instead)
        m ← β₁ m + (1 - β₁) g
        v ← β₂ v + (1 - β₂) g²       (amsgrad: its running maximum is used below)
        θ ← θ - α / (1 - β₁ᵗ) · m / (√(v / (1 - β₂ᵗ)) + ε)

    Where a gradient has been exactly zero, √v has derivative 0, which is the limit.

    >>> rule = adam(lr=0.1)
    >>> params = [torch.tensor([1.0, 1.0])]
    >>> params, state = rule.update(params, [torch.tensor([3.0, 0.0])], rule.init(params))
    >>> params
    [tensor([0.9000, 1.0000])]
    """
    return Rule(ADAM, (locals(),))


def adamw(
    lr: Any = 1e-3,
    betas: Any = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 1e-2,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
) -> Rule:
    """AdamW (Loshchilov and Hutter, 2019): :func:`adam` with decoupled weight decay.

    >>> rule = adamw(lr=0.1, weight_decay=0.5)
    >>> params = [torch.tensor([1.0])]
    >>> params, state = rule.update(params, [torch.tensor([0.0])], rule.init(params))
    >>> params
    [tensor([0.9500])]
    """
    return Rule(ADAMW, (locals(),))
