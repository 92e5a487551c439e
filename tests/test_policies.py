"""DiCE against a tabular problem of which every trajectory is enumerated; baseline; policies."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import innerloop as il
from innerloop import policies
from innerloop.errors import InnerLoopError
from innerloop.policies import dice, linear_baseline, returns_to_go

STATES, ACTIONS, TIME, DISCOUNT = 2, 2, 3, 0.8


class Problem(NamedTuple):
    """A Markov decision process: first states, transitions [s, a, s'], rewards [s, a]."""

    first: Tensor
    moves: Tensor
    rewards: Tensor


@pytest.fixture
def problem() -> Problem:
    return Problem(
        torch.rand(STATES).softmax(0),
        torch.randn(STATES, ACTIONS, STATES).softmax(-1),
        torch.randn(STATES, ACTIONS),
    )


def exact(problem: Problem, logits: Tensor) -> Tensor:
    """The expected return, by carrying the distribution over states along."""
    policy, here = logits.softmax(-1), problem.first
    total = torch.zeros(())
    for t in range(TIME):
        both = here[:, None] * policy
        total = total + DISCOUNT**t * (both * problem.rewards).sum()
        here = torch.einsum("sa,san->n", both, problem.moves)
    return total


class Every(NamedTuple):
    """All trajectories: states and actions. [trajectories, time]"""

    states: Tensor
    actions: Tensor


def every() -> Every:
    paths = list(itertools.product(range(STATES), range(ACTIONS), repeat=TIME))
    table = torch.tensor(paths).reshape(len(paths), TIME, 2)
    return Every(table[..., 0], table[..., 1])


def log_probs(logits: Tensor, paths: Every) -> Tensor:
    return logits.log_softmax(-1)[paths.states, paths.actions]


def chances(problem: Problem, logits: Tensor, paths: Every) -> Tensor:
    """How likely each trajectory is. [trajectories]"""
    found = problem.first[paths.states[:, 0]] * log_probs(logits, paths).sum(-1).exp()
    for t in range(TIME - 1):
        now, action, then = paths.states[:, t], paths.actions[:, t], paths.states[:, t + 1]
        found = found * problem.moves[now, action, then]
    return found


def expectation(problem: Problem, surrogate, start: Tensor):
    """What the surrogate is in the mean over all trajectories sampled at ``start``.

    Surrogates are linear in rewards and baselines, so these carry the chances of trajectories.
    """
    paths = every()
    weights = chances(problem, start, paths)
    assert weights.sum().item() == pytest.approx(1)
    share = (len(weights) * weights)[:, None]
    rewards = problem.rewards[paths.states, paths.actions]
    guesses = GUESSES[paths.states, torch.arange(TIME)]
    return lambda logits: surrogate(log_probs(logits, paths), share * rewards, share * guesses)


GUESSES = torch.tensor([[0.3, -1.2, 2.0], [-0.7, 0.4, 5.0]], dtype=torch.float64)
"""Of the return from a state and a time on: any numbers will do. [states, time]"""


def plain(log_probs: Tensor, rewards: Tensor, guesses: Tensor) -> Tensor:
    return dice(log_probs, rewards, discount=DISCOUNT)


def with_baseline(log_probs: Tensor, rewards: Tensor, guesses: Tensor) -> Tensor:
    return dice(log_probs, rewards, guesses, discount=DISCOUNT)


def forgetful(log_probs: Tensor, rewards: Tensor, guesses: Tensor) -> Tensor:
    return dice(log_probs, rewards, discount=DISCOUNT, decay=0.0)


def naive(log_probs: Tensor, rewards: Tensor, guesses: Tensor) -> Tensor:
    """REINFORCE: the first derivative is right."""
    powers = DISCOUNT ** torch.arange(TIME)
    return (log_probs * powers * returns_to_go(rewards, DISCOUNT)).sum(-1).mean()


def original(log_probs: Tensor, rewards: Tensor, guesses: Tensor) -> Tensor:
    """DiCE as Foerster et al. write it."""
    seen = log_probs.cumsum(-1)
    powers = DISCOUNT ** torch.arange(TIME)
    return (torch.exp(seen - seen.detach()) * powers * rewards).sum(-1).mean()


def derivatives(function, start: Tensor, order: int) -> list[Tensor]:
    """The value, and all partial derivatives up to an order, each as a flat tensor."""
    x = start.clone().requires_grad_()
    found = [function(x).reshape(1)]
    for _ in range(order):
        rows = [torch.autograd.grad(v, x, create_graph=True)[0].flatten() for v in found[-1]]
        found.append(torch.cat(rows))
    return [v.detach() for v in found]


@pytest.mark.parametrize("surrogate", [plain, with_baseline, original])
def test_every_derivative_is_that_of_the_expected_return(problem, surrogate):
    start = torch.randn(STATES, ACTIONS)
    found = derivatives(expectation(problem, surrogate, start), start, 3)
    truth = derivatives(lambda x: exact(problem, x), start, 3)
    for order, (mine, right) in enumerate(zip(found, truth, strict=True)):
        assert right.abs().max() > 1e-3, order
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("surrogate", [naive, forgetful])
def test_other_surrogates_have_another_second_derivative(problem, surrogate):
    start = torch.randn(STATES, ACTIONS)
    _, first, second = derivatives(expectation(problem, surrogate, start), start, 2)
    _, right, curvature = derivatives(lambda x: exact(problem, x), start, 2)
    torch.testing.assert_close(first, right)
    assert (second - curvature).abs().max() > 0.1 * curvature.abs().max()


def test_without_a_baseline_it_is_dice_term_by_term():
    """On one trajectory, not only in the mean."""
    start, rewards = torch.randn(STATES, ACTIONS), torch.randn(1, TIME)
    path = Every(torch.tensor([[0, 1, 1]]), torch.tensor([[1, 1, 0]]))
    both = [
        derivatives(lambda x, f=f: f(log_probs(x, path), rewards, rewards), start, 2)
        for f in (plain, original)
    ]
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("own", [torch.bool, torch.uint8, torch.int8, torch.int64])
@pytest.mark.parametrize("alive", [None, torch.ones(1, 300)])
def test_rewards_that_are_whole_numbers(own, alive):
    """Times above 127 or 255 have no place in their type."""
    chance = torch.tensor(0.3, requires_grad=True)
    found = [
        torch.autograd.grad(dice(chance.log().expand(1, 300), r, discount=0.9, alive=alive), chance)
        for r in (torch.ones(1, 300), torch.ones(1, 300).to(own))
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("own", [torch.float16, torch.bfloat16])
def test_halves_are_discounted_in_float32(own):
    """In bfloat16 0.99 is 0.988, and there are no times above 256 but every second."""
    log_probs, rewards = torch.zeros(1, 300, requires_grad=True), torch.ones(1, 300)
    expected = torch.autograd.grad(dice(log_probs, rewards, discount=0.99), log_probs)
    for r, logp in ((rewards.to(own), log_probs), (rewards, log_probs.to(own))):
        found = torch.autograd.grad(dice(logp, r, discount=0.99), log_probs)
        # Log-probabilities that are halves have slopes that are halves.
        bound = 1e-5 if logp is log_probs else torch.finfo(own).eps
        torch.testing.assert_close(found, expected, rtol=bound, atol=0)
    torch.testing.assert_close(
        returns_to_go(rewards.to(own), 0.99).double(),
        returns_to_go(rewards, 0.99),
        rtol=1e-5,
        atol=0,
    )


class Table(nn.Module):
    """Logits of two actions for each of two places, which are numbers."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([[0.3, -0.2], [0.1, 0.4]]))

    def log_prob(self, observations, actions):
        chosen = self.logits.log_softmax(-1)[observations.long().squeeze(-1)]
        return chosen.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize(
    "own", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, "autocast"]
)
def test_rewards_are_not_rounded_to_the_type_of_observations(own):
    policy, places = Table(), torch.randint(2, (6, 40, 1)).double()
    actions, rewards = torch.randint(2, (6, 40)), torch.rand(6, 40)

    def value_and_slope(observations):
        episodes = policies.Episodes(observations, actions, rewards)
        value = policies.expected_return(policy, episodes, discount=0.99)
        return value, *torch.autograd.grad(value, policy.logits)

    if own == "autocast":
        expected = value_and_slope(places.float())
        with torch.autocast("cpu", torch.bfloat16):
            found = value_and_slope(places.float())
    else:
        # Of halves, rewards are in float32.
        expected = value_and_slope(places.float() if own.is_floating_point else places)
        found = value_and_slope(places.to(own))
    assert expected[0] > 0.1 and expected[1].any()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    if found[0].dtype == torch.float64:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_decay_zero_is_the_low_variance_curvature():
    logp = torch.randn(4, TIME, requires_grad=True)
    rewards = torch.randn(4, TIME)
    ratio = torch.exp(logp - logp.detach())
    other = (ratio * returns_to_go(rewards)).sum(-1).mean()
    for f in (dice(logp, rewards, decay=0.0), other):
        (first,) = torch.autograd.grad(f, logp, create_graph=True)
        torch.testing.assert_close(first, returns_to_go(rewards) / 4)
        (second,) = torch.autograd.grad(first.sum(), logp)
        torch.testing.assert_close(second, returns_to_go(rewards) / 4)


def test_what_comes_after_the_end_does_not_count():
    rewards, alive = torch.randn(3, 5), (torch.arange(5) < 3).expand(3, 5)
    short, long = (
        lambda x: dice(x[:, :3], rewards[:, :3], discount=0.9),
        lambda x: dice(x, rewards, discount=0.9, alive=alive),
    )
    start = torch.randn(3, 5)
    pairs = zip(derivatives(short, start, 2), derivatives(long, start, 2), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)
    assert torch.equal(long(start), dice(start, rewards, discount=0.9, alive=alive.float()))


class Positive(policies.Gaussian):
    """Actions above zero: zero itself has no finite log-probability."""

    def log_prob(self, observations: Tensor, actions: Tensor) -> Tensor:
        return super().log_prob(observations, actions.log())


@pytest.mark.parametrize("kind", [policies.Gaussian, Positive, policies.Categorical])
def test_nothing_after_the_end_has_to_be_a_number(kind):
    policy = kind(3, 2, hidden=[4])
    alive = torch.arange(6) < torch.tensor([[3], [6], [5], [1]])
    observations = torch.randn(4, 6, 3)
    discrete = kind is policies.Categorical
    actions = torch.randint(2, (4, 6)) if discrete else torch.rand(4, 6, 2) + 0.1
    dead = alive if discrete else alive.unsqueeze(-1)
    nothing = torch.tensor(-1 if discrete else math.nan, dtype=actions.dtype)
    rewards = torch.randn(4, 6)
    spoiled = policies.Episodes(
        torch.where(alive.unsqueeze(-1), observations, math.nan),
        torch.where(dead, actions, nothing),
        torch.where(alive, rewards, math.nan),
        alive,
    )
    found = []
    for episodes in (policies.Episodes(observations, actions, rewards, alive), spoiled):
        value = policies.expected_return(policy, episodes, discount=0.9)
        found.append((value, *torch.autograd.grad(value, list(policy.parameters()))))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_baseline_after_the_end_does_not_count():
    alive = (torch.arange(5) < 3).expand(3, 5)
    scores = torch.randn(3, 5, requires_grad=True)
    baseline = torch.where(alive, torch.randn(3, 5), math.nan)
    value = dice(scores, torch.randn(3, 5), baseline, alive=alive)
    (found,) = torch.autograd.grad(value, scores)
    assert value.isfinite() and found.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: policies.Gaussian(2, 1, std=0.0), "above 0"),
        (lambda: policies.Gaussian(2, 1, std=-1.0), "above 0"),
        (lambda: policies.Gaussian(2, 1, std=math.nan), "above 0"),
        (
            lambda: dice(torch.zeros(4, 3, 2), torch.zeros(4, 3)),
            r"\(4, 3, 2\).*rewards of shape \(4, 3\)",
        ),
        (lambda: dice(torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(4)), "baseline"),
        (lambda: linear_baseline(torch.zeros(1, 3, 2), torch.zeros(1, 3)), "at least 2"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(InnerLoopError, match=message):
        call()


# The baseline. --------------------------------------------------------------------------------


def test_no_episode_has_a_part_in_its_own_guess():
    observations, returns = torch.randn(6, 5, 2), torch.randn(6, 5)
    before = linear_baseline(observations, returns)
    for changed in (0, 4):
        other = returns.clone()
        other[changed] += 1
        after = linear_baseline(observations, other)
        mine = slice(0, 3) if changed < 3 else slice(3, 6)
        theirs = slice(3, 6) if changed < 3 else slice(0, 3)
        assert torch.equal(after[mine], before[mine])
        assert not torch.equal(after[theirs], before[theirs])


def test_dead_time_has_no_part_in_the_fit():
    observations, returns = torch.randn(4, 6, 2), torch.randn(4, 6)
    alive = (torch.arange(6) < 4).expand(4, 6)
    other = torch.where(alive, returns, 100.0)
    found = [linear_baseline(observations, r, alive) for r in (returns, other)]
    torch.testing.assert_close(*found)
    nowhere = torch.where(alive.unsqueeze(-1), observations, math.nan)
    guess = linear_baseline(nowhere, torch.where(alive, returns, math.nan), alive)
    torch.testing.assert_close(guess[alive], found[0][alive])


def test_the_baseline_lowers_the_variance_of_first_and_second_derivatives():
    def sampled(weights: Tensor, use: bool) -> tuple[Tensor, Tensor]:
        observations, noise = torch.randn(20, 6, 1), torch.randn(20, 6)
        actions = observations[..., 0] * weights.detach() + noise
        rewards = 10 + 2 * observations[..., 0] - actions.square()
        logp = -(actions - observations[..., 0] * weights).square() / 2
        guess = linear_baseline(observations, returns_to_go(rewards)) if use else None
        value = dice(logp, rewards, guess)
        (first,) = torch.autograd.grad(value, weights, create_graph=True)
        return first.detach(), torch.autograd.grad(first, weights)[0]

    weights = torch.tensor(0.5, requires_grad=True)
    spread = [torch.tensor([sampled(weights, use) for _ in range(200)]).std(0) for use in (0, 1)]
    assert (spread[1] < 0.7 * spread[0]).all()


# Policies. -------------------------------------------------------------------------------------


def test_the_gaussian_policy_is_torchs_distribution():
    policy = policies.Gaussian(3, 2, [8], std=0.7)
    nn.init.normal_(policy.net[-1].weight)
    observations = torch.randn(5, 4, 3)
    actions = policy.act(observations, policy.noise(5, 4))
    reference = torch.distributions.Normal(policy(observations), policy.log_std.exp())
    torch.testing.assert_close(
        policy.log_prob(observations, actions), reference.log_prob(actions).sum(-1)
    )
    assert math.isclose(policy.log_std.exp()[0].item(), 0.7)


def test_the_categorical_policy_is_torchs_distribution_and_samples_it():
    policy = policies.Categorical(3, 4, [8])
    nn.init.normal_(policy.net[-1].weight)
    observation = torch.randn(3)
    reference = torch.distributions.Categorical(logits=policy(observation))
    many = observation.expand(20_000, 3)
    actions = policy.act(many, policy.noise(20_000))
    torch.testing.assert_close(policy.log_prob(many, actions), reference.log_prob(actions))
    shares = torch.bincount(actions, minlength=4) / len(actions)
    assert (shares - reference.probs).abs().max() < 0.02


# In an inner loop. -----------------------------------------------------------------------------


def bandit(policy: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Samples with the weights it is handed, out of the noise in the batch."""
    target, noise = batch
    observations = torch.ones(*noise.shape[:2], 1)
    actions = policy.act(observations, noise)
    rewards = -(actions - target).square().sum(-1)
    return -policies.expected_return(policy, policies.Episodes(observations, actions, rewards))


def bandit_grads(backward: il.backward.Backward, way: object) -> list[Tensor]:
    torch.manual_seed(1)
    policy = policies.Gaussian(1, 2, [4], std=0.5)
    inner = il.InnerLoop(
        policy, torch.optim.SGD(policy.parameters(), lr=0.1), bandit, backward=backward
    )
    target = torch.randn(3, 2)
    train = [(target, policy.noise(3, 8, 2)) for _ in range(3)]
    inner(train, (target, policy.noise(3, 8, 2)), tasks=way).sum().backward()
    return [p.grad.clone() for p in policy.parameters()]


@pytest.mark.parametrize("way", [il.tasks.loop(), il.tasks.vmap()], ids=["loop", "vmap"])
@pytest.mark.parametrize("backward", [il.Tape(), il.Remat(), il.Binomial(2)], ids=str)
def test_steps_that_are_computed_again_sample_the_same_episodes(backward, way):
    expected = bandit_grads(il.Tape(), il.tasks.loop())
    for found, truth in zip(bandit_grads(backward, way), expected, strict=True):
        torch.testing.assert_close(found, truth)
