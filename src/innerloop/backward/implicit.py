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
from innerloop._tree import differentiable
from innerloop.backward.attach import attach
from innerloop.backward.solvers import (
    Product,
    conjugate_gradient,
    gmres,
    neumann,
    relative_residual,
)
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
from innerloop.guard.randomness import Autocast, Randomness, devices_of, restore_randomness
from innerloop.guard.writes import Unwritten
from innerloop.step.protocol import Step, fold

_SOLVERS = {"cg": conjugate_gradient, "neumann": neumann, "gmres": gmres}


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

    def solve(self, product: Product, b: Tensor) -> Tensor:
        """``A⁻¹ b``, or an error if the solver was to converge and did not."""
        limit = self.iterations or max(1000, 10 * b.numel())
        tolerance = self.tolerance or (1e-10 if b.dtype.itemsize >= 8 else 1e-5)
        options = {"scale": self.scale} if self.solver == "neumann" else {}
        x = _SOLVERS[self.solver](product, b, limit, tolerance, **options)
        if self.iterations is None:
            residual = relative_residual(product, x, b)
            if not residual <= 100 * tolerance:
                raise _not_solved(self, residual, tolerance)
        return x


class _Run:
    """One converged run: its last state, and the equation that holds there."""

    def __init__(
        self, how: Implicit, step: Step, state: Any, meta: Any, batches: Sequence[Any]
    ) -> None:
        if not step.symmetric and how.solver == "cg":
            raise _not_symmetric()
        self.how, self.step, self.meta = how, step, meta
        start = _tree.leaves(state)
        check_visible(start)
        fetched = [batches[j] for j in range(len(batches))]
        counts = Counter(map(id, fetched))
        self.batches = list({id(batch): batch for batch in fetched}.values())
        self.shares = [counts[id(batch)] / len(fetched) for batch in self.batches]
        self.callers = Unwritten()
        self.callers.add(_tree.leaves((state, meta, self.batches)))
        self.devices = devices_of(start)
        self.autocast = Autocast(self.devices)
        own = [_tree.detach(leaf) for leaf in start]
        self.start = _tree.fill(state, own), _tree.map(_tree.detach, meta)
        with torch.no_grad():
            self.state, self.outs = self._train([_tree.map(cut, batch) for batch in fetched])
        self.randomness = Randomness(self.devices)
        self.final = _tree.leaves(self.state)
        check_visible([*self.final, *_tree.leaves(self.outs)])
        last = {id(leaf) for leaf in self.final}
        pairs = zip(own, start, strict=True)
        self.unmoved = {id(new): old for new, old in pairs if id(new) in last}
        """By the id of a final leaf that no step has replaced, the tensor that was given."""
        tensors = _tree.tensors((meta, list(self.unmoved.values()), self.batches))
        self.inputs = list({id(t): t for t in tensors if t.requires_grad}.values())
        with restore_randomness(self.devices):
            _, unknown, residual = self._equation()
        self.places, size = list(unknown), _norm(residual)
        del unknown, residual
        self._check_influence([t for t in _tree.tensors(start) if t.requires_grad])
        if self.inputs and self.places:
            self._check_stationary(size)

    def _train(self, batches: list[Any]) -> tuple[Any, list[Any]]:
        """Take all steps; refuse tensors that they close over."""
        roots = self.step.roots
        try:
            found, leaves = self._observe(batches)
        except closures.ComputedOutsideError as error:
            raise closures.closure_error(None, error.node, roots) from None
        with restore_randomness(self.devices):
            closures.Suspects(leaves).refuse(lambda: self._observe(batches)[1], roots)
        return found

    def _observe(self, batches: list[Any]) -> tuple[Any, list[Tensor]]:
        """Take all steps: the result, and the leaves they use without being given them."""
        observer = closures.Observer()
        found = fold(self.step.with_observer(observer.look), *self.start, batches)
        observer.settle()
        return found, list(observer.found.values())

    def _check_influence(self, learned: Sequence[Tensor]) -> None:
        lasting = self.step.lasting
        for name, value in ({} if lasting is None else self.meta.opt).items():
            if name not in lasting and any(t.requires_grad for t in _tree.tensors(value)):
                raise _no_influence(f"the setting {name!r} of the optimizer")
        resting = {id(t) for t in self.unmoved.values()}
        if not self.how.proximal and any(id(t) not in resting for t in learned):
            raise _no_influence("the initial state")

    def _check_stationary(self, end: float) -> None:
        with torch.no_grad(), restore_randomness(self.devices):
            batches = [_tree.map(cut, batch) for batch in self.batches]
            begin = _norm(list(self._residual(*self.start, batches).values()))
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

    def _residual(self, state: Any, meta: Any, batches: Sequence[Any]) -> dict[int, Tensor]:
        """By the place of each unknown among the leaves, what is zero at convergence.

        It is averaged over the batches of all steps. A batch may leave weights out, which then
        stay where they are.
        """
        places = {id(leaf): i for i, leaf in enumerate(_tree.leaves(state))}
        total: dict[int, Tensor] = {}
        for batch, share in zip(batches, self.shares, strict=True):
            self.randomness.set()
            for leaf, rest in self.step.residual(state, meta, batch):
                place, part = places[id(leaf)], share * rest
                total[place] = total[place] + part if place in total else part
        return total

    def _equation(self) -> tuple[list[Tensor], dict[int, Tensor], list[Tensor]]:
        """Stand-ins for the inputs, the unknowns by place, and the residual as their function."""
        given = {id(t): t.detach().requires_grad_() for t in self.inputs}

        def stand_in(value: Any) -> Any:
            return given[id(value)] if id(value) in given else cut(value)

        fixed = self.unmoved.keys() | {id(t) for t in self.step.constants(self.state)}
        leaves = [stand_in(self.unmoved.get(id(leaf), leaf)) for leaf in self.final]
        moved = [i for i, t in enumerate(self.final) if differentiable(t) and id(t) not in fixed]
        for i in moved:
            leaves[i].requires_grad_()
        state = _tree.fill(self.state, leaves)
        meta, batches = _tree.map(stand_in, (self.meta, self.batches))
        with self.autocast.restore(), torch.enable_grad():
            residual = self._residual(state, meta, batches)
        unknown = {i: leaves[i] for i in moved if i in residual}
        return list(given.values()), unknown, [residual[i] for i in unknown]

    def result(self) -> tuple[Any, Any]:
        """The last state and the stacked outputs, connected to the inputs."""
        leaves = [self.unmoved.get(id(leaf), leaf) for leaf in self.final]
        outs = columns(self.outs)
        if self.inputs and self.places:
            leaves, outs = connect(
                leaves,
                outs,
                self.places,
                lambda values: attach(values, self.inputs, self.pull, name="Implicit"),
            )
        return _tree.fill(self.state, leaves), _tree.fill(self.outs[0], outs)

    def pull(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs, given those of the converged weights."""
        if any(g is not None for g in grads[len(self.places) :]):
            raise _outputs_on_the_way()
        self.callers.check()
        with restore_randomness(self.devices):
            given, unknown, residual = self._equation()
        weights = list(unknown.values())
        b = _flat(grads[: len(weights)], weights)

        def product(v: Tensor) -> Tensor:
            return _flat(_pull(residual, v, weights), weights)

        if self.step.first_order:
            _check_moved(b, product(b), weights)
        return _pull(residual, -self.how.solve(product, b), given)


def _pull(residual: list[Tensor], v: Tensor, inputs: list[Tensor]) -> list[Tensor | None]:
    """The gradients of the inputs, given that of the residual as one vector."""
    pairs = zip(residual, _split(v, residual), strict=True)
    live = [(rest, grad) for rest, grad in pairs if rest.requires_grad]
    if not live:
        return [None] * len(inputs)
    outputs, grads = zip(*live, strict=True)
    found = torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)
    return list(found)


def _flat(grads: Sequence[Tensor | None], like: list[Tensor]) -> Tensor:
    pairs = zip(grads, like, strict=True)
    return torch.cat([(torch.zeros_like(t) if g is None else g).reshape(-1) for g, t in pairs])


def _split(v: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = v.split([t.numel() for t in like])
    return [part.reshape(t.shape) for part, t in zip(parts, like, strict=True)]


def _norm(tensors: list[Tensor]) -> float:
    return torch.nn.utils.get_total_norm(tensors).item()


# Refusals. --------------------------------------------------------------------------------------


def _not_symmetric() -> InnerLoopError:
    return InnerLoopError(
        four_part(
            "You gave Implicit(solver='cg') a step of your own.",
            "solver='gmres' or 'neumann'.",
            "the derivative of a step is in general not symmetric.",
            "Implicit(solver='gmres').",
        )
    )


def _not_solved(how: Implicit, residual: float, tolerance: float) -> RequirementError:
    return RequirementError(
        four_part(
            f"{how} stopped with a relative residual of {residual:.1e}.",
            f"{tolerance:.0e}.",
            "the matrix of second derivatives is singular, not positive definite, or too "
            "badly conditioned for this solver and dtype.",
            "proximal=..., a regularized loss, solver='gmres', a larger tolerance, or "
            "iterations=... to take an approximation.",
        )
    )


def _no_influence(what: str) -> RequirementError:
    return RequirementError(
        four_part(
            f"You differentiate by {what} with Implicit().",
            "meta-parameters of the loss, weight decay, or the initial weights with a proximal "
            "term.",
            "where training has converged, the way there has no influence: the gradient is zero.",
            "learn without it, Implicit(proximal=1.0) for the initial weights, or another "
            "strategy.",
        )
    )


def _outputs_on_the_way() -> RequirementError:
    return RequirementError(
        four_part(
            "You differentiate outputs of the steps (losses on the way) with Implicit().",
            "a function of the final state only.",
            "what happened on the way is not determined by where training ended.",
            "another strategy, or .detach() the outputs.",
        )
    )


def _check_moved(b: Tensor, image: Tensor, weights: list[Tensor]) -> None:
    """Refuse weights that are measured and that nothing moves if the inner gradient is constant."""
    pairs = zip(_split(b, weights), _split(image, weights), strict=True)
    if any(bool(wanted.any()) and not bool(moves.any()) for wanted, moves in pairs):
        raise RequirementError(
            four_part(
                "You differentiate with Implicit() and first_order=True.",
                "a proximal term, or a weight decay of every weight that is measured.",
                "with inner gradients as constants nothing else moves the point of convergence.",
                "Implicit(proximal=1.0) for the initial weights; first_order=False for a loss.",
            )
        )
