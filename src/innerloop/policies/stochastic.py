"""Small stochastic policies that take their random numbers as an argument.

The same weights and the same noise give the same action. So an inner loop that samples episodes as
it goes samples the same ones when a strategy computes a step again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from innerloop.errors import InnerLoopError, refusal


class Gaussian(nn.Module):
    """Actions in Rⁿ: a net gives the mean, and a learned vector the standard deviations.

    >>> policy = Gaussian(2, 1, hidden=[8])
    >>> noise = policy.noise(5, generator=torch.Generator().manual_seed(0))
    >>> action = policy.act(torch.zeros(5, 2), noise)
    >>> policy.log_prob(torch.zeros(5, 2), action).shape
    torch.Size([5])
    """

    def __init__(
        self, observations: int, actions: int, hidden: Sequence[int] = (64, 64), std: float = 1.0
    ) -> None:
        super().__init__()
        if not 0 < std < math.inf:
            raise _wrong_std(std)
        self.size = actions
        self.net = _net(observations, hidden, actions)
        self.log_std = nn.Parameter(torch.full((actions,), math.log(std)))

    def forward(self, observations: Tensor) -> Tensor:
        """Return the mean action. [..., actions]"""
        return self.net(observations)

    def noise(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw the random numbers of :meth:`act`. [*shape, actions]"""
        kind = self.log_std
        drawn = torch.randn(*shape, self.size, generator=generator, dtype=kind.dtype)
        return drawn.to(kind.device)

    @torch.no_grad()
    def act(self, observations: Tensor, noise: Tensor) -> Tensor:
        """Sample an action. [..., actions]"""
        return self(observations) + self.log_std.exp() * noise

    def log_prob(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Return the log-probability of actions. [...]"""
        z = (actions - self(observations)) * (-self.log_std).exp()
        return -(0.5 * z.square() + self.log_std + 0.5 * math.log(2 * math.pi)).sum(-1)


class Categorical(nn.Module):
    """One of several actions, by the logits of a net.

    >>> policy = Categorical(4, 2, hidden=[8])
    >>> action = policy.act(torch.zeros(5, 4), policy.noise(5))
    >>> policy.log_prob(torch.zeros(5, 4), action).shape
    torch.Size([5])
    """

    def __init__(self, observations: int, choices: int, hidden: Sequence[int] = (64, 64)) -> None:
        super().__init__()
        self.size = choices
        self.net = _net(observations, hidden, choices)

    def forward(self, observations: Tensor) -> Tensor:
        """Return the logits. [..., choices]"""
        return self.net(observations)

    def noise(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw the random numbers of :meth:`act`: Gumbel noise. [*shape, choices]"""
        kind = next(self.parameters())
        # Not in half precision: near 1 it has no numbers.
        exact = torch.promote_types(kind.dtype, torch.float32)
        uniform = torch.rand(*shape, self.size, generator=generator, dtype=exact)
        drawn = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
        return drawn.to(kind.device, kind.dtype)

    @torch.no_grad()
    def act(self, observations: Tensor, noise: Tensor) -> Tensor:
        """Sample an action: the largest of the logits with Gumbel noise. [...]"""
        return (self(observations) + noise).argmax(-1)

    def log_prob(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Return the log-probability of actions. [...]"""
        every = self(observations).log_softmax(-1)
        return every.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def _net(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    sizes = [inputs, *hidden]
    layers: list[Any] = []
    for before, after in zip(sizes, hidden, strict=False):
        layers += [nn.Linear(before, after), nn.Tanh()]
    last = nn.Linear(sizes[-1], outputs)
    # Small at first: no action is preferred before anything was learned.
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def _wrong_std(std: float) -> InnerLoopError:
    return refusal(
        f"You wrote Gaussian(..., std={std}).",
        "a number above 0.",
        "the score of an action is in units of it.",
        "Gaussian(observations, actions, std=1.0).",
    )
