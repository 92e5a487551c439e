"""Muon."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop._numerics import safe_norm
from innerloop.optim import refusals
from innerloop.optim.family import (
    Family,
    Group,
    Packed,
    Slots,
    Value,
    add_scaled,
    larger,
    shrink,
)
from innerloop.optim.rule import Rule
from innerloop.optim.settings import scalar_setting


def _start(params: Tensor, group: Group) -> Slots:
    if params.dim() != 2:
        raise refusals.not_a_matrix(params)
    return {"momentum_buffer": torch.zeros_like(params)}


def _lerp(start: Tensor, end: Tensor, weight: Value) -> Tensor:
    """``start + weight * (end - start)``, by torch's own kernel where that takes the weight.

    What follows is rounded to few digits, so a difference in the last one could become visible.
    """
    if isinstance(weight, Tensor):
        return start + weight * (end - start)
    return torch.lerp(start, end, weight)


def _addmm(base: Tensor, left: Tensor, right: Tensor, beta: Value, alpha: Value) -> Tensor:
    """``beta * base + alpha * left @ right``, rounded once to the dtype of ``base``."""
    if not isinstance(beta, Tensor) and not isinstance(alpha, Tensor):
        return torch.addmm(base, left, right, beta=beta, alpha=alpha)
    wide = torch.promote_types(base.dtype, torch.float32)
    product = left.to(wide) @ right.to(wide)
    return (beta * base.to(wide) + alpha * product).to(base.dtype)


def _newton_schulz(
    matrix: Tensor, coefficients: tuple[Value, ...], eps: Value, steps: int, norm: Any
) -> Tensor:
    """About U Vᵀ for a matrix U S Vᵀ, by ``steps`` iterations of an odd quintic polynomial."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / larger(norm(x), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = _addmm(x, _addmm(gram, gram, gram, b, c), x, a, 1)
    return x.T if tall else x


def _orthogonalize(packed: Packed, matrix: Tensor) -> Tensor:
    """Newton–Schulz with the value of ``ns_dtype`` and the derivative of the matrix's own dtype."""
    steps, dtype = packed.options["ns_steps"], packed.options["ns_dtype"]
    coefficients, eps = scalar_setting(packed, "ns_coefficients"), scalar_setting(packed, "eps")
    smooth = _newton_schulz(matrix, coefficients, eps, steps, safe_norm)
    if dtype == matrix.dtype:
        return smooth
    with torch.no_grad():
        a, b, c, least = (_detach(value) for value in (*coefficients, eps))
        rounded = _newton_schulz(matrix.detach().to(dtype), (a, b, c), least, steps, torch.norm)
    return rounded.to(matrix.dtype) + (smooth - smooth.detach())


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _ratio(shape: torch.Size, adjust_lr_fn: str | None) -> float:
    """The factor of the learning rate for a matrix of this shape."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * max(rows, columns) ** 0.5
    return max(1, rows / columns) ** 0.5


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    h, grads, options = packed.hyper, packed.grads, packed.options
    buffer = _lerp(packed.slots["momentum_buffer"], grads, 1 - h["momentum"])
    step = _lerp(grads, buffer, h["momentum"]) if options["nesterov"] else buffer
    rate = h["lr"] * _ratio(grads.shape, options["adjust_lr_fn"])
    new = add_scaled(shrink(packed), _orthogonalize(packed, step), -rate)
    return new, {"momentum_buffer": buffer}


MUON = Family(
    torch_class=torch.optim.Muon,
    settings={"lr": 1, "weight_decay": 1, "momentum": 1, "ns_coefficients": 3, "eps": 1},
    options={
        "nesterov": True,
        "ns_steps": 5,
        "adjust_lr_fn": None,
        "ns_dtype": torch.bfloat16,
    },
    counters={},
    start=_start,
    update=_update,
    layout="tensor",
    real_only=True,
)


def muon(
    lr: Any = 1e-3,
    weight_decay: Any = 0.1,
    momentum: Any = 0.95,
    nesterov: bool = True,
    ns_coefficients: Any = (3.4445, -4.7750, 2.0315),
    eps: Any = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    *,
    ns_dtype: torch.dtype = torch.bfloat16,
) -> Rule:
    r"""Muon (Jordan et al., 2024).

    With gradient :math:`G` of a matrix ``[rows, columns]``, ``lr`` = γ, ``weight_decay`` = λ,
    ``momentum`` = μ, ``ns_coefficients`` = (a, b, c) and ``eps`` = ε::

        B ← μ B + (1 - μ) G
        X ← (1 - μ) G + μ B  if nesterov  else  B
        X ← X / max(‖X‖, ε)
        X ← a X + (b X Xᵀ + c (X Xᵀ)²) X             (ns_steps times)
        θ ← (1 - γ λ) θ - γ √max(1, rows / columns) X

    ``adjust_lr_fn="match_rms_adamw"`` multiplies γ by 0.2 √max(rows, columns) instead.

    ``torch.optim.Muon`` iterates in bfloat16, and so does this rule: its trajectory is torch's. A
    function rounded to three digits has steps, not a derivative, so the derivative is that of the
    same iteration in the parameter's own dtype. With ``ns_dtype`` set to that dtype the iteration
    itself runs in it and the derivative is that of exactly what is computed. For an optimizer from
    torch, put it in the parameter group: ``Muon([{"params": ..., "ns_dtype": torch.float32}])``.

    >>> rule = muon(lr=0.1, weight_decay=0)
    >>> params = [torch.eye(2)]
    >>> params, state = rule.update(params, [torch.eye(2)], rule.init(params))
    >>> params[0].diagonal() < 1
    tensor([True, True])
    """
    return Rule(MUON, (locals(),))
