"""One file for each library: the same meta-step, written as its users would write it.

Each has `build(problem, way, system)`, whose result computes the gradient of the measured loss,
averaged over the tasks, by everything that is learned.
"""
