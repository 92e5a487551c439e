"""A step with its derivative along directions, out of reverse-mode derivatives alone.

torch's forward mode lacks formulas (LSTM, mse_loss) and has wrong ones (batch norm), so it is not
used. A pullback is linear in its argument; differentiating it by that gives the pushforward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop._tree import differentiable
from innerloop.guard import closures, graph
from innerloop.modules.exact import twice_differentiable
from innerloop.step.refusals import no_gradient
from innerloop.step.state import Meta, State, named_leaves, rebuild

Tangents = list[Tensor | None]


class Pushforward:
    """The derivative of ``outputs`` along any direction of ``inputs``, in whose graph they are."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self.live = [i for i, t in enumerate(outputs) if t.requires_grad]
        self.count = len(outputs)
        reached = [outputs[i] for i in self.live]
        self.dummies = [torch.zeros_like(t).requires_grad_() for t in reached]
        self.pulled: Sequence[Tensor | None] = [None] * len(inputs)
        if reached and inputs:
            self.pulled = torch.autograd.grad(
                reached, inputs, self.dummies, create_graph=True, allow_unused=True
            )

    def __call__(self, tangents: Sequence[Tensor | None]) -> Tangents:
        """One tangent for each output, given one for each input; ``None`` stands for zero."""
        found: Tangents = [None] * self.count
        pushed = _pull(self.pulled, tangents, self.dummies)
        for i, tangent in zip(self.live, pushed, strict=True):
            found[i] = tangent
        return found


def _pull(
    outputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """The gradients of ``inputs``, given those of the outputs; ``None`` stands for zero."""
    pairs = [
        (output, cotangent)
        for output, cotangent in zip(outputs, cotangents, strict=True)
        if output is not None and cotangent is not None and output.requires_grad
    ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    return torch.autograd.grad(
        [output for output, _ in pairs],
        inputs,
        [cotangent for _, cotangent in pairs],
        retain_graph=True,
        allow_unused=True,
    )


class GenericLinearization:
    """Any step and its pushforward, which takes third derivatives of what is inside."""

    def __init__(self, step: Any, state: Any, meta: Any, batch: Any) -> None:
        self.given = [t for t in _tree.tensors((state, meta)) if t.requires_grad]
        since = graph.now()
        self.state, self.out = step(state, meta, batch)
        self.leaves = [_tree.flatten(tree)[0] for tree in (self.state, self.out)]
        outputs = [t for leaves in self.leaves for t in leaves if differentiable(t)]
        self.suspects = closures.suspects(outputs, self.given, since, step.roots)
        self.pushforward = Pushforward(outputs, self.given)

    def push(self, tangents: Mapping[int, Tensor]) -> tuple[Tangents, Tangents]:
        rest = iter(self.pushforward([tangents.get(id(t)) for t in self.given]))
        first, second = (
            [next(rest) if differentiable(t) else None for t in leaves] for leaves in self.leaves
        )
        return first, second


class InnerLinearization:
    """An inner step and its pushforward, by second derivatives of the loss and no higher ones.

    The inner gradient's derivative along (dθ, dφ) is the gradient by θ of ⟨∇ℓ, (dθ, dφ)⟩, since the
    matrix of second derivatives is symmetric. The rule's part is pushed forward by itself.
    """

    def __init__(self, step: Any, state: State, meta: Meta, batch: Any) -> None:
        since = graph.now()
        named = named_leaves(state.params)
        sources = step.sources(named)
        self._sources, self._trained = list(sources.values()), [named[n] for n in sources]
        others = [t for name, t in named.items() if name not in sources] + _tree.tensors(meta.loss)
        self._others = [t for t in others if isinstance(t, Tensor) and t.requires_grad]
        with torch.enable_grad(), twice_differentiable():
            params = rebuild(state.params, {**step.resting(named), **sources})
            found = step.evaluate(params, state, meta, batch)
            wanted = {**sources, **{f"other {i}": t for i, t in enumerate(self._others)}}
            first = step.gradients(found.total, wanted, follow=True)
            self._first = list(first.values())
            own = {name: first[name] for name in sources}
            if all([g is None for g in own.values()]):
                raise no_gradient()
            self._grads = [None if g is None else g.detach().requires_grad_() for g in own.values()]
            grads = dict(zip(sources, self._grads, strict=True))
            if step.grad_transform is not None:
                # A transform that writes in place must find no leaves.
                grads = {n: None if g is None else g.clone() for n, g in grads.items()}
            grads = step.pull_to_anchor(grads, named, meta)
            given = state._replace(buffers=found.buffers)
            self.state = step.update(given, meta, dict.fromkeys(named) | grads, found, batch)
        self.out = _tree.map(_tree.detach, found.out)
        self._first_order = step.first_order
        self._given = [t for t in _tree.tensors((state.params, state.opt, meta)) if t.requires_grad]
        self._outputs, self._aux = _tree.flatten(self.state)[0], _tree.flatten(found.out)[0]
        moved = [g for g in self._grads if g is not None]
        known = [*self._sources, *self._given, *self._others, *moved]
        shown = [*_only(self._outputs), *_only(self._aux), *_only(own.values())]
        self.suspects = closures.suspects(shown, known, since, step.roots)
        self._rule = Pushforward(_only(self._outputs), [*self._given, *moved])
        kind = _FirstOrder if step.first_order else Pushforward
        self._loss = kind(_only(self._aux), [*self._sources, *self._others])

    def push(self, tangents: Mapping[int, Tensor]) -> tuple[Tangents, Tangents]:
        loss = [tangents.get(id(t)) for t in (*self._trained, *self._others)]
        changes: Sequence[Tensor | None] = [None] * len(self._sources)
        if not self._first_order:
            changes = _pull(self._first, loss, self._sources)
        pairs = zip(self._grads, changes, strict=True)
        moved = [change for grad, change in pairs if grad is not None]
        given = [tangents.get(id(t)) for t in self._given]
        return (
            _spread(self._outputs, self._rule([*given, *moved])),
            _spread(self._aux, self._loss(loss)),
        )


class _FirstOrder:
    """A :class:`Pushforward` that takes only first derivatives of outputs that are numbers."""

    def __init__(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        self._rows = [_Row(t, inputs) if _is_number(t) else None for t in outputs]
        self._rest = Pushforward([t for t in outputs if not _is_number(t)], inputs)

    def __call__(self, tangents: Sequence[Tensor | None]) -> Tangents:
        rest = iter(self._rest(tangents))
        return [next(rest) if row is None else row(tangents) for row in self._rows]


class _Row:
    """The derivative of one number along a direction, out of its gradient."""

    def __init__(self, output: Tensor, inputs: list[Tensor]) -> None:
        self._like = output.detach()
        self._row: Sequence[Tensor | None] = [None] * len(inputs)
        if output.requires_grad and inputs:
            ones = torch.ones_like(output)
            self._row = torch.autograd.grad(
                output, inputs, ones, retain_graph=True, allow_unused=True
            )

    def __call__(self, tangents: Sequence[Tensor | None]) -> Tensor | None:
        parts = [
            (row.conj() * tangent).sum().real
            for row, tangent in zip(self._row, tangents, strict=True)
            if row is not None and tangent is not None
        ]
        if not parts:
            return None
        return torch.stack([p.to(self._like.dtype) for p in parts]).sum().reshape(self._like.shape)


def _is_number(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and not tensor.is_complex()


def _only(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if differentiable(leaf)]


def _spread(leaves: Iterable[Any], tangents: Iterable[Any]) -> list[Any]:
    rest = iter(tangents)
    return [next(rest) if differentiable(leaf) else None for leaf in leaves]
