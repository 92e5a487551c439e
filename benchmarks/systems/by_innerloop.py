"""innerloop, by `InnerLoop`. A way names how tasks are taken, the unit that is compiled, and the
strategy of the backward pass: `vmap whole`. `compiled` leaves the unit to `inner.compile()`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import innerloop as il
from systems.problem import MetaStep, Problem
from systems.torch_parts import Batch, loss, network, optimizer

_TASKS = ("auto", "loop", "vmap", "threads")
_UNITS = {"step": "step", "whole": "whole", "compiled": "auto"}
_STRATEGIES = ("Tape", "Remat", "Binomial")


def _tasks(words: list[str]) -> Any:
    """The argument `tasks`."""
    for word in words:
        if word == "threads":
            return il.tasks.threads(torch.get_num_threads())
        if word in _TASKS:
            return getattr(il.tasks, word)()
    return False


def _choices(problem: Problem) -> Any:
    if problem.case.per == "step":
        return {"lr": il.Learn(per="step", steps=problem.case.steps)}
    return problem.case.learn


def build(problem: Problem, way: str, system: str) -> MetaStep:
    words = way.split()
    unknown = set(words) - {*_TASKS, *_UNITS, *_STRATEGIES}
    if unknown:
        raise ValueError(f"no way of innerloop is called {unknown}")
    model = network(problem)
    strategy = next((getattr(il, word)() for word in words if word in _STRATEGIES), il.Tape())

    def measured(model: nn.Module, batch: Batch) -> Tensor:
        return loss(problem, model(batch[0]), batch[1])

    opt = optimizer(problem, model)
    inner = il.InnerLoop(model, opt, measured, learn=_choices(problem), backward=strategy)
    for word in words:
        if word in _UNITS:
            inner.compile(_UNITS[word])
    how = _tasks(words)

    def run() -> Any:
        inner.zero_grad()
        inner(problem.train, problem.val, tasks=how).mean().backward()
        grads: dict[str, Any] = {name: p.grad.flatten() for name, p in inner.settings.items()}
        if inner.learn_init:
            grads["init"] = [p.grad for p in model.parameters()]
        return grads

    def remark() -> str:
        chosen = str(how.chosen) if isinstance(how, il.tasks.auto) and how.chosen else ""
        return "; ".join(filter(None, [chosen, str(getattr(inner, "compiler", None) or "")]))

    return MetaStep(run, remark)
