"""Some steps with a graph of their own, from which a gradient is pulled back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.guard import closures, graph
from innerloop.step.protocol import Step

Grads = list[Tensor | None]


class StandIns:
    """Stand-ins for the caller's tensors that require grad: same values, no history.

    Args:
        original: by the id of a state leaf that no step has replaced, the caller's tensor. Its
            gradient is added to that tensor's instead of being passed to the state before.
        meta: the meta-parameters of every step.
    """

    def __init__(self, original: Mapping[int, Any], meta: Any) -> None:
        self.original = original
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        """By the id of a tensor of the caller, itself and its stand-in."""
        self.meta = _tree.map(self.of, meta)
        self.in_meta = dict(self.pairs)
        self.states = {key: self.of(tensor) for key, tensor in original.items()}

    def of(self, value: Any) -> Any:
        """The stand-in of a tensor that requires grad; other values as they are."""
        if not (isinstance(value, Tensor) and value.requires_grad):
            return value
        if id(value) not in self.pairs:
            self.pairs[id(value)] = (value, value.detach().requires_grad_())
        return self.pairs[id(value)][1]

    @property
    def all(self) -> list[Tensor]:
        """The stand-ins."""
        return [new for _, new in self.pairs.values()]

    @property
    def originals(self) -> dict[int, Tensor]:
        """By the id of its stand-in, each tensor of the caller."""
        return {id(new): old for old, new in self.pairs.values()}


class Segment:
    """Steps taken with stand-ins for every tensor they are given.

    ``closed_over`` are leaves that the steps use without being given them.
    """

    def __init__(
        self,
        step: Step,
        state: Any,
        batches: Sequence[Any],
        stand_ins: StandIns,
        closed_over: Sequence[Tensor] = (),
    ) -> None:
        self.since = graph.now()
        self.stand_ins, self.closed_over = stand_ins, list(closed_over)
        self.given = dict(stand_ins.in_meta)
        """By its id, each tensor of the caller that these steps are given, and its stand-in."""
        self.sources: list[Tensor | None] = []
        """For each state leaf its stand-in, or None if it has no gradient of its own here."""
        self.constants = set(map(id, step.constants(state)))
        self.state = _tree.map(self._enter, state)
        self.outs: list[Any] = []
        with torch.enable_grad():
            for batch in batches:
                self.state, out = step(
                    self.state, stand_ins.meta, _tree.map(self._hand_over, batch)
                )
                self.outs.append(out)
        self.leaves = _tree.leaves(self.state)

    def _enter(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            self.sources.append(None)
            return leaf
        if id(leaf) in self.stand_ins.states:
            self.sources.append(None)
            old, new = self.stand_ins.original[id(leaf)], self.stand_ins.states[id(leaf)]
            if new is not old:
                self.given[id(old)] = old, new
            return new
        if id(leaf) in self.constants or not _tree.differentiable(leaf):
            self.sources.append(None)
            return leaf
        source = leaf.detach().requires_grad_()
        self.sources.append(source)
        return source

    def _hand_over(self, value: Any) -> Any:
        """A leaf of a batch as a new object: a loss may change its ``requires_grad``."""
        if not isinstance(value, Tensor):
            return value
        if not value.requires_grad:
            return value.detach()
        if id(value) not in self.given:
            pair = self.stand_ins.pairs.get(id(value))
            self.given[id(value)] = pair or (value, value.detach().requires_grad_())
        return self.given[id(value)][1]

    def find_closures(self) -> tuple[list[Tensor], list[Any]]:
        """Leaves, and nodes older than the segment, that its results depend on besides."""
        sources = [t for t in self.sources if t is not None]
        known = [*sources, *(new for _, new in self.given.values()), *self.closed_over]
        return closures.closed_over(_tree.tensors((self.leaves, self.outs)), known, self.since)

    def pull(
        self,
        above: Grads,
        outs: Sequence[Grads] | None,
        add: Callable[[Tensor, Tensor], None],
    ) -> Grads:
        """B before these steps, out of B after them; ``add`` gets the caller's tensors' part (A).

        ``above`` has a gradient for each leaf of the state after. ``outs`` has one for each leaf of
        each output, or is ``None`` if there are none.
        """
        pairs = _live(self.leaves, above)
        if outs is not None:
            for out, grads in zip(self.outs, outs, strict=True):
                pairs += _live(_tree.leaves(out), grads)
        callers = [*self.given.values(), *((t, t) for t in self.closed_over)]
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
