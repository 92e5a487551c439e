"""The protocol of a step: everything a strategy may ask of it, with defaults for any function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.errors import InnerLoopError, four_part
from innerloop.step.linearized import GenericLinearization
from innerloop.step.linearized import inner_product as inner_product
from innerloop.step.state import State

Look = Callable[[Iterable[Tensor], Iterable[Tensor]], None]
"""``look(outputs, given)``: sees the graph of ``outputs`` before a step drops it."""
Pairs = list[tuple[Tensor, Tensor]]


class Linearization(Protocol):
    """A step at one point, with its derivative along directions."""

    state: Any
    out: Any
    suspects: Any
    """Leaves that the step used without being given them."""

    def push(self, tangents: Mapping[int, Tensor]) -> tuple[list[Any], list[Any]]:
        """Tangents of the new state's leaves and of the outputs', given those of leaves by id."""
        ...


class Step:
    """A step ``step(state, meta, batch) -> (state, out)``; the base of every step."""

    first_order: bool = False
    """True if inner gradients are constants."""
    symmetric: bool = False
    """True if the derivative of :meth:`residual` is a symmetric matrix."""
    lasting: frozenset[str] | None = None
    """The settings that influence where training converges; ``None`` if that is not known."""

    def __call__(self, state: Any, meta: Any, batch: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    @property
    def roots(self) -> tuple[Any, ...]:
        """The functions and modules in which to look for the name of a closed-over tensor."""
        return (self,)

    @property
    def identity(self) -> Any:
        """A hashable value that equal steps share."""
        return self

    def check_state(self, state: Any) -> None:
        """Refuse a state that the step cannot start from."""

    def constants(self, state: Any) -> list[Tensor]:
        """The tensors of a state that have no derivative."""
        return list(state.buffers.values()) if isinstance(state, State) else []

    def with_guard(self) -> Step:
        """The same step, whose next gradient with a graph is checked for missing derivatives."""
        return self

    def with_observer(self, look: Look) -> Step:
        """The same step without a graph in its results; ``look`` sees the graph it had."""
        return _Observed(self, look)

    def with_probe(self, probe: Callable[[Tensor], None]) -> Step:
        """The same step, which calls ``probe`` with its loss before it goes on."""
        return self

    def with_start(self, start: Any) -> Step:
        """The same step, for states that its own steps made out of ``start``.

        Only tensors of ``start`` may also be, or have a part in, the other arguments.
        """
        return self

    def linearize(self, state: Any, meta: Any, batch: Any) -> Linearization:
        """The step at a point whose tensors are leaves, with its derivative along directions."""
        return GenericLinearization(self, state, meta, batch)

    def residual(self, state: Any, meta: Any, batch: Any) -> Pairs:
        """Each unknown of a converged training, with what is zero there: θ - step(θ)."""
        before, after = _tree.leaves(state), _tree.leaves(self(state, meta, batch)[0])
        pairs = zip(before, after, strict=True)
        return [(old, old - new) for old, new in pairs if _tree.differentiable(old)]

    def with_proximal(self, strength: float) -> Step:
        """The same step with ``strength / 2 · ‖θ - anchor‖²`` added to its loss (iMAML)."""
        raise InnerLoopError(
            four_part(
                "You gave Implicit(proximal=...) a step of your own.",
                "a step made by innerloop.inner_step.",
                "the term must become part of its loss.",
                "the term in your own step, and Implicit() without it.",
            )
        )


class PlainStep(Step):
    """A function of the user's as a step.

    It may write to the containers it is given, so it gets copies of them.
    """

    def __init__(self, function: Callable[..., tuple[Any, Any]]) -> None:
        self.function = function

    def __call__(self, state: Any, meta: Any, batch: Any) -> tuple[Any, Any]:
        return self.function(_tree.copied(state), meta, batch)

    @property
    def roots(self) -> tuple[Any, ...]:
        return (self.function,)

    @property
    def identity(self) -> Any:
        return id(self.function)


class _Observed(Step):
    def __init__(self, step: Step, look: Look) -> None:
        self.step, self.look = step, look

    def __call__(self, state: Any, meta: Any, batch: Any) -> tuple[Any, Any]:
        with torch.enable_grad():
            found = self.step(state, meta, batch)
        self.look(_tree.tensors(found), ())
        return _tree.map(_tree.detach, found)


def as_step(step: Any) -> Step:
    """A step as it is; any other function as a :class:`PlainStep`."""
    return step if isinstance(step, Step) else PlainStep(step)


def fold(
    step: Callable[..., tuple[Any, Any]], state: Any, meta: Any, batches: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """The plain loop: the final state and a list of outputs."""
    start, outs = state, []
    for j in range(len(batches)):
        if j == 1 and isinstance(step, Step):
            step = step.with_start(start)
        state, out = step(state, meta, batches[j])
        outs.append(out)
    return state, outs
