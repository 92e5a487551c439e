"""RAdam."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop._numerics import safe_sqrt
from innerloop.optim.family import Family, Packed, Slots, Value, add_scaled, average, regularize
from innerloop.optim.rule import Rule


def _rectification(beta2: Value, step: Tensor) -> tuple[Tensor, Tensor]:
    """The test ρₜ > 5, by which the variance is tractable, and √(1 - β₂ᵗ) times r.

    Where it fails the arguments are replaced by harmless ones: a root of a negative number
    would be NaN, and its derivative would stay so behind the ``where``.
    """
    power = beta2**step
    limit = 2 / (1 - beta2) - 1
    length = limit - 2 * step * power / (1 - power)
    tractable = length > 5
    length = torch.where(tractable, length, 6.0)
    limit = torch.where(tractable, limit * torch.ones_like(length), 6.0)
    squared = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
    return tractable, (squared * (1 - power)).sqrt()


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    slots, e, h = packed.slots, packed.spread, packed.hyper
    beta1, beta2 = h["betas"]
    params, grads = regularize(packed)
    step = slots["step"] + 1
    first = average(slots["exp_avg"], grads, e(beta1))
    second = average(slots["exp_avg_sq"], grads * grads, e(beta2))
    tractable, gain = (e(value) for value in _rectification(beta2, step))
    denominator = torch.where(tractable, safe_sqrt(second) + e(h["eps"]), 1.0)
    scaled = first * torch.where(tractable, gain, 1.0) / denominator
    new = {"step": step, "exp_avg": first, "exp_avg_sq": second}
    return add_scaled(params, scaled, e(-h["lr"] / (1 - beta1**step))), new


RADAM = Family(
    torch_class=torch.optim.RAdam,
    settings={"lr": 1, "betas": 2, "eps": 1, "weight_decay": 1},
    options={"decoupled_weight_decay": False, "maximize": False},
    buffers=("exp_avg", "exp_avg_sq"),
    update=_update,
)


def radam(
    lr: Any = 1e-3,
    betas: Any = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> Rule:
    r"""RAdam, Adam with a rectified rate (Liu et al., 2020, Algorithm 2).

    With gradient :math:`g` at step :math:`t`, ``betas`` = (β₁, β₂), ``lr`` = α, ``eps`` = ε and
    ``weight_decay`` = λ::

        g  ← g + λ θ                 (decoupled: θ ← (1 - α λ) θ instead)
        m  ← β₁ m + (1 - β₁) g
        v  ← β₂ v + (1 - β₂) g²
        ρ∞ = 2 / (1 - β₂) - 1,   ρₜ = ρ∞ - 2 t β₂ᵗ / (1 - β₂ᵗ)
        r  = √((ρₜ - 4)(ρₜ - 2) ρ∞ / ((ρ∞ - 4)(ρ∞ - 2) ρₜ))
        θ  ← θ - α / (1 - β₁ᵗ) · m · r √(1 - β₂ᵗ) / (√v + ε)     if ρₜ > 5
        θ  ← θ - α / (1 - β₁ᵗ) · m                               otherwise

    The choice between the two lines is piecewise constant in β₂ and has no derivative of its own.

    >>> rule = radam(lr=0.1)
    >>> params = [torch.tensor([1.0, 1.0])]
    >>> params, state = rule.update(params, [torch.tensor([3.0, 0.0])], rule.init(params))
    >>> params
    [tensor([0.7000, 1.0000])]
    """
    return Rule(RADAM, (locals(),))
