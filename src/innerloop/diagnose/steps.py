"""Algorithm 1, looked at step by step: B_j, and what each step adds to the meta-gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.backward import Remat, Tape
from innerloop.call import Prepared
from innerloop.diagnose.measure import as_leaves, measured, replica
from innerloop.diagnose.meta_parameters import MetaParameter
from innerloop.inner_loop import InnerLoop
from innerloop.step.state import Meta, State, differentiable
from innerloop.step.step import InnerStep
from innerloop.unroll import unroll


class Steps(NamedTuple):
    """Norms by step."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    b_norms: tuple[float, ...]
    per_step: Mapping[str, tuple[float, ...]]
    """By meta-parameter; see :class:`innerloop.diagnose.Row`."""
    direct: Mapping[str, float]


class Probed(NamedTuple):
    """What one step is given: its batch, its own copy of φ, and zeros to add to the weights.

    The gradient by these zeros is B_j; that by the copy is what the step adds to A.
    """

    batch: Any
    meta: Meta
    zeros: Mapping[str, Tensor]


def look_at_steps(
    inner: InnerLoop, phi: Sequence[MetaParameter], batches: Sequence[Any], val: Any
) -> Steps:
    """Run the loop once and differentiate it by everything that each step was given."""
    run = inner.prepared(len(batches))
    norms: dict[int, float] = {}
    step = _probing(run.step, norms)
    given = [_probed(run, batches[j]) for j in range(len(batches))]
    strategy = Tape() if isinstance(inner.backward, Tape) else Remat()
    start = next(iter(inner._going_on(alone=True)), run.state)
    start = _tree.map(lambda v: v.detach() if isinstance(v, Tensor) else v, start)
    final, outs = unroll(step, start, None, given, strategy)
    last, direct = _last(inner, run, final, phi, val)
    found = _pulled(final.params, last, given)
    count = len(given[0].zeros) if given else 0
    b_norms = [_norm(row[:count]) for row in found] + [_norm(last.values())]
    losses = outs[0] if isinstance(outs, tuple) else outs
    return Steps(
        () if losses is None else tuple(losses.detach().double().reshape(-1).tolist()),
        tuple(norms.get(start.time + j, 0.0) for j in range(len(batches))),
        tuple(b_norms),
        _by_parameter(run, phi, given, found),
        {p.name: _norm([g]) for p, g in zip(phi, direct, strict=True)},
    )


def _probing(step: InnerStep, norms: dict[int, float]) -> Any:
    """The step with zeros added to its weights, noting the norm of its inner gradient."""
    time = 0

    def noted(grads: dict[str, Any]) -> Mapping[str, Any]:
        norms.setdefault(time, _norm(grads.values()))
        return grads if step.grad_transform is None else step.grad_transform(grads)

    looked = dataclasses.replace(step, grad_transform=noted)

    def probed(state: State, _: Any, given: Probed) -> tuple[State, Any]:
        nonlocal time
        time = state.time
        params = {
            name: p + given.zeros[name] if name in given.zeros else p
            for name, p in state.params.items()
        }
        return looked(state._replace(params=params), given.meta, given.batch)

    return probed


def _probed(run: Prepared, batch: Any) -> Probed:
    assert run.step.model is not None
    own = run.step.model.params
    zeros = {
        name: torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape).requires_grad_()
        for name, p in run.state.params.items()
        if differentiable(p) and own[name].requires_grad
    }
    copy = _tree.map(lambda t: t.detach().requires_grad_() if _followed(t) else t, run.meta)
    return Probed(batch, copy, zeros)


def _followed(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _last(
    inner: InnerLoop, run: Prepared, final: State, phi: Sequence[MetaParameter], val: Any
) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """B_J by name, and the gradient that L_val has by φ without any step."""
    assert run.step.model is not None
    params = as_leaves(run.step.model, final.params)
    value = measured(inner, replica(run.step.model, final, params), val)
    leaves = {name: p for name, p in params.items() if p.requires_grad}
    sources = [*leaves.values(), *(p.tensor for p in phi)]
    grads = torch.autograd.grad(value.reshape(()), sources, allow_unused=True)
    last = {n: g for n, g in zip(leaves, grads, strict=False) if g is not None}
    return last, list(grads[len(leaves) :])


def _pulled(
    params: Mapping[str, Tensor], last: Mapping[str, Tensor], given: Sequence[Probed]
) -> list[list[Tensor | None]]:
    """For each step, the gradient by its zeros and by its copy of φ."""
    rows = [[*g.zeros.values(), *filter(_followed, _tree.flatten(g.meta)[0])] for g in given]
    ends = {name: b for name, b in last.items() if params[name].requires_grad}
    if not ends or not rows:
        return [[None] * len(row) for row in rows]
    flat = [t for row in rows for t in row]
    grads = iter(
        torch.autograd.grad(
            [params[name] for name in ends], flat, list(ends.values()), allow_unused=True
        )
    )
    return [[next(grads) for _ in row] for row in rows]


def _by_parameter(
    run: Prepared,
    phi: Sequence[MetaParameter],
    given: Sequence[Probed],
    found: Sequence[Sequence[Tensor | None]],
) -> dict[str, tuple[float, ...]]:
    assert run.step.model is not None
    weights = {id(p): name for name, p in run.step.model.params.items()}
    zeros = list(given[0].zeros) if given else []
    settings = list(filter(_followed, _tree.flatten(run.meta)[0]))
    rows: dict[str, list[float]] = {p.name: [] for p in phi}
    others = [p for p in phi if p.part != "init"]
    for row in found:
        b = dict(zip(zeros, row, strict=False))
        for p in phi:
            if p.part == "init":
                rows[p.name].append(_norm([b.get(weights.get(id(p.tensor), ""))]))
        added = _through(settings, row[len(zeros) :], [p.tensor for p in others])
        for p, grad in zip(others, added, strict=True):
            rows[p.name].append(_norm([grad]))
    return {name: tuple(norms) for name, norms in rows.items()}


def _through(
    settings: Sequence[Tensor], grads: Sequence[Tensor | None], phi: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Gradients by φ, given those by the settings that were computed from it."""
    pairs = [(s, g) for s, g in zip(settings, grads, strict=True) if g is not None]
    if not pairs or not phi:
        return [None] * len(phi)
    return torch.autograd.grad(
        [s for s, _ in pairs],
        list(phi),
        [g for _, g in pairs],
        retain_graph=True,
        allow_unused=True,
    )


def _norm(tensors: Any) -> float:
    parts = [float(torch.linalg.vector_norm(t.detach())) for t in tensors if t is not None]
    return math.sqrt(sum(part * part for part in parts)) if parts else 0.0
