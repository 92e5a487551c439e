"""DiCE: a score-function surrogate whose derivatives of every order are unbiased."""

from __future__ import annotations

import torch
from torch import Tensor

from innerloop._numerics import full_precision, widened
from innerloop.errors import InnerLoopError, refusal


def dice(
    log_probs: Tensor,
    rewards: Tensor,
    baseline: Tensor | None = None,
    *,
    discount: float = 1.0,
    decay: float = 1.0,
    alive: Tensor | None = None,
) -> Tensor:
    """Return the mean return of episodes, with estimates of all its derivatives by the policy.

    Actions were sampled, so the return itself has no gradient. In expectation the derivatives of
    this are those of the expected return, of any order: so a gradient step on it can be part of
    an inner loop. With the log-probability lₜ of the action, the reward rₜ, a baseline bₜ and
    ⊥ for a value that is not differentiated,

        wₜ = λ wₜ₋₁ + lₜ        vₜ = wₜ - lₜ        □(w) = exp(w - ⊥w)
        Aₜ = Σₖ₌ₜ γᵏ rₖ - γᵗ bₜ
        J  = ⊥(Σₜ γᵗ rₜ) + Σₜ (□(wₜ) - □(vₜ)) Aₜ

    averaged over episodes. With ``decay`` λ = 1 and no baseline this is DiCE (Foerster et al. 2018)
    term by term; as it stands it is Loaded DiCE (Farquhar et al. 2019), whose baseline lowers the
    variance of every order and changes no expectation. A λ below 1 forgets how earlier actions
    led here: less variance, and derivatives above the first are biased. λ = 0 is the
    low-variance curvature of ProMP (Rothfuss et al. 2019). The first derivative is the same for
    every λ.

    Args:
        log_probs: of the actions taken, differentiable by the policy. [episodes, time]
        rewards: [episodes, time]
        baseline: a prediction of the return from here on that does not depend on the action.
            [episodes, time]
        discount: γ.
        decay: λ.
        alive: whether the action was taken before the end of its episode. [episodes, time] What
            comes later does not count; but torch differentiates the log-probabilities there too,
            so the actions and observations they are made of have to be finite, as
            :func:`expected_return` makes them.

    >>> chance = torch.tensor(0.25, requires_grad=True)  # of the action that earns 1
    >>> log_probs = torch.stack([chance.log(), (1 - chance).log()])[[0, 1, 1, 1]].unsqueeze(1)
    >>> value = dice(log_probs, torch.tensor([[1.0], [0.0], [0.0], [0.0]]))
    >>> value.item(), torch.autograd.grad(value, chance)[0].item()
    (0.25, 1.0)
    """
    _check(log_probs, rewards, baseline, alive)
    log_probs = widened(log_probs)
    rewards = rewards.detach()
    rewards = widened(rewards if rewards.is_floating_point() else rewards.to(log_probs.dtype))
    if alive is not None:
        alive = alive.bool()
        log_probs = torch.where(alive, log_probs, 0.0)
        rewards = torch.where(alive, rewards, 0.0)
        baseline = None if baseline is None else torch.where(alive, baseline, 0.0)
    time = torch.arange(rewards.shape[-1], device=rewards.device)
    future = returns_to_go(rewards, discount)
    expected = 0.0 if baseline is None else baseline.detach()
    advantages = discount ** time.to(rewards.dtype) * (future - expected)
    seen = _decayed_sums(log_probs, decay)
    weights = _one(seen) - _one(seen - log_probs)
    return (future[..., 0] + (weights * advantages).sum(-1)).mean()


def returns_to_go(rewards: Tensor, discount: float = 1.0) -> Tensor:
    """Sum the discounted rewards from each time on. [..., time]

    >>> returns_to_go(torch.tensor([1.0, 2.0, 4.0]), discount=0.5)
    tensor([3., 4., 4.])
    """
    if not rewards.is_floating_point():
        rewards = rewards.to(torch.get_default_dtype())
    return _decayed_sums(widened(rewards).flip(-1), discount).flip(-1)


def _decayed_sums(values: Tensor, decay: float) -> Tensor:
    """Sum every value and those before it, each times ``decay`` to the power of its age."""
    time = torch.arange(values.shape[-1], device=values.device)
    age = time - time[:, None]
    # A power of a negative age may be infinite, and is not wanted.
    factors = torch.where(age >= 0, decay ** age.clamp(min=0).to(values.dtype), 0.0)
    with full_precision(values.device):
        return values @ factors


def _one(exponent: Tensor) -> Tensor:
    """Return 1, with the derivatives of the exponential."""
    return torch.exp(exponent - exponent.detach())


def _check(
    log_probs: Tensor, rewards: Tensor, baseline: Tensor | None, alive: Tensor | None
) -> None:
    given = {"rewards": rewards, "baseline": baseline, "alive": alive}
    shapes = {name: tuple(t.shape) for name, t in given.items() if t is not None}
    expected = tuple(log_probs.shape)
    for name, shape in shapes.items():
        if shape != expected or len(expected) != 2:
            raise _other_shape(expected, name, shape)


def _other_shape(expected: tuple[int, ...], name: str, shape: tuple[int, ...]) -> InnerLoopError:
    return refusal(
        f"You gave log_probs of shape {expected} and {name} of shape {shape}.",
        "one value for each action, [episodes, time], in all of them.",
        "an action is credited with the rewards from its own time on.",
        "policy.log_prob(observations, actions), summed over the parts of an action.",
    )
