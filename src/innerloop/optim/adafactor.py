"""Adafactor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop._numerics import safe_norm
from innerloop.optim.family import (
    Family,
    Group,
    Packed,
    Slots,
    Value,
    add_scaled,
    ascent,
    average,
    count,
    larger,
    shrink,
    smaller,
)
from innerloop.optim.rule import Rule
from innerloop.optim.settings import scalar_setting


def _start(params: Tensor, group: Group) -> Slots:
    if params.dim() < 2:
        return {"step": count(), "variance": torch.zeros_like(params)}
    return {
        "step": count(),
        "row_var": torch.zeros_like(params[..., :1]),
        "col_var": torch.zeros_like(params[..., :1, :]),
    }


def _second_moment(slots: Slots, grads: Tensor, keep: Tensor, eps: Value) -> tuple[Tensor, Slots]:
    """The estimate of the squared gradient, and the state it is made from."""
    squared = grads * grads
    if "variance" in slots:
        variance = average(slots["variance"], squared, keep)
        return variance, {"variance": variance}
    row = average(slots["row_var"], squared.mean(-1, keepdim=True), keep)
    column = average(slots["col_var"], squared.mean(-2, keepdim=True), keep)
    estimate = row @ column / larger(row.mean(-2, keepdim=True), eps)
    return estimate, {"row_var": row, "col_var": column}


def _root_mean_square(tensor: Tensor) -> Tensor:
    return safe_norm(tensor) / tensor.numel() ** 0.5


def _clipping(direction: Tensor, threshold: Value) -> Tensor:
    """``max(1, RMS(U) / d)``.

    The first update of a vector has RMS 1 up to rounding, and d is 1 by default: equality counts as
    not clipped, or else the sign of a rounding error would choose between two derivatives.
    """
    excess = _root_mean_square(direction) / threshold
    return torch.where(excess > 1 + 8 * torch.finfo(direction.dtype).eps, excess, 1.0)


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    h, grads = packed.hyper, ascent(packed)
    eps1, eps2 = h["eps"]
    if eps1 is None:
        eps1 = torch.finfo(packed.params.dtype).eps
    step = packed.slots["step"] + 1
    keep = 1 - step ** scalar_setting(packed, "beta2_decay")
    estimate, moments = _second_moment(packed.slots, grads, keep, eps1)
    direction = grads * larger(estimate, eps1 * eps1).rsqrt()
    clipped = direction / _clipping(direction, h["d"])
    rate = larger(_root_mean_square(packed.params), eps2) * smaller(step**-0.5, h["lr"])
    return add_scaled(shrink(packed), clipped, -rate), {"step": step, **moments}


ADAFACTOR = Family(
    torch_class=torch.optim.Adafactor,
    optional=frozenset({"eps"}),
    settings={"lr": 1, "beta2_decay": 1, "eps": 2, "d": 1, "weight_decay": 1},
    options={"maximize": False},
    start=_start,
    update=_update,
    layout="tensor",
    real_only=True,
)


def adafactor(
    lr: Any = 1e-2,
    beta2_decay: Any = -0.8,
    eps: Any = (None, 1e-3),
    d: Any = 1.0,
    weight_decay: Any = 0.0,
    *,
    maximize: bool = False,
) -> Rule:
    r"""Adafactor (Shazeer and Stern, 2018), as ``torch.optim`` has it.

    With gradient :math:`G` at step :math:`t`, ``lr`` = γ, ``beta2_decay`` = τ, ``eps`` = (ε₁, ε₂),
    ``d`` = d, ``weight_decay`` = λ, and RMS the root of the mean square::

        α ← max(ε₂, RMS(θ)) · min(γ, 1 / √t)
        θ ← (1 - γ λ) θ
        R ← (1 - t^τ) R + t^τ mean(G², over columns)
        C ← (1 - t^τ) C + t^τ mean(G², over rows)
        V ← R C / max(mean(R), ε₁)                   (a vector has its own V, averaged like R)
        U ← G / max(√V, ε₁)
        θ ← θ - α U / max(1, RMS(U) / d)

    An ε₁ of ``None`` is the machine precision of the parameter's dtype.

    >>> rule = adafactor(lr=0.1)
    >>> params = [torch.tensor([[1.0, 1.0]])]
    >>> params, state = rule.update(params, [torch.tensor([[3.0, 0.0]])], rule.init(params))
    >>> params
    [tensor([[0.9000, 1.0000]])]
    """
    return Rule(ADAFACTOR, (locals(),))
