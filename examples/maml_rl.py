"""MAML for reinforcement learning: a policy that finds a goal it cannot see, after one step.

Episodes are sampled anew with the weights of every step. DiCE (Foerster et al. 2018) makes the
gradient step on their return a function whose derivative is right.
"""

import torch

import innerloop as il
from innerloop import policies

HORIZON, EPISODES, TASKS = 20, 20, 20


def walk(policy, goal, noise):
    """Episodes in the plane: a step is at most 0.1, the reward minus the distance to the goal.

    All randomness is in the noise, so the same weights walk the same paths.
    """
    here = torch.zeros(EPISODES, 2)
    seen, actions, rewards = [], [], []
    for t in range(HORIZON):
        action = policy.act(here, noise[:, t])
        seen.append(here)
        actions.append(action)
        here = here + 0.1 * action.clamp(-1, 1)
        rewards.append(-(here - goal).norm(dim=-1))
    return policies.Episodes(*(torch.stack(part, 1) for part in (seen, actions, rewards)))


def loss(policy, batch):
    goal, noise = batch
    return -policies.expected_return(policy, walk(policy, goal, noise), discount=0.99)


def main(iterations: int = 100) -> float:
    torch.manual_seed(0)
    policy = policies.Gaussian(2, 2, hidden=[64, 64], std=0.5)
    # Rates are learned too, by their logarithm.
    rates = il.Learn(per="parameter", transform="log")
    sgd = torch.optim.SGD(policy.parameters(), lr=0.05)
    inner = il.InnerLoop(
        policy, sgd, loss, learn={"init": True, "lr": rates}, tasks=il.tasks.vmap()
    )
    meta = torch.optim.Adam(inner.parameters(), lr=3e-3)

    def sampled(goals):
        """A goal for each task, and fresh randomness: what one step needs."""
        return goals, policy.noise(len(goals), EPISODES, HORIZON)

    for _ in range(iterations):
        goals = torch.rand(TASKS, 2) - 0.5
        meta.zero_grad()
        inner([sampled(goals)], sampled(goals), tasks=True).mean().backward()
        torch.nn.utils.clip_grad_norm_(inner.parameters(), 10.0)
        meta.step()

    # Goals that were not seen before.
    goals = torch.rand(20, 2) - 0.5
    with torch.no_grad():
        before = -torch.stack([loss(policy, (g, n)) for g, n in zip(*sampled(goals), strict=True)])
        after = -inner([sampled(goals)], sampled(goals), tasks=True)
    print(f"return for new goals: {before.mean():.2f} before, {after.mean():.2f} after one step")
    return after.mean().item()


if __name__ == "__main__":
    main()
