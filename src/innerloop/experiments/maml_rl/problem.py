"""Families of problems to act in: every task is one world, all random numbers are given.

``sample(policy, batch)`` is a function of the weights and the batch alone. An inner loop can sample
anew with the weights of each step, and a step that is computed again sees the same episodes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import innerloop as il
from innerloop.policies import Categorical, Episodes, Gaussian


@dataclasses.dataclass(frozen=True)
class Navigation:
    """Walk in the plane to a goal that the policy cannot see (Finn et al. 2017).

    Goals are in the square [-1/2, 1/2]². An episode starts at the origin, a step is at most 0.1 in
    each direction, and the reward is minus the distance to the goal. A batch is (goal, noise).
    """

    horizon: int

    reach: ClassVar[float] = 0.1
    scale: ClassVar[float] = 1.0

    def policy(self, hidden: int) -> nn.Module:
        return Gaussian(2, 2, [hidden, hidden], std=0.5)

    def tasks(self, count: int, generator: torch.Generator) -> Tensor:
        """Goals. [tasks, 2]"""
        return torch.rand(count, 2, generator=generator, dtype=torch.float32) - 0.5

    def batch(
        self, policy: Any, tasks: Tensor, episodes: int, generator: torch.Generator
    ) -> tuple[Tensor, ...]:
        return tasks, policy.noise(len(tasks), episodes, self.horizon, generator=generator)

    @torch.no_grad()
    def sample(self, policy: Any, batch: tuple[Tensor, ...]) -> Episodes:
        """Episodes of one task."""
        goal, noise = batch
        here = torch.zeros_like(noise[:, 0])
        seen, actions, rewards = [], [], []
        for t in range(self.horizon):
            action = policy.act(here, noise[:, t])
            seen.append(here)
            actions.append(action)
            here = here + self.reach * action.clamp(-1, 1)
            rewards.append(-(here - goal).norm(dim=-1))
        return Episodes(*(torch.stack(parts, 1) for parts in (seen, actions, rewards)))

    def task_strategy(self) -> Any:
        return il.tasks.vmap()


@dataclasses.dataclass(frozen=True)
class CartPole:
    """Balance a pole on a cart (Gymnasium's) whose physics are not known.

    A task has the force of its motor, of 5 to 15 and with either sign, half the length of its
    pole, 0.25 to 1, and its gravity, 5 to 15. With the other sign a push goes to the other side, so
    no policy serves all tasks. The reward is 1 for each step before the pole falls. A batch is
    (physics, seed of the first states, noise).
    """

    horizon: int

    # The gradient of a return in tens suits the same rates as that of the other world.
    scale: ClassVar[float] = 0.1
    ranges: ClassVar[tuple[tuple[float, float], ...]] = ((5.0, 15.0), (0.25, 1.0), (5.0, 15.0))

    def __post_init__(self) -> None:
        import gymnasium  # noqa: F401 - missing packages are named before any work is done

    def policy(self, hidden: int) -> nn.Module:
        return Categorical(4, 2, [hidden])

    def tasks(self, count: int, generator: torch.Generator) -> Tensor:
        """Force, half the length, gravity; every second motor is reversed. [tasks, 3]"""
        low, high = torch.tensor(self.ranges, dtype=torch.float32).unbind(1)
        drawn = torch.rand(count, 3, generator=generator, dtype=torch.float32)
        signs = torch.ones(count, 3)
        signs[1::2, 0] = -1
        return (low + (high - low) * drawn) * signs.to(drawn.dtype)

    def batch(
        self, policy: Any, tasks: Tensor, episodes: int, generator: torch.Generator
    ) -> tuple[Tensor, ...]:
        seeds = torch.randint(2**31, (len(tasks),), generator=generator)
        noise = policy.noise(len(tasks), episodes, self.horizon, generator=generator)
        return tasks, seeds, noise

    @torch.no_grad()
    def sample(self, policy: Any, batch: tuple[Tensor, ...]) -> Episodes:
        """Episodes of one task, all at once in one of Gymnasium's vector environments."""
        physics, seed, noise = batch
        world = self._world(physics, len(noise))
        observed, _ = world.reset(seed=int(seed))
        alive = torch.ones(len(noise), dtype=torch.bool)
        steps = []
        for t in range(self.horizon):
            here = torch.from_numpy(observed).to(noise.dtype)
            action = policy.act(here, noise[:, t])
            observed, reward, fallen, _, _ = world.step(action.numpy())
            earned = torch.from_numpy(reward).to(noise.dtype) * alive
            steps.append((here, action, earned, alive))
            alive = alive & ~torch.from_numpy(fallen)
            if not alive.any():
                break
        return Episodes(*(torch.stack(parts, 1) for parts in zip(*steps, strict=True)))

    def _world(self, physics: Tensor, episodes: int) -> Any:
        from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

        # Longer than an episode here: nothing is truncated.
        world = CartPoleVectorEnv(num_envs=episodes, max_episode_steps=self.horizon + 1)
        world.force_mag, world.length, world.gravity = physics.tolist()
        world.polemass_length = world.masspole * world.length
        return world

    def task_strategy(self) -> Any:
        return il.tasks.loop()


WORLDS = {"navigation": Navigation, "cartpole": CartPole}
