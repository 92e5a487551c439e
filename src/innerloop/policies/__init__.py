"""Policies and returns that can be differentiated twice, for MAML in reinforcement learning."""

from innerloop.policies.baseline import linear_baseline as linear_baseline
from innerloop.policies.dice import dice as dice
from innerloop.policies.dice import returns_to_go as returns_to_go
from innerloop.policies.episodes import Episodes as Episodes
from innerloop.policies.episodes import expected_return as expected_return
from innerloop.policies.stochastic import Categorical as Categorical
from innerloop.policies.stochastic import Gaussian as Gaussian
