"""Sampled episodes, and the return that they estimate."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop.policies.baseline import linear_baseline
from innerloop.policies.dice import dice, returns_to_go


class Episodes(NamedTuple):
    """Sampled episodes; ``alive`` is ``None`` if none of them ended early."""

    observations: Tensor
    """[episodes, time, size]"""
    actions: Tensor
    """[episodes, time, ...]"""
    rewards: Tensor
    """[episodes, time]"""
    alive: Tensor | None = None
    """True where the action was taken before the episode's end. [episodes, time]"""


def expected_return(
    policy: Any, episodes: Episodes, *, discount: float = 1.0, decay: float = 1.0
) -> Tensor:
    """:func:`dice` of episodes that were sampled with ``policy``, less a linear baseline.

    Entries after the end of an episode do not count, whatever they hold: NaN, or no valid action.
    """
    observations, actions, rewards, alive = episodes
    # Observations may be numbers of places, or halves, in which rewards would be rounded.
    whole = not observations.is_floating_point()
    own = torch.get_default_dtype() if whole else observations.dtype
    dtype = torch.promote_types(own, torch.float32)
    rewards = rewards.to(dtype)
    if alive is not None:
        alive = alive.bool()
        rewards = torch.where(alive, rewards, 0.0)
        observations, actions = (
            _mask_after_end(observations, alive),
            _mask_after_end(actions, alive),
        )
    future = returns_to_go(rewards, discount)
    return dice(
        policy.log_prob(observations, actions),
        rewards,
        linear_baseline(observations.to(dtype), future, alive),
        discount=discount,
        decay=decay,
        alive=alive,
    )


def _mask_after_end(values: Tensor, alive: Tensor) -> Tensor:
    """Replace the values after the end by the first one. [episodes, time, ...]

    It is not enough to leave their log-probabilities out: the derivative of those that are not
    finite, times zero, is NaN. The first value is one that the policy can handle; zero may not be.
    """
    alive = alive.reshape(*alive.shape, *[1] * (values.dim() - alive.dim()))
    first = torch.where(alive[:, :1], values[:, :1], torch.zeros_like(values[:, :1]))
    return torch.where(alive, values, first)
