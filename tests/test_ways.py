"""Problems x optimizers x what is learned x ways to run tasks: losses and gradients as the loop's.

The table of the strategies once more, with a task axis. The loop over the tasks is held to single
calls in the tests of tasks, and these to plain training and to differences in that table.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim

import innerloop as il
from inner_problems import NORMS, PROBLEMS, squares
from test_strategies import OPTIMIZERS, Case, Ready, choices, ready
from ways import ENGINES, LOOP, STEP, THREADS, VMAP, WHOLE, Engine, assert_same, gap, gradients

TASKS = 3  # not divisible by two threads
STEPS = 2


class Outcome(NamedTuple):
    losses: Tensor
    """Of all tasks."""
    grads: list[Tensor]
    """Of their sum with unequal weights."""


def tasks_of(given: Ready) -> tuple[list[Any], Any]:
    """Batches with a task axis; the first task's are those of the single problem."""
    more = [given.problem.build() for _ in range(TASKS - 1)]
    trains = [given.built.train, *(built.train for built in more)]
    vals = [given.built.val, *(built.val for built in more)]
    steps = [_stacked(parts) for parts in zip(*trains, strict=True)][:STEPS]
    return ([steps[0]] * 2 if given.row.one_group else steps), _stacked(vals)


def _stacked(parts: Any) -> tuple[Tensor, ...]:
    return tuple(torch.stack(column) for column in zip(*parts, strict=True))


def outcome(case: Case, engine: Engine, backward: Any = None, checked: bool = True) -> Outcome:
    given = ready(case)
    train, val = tasks_of(given)
    learned = [n for n in choices(*case[:2]) if case.learn in (n, "everything")]
    inner = il.InnerLoop(
        given.built.model,
        given.optimizer,
        given.built.loss,
        learn=tuple(n for n in learned if n not in ("loss", "everything")),
        backward=backward,
        val_loss=given.problem.val_loss,
    )
    engine.ready(inner)
    losses = inner(train, val, tasks=engine.way)
    weights = torch.linspace(0.5, 1.5, TASKS)
    grads = gradients((losses * weights).sum(), inner)
    if checked:
        engine.check(inner)
    return Outcome(losses.detach(), grads)


@functools.cache
def by_loop(case: Case, backward: Any = None) -> Outcome:
    return outcome(case, LOOP, backward)


def assert_alike(actual: Outcome, expected: Outcome) -> None:
    assert_same([actual.losses], [expected.losses])
    assert_same(actual.grads, expected.grads)


# Problems and optimizers. -----------------------------------------------------------------------


def table() -> list[Any]:
    """Every problem with Adam, every optimizer on one problem, and each part learned alone.

    Dropout draws other numbers in every engine, and LBFGS and LSTMs cannot be batched: see below.
    Tracing takes seconds, so compiled engines leave most of the table to slow runs.
    """
    rows = [(p, "Adam") for p in PROBLEMS | NORMS if p != "dropout"]
    rows += [("quadratic", o) for o in OPTIMIZERS if o not in ("Adam", "LBFGS")]
    cases = [Case(*row, "everything") for row in rows]
    cases += [Case("mlp", "SGD", learn) for learn in choices("mlp", "SGD")[:-1]]
    found = []
    for case, engine in itertools.product(cases, ENGINES):
        if case.problem == "lstm" and engine is not THREADS:
            continue
        slow = engine.unit is not None and (str(case), engine) not in QUICK
        marks = (pytest.mark.slow,) if slow else ()
        found.append(pytest.param(case, engine, marks=marks, id=f"{case}-{engine}"))
    return found


QUICK = [
    ("quadratic-SGD-everything", WHOLE),
    ("quadratic-Adam-everything", STEP),
    ("learned_loss-Adam-everything", STEP),
    ("frozen-Adam-everything", STEP),
]


@pytest.mark.parametrize(("case", "engine"), table())
def test_every_way_is_the_loop(case: Case, engine: Engine) -> None:
    assert_alike(outcome(case, engine), by_loop(case))


@pytest.mark.parametrize(
    ("problem", "engine"),
    [(p, e) for p in ("lstm", "LBFGS") for e in ENGINES],
    ids=str,
)
def test_what_cannot_be_batched_has_the_loops_result(problem: str, engine: Engine) -> None:
    """With a warning that names it."""
    lstm = problem == "lstm"
    case = Case("lstm", "SGD", "everything") if lstm else Case("mlp", "LBFGS", "init")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        actual = outcome(case, engine, checked=False)
    assert_alike(actual, by_loop(case))
    messages = [str(w.message) for w in found]
    assert len(messages) <= 1, messages
    if engine is VMAP:
        assert ("layer LSTM" if lstm else "optimizer LBFGS") in messages[0]
    if engine.unit is not None:
        assert "cannot be compiled" in messages[0]


# Strategies. ------------------------------------------------------------------------------------

STRATEGIES = [
    il.Tape(),
    il.Remat(every=2),
    il.Binomial(1),
    il.Truncated(1000, within=il.Remat()),
    il.Auto("1GB"),
    il.Forward(),
]
FOLLOWED = [
    *itertools.product(["norm"], STRATEGIES, [THREADS, VMAP]),
    ("quadratic", il.Binomial(1), WHOLE),
]
each_way = pytest.mark.parametrize("engine", [THREADS, VMAP], ids=str)


@pytest.mark.parametrize(("problem", "backward", "engine"), FOLLOWED, ids=str)
def test_every_strategy_is_the_loops_tape(problem: str, backward: Any, engine: Engine) -> None:
    case = Case(problem, "Adam", "everything")
    assert_alike(outcome(case, engine, backward), by_loop(case))


@each_way
@pytest.mark.parametrize("backward", [il.Truncated(1), il.Truncated(1, il.Remat())], ids=repr)
def test_truncation_is_the_loops(backward: Any, engine: Engine) -> None:
    case = Case("quadratic", "Adam", "lr")
    truncated = by_loop(case, backward)
    assert gap(truncated.grads, by_loop(case).grads) > 1e-3
    assert_alike(outcome(case, engine, backward), truncated)


@each_way
@pytest.mark.parametrize(("solver", "iterations"), [("cg", 1), ("gmres", 100)])
def test_implicit_gradients_are_the_loops(solver: str, iterations: int, engine: Engine) -> None:
    """Tasks of different curvature, each with a linear system of its own, solved or not."""

    def run(engine: Engine) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1, bias=False)
        optimizer = optim.SGD(model.parameters(), lr=0.2, weight_decay=0.3)
        inner = il.InnerLoop(
            model,
            optimizer,
            squares,
            learn=("weight_decay",),
            backward=il.Implicit(solver, iterations=iterations, tolerance=1e-13, stationary=1.0),
        )
        sizes = torch.linspace(0.3, 1.5, TASKS).view(-1, 1, 1)
        *train, val = [
            (sizes * torch.randn(TASKS, 5, 2), torch.randn(TASKS, 5, 1)) for _ in range(2)
        ]
        losses = inner(train * 80, val, tasks=engine.way)
        return losses, gradients((losses * torch.linspace(0.5, 1.5, TASKS)).sum(), inner)

    expected_losses, expected = run(LOOP)
    if engine is VMAP:
        with pytest.warns(UserWarning, match="Implicit"):
            losses, grads = run(engine)
    else:
        losses, grads = run(engine)
    assert_same([losses], [expected_losses])
    assert_same(grads, expected)
