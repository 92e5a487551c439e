"""The derivative of a converged training, whatever led there."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.backward.attach import attach
from innerloop.backward.solvers import conjugate_gradient, gmres, neumann
from innerloop.backward.strategy import (
    Backward,
    check_visible,
    columns,
    connect,
    cut,
    run_plainly,
)
from innerloop.errors import InnerLoopError, RequirementError, four_part
from innerloop.guard import closures
from innerloop.guard.randomness import Autocast, Randomness, devices_of, preserved
from innerloop.guard.writes import Unwritten
from innerloop.step.protocol import Step, fold

_SOLVERS = ("cg", "neumann", "gmres")


@dataclass(frozen=True)
class Implicit(Backward):
    """Differentiate the equation that holds where training has converged (iMAML).

    There the inner gradient is zero, and a change of φ moves the weights so that it stays zero:
    dθ = -H⁻¹ (∂²ℓ/∂θ∂φ) dφ. The product with H⁻¹ is found by ``solver``: ``"cg"`` (symmetric
    positive definite H), ``"neumann"`` (a series, whose ``scale`` is estimated if not given) or
    ``"gmres"`` (any H).

    A weight decay that is part of the gradient belongs to the equation. Besides it, what the
    optimizer does on its way has no influence on where it ends, so settings and initial weights
    have no gradient; but with ``proximal`` = λ > 0 the loss has ``λ/2 ‖θ - θ₀‖²`` added,
    and the initial weights have one (Rajeswaran et al., 2019). With ``first_order=True`` the
    inner gradient is a constant of the equation, so that the proximal term alone counts. Of a
    general step, the fixed point is taken, with its whole state.

    With ``iterations=None`` the solver must reach ``tolerance`` (by default 1e-10, and 1e-5 in
    single precision); a given number of iterations is
    an approximation by choice and is taken as it comes. ``stationary`` is how large the
    gradient at the end may be, relative to the start, without a warning.

    Memory: the last state and the activations of one step for each distinct batch.
    Time:   plain training, and one second-order product per iteration.
    Exact:  at a stationary point.
    """

    each_task_alone: ClassVar[bool] = True  # a linear system for all is another one
    solver: str = "cg"
    iterations: int | None = None
    tolerance: float | None = None
    proximal: float = 0.0
    scale: float | None = None
    stationary: float = 1e-3

    def __post_init__(self) -> None:
        good = self.solver in _SOLVERS and self.proximal >= 0
        good = good and (self.tolerance is None or self.tolerance > 0)
        if not good or (self.iterations is not None and self.iterations < 1):
            raise InnerLoopError(
                four_part(
                    f"You wrote {self}.",
                    f"a solver out of {', '.join(map(repr, _SOLVERS))}, proximal >= 0, "
                    "tolerance > 0, and iterations above 0 or None.",
                    "they say how the linear system of the implicit gradient is solved.",
                    "Implicit(solver='cg', proximal=1.0).",
                )
            )

    def run(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        if self.proximal:
            step, meta = step.with_proximal(self.proximal), meta._replace(anchor=state.params)
        if not torch.is_grad_enabled() or not len(batches):
            return run_plainly(step, state, meta, batches)
        return _Run(self, step, state, meta, batches).result()

    def solve(self, product: Any, b: Tensor) -> Tensor:
        """``A⁻¹ b``, or an error if the solver was to converge and did not."""
        limit = self.iterations or max(1000, 10 * b.numel())
        tolerance = self.tolerance or (1e-10 if b.dtype.itemsize >= 8 else 1e-5)
        if self.solver == "cg":
            x, left = conjugate_gradient(product, b, limit, tolerance)
        elif self.solver == "neumann":
            x, left = neumann(product, b, limit, tolerance, self.scale)
        else:
            x, left = gmres(product, b, limit, tolerance)
        if self.iterations is None and not left <= 100 * tolerance:
            raise RequirementError(
                four_part(
                    f"{self} stopped with a relative residual of {left:.1e}.",
                    f"{tolerance:.0e}.",
                    "the matrix of second derivatives is singular, not positive definite, or too "
                    "badly conditioned for this solver and dtype.",
                    "proximal=..., a regularized loss, solver='gmres', a larger tolerance, or "
                    "iterations=... to take an approximation.",
                )
            )
        return x


_FIRST_ORDER = four_part(
    "You differentiate with Implicit() and first_order=True.",
    "a proximal term, or a weight decay of every weight that is measured.",
    "with inner gradients as constants nothing else moves the point of convergence.",
    "Implicit(proximal=1.0) for the initial weights; first_order=False for a loss.",
)


class _Run:
    """One converged run: its last state, and the equation that holds there."""

    def __init__(
        self, how: Implicit, step: Step, state: Any, meta: Any, batches: Sequence[Any]
    ) -> None:
        self.how, self.step = how, step
        self.start, self.spec = _tree.flatten(state)
        check_visible(self.start)
        self.meta, self.meta_spec = _tree.flatten(meta)
        fetched = [batches[j] for j in range(len(batches))]
        self.batches = list({id(batch): batch for batch in fetched}.values())
        counts = Counter(map(id, fetched))
        self.shares = [counts[id(batch)] / len(fetched) for batch in self.batches]
        if not step.symmetric and how.solver == "cg":
            raise InnerLoopError(
                four_part(
                    "You gave Implicit(solver='cg') a step of your own.",
                    "solver='gmres' or 'neumann'.",
                    "the derivative of a step is in general not symmetric.",
                    "Implicit(solver='gmres').",
                )
            )
        self.callers = Unwritten()
        self.callers.add(_tree.leaves((state, meta, self.batches)))
        devices = devices_of(self.start)
        self.devices, self.autocast = devices, Autocast(devices)
        own = [_tree.detach(leaf) for leaf in self.start]
        fed = [_tree.map(cut, batch) for batch in fetched]
        with torch.no_grad():
            final, self.outs = self._train(_tree.unflatten(own, self.spec), meta, fed)
            self.randomness = Randomness(devices)
        self.final, self.final_spec = _tree.flatten(final)
        check_visible(self.final)
        last = {id(leaf) for leaf in self.final}
        pairs = zip(own, self.start, strict=True)
        self.unmoved = {id(new): old for new, old in pairs if id(new) in last}
        """By the id of a final leaf that no step has replaced, the tensor that was given."""
        self._check_inputs(meta)

    def _train(self, state: Any, meta: Any, batches: list[Any]) -> tuple[Any, list[Any]]:
        """Take all steps; refuse tensors that they close over."""
        observer, roots = closures.Observer(), self.step.roots
        try:
            step = self.step.observed(observer.look)
            found = fold(step, state, _tree.map(_tree.detach, meta), batches)
        except closures.ComputedOutsideError as error:
            raise closures.not_followed(None, error.node, roots) from None
        observer.settle()
        closures.Suspects(observer.found.values()).refuse(
            lambda: self._leaves_of(state, meta, batches), roots
        )
        return found

    def _leaves_of(self, state: Any, meta: Any, batches: list[Any]) -> list[Tensor]:
        """The leaves that the steps use without being given them, by taking the steps again."""
        observer = closures.Observer()
        with preserved(self.devices):
            fold(self.step.observed(observer.look), state, _tree.map(_tree.detach, meta), batches)
        observer.settle()
        return list(observer.found.values())

    def _check_inputs(self, meta: Any) -> None:
        learned = [t for t in self.start if isinstance(t, Tensor) and t.requires_grad]
        resting = {id(t) for t in self.unmoved.values()}
        lost = [t for t in learned if id(t) not in resting]
        anchored = self.how.proximal > 0
        lasting = self.step.lasting
        for name, value in ({} if lasting is None else meta.opt).items():
            if name not in lasting and any(t.requires_grad for t in _tree.tensors(value)):
                raise RequirementError(_no_influence(f"the setting {name!r} of the optimizer"))
        if lost and not anchored:
            raise RequirementError(_no_influence("the initial state"))

    def result(self) -> tuple[Any, Any]:
        tensors = [*self.meta, *self.unmoved.values(), *_tree.leaves(self.batches)]
        inputs = {id(t): t for t in tensors if isinstance(t, Tensor) and t.requires_grad}
        self.inputs = list(inputs.values())
        self.places = self._places()
        leaves = [self.unmoved.get(id(leaf), leaf) for leaf in self.final]
        outs = columns(self.outs)
        for column in outs:
            check_visible(column if isinstance(column, list) else ())
        if self.inputs and self.places:
            self._check_stationary()
            leaves, outs = connect(
                leaves,
                outs,
                self.places,
                lambda values: attach(values, self.inputs, self.pull, name="Implicit"),
            )
        return _tree.unflatten(leaves, self.final_spec), _tree.fill(self.outs[0], outs)

    def _places(self) -> list[int]:
        """Where the unknowns of the equation are among the leaves of the last state."""
        with torch.no_grad(), preserved(self.devices):
            meta = _tree.unflatten([_tree.detach(t) for t in self.meta], self.meta_spec)
            state = self._at(self.final)
            found = [
                pair
                for batch in self.batches
                for pair in self.step.residual(state, meta, _tree.map(cut, batch))
            ]
        moved = {id(leaf) for leaf, _ in found}
        return [i for i, leaf in enumerate(self.final) if id(leaf) in moved]

    def _at(self, leaves: list[Any]) -> Any:
        return _tree.unflatten(leaves, self.final_spec)

    def residual(self, state: Any, meta: Any, batches: Sequence[Any]) -> list[Tensor]:
        """The residual, zero at convergence, averaged over the batches of all steps."""
        leaves = _tree.leaves(state)
        unknown = [leaves[i] for i in self.places]
        total = [torch.zeros_like(leaf) for leaf in unknown]
        for batch, share in zip(batches, self.shares, strict=True):
            self.randomness.set()
            # A batch may leave weights out, which then stay where they are.
            pairs = self.step.residual(state, meta, batch)
            moving = {id(leaf): rest for leaf, rest in pairs}
            found = [moving.get(id(leaf)) for leaf in unknown]
            total = [a if b is None else a + share * b for a, b in zip(total, found, strict=True)]
        return total

    def _check_stationary(self) -> None:
        with torch.no_grad(), preserved(self.devices):
            meta = _tree.unflatten([_tree.detach(t) for t in self.meta], self.meta_spec)
            batches = [_tree.map(cut, batch) for batch in self.batches]
            start = _tree.unflatten([_tree.detach(t) for t in self.start], self.spec)
            end = _norm(self.residual(self._at(self.final), meta, batches))
            begin = _norm(self.residual(start, meta, batches))
        if end > self.how.stationary * begin:
            warnings.warn(
                four_part(
                    f"Training ended with a gradient of {end:.1e}, and began with {begin:.1e}.",
                    f"a ratio of at most {self.how.stationary:g}.",
                    "the implicit gradient is exact only where training has converged.",
                    "more steps, or Implicit(stationary=...) to accept it.",
                ),
                stacklevel=6,
            )

    def pull(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs, given those of the converged weights."""
        if any(g is not None for g in grads[len(self.places) :]):
            raise RequirementError(
                four_part(
                    "You differentiate outputs of the steps (losses on the way) with Implicit().",
                    "a function of the final state only.",
                    "what happened on the way is not determined by where training ended.",
                    "another strategy, or .detach() the outputs.",
                )
            )
        self.callers.check()
        grads = grads[: len(self.places)]
        given = {id(t): t.detach().requires_grad_() for t in self.inputs}
        originals = [self.unmoved.get(id(leaf), leaf) for leaf in self.final]
        leaves: list[Any] = [given.get(id(leaf), leaf) for leaf in originals]
        for i in self.places:
            leaves[i] = leaves[i].detach().requires_grad_()
        unknown: list[Tensor] = [leaves[i] for i in self.places]
        meta = _tree.unflatten([given.get(id(t), t) for t in self.meta], self.meta_spec)
        batches = _tree.map(lambda t: given[id(t)] if id(t) in given else cut(t), self.batches)
        with preserved(self.devices), self.autocast.restored(), torch.enable_grad():
            equation = self.residual(self._at(leaves), meta, batches)
        b = torch.cat(
            [
                (torch.zeros_like(u) if g is None else g).reshape(-1)
                for u, g in zip(unknown, grads, strict=True)
            ]
        )

        def product(v: Tensor) -> Tensor:
            parts = _split(v, equation)
            live = [(e, p) for e, p in zip(equation, parts, strict=True) if e.requires_grad]
            found = torch.autograd.grad(
                [e for e, _ in live],
                unknown,
                [p for _, p in live],
                retain_graph=True,
                materialize_grads=True,
                allow_unused=True,
            )
            return torch.cat([f.reshape(-1) for f in found])

        if self.step.first_order and b.any():
            constant = not any(e.requires_grad for e in equation)
            moved = torch.zeros_like(b) if constant else product(b)
            pairs = zip(_split(b, equation), _split(moved, equation), strict=True)
            if any(bool(wanted.any()) and not moves.any() for wanted, moves in pairs):
                raise RequirementError(_FIRST_ORDER)
        solution = _split(self.how.solve(product, b), equation)
        live = [(e, -s) for e, s in zip(equation, solution, strict=True) if e.requires_grad]
        found = torch.autograd.grad(
            [e for e, _ in live], list(given.values()), [s for _, s in live], allow_unused=True
        )
        return list(found)


def _norm(tensors: list[Tensor]) -> float:
    return torch.stack([t.norm() for t in tensors]).norm().item()


def _split(v: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = v.split([t.numel() for t in like])
    return [part.reshape(t.shape) for part, t in zip(parts, like, strict=True)]


def _no_influence(what: str) -> str:
    return four_part(
        f"You differentiate by {what} with Implicit().",
        "meta-parameters of the loss, weight decay, or the initial weights with a proximal term.",
        "where training has converged, the way there has no influence: the gradient is zero.",
        "learn without it, Implicit(proximal=1.0) for the initial weights, or another strategy.",
    )
