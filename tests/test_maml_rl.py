"""`innerloop maml-rl`: what it writes, that it can be stopped anywhere, that worlds are fair."""

from __future__ import annotations

import pytest
import torch

import innerloop as il
from commands import flags_of, read
from innerloop.__main__ import main
from innerloop.experiments.maml_rl import training as maml_rl
from innerloop.experiments.maml_rl.problem import WORLDS, CartPole, Navigation
from innerloop.policies import Categorical, Gaussian

flags = flags_of("maml-rl")


@pytest.mark.parametrize("world", WORLDS)
def test_the_result_is_that_of_every_seed(world, tmp_path, capsys):
    if world == "cartpole":
        pytest.importorskip("gymnasium")
    assert main(flags(tmp_path / "run", world=world)) == 0
    result = read(tmp_path / "run")
    assert [one["seed"] for one in result["seeds"]] == [0, 1]
    returns = torch.tensor([one["returns"] for one in result["seeds"]])
    assert returns.shape == (2, 4) and returns.isfinite().all()
    torch.testing.assert_close(torch.tensor(result["mean"]), returns.mean(0))
    improved = bool((returns[:, 1] > returns[:, 0]).all())
    assert result["improved_in_every_seed"] == improved
    said = capsys.readouterr().out
    assert ("NOT in every seed" in said) == (not improved)
    assert f"{returns[1, 3]:.2f} ±" in said


def test_without_an_inner_loop_the_mean_return_is_trained_for():
    """And rates stay as they are: nothing is adapted while it is trained."""
    config = maml_rl.Config.configure(
        {"steps": 0, "tasks": 3, "episodes": 4, "horizon": 5}, "quick"
    )
    learner = maml_rl.Learner(config, 0)
    generator = torch.Generator().manual_seed(0)
    tasks = learner.world.tasks(3, generator)
    (val,) = learner.batches(tasks, 1, generator)
    each = [learner.loss(learner.policy, one(val, t))[0] for t in range(3)]
    expected = torch.autograd.grad(torch.stack(each).mean(), list(learner.policy.parameters()))
    learner.generator.manual_seed(0)
    before = learner.inner.hyper["lr"].clone()
    learner.update()
    found = [p.grad for p in learner.policy.parameters()]
    torch.testing.assert_close(found, list(expected))
    assert torch.equal(learner.inner.hyper["lr"], before)


def test_the_first_seed_can_be_chosen(tmp_path):
    """A run of the second seed alone finds what a run of both found for it."""
    assert main(flags(tmp_path / "both")) == 0
    assert main(flags(tmp_path / "second", seed="1", seeds="1")) == 0
    results = [read(tmp_path / name) for name in ("both", "second")]
    assert results[0]["seeds"][1] == results[1]["seeds"][0]
    assert results[0]["seeds"][0]["returns"] != results[0]["seeds"][1]["returns"]


def test_a_flag_stands_above_the_preset():
    config = maml_rl.Config.configure({"world": "cartpole", "seeds": 7}, "quick")
    assert config.seeds == 7 and config.horizon == 100


# The worlds. ---------------------------------------------------------------------------------


def drawn(world, policy, tasks=2, episodes=5):
    made = torch.Generator().manual_seed(0)
    return world.batch(policy, world.tasks(tasks, made), episodes, made)


def one(batch, task):
    return tuple(part[task] for part in batch)


def test_a_walk_is_made_of_its_actions():
    policy = Gaussian(2, 2, [4]).float()
    goal, noise = one(drawn(Navigation(7), policy), 0)
    found = Navigation(7).sample(policy, (goal, noise))
    assert not found.observations[:, 0].any()
    moved = found.observations[:, 1:] - found.observations[:, :-1]
    torch.testing.assert_close(moved, 0.1 * found.actions[:, :-1].clamp(-1, 1))
    distance = (found.observations[:, 1:] - goal).norm(dim=-1)
    torch.testing.assert_close(found.rewards[:, :-1], -distance)
    assert not found.rewards.requires_grad


def test_goals_are_in_the_square_and_both_kinds_of_motors_are_there():
    pytest.importorskip("gymnasium")
    made = torch.Generator().manual_seed(0)
    goals = Navigation(5).tasks(500, made)
    assert goals.abs().max() <= 0.5 and goals.abs().max() > 0.45
    force, length, gravity = CartPole(5).tasks(500, made).unbind(1)
    assert (force > 0).sum() == 250 and 5 <= force.abs().min() < force.abs().max() <= 15
    assert 0.25 <= length.min() < length.max() <= 1 and 5 <= gravity.min() < gravity.max() <= 15


def test_an_episode_is_over_when_the_pole_falls():
    pytest.importorskip("gymnasium")
    world, policy = CartPole(80), Categorical(4, 2, [4]).float()
    physics, seed, noise = one(drawn(world, policy, episodes=8), 0)
    found = world.sample(policy, (physics, seed, noise))
    assert found.alive is not None
    ends = found.alive.sum(1)
    assert ends.min() < found.alive.shape[1]
    torch.testing.assert_close(found.rewards.sum(1), ends.to(found.rewards.dtype))
    for alive, end in zip(found.alive, ends, strict=True):
        assert alive[:end].all() and not alive[end:].any()
    again = world.sample(policy, (physics, seed, noise))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_a_reversed_motor_is_a_mirror():
    """With the force negated, the other actions do the same."""
    pytest.importorskip("gymnasium")
    world, policy = CartPole(10), Categorical(4, 2, [4]).float()
    physics, seed, noise = one(drawn(world, policy), 0)

    class Opposite:
        def act(self, observations, noise):
            return 1 - policy.act(observations, noise)

    straight = world.sample(policy, (physics, seed, noise))
    mirrored = world.sample(Opposite(), (physics * torch.tensor([-1, 1, 1]), seed, noise))
    torch.testing.assert_close(straight.observations, mirrored.observations)


@pytest.mark.parametrize("world", WORLDS)
def test_strategies_that_compute_again_find_the_same_gradient(world):
    if world == "cartpole":
        pytest.importorskip("gymnasium")
    config = maml_rl.Config(world=world, tasks=2, episodes=6, horizon=12, steps=2, hidden=4)
    found = []
    for backward in (il.Tape(), il.Remat(), il.Binomial(1)):
        learner = maml_rl.Learner(config, seed=0)
        learner.inner.double()
        learner.inner.backward = backward
        made = torch.Generator().manual_seed(0)
        tasks = learner.world.tasks(2, made)
        *train, val = learner.batches(tasks, 3, made)
        learner.inner(_doubled(train), _doubled([val])[0], tasks=True).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in learner.inner.parameters()]))
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def _doubled(batches):
    return [tuple(t.double() if t.is_floating_point() else t for t in b) for b in batches]


@pytest.mark.slow
def test_adaptation_earns_more_on_held_out_goals(tmp_path):
    small = {"seeds": "1", "iterations": "40", "tasks": "20", "episodes": "20", "horizon": "20"}
    words = [f"--{name}={value}" for name, value in small.items()]
    assert main(["maml-rl", *words, "--out", str(tmp_path / "run")]) == 0
    (one,) = read(tmp_path / "run")["seeds"]
    assert one["returns"][1] > one["returns"][0] + 2
    assert one["better"] > 0.8
