"""A step with its derivative along directions, out of reverse-mode derivatives alone.

torch's forward mode lacks formulas (LSTM, mse_loss) and has wrong ones (batch norm), so it is not
used. A pullback is linear in its argument; differentiating it by that gives the pushforward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """The derivative of ``outputs`` along any direction of ``inputs``, in whose graph they are.

    A number needs its gradient only, so that losses without a second derivative have one here.
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._numbers: dict[int, Sequence[Tensor | None]] = {}
        """The gradients of the outputs that are numbers, by place."""
        self._others: list[int] = []
        self._outputs = [t.detach() for t in outputs]
        for i, output in enumerate(outputs):
            if output.requires_grad and inputs:
                if output.numel() == 1 and not output.is_complex():
                    self._numbers[i] = _pull([output], [torch.ones_like(output)], inputs)
                else:
                    self._others.append(i)
        others = [outputs[i] for i in self._others]
        self._dummies = [torch.zeros_like(t).requires_grad_() for t in others]
        self._pulled = _pull(others, self._dummies, inputs, create_graph=True)

    def __call__(self, tangents: Sequence[Tensor | None]) -> Tangents:
        """One tangent for each output, given one for each input; ``None`` stands for zero."""
        found: Tangents = [None] * len(self._outputs)
        for i, gradient in self._numbers.items():
            product = inner_product(gradient, tangents)
            if product is not None:
                found[i] = product.to(self._outputs[i]).reshape(self._outputs[i].shape)
        pushed = _pull(self._pulled, tangents, self._dummies)
        for i, tangent in zip(self._others, pushed, strict=True):
            found[i] = tangent
        return found


def inner_product(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> Tensor | None:
    """The real inner product of two lists of tensors; ``None`` stands for zero."""
    pairs = zip(some, others, strict=True)
    parts = [(a.conj() * b).sum().real for a, b in pairs if a is not None and b is not None]
    return torch.stack([part.to(parts[0].dtype) for part in parts]).sum() if parts else None


def _pull(
    outputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    create_graph: bool = False,
) -> Sequence[Tensor | None]:
    """The gradients of ``inputs``, given those of the outputs; ``None`` stands for zero."""
    pairs = [
        (output, cotangent)
        for output, cotangent in zip(outputs, cotangents, strict=True)
        if output is not None and cotangent is not None and output.requires_grad
    ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    reached, given = zip(*pairs, strict=True)
    return torch.autograd.grad(
        reached, inputs, given, retain_graph=True, create_graph=create_graph, allow_unused=True
    )


class GenericLinearization:
    """Any step and its pushforward, which takes third derivatives of what is inside."""

    def __init__(self, step: Any, state: Any, meta: Any, batch: Any) -> None:
        self._given = [t for t in _tree.tensors((state, meta)) if t.requires_grad]
        since = graph.now()
        self.state, self.out = step(state, meta, batch)
        self._leaves = _tree.leaves(self.state), _tree.leaves(self.out)
        outputs = _only([*self._leaves[0], *self._leaves[1]])
        self.suspects = closures.suspects(outputs, self._given, since, step.roots)
        self._pushforward = Pushforward(outputs, self._given)

    def push(self, tangents: Mapping[int, Tensor]) -> tuple[Tangents, Tangents]:
        pushed = iter(self._pushforward([tangents.get(id(t)) for t in self._given]))
        return _spread(self._leaves[0], pushed), _spread(self._leaves[1], pushed)


class InnerLinearization:
    """An inner step and its pushforward, by second derivatives of the loss and no higher ones.

    The inner gradient's derivative along (dθ, dφ) is the gradient by θ of ⟨∇ℓ, (dθ, dφ)⟩, since the
    matrix of second derivatives is symmetric. The rule's part is pushed forward by itself.
    """

    def __init__(self, step: Any, state: State, meta: Meta, batch: Any) -> None:
        since = graph.now()
        named = named_leaves(state.params)
        sources = step.sources(named)
        self._sources = list(sources.values())
        others = [t for name, t in named.items() if name not in sources] + _tree.tensors(meta.loss)
        others = [t for t in others if isinstance(t, Tensor) and t.requires_grad]
        self._loss_inputs = [*self._sources, *others]
        self._loss_given = [*(named[name] for name in sources), *others]
        """As the inputs of the loss, with the weights of the state instead of their views."""
        with torch.enable_grad(), twice_differentiable():
            params = rebuild(state.params, {**step.resting(named), **sources})
            found = step.evaluate(params, state, meta, batch)
            wanted = {**sources, **{f"other {i}": t for i, t in enumerate(others)}}
            self._gradient = list(step.gradients(found.total, wanted, needs_graph=True).values())
            own = self._gradient[: len(sources)]
            if all([g is None for g in own]):
                raise no_gradient()
            self._grads = [None if g is None else g.detach().requires_grad_() for g in own]
            # A transform that writes in place must find no leaves.
            clones = [None if g is None else g.clone() for g in self._grads]
            grads = step.pull_to_anchor(dict(zip(sources, clones, strict=True)), named, meta)
            given = state._replace(buffers=found.buffers)
            self.state = step.update(given, meta, dict.fromkeys(named) | grads, found, batch)
        self.out = _tree.map(_tree.detach, found.out)
        self._first_order = step.first_order
        given = [t for t in _tree.tensors((state.params, state.opt, meta)) if t.requires_grad]
        self._rule_given = given
        moved = [g for g in self._grads if g is not None]
        self._outputs, self._aux = _tree.leaves(self.state), _tree.leaves(found.out)
        shown = _only([*self._outputs, *self._aux, *own])
        known = [*self._loss_inputs, *given, *moved]
        self.suspects = closures.suspects(shown, known, since, step.roots)
        self._rule = Pushforward(_only(self._outputs), [*given, *moved])
        self._loss = Pushforward(_only(self._aux), self._loss_inputs)

    def push(self, tangents: Mapping[int, Tensor]) -> tuple[Tangents, Tangents]:
        loss = [tangents.get(id(t)) for t in self._loss_given]
        changes: Sequence[Tensor | None] = [None] * len(self._sources)
        if not self._first_order:
            changes = _pull(self._gradient, loss, self._sources)
        pairs = zip(self._grads, changes, strict=True)
        moved = [change for grad, change in pairs if grad is not None]
        given = [tangents.get(id(t)) for t in self._rule_given]
        return (
            _spread(self._outputs, iter(self._rule([*given, *moved]))),
            _spread(self._aux, iter(self._loss(loss))),
        )


def _only(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if differentiable(leaf)]


def _spread(leaves: Iterable[Any], tangents: Iterator[Any]) -> list[Any]:
    return [next(tangents) if differentiable(leaf) else None for leaf in leaves]
