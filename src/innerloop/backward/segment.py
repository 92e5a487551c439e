"""Some steps with a graph of their own, from which a gradient is pulled back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.backward.strategy import Step, cut, differentiable, taken
from innerloop.guard import closures

Grads = list[Tensor | None]


class Segment:
    """Steps taken with stand-ins for every tensor they are given: same values, no history.

    ``original`` tells for a state leaf which tensor of the caller it is, if it is one; its gradient
    is a part of that tensor's, not of the state before. ``outside`` are tensors that the step was
    seen to close over. With ``again`` only derivatives are wanted: a step that knows how leaves
    values of the last state out.
    """

    def __init__(
        self,
        step: Step,
        state: Any,
        meta: Any,
        batches: Sequence[Any],
        original: Mapping[int, Any],
        outside: Sequence[Tensor],
        again: bool = False,
    ) -> None:
        self.since = closures.sequence_number()
        self.stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        """By the id of a tensor of the caller, itself and its stand-in."""
        leaves, spec = _tree.flatten(state)
        below = [self._below(leaf, original) for leaf in leaves]
        self.before = [
            new if differentiable(leaf) and id(leaf) not in original else None
            for leaf, new in zip(leaves, below, strict=True)
        ]
        given = _tree.map(self._of, meta)
        self.leaves = [t for t in outside if t.grad_fn is None]
        computed = {id(t): self._of(t) for t in outside if t.grad_fn is not None}
        exchange = closures.exchanged(computed) if computed else contextlib.nullcontext()
        self.state, self.outs = _tree.unflatten(below, spec), []
        with torch.enable_grad(), exchange:
            for number, batch in enumerate(batches, 1):
                last = again and number == len(batches)
                how = getattr(step, "replayed", step) if last else step
                self.state, out = taken(how, self.state, given, _tree.map(self._handed, batch))
                self.outs.append(out)

    def _below(self, leaf: Any, original: Mapping[int, Any]) -> Any:
        if id(leaf) in original:
            return self._of(original[id(leaf)])
        return closures.own(leaf.detach().requires_grad_()) if differentiable(leaf) else leaf

    def _of(self, value: Any) -> Any:
        """The stand-in of a tensor of the caller that requires grad; all else as it is."""
        if not (isinstance(value, Tensor) and value.requires_grad):
            return value
        if id(value) not in self.stand_ins:
            self.stand_ins[id(value)] = (value, value.detach().requires_grad_())
        return self.stand_ins[id(value)][1]

    def _handed(self, value: Any) -> Any:
        """What stands for a leaf of a batch."""
        asked = isinstance(value, Tensor) and value.requires_grad
        return self._of(value) if asked else cut(value)

    def unmoved(self) -> dict[int, Tensor]:
        """By the id of its stand-in, each tensor of the caller."""
        return {id(new): old for old, new in self.stand_ins.values()}

    def strangers(self) -> tuple[list[Tensor], list[Any]]:
        """What the results depend on besides what the steps were given."""
        return closures.strangers(self._results(), self._known(), self.since)

    def _results(self) -> list[Tensor]:
        leaves = _tree.flatten((self.state, self.outs))[0]
        return [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]

    def _known(self) -> list[Tensor]:
        sources = [t for t in self.before if t is not None]
        return [*sources, *(new for _, new in self.stand_ins.values()), *self.leaves]

    def pulled(
        self,
        above: Grads,
        outs: Sequence[Grads],
        roots: Sequence[Any],
        add: Callable[[Tensor, Tensor], None],
    ) -> Grads:
        """B before these steps, out of B after them; ``add`` gets what falls to the caller's (A).

        ``above`` has a gradient for each leaf of the state after, ``outs`` one for each leaf of
        each output. ``suspects`` are then to be looked at, when this segment is gone.
        """
        outputs, cotangents = _paired(_tree.flatten(self.state)[0], above)
        for out, grads in zip(self.outs, outs, strict=True):
            more = _paired(_tree.flatten(out)[0], grads)
            outputs, cotangents = outputs + more[0], cotangents + more[1]
        self.suspects = closures.suspects(outputs, self._known(), self.since, roots)
        sources = [t for t in self.before if t is not None]
        pairs = [*self.stand_ins.values(), *((t, t) for t in self.leaves)]
        targets = [*sources, *(new for _, new in pairs)]
        found: Sequence[Tensor | None] = [None] * len(targets)
        if outputs and targets:
            found = torch.autograd.grad(outputs, targets, cotangents, allow_unused=True)
        rest = iter(found)
        below = [None if t is None else next(rest) for t in self.before]
        for (tensor, _), grad in zip(pairs, rest, strict=True):
            if grad is not None:
                add(tensor, grad)
        return below


def _paired(tensors: Sequence[Any], grads: Grads) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [
        (tensor, grad)
        for tensor, grad in zip(tensors, grads, strict=True)
        if grad is not None and tensor.requires_grad
    ]
    return [tensor for tensor, _ in pairs], [grad for _, grad in pairs]
