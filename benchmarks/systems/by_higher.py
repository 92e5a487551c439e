"""The library of the paper, as in its MAML example: a context per task, with overrides."""

from __future__ import annotations

import math
from typing import Any

import higher
from torch import Tensor

from systems.problem import BETAS, EPS, MetaStep, Problem
from systems.torch_parts import Batch, averaged, loss, network, optimizer, tasks


def _overrides(problem: Problem, learned: dict[str, list[Tensor]], step: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "lr" in learned:
        rate = learned["lr"][0]
        found["lr"] = [rate[step]] if problem.case.per == "step" else list(rate.unbind())
    if "betas" in learned:
        found["betas"] = [tuple(learned["betas"][0].unbind())]
    if problem.case.rule == "adam":
        # The wheel adds eps elsewhere; with this value it follows torch. See `workloads.py`.
        found["eps"] = [EPS * math.sqrt(1 - BETAS[1] ** (step + 1))]
    return found


def build(problem: Problem, way: str, system: str) -> MetaStep:
    model = network(problem)
    opt = optimizer(problem, model)
    starts = {"lr": problem.rate, "betas": problem.betas}
    learned = {n: [starts[n].clone().requires_grad_()] for n in problem.case.learn if n in starts}
    if "init" in problem.case.learn:
        learned = {"init": list(model.parameters()), **learned}
    each = tasks(problem)

    def measured(train: list[Batch], val: Batch) -> Tensor:
        share = "init" not in learned
        with higher.innerloop_ctx(model, opt, copy_initial_weights=share) as (fmodel, diffopt):
            for step, (x, y) in enumerate(train):
                overrides = _overrides(problem, learned, step)
                diffopt.step(loss(problem, fmodel(x), y), override=overrides or None)
            return loss(problem, fmodel(val[0]), val[1])

    return MetaStep(lambda: averaged(problem, learned, (measured(*task) for task in each)))
