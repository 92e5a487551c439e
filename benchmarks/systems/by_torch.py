"""Plain torch in three ways that share all but a few lines.

`torch`: a loop over tasks and steps, with the optimizer written out. `torch.func`: the same loop
over steps, transformed. `torchopt`: either, with that library's optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

import models
from systems.problem import EPS, MetaStep, Problem
from systems.torch_parts import Batch, averaged, loss, network, tasks

Params = list[Tensor]
Learned = dict[str, Any]  # `init`: the weights; `lr`, `betas`: a tensor


class Rule(NamedTuple):
    """An optimizer with given settings."""

    init: Callable[[Params], Any]
    update: Callable[[Params, Sequence[Tensor], Any, int], tuple[Params, Any]]


# --- optimizers -------------------------------------------------------------------------------


def _root(v: Tensor) -> Tensor:
    """A square root whose derivative at 0 is 0: a dead ReLU has no gradient to divide by."""
    dead = v == 0
    return torch.where(dead, 0.0, torch.where(dead, 1.0, v).sqrt())


def _written_out(problem: Problem, rate: Tensor, betas: Tensor) -> Rule:
    def sgd(params: Params, grads: Sequence[Tensor], state: Any, step: int) -> Any:
        rates = problem.rates(rate, step)
        return [p - r * g for p, g, r in zip(params, grads, rates, strict=True)], state

    def adam(params: Params, grads: Sequence[Tensor], state: Any, step: int) -> Any:
        b1, b2 = betas[0], betas[1]
        first = [b1 * m + (1 - b1) * g for m, g in zip(state[0], grads, strict=True)]
        second = [b2 * v + (1 - b2) * g * g for v, g in zip(state[1], grads, strict=True)]
        c1, c2 = 1 - b1 ** (step + 1), (1 - b2 ** (step + 1)).sqrt()
        rates = problem.rates(rate, step)
        new = [
            p - r / c1 * m / (_root(v) / c2 + EPS)
            for p, m, v, r in zip(params, first, second, rates, strict=True)
        ]
        return new, (first, second)

    def moments(params: Params) -> Any:
        return [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]

    return Rule(moments, adam) if problem.case.rule == "adam" else Rule(lambda params: None, sgd)


def _of_torchopt(problem: Problem, rate: Tensor, betas: Tensor) -> Rule:
    """One optimizer for each group, as torchopt has no groups; a rate per step is a schedule."""
    import torchopt

    members = [
        [i for i, group in enumerate(problem.groups) if group == wanted]
        for wanted in range(max(problem.groups) + 1)
    ]

    def transformation(group: int) -> Any:
        lr: Any = rate[group]
        if problem.case.per == "step":
            lr = rate.__getitem__
        if problem.case.rule == "adam":
            return torchopt.adam(lr, betas=(betas[0], betas[1]), eps=EPS)
        return torchopt.sgd(lr)

    each = [transformation(group) for group in range(len(members))]

    def init(params: Params) -> Any:
        return [o.init([params[i] for i in m]) for o, m in zip(each, members, strict=True)]

    def update(params: Params, grads: Sequence[Tensor], state: Any, step: int) -> Any:
        new, states = list(params), []
        for optimizer, mine, one in zip(each, members, state, strict=True):
            some, kept = optimizer.update([grads[i] for i in mine], one, inplace=False)
            moved = torchopt.apply_updates([params[i] for i in mine], some, inplace=False)
            states.append(kept)
            for i, value in zip(mine, moved, strict=True):
                new[i] = value
        return new, states

    return Rule(init, update)


# --- one task ---------------------------------------------------------------------------------


class _Task(NamedTuple):
    problem: Problem
    model: nn.Module
    rule: Callable[[Problem, Tensor, Tensor], Rule]
    weights: Params

    def loss(self, params: Params, batch: Batch) -> Tensor:
        named = dict(zip(self.problem.weights, params, strict=True))
        return loss(self.problem, functional_call(self.model, named, (batch[0],)), batch[1])

    def taped(self, params: Params, batch: Batch) -> Sequence[Tensor]:
        return torch.autograd.grad(self.loss(params, batch), params, create_graph=True)

    def transformed(self, params: Params, batch: Batch) -> Sequence[Tensor]:
        return torch.func.grad(self.loss)(params, batch)

    def measured(self, grad: Any, learned: Learned, train: list[Batch], val: Batch) -> Tensor:
        params = learned.get("init", self.weights)
        settings = (learned.get("lr", self.problem.rate), learned.get("betas", self.problem.betas))
        rule = self.rule(self.problem, *settings)
        state = rule.init(params)
        for step, batch in enumerate(train):
            params, state = rule.update(params, grad(params, batch), state, step)
        return self.loss(params, val)


# --- all tasks --------------------------------------------------------------------------------


def _learned(problem: Problem, weights: Params) -> Learned:
    every = {"init": weights, "lr": problem.rate, "betas": problem.betas}
    return {name: every[name] for name in problem.case.learn}


def _looped(task: _Task) -> MetaStep:
    problem = task.problem
    weights = [w.clone().requires_grad_() for w in task.weights]
    learned = {
        name: value if name == "init" else value.clone().requires_grad_()
        for name, value in _learned(problem, weights).items()
    }
    leaves = {name: v if name == "init" else [v] for name, v in learned.items()}
    each, task = tasks(problem), task._replace(weights=weights)

    def run() -> Any:
        losses = (task.measured(task.taped, learned, train, val) for train, val in each)
        return averaged(problem, leaves, losses)

    return MetaStep(run)


def _functional(task: _Task, compiled: bool) -> MetaStep:
    problem = task.problem
    case = problem.case
    distinct = problem.train[: case.batches]

    def measured(learned: Learned, train: list[Batch], val: Batch) -> Tensor:
        return task.measured(task.transformed, learned, train * (case.steps // case.batches), val)

    def total(learned: Learned, train: list[Batch], val: Batch) -> Tensor:
        if case.tasks is None:
            return measured(learned, train, val)
        # Each random operation would be a decision; there are none.
        return torch.func.vmap(measured, (None, 0, 0))(learned, train, val).mean()

    gradient = torch.func.grad(total)
    if compiled:
        gradient = torch.compile(gradient, fullgraph=True)
    learned = _learned(problem, task.weights)
    return MetaStep(lambda: gradient(learned, distinct, problem.val))


def build(problem: Problem, way: str, system: str) -> MetaStep:
    """Ways: `loop`, `vmap` or `grad` (one task); `compiled` after these."""
    words = way.split()
    looped = "loop" in words
    norm = {} if looped else {"norm": models.ComposedNorm}
    model = network(problem, **norm)
    rule = _of_torchopt if system == "torchopt" else _written_out
    task = _Task(problem, model, rule, list(problem.weights.values()))
    return _looped(task) if looped else _functional(task, "compiled" in words)
