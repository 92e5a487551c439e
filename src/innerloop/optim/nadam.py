"""NAdam."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop._numerics import safe_sqrt
from innerloop.optim.family import Family, Packed, Slots, average, regularize
from innerloop.optim.rule import Rule


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    slots, e, h = packed.slots, packed.spread, packed.hyper
    beta1, beta2 = h["betas"]
    lr, decay = h["lr"], h["momentum_decay"]
    params, grads = regularize(packed)
    step = slots["step"] + 1
    mu = beta1 * (1 - 0.5 * 0.96 ** (step * decay))
    mu_next = beta1 * (1 - 0.5 * 0.96 ** ((step + 1) * decay))
    product = slots["mu_product"] * mu
    first = average(slots["exp_avg"], grads, e(beta1))
    second = average(slots["exp_avg_sq"], grads * grads, e(beta2))
    denominator = safe_sqrt(second) * e(1 / (1 - beta2**step).sqrt()) + e(h["eps"])
    now = lr * (1 - mu) / (1 - product)
    ahead = lr * mu_next / (1 - product * mu_next)
    new = {"step": step, "mu_product": product, "exp_avg": first, "exp_avg_sq": second}
    return params - (e(now) * grads + e(ahead) * first) / denominator, new


NADAM = Family(
    torch_class=torch.optim.NAdam,
    settings={"lr": 1, "betas": 2, "eps": 1, "weight_decay": 1, "momentum_decay": 1},
    options={"decoupled_weight_decay": False, "maximize": False},
    buffers=("exp_avg", "exp_avg_sq"),
    counters={"step": 0.0, "mu_product": 1.0},
    update=_update,
)


def nadam(
    lr: Any = 2e-3,
    betas: Any = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0,
    momentum_decay: Any = 4e-3,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> Rule:
    r"""NAdam, Adam with Nesterov momentum (Dozat, 2016).

    With gradient :math:`g` at step :math:`t`, ``betas`` = (β₁, β₂), ``lr`` = α, ``eps`` = ε,
    ``weight_decay`` = λ and ``momentum_decay`` = ψ::

        g  ← g + λ θ                 (decoupled: θ ← (1 - α λ) θ instead)
        μₜ = β₁ (1 - 0.96^(t ψ) / 2)
        π  ← π μₜ                    (the product of all μ; π μₜ₊₁ belongs to the next step)
        m  ← β₁ m + (1 - β₁) g
        v  ← β₂ v + (1 - β₂) g²
        θ  ← θ - α (μₜ₊₁ m / (1 - π μₜ₊₁) + (1 - μₜ) g / (1 - π)) / (√(v / (1 - β₂ᵗ)) + ε)

    Where a gradient has been exactly zero, √v has derivative 0, which is the limit.

    >>> rule = nadam(lr=0.1, momentum_decay=0)
    >>> params = [torch.tensor([1.0, 1.0])]
    >>> params, state = rule.update(params, [torch.tensor([3.0, 0.0])], rule.init(params))
    >>> params
    [tensor([0.8944, 1.0000])]
    """
    return Rule(NADAM, (locals(),))
