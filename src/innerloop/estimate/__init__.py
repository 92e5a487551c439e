"""Gradients where there is none to take: estimates out of values, in place of a backward pass."""

from innerloop.estimate._baseline import RunningMean as RunningMean
from innerloop.estimate._evolution import evolution as evolution
from innerloop.estimate._reinforce import reinforce as reinforce
