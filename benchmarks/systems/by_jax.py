"""JAX: compiled functions, optimizers from optax.

Ways: `vmap`, one function for all tasks, or `loop`, one for each task, called in turn;
`scan` makes the steps a loop of the compiled program instead of unrolling them; `remat` keeps only
the states between them; `safe` takes Adam from here, because the derivative of optax's is not a
number where a gradient is zero (`eps_root` prevents that, and gives other weights).
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from systems import jax_models
from systems.problem import EPS, MetaStep, Problem

Params = dict[str, jax.Array]


def _loss(problem: Problem, out: jax.Array, wanted: jax.Array) -> jax.Array:
    if problem.classes:
        return optax.softmax_cross_entropy_with_integer_labels(out, wanted).mean()
    return jnp.square(out - wanted).mean()


def _root(v: jax.Array) -> jax.Array:
    """A square root whose derivative at 0 is 0."""
    dead = v == 0
    return jnp.where(dead, 0.0, jnp.sqrt(jnp.where(dead, 1.0, v)))


def _safe_adam(betas: jax.Array) -> optax.GradientTransformation:
    b1, b2 = betas

    def init(params: Params) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros, zeros, jnp.zeros([], jnp.int32)

    def update(grads: Params, state: Any, params: Any = None) -> Any:
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state[0], grads)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state[1], grads)
        time = state[2] + 1
        c1, c2 = 1 - b1**time, jnp.sqrt(1 - b2**time)
        moves = jax.tree.map(lambda m, v: m / c1 / (_root(v) / c2 + EPS), first, second)
        return moves, (first, second, time)

    return optax.GradientTransformation(init, update)


def _direction(problem: Problem, words: list[str], betas: Any) -> optax.GradientTransformation:
    if problem.case.rule == "sgd":
        return optax.identity()
    if "safe" in words:
        return _safe_adam(betas)
    return optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=EPS)


def _measured(problem: Problem, words: list[str], start: Any, train: Any, val: Any) -> Any:
    """One task. `train` is the case's distinct batches, stacked."""
    network = getattr(jax_models, problem.case.network)(**problem.case.sizes)
    params, rate = start["init"], start["lr"]
    direction = _direction(problem, words, start["betas"])

    def loss(params: Params, batch: Any) -> jax.Array:
        return _loss(problem, network(params, batch[0]), batch[1])

    def step(carry: Any, at: jax.Array) -> Any:
        params, state = carry
        batch = jax.tree.map(lambda a: a[at if problem.case.fresh else 0], train)
        moves, state = direction.update(jax.grad(loss)(params, batch), state, params)
        # By name: a transformation gives the weights back in another order.
        rates = dict(zip(problem.weights, problem.rates(rate, at), strict=True))
        return ({name: p - rates[name] * moves[name] for name, p in params.items()}, state), None

    if "remat" in words:
        step = jax.checkpoint(step)
    carry = (params, direction.init(params))
    if "scan" in words:
        carry, _ = jax.lax.scan(step, carry, jnp.arange(problem.case.steps))
    else:
        for at in range(problem.case.steps):
            carry, _ = step(carry, at)
    return loss(carry[0], val)


def _mean(*parts: jax.Array) -> jax.Array:
    return sum(parts[1:], parts[0]) / len(parts)


def build(problem: Problem, way: str, system: str) -> MetaStep:
    words, case = way.split(), problem.case
    every = {"init": problem.weights, "lr": problem.rate, "betas": problem.betas}
    learned = {name: every.pop(name) for name in case.learn}
    # The task axis, if there is one, comes first.
    axis = 0 if case.tasks is None else 1
    train = jax.tree.map(lambda *parts: jnp.stack(parts, axis), *problem.train[: case.batches])

    def one(learned: Any, given: Any, train: Any, val: Any) -> jax.Array:
        return _measured(problem, words, learned | given, train, val)

    def total(*args: Any) -> jax.Array:
        return jax.vmap(one, (None, None, 0, 0))(*args).mean()

    gradient = jax.jit(jax.grad(total if "vmap" in words else one))
    each = [(train, problem.val)]
    if "loop" in words:
        parts = range(case.tasks or 0)
        each = [jax.tree.map(operator.itemgetter(t), each[0]) for t in parts]

    def run() -> Any:
        found = [gradient(learned, every, *task) for task in each]
        grads = found[0] if len(found) == 1 else jax.tree.map(_mean, *found)
        if "init" in grads:
            grads = grads | {"init": [grads["init"][name] for name in problem.weights]}
        return jax.block_until_ready(grads)

    return MetaStep(run)
