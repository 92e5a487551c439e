"""Some steps with a graph of their own, from which a gradient is pulled back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop._tree import differentiable
from innerloop.guard import closures, graph
from innerloop.step.protocol import Step

Grads = list[Tensor | None]


class Segment:
    """Steps taken with stand-ins for every tensor they are given: same values, no history.

    ``original`` tells for a state leaf which tensor of the caller it is, if it is one; its gradient
    is a part of that tensor's, not of the state before. ``closed_over`` are leaves that the steps
    use without being given them.
    """

    def __init__(
        self,
        step: Step,
        state: Any,
        meta: Any,
        batches: Sequence[Any],
        original: Mapping[int, Any],
        closed_over: Sequence[Tensor] = (),
    ) -> None:
        self.since = graph.now()
        self.closed_over = list(closed_over)
        self.stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        """By the id of a tensor of the caller, itself and its stand-in."""
        self.sources: list[Tensor | None] = []
        """For each state leaf its stand-in, or None if it has no gradient of its own here."""
        self.original = original
        self.constants = set(map(id, step.constants(state)))
        self.state = _tree.map(self._enter, state)
        meta = _tree.map(self._stand_in, meta)
        self.outs: list[Any] = []
        with torch.enable_grad():
            for batch in batches:
                self.state, out = step(self.state, meta, _tree.map(self._hand_over, batch))
                self.outs.append(out)

    def _enter(self, leaf: Any) -> Any:
        if id(leaf) in self.original:
            self.sources.append(None)
            return self._stand_in(self.original[id(leaf)])
        has_gradient = differentiable(leaf) and id(leaf) not in self.constants
        source = leaf.detach().requires_grad_() if has_gradient else None
        self.sources.append(source)
        return leaf if source is None else source

    def _stand_in(self, value: Any) -> Any:
        """The stand-in of a tensor of the caller that requires grad; other values as they are."""
        if not (isinstance(value, Tensor) and value.requires_grad):
            return value
        if id(value) not in self.stand_ins:
            self.stand_ins[id(value)] = (value, value.detach().requires_grad_())
        return self.stand_ins[id(value)][1]

    def _hand_over(self, value: Any) -> Any:
        """A leaf of a batch as a new object: what a loss does to its flags stays here."""
        if not isinstance(value, Tensor):
            return value
        return self._stand_in(value) if value.requires_grad else value.detach()

    def unmoved(self) -> dict[int, Tensor]:
        """By the id of its stand-in, each tensor of the caller."""
        return {id(new): old for old, new in self.stand_ins.values()}

    def find_closures(self) -> tuple[list[Tensor], list[Any]]:
        """Leaves, and nodes older than the segment, that its results depend on unexpectedly."""
        sources = [t for t in self.sources if t is not None]
        known = [*sources, *(new for _, new in self.stand_ins.values()), *self.closed_over]
        return closures.closed_over(_tree.tensors((self.state, self.outs)), known, self.since)

    def pull(
        self, above: Grads, outs: Sequence[Grads], add: Callable[[Tensor, Tensor], None]
    ) -> Grads:
        """B before these steps, out of B after them; ``add`` gets the caller's tensors' part (A).

        ``above`` has a gradient for each leaf of the state after, ``outs`` one for each leaf of
        each output.
        """
        pairs = _live(_tree.leaves(self.state), above)
        for out, grads in zip(self.outs, outs, strict=True):
            pairs += _live(_tree.leaves(out), grads)
        callers = [*self.stand_ins.values(), *((t, t) for t in self.closed_over)]
        targets = [t for t in self.sources if t is not None] + [new for _, new in callers]
        found: Sequence[Tensor | None] = [None] * len(targets)
        if pairs and targets:
            outputs, cotangents = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, targets, cotangents, allow_unused=True)
        rest = iter(found)
        below = [None if source is None else next(rest) for source in self.sources]
        for (tensor, _), grad in zip(callers, rest, strict=True):
            if grad is not None:
                add(tensor, grad)
        return below


def _live(tensors: Sequence[Any], grads: Grads) -> list[tuple[Tensor, Tensor]]:
    return [
        (tensor, grad)
        for tensor, grad in zip(tensors, grads, strict=True)
        if grad is not None and tensor.requires_grad
    ]
