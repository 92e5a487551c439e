"""Averaged stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from innerloop.optim.family import (
    Family,
    Packed,
    Slots,
    add_scaled,
    ascent,
    average,
    count,
    decayed,
    once_started,
)
from innerloop.optim.rule import Rule


def _fresh(params: Tensor, group: Mapping[str, Any]) -> Slots:
    return {
        "step": count(),
        "eta": count(),
        "mu": count() + 1,
        "ax": torch.zeros_like(params),
    }


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    slots, e, h = packed.slots, packed.spread, packed.hyper
    lr, lambd = h["lr"], h["lambd"]
    grads = decayed(packed, ascent(packed))
    eta = torch.where(slots["step"] == 0, lr, slots["eta"])
    params = add_scaled(packed.params * e(1 - lambd * eta), grads, e(-eta))
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
    scalars=frozenset({"step", "eta", "mu"}),
    fresh=_fresh,
    write=once_started,
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
    group = {
        "lr": lr,
        "lambd": lambd,
        "alpha": alpha,
        "t0": t0,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    return Rule(ASGD, (group,))
