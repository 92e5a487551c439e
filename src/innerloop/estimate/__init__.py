"""Gradient estimators: from values of the outer loss, without a backward pass."""

from innerloop.estimate.baselines import RunningMean as RunningMean
from innerloop.estimate.evolution_strategies import evolution as evolution
from innerloop.estimate.score_function import reinforce as reinforce
