"""Averaged stochastic gradient descent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop.optim.family import Family, Packed, Slots, add_scaled, average, regularize
from innerloop.optim.rule import Rule


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    slots, e, h = packed.slots, packed.spread, packed.hyper
    lr, lambd = h["lr"], h["lambd"]
    params, grads = regularize(packed)
    eta = torch.where(slots["step"] == 0, lr, slots["eta"])
    params = add_scaled(params * e(1 - lambd * eta), grads, e(-eta))
    step = slots["step"] + 1
    new = {
        "step": step,
        "eta": lr / (1 + lambd * lr * step) ** h["alpha"],
        "mu": 1 / torch.maximum(step - h["t0"], torch.ones_like(step)),
        "ax": average(slots["ax"], params, e(1 - slots["mu"])),
    }
    return params, new


ASGD = Family(
    torch_class=torch.optim.ASGD,
    settings={"lr": 1, "lambd": 1, "alpha": 1, "t0": 1, "weight_decay": 1},
    options={"maximize": False},
    buffers=("ax",),
    counters={"step": 0.0, "eta": 0.0, "mu": 1.0},
    update=_update,
)


def asgd(
    lr: Any = 1e-2,
    lambd: Any = 1e-4,
    alpha: Any = 0.75,
    t0: Any = 1e6,
    weight_decay: Any = 0,
    *,
    maximize: bool = False,
) -> Rule:
    r"""ASGD (Polyak and Juditsky, 1992; this form: Bottou).

    With gradient :math:`g` at step :math:`t`, ``lr`` = γ, ``lambd`` = λ, ``alpha`` = α, ``t0`` = t₀
    and ``weight_decay`` = ω::

        g ← g + ω θ
        θ ← (1 - λ η) θ - η g        (η = γ at the first step)
        a ← a + μ (θ - a)            (μ = 1 at the first step)
        η ← γ / (1 + λ γ t)^α
        μ ← 1 / max(1, t - t₀)

    The average a is the state ``ax``; it does not act on θ, so ``t0`` has a derivative only in what
    is computed from the average.

    >>> rule = asgd(lr=0.1, lambd=0)
    >>> params = [torch.tensor([1.0])]
    >>> params, state = rule.update(params, [torch.tensor([2.0])], rule.init(params))
    >>> params
    [tensor([0.8000])]
    """
    return Rule(ASGD, (locals(),))
