"""A baseline: a prediction of the return from the state, without the action."""

from __future__ import annotations

import torch
from torch import Tensor

from innerloop._numerics import full_precision, widened
from innerloop.errors import InnerLoopError, refusal


def linear_baseline(
    observations: Tensor, returns: Tensor, alive: Tensor | None = None, *, ridge: float = 1e-3
) -> Tensor:
    """Fit returns by a linear function of the observation, its squares, and powers of time.

    The features are those of Duan et al. (2016), which MAML uses too. The first half of the
    episodes is predicted by a fit to the second half, and the other way round, so that no action
    affects its own baseline: :func:`dice` stays unbiased.

    Args:
        observations: [episodes, time, size]
        returns: from each time on, as :func:`returns_to_go` computes them. [episodes, time]
        alive: whether an episode had not ended. [episodes, time]
        ridge: regularization, relative to the mean square of a feature.

    >>> observations = torch.randn(4, 10, 2)
    >>> returns = 3 * observations[..., 0] + 1
    >>> torch.allclose(linear_baseline(observations, returns, ridge=1e-6), returns, atol=1e-2)
    True
    """
    episodes = len(returns)
    if episodes < 2:
        raise _too_few_episodes(episodes)
    observations, returns = widened(observations.detach()), widened(returns.detach())
    if alive is not None:
        # What is not finite would count even with weight zero.
        observations = torch.where(alive.bool().unsqueeze(-1), observations, 0.0)
        returns = torch.where(alive.bool(), returns, 0.0)
    features = _features(observations)
    weight = torch.ones_like(returns) if alive is None else alive.bool().to(returns.dtype)
    half = episodes // 2
    first, second = slice(None, half), slice(half, None)
    with full_precision(returns.device):
        fits = [_fit(features[s], returns[s], weight[s], ridge) for s in (second, first)]
        return torch.cat([features[s] @ w for s, w in zip((first, second), fits, strict=True)])


def _features(observations: Tensor) -> Tensor:
    steps = observations.shape[-2]
    time = torch.arange(steps, dtype=observations.dtype, device=observations.device) / steps
    powers = torch.stack([time**k for k in range(4)], dim=-1)
    shared = powers.expand(*observations.shape[:-1], 4)
    return torch.cat([observations, observations.square(), shared], dim=-1)


def _fit(features: Tensor, returns: Tensor, weight: Tensor, ridge: float) -> Tensor:
    """Solve the regularized least-squares problem. [size]"""
    flat, weighted = features.flatten(0, 1), (features * weight.unsqueeze(-1)).flatten(0, 1)
    square = weighted.mT @ flat
    # A feature that is zero everywhere must not leave the matrix singular.
    damping = ridge * (square.diagonal(dim1=-2, dim2=-1).mean(-1) + 1e-6)
    size = torch.eye(square.shape[-1], dtype=square.dtype, device=square.device)
    return torch.linalg.solve(square + damping * size, weighted.mT @ returns.flatten())


def _too_few_episodes(episodes: int) -> InnerLoopError:
    return refusal(
        f"You fitted a baseline to {episodes} episode(s).",
        "at least 2.",
        "each half of the episodes is predicted by a fit to the other half.",
        "more episodes, or dice(...) without a baseline.",
    )
