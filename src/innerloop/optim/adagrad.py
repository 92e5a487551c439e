"""Adagrad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop._numerics import safe_sqrt
from innerloop.optim.family import Family, Packed, Slots, add_scaled, regularize, start_from
from innerloop.optim.rule import Rule


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    slots, e, h = packed.slots, packed.spread, packed.hyper
    params, grads = regularize(packed)
    total = start_from(packed, h["initial_accumulator_value"], "sum") + grads * grads
    rate = h["lr"] / (1 + slots["step"] * h["lr_decay"])
    scaled = grads / (safe_sqrt(total) + e(h["eps"]))
    return add_scaled(params, scaled, e(-rate)), {"step": slots["step"] + 1, "sum": total}


ADAGRAD = Family(
    torch_class=torch.optim.Adagrad,
    settings=dict.fromkeys(
        ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"), 1
    ),
    options={"maximize": False},
    buffers=("sum",),
    update=_update,
)


def adagrad(
    lr: Any = 1e-2,
    lr_decay: Any = 0,
    weight_decay: Any = 0,
    initial_accumulator_value: Any = 0,
    eps: Any = 1e-10,
    *,
    maximize: bool = False,
) -> Rule:
    r"""Adagrad (Duchi, Hazan and Singer, 2011).

    With gradient :math:`g` at step :math:`t`, ``lr`` = α, ``lr_decay`` = η, ``weight_decay`` = λ,
    ``initial_accumulator_value`` = τ and ``eps`` = ε::

        g ← g + λ θ
        s ← s + g²                   (s = τ before the first step)
        θ ← θ - α / (1 + (t - 1) η) · g / (√s + ε)

    Where a gradient has been exactly zero, √s has derivative 0, which is the limit.

    >>> rule = adagrad(lr=0.1)
    >>> params = [torch.tensor([1.0, 1.0])]
    >>> params, state = rule.update(params, [torch.tensor([3.0, 0.0])], rule.init(params))
    >>> params
    [tensor([0.9000, 1.0000])]
    """
    return Rule(ADAGRAD, (locals(),))
