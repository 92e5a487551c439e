"""What was sampled with a policy, and the return it estimates."""

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
    """Whether the action was taken before the episode's end. [episodes, time]"""


def expected_return(
    policy: Any, episodes: Episodes, *, discount: float = 1.0, decay: float = 1.0
) -> Tensor:
    """:func:`dice` of episodes that were sampled with ``policy``, less a linear baseline."""
    observations, actions, rewards, alive = episodes
    rewards = rewards.to(observations.dtype)
    if alive is not None:
        alive = alive.bool()
        rewards = torch.where(alive, rewards, 0.0)
    future = returns_to_go(rewards, discount)
    return dice(
        policy.log_prob(observations, actions),
        rewards,
        linear_baseline(observations, future, alive),
        discount=discount,
        decay=decay,
        alive=alive,
    )
