"""Linear systems given only by products with the matrix: ``product(v)`` for ``A v = b``.

Vectors are flat. A solver stops when the norm of the residual is ``tolerance`` times that of ``b``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


def conjugate_gradient(product: Product, b: Tensor, iterations: int, tolerance: float) -> Tensor:
    """For symmetric positive definite matrices (Hestenes and Stiefel, 1952)."""
    x = torch.zeros_like(b)
    rest, direction = b.clone(), b.clone()
    size, goal = rest.dot(rest), tolerance * b.norm()
    for _ in range(iterations):
        if size.sqrt() <= goal:
            break
        image = product(direction)
        curvature = direction.dot(image)
        if curvature <= 0:
            # Not positive definite here: no step along this direction makes sense.
            break
        step = size / curvature
        x = x + step * direction
        rest = rest - step * image
        new = rest.dot(rest)
        direction = rest + (new / size) * direction
        size = new
    return x


def neumann(
    product: Product, b: Tensor, iterations: int, tolerance: float, scale: float | None
) -> Tensor:
    """``scale · Σ (I - scale · A)ᵏ b``; converges if that matrix shrinks every vector."""
    if scale is None:
        scale = 1.0 / max(_largest(product, b), torch.finfo(b.dtype).tiny)
    x, term, goal = torch.zeros_like(b), scale * b, tolerance * scale * b.norm()
    for _ in range(iterations):
        x = x + term
        if term.norm() <= goal:
            break
        term = term - scale * product(term)
    return x


def _largest(product: Product, like: Tensor) -> float:
    """The largest eigenvalue in size, a little overestimated, by power iteration."""
    generator = torch.Generator(device=like.device).manual_seed(0)
    v = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    value = torch.zeros((), dtype=like.dtype)
    for _ in range(30):
        v = v / v.norm().clamp_min(torch.finfo(v.dtype).tiny)
        v = product(v)
        value = v.norm()
    return 1.1 * value.item()


def gmres(
    product: Product, b: Tensor, iterations: int, tolerance: float, restart: int = 50
) -> Tensor:
    """For any matrix (Saad and Schultz, 1986): the least residual over a growing Krylov space."""
    x, goal, taken = torch.zeros_like(b), tolerance * b.norm(), 0
    while taken < iterations:
        rest = b - product(x) if taken else b
        if rest.norm() <= goal:
            break
        size = min(restart, iterations - taken, b.numel())
        change, used = _cycle(product, rest, size, goal)
        x = x + change
        taken += used
    return x


def _cycle(product: Product, rest: Tensor, size: int, goal: Tensor) -> tuple[Tensor, int]:
    norm = rest.norm()
    basis = [rest / norm]
    matrix = torch.zeros(size + 1, size, dtype=rest.dtype, device=rest.device)
    goals = torch.zeros(size + 1, dtype=rest.dtype, device=rest.device)
    goals[0] = norm
    used, weights = 0, torch.zeros(0, dtype=rest.dtype, device=rest.device)
    for k in range(size):
        new = product(basis[k])
        for _ in range(2):  # Twice is enough: once loses orthogonality to rounding.
            for i, vector in enumerate(basis):
                part = vector.dot(new)
                matrix[i, k] += part
                new = new - part * vector
        matrix[k + 1, k] = new.norm()
        used = k + 1
        small, target = matrix[: k + 2, : k + 1], goals[: k + 2]
        weights = torch.linalg.lstsq(small, target[:, None]).solution[:, 0]
        if (small @ weights - target).norm() <= goal or matrix[k + 1, k] <= 1e-14 * norm:
            break
        basis.append(new / matrix[k + 1, k])
    change = sum((w * v for w, v in zip(weights, basis, strict=False)), torch.zeros_like(rest))
    return change, used


def relative_residual(product: Product, x: Tensor, b: Tensor) -> float:
    """The norm of ``b - A x``, relative to that of ``b``."""
    norm = b.norm()
    return 0.0 if norm == 0 else ((b - product(x)).norm() / norm).item()
