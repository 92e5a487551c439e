"""A step with its derivative along directions, for derivatives that are carried forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.guard import closures, second_order
from innerloop.modules.exact import twice_differentiable
from innerloop.step.evaluation import check_found, check_unwritten, source, versions_of
from innerloop.step.pushforward import Pushforward
from innerloop.step.state import Meta, State, differentiable, named_leaves


class Linearized:
    """One step and its pushforward, by second derivatives of the loss and no higher ones.

    The inner gradient's derivative along (dθ, dφ) is the gradient by θ of ⟨∇ℓ, (dθ, dφ)⟩, since the
    matrix of second derivatives is symmetric. The rule's part is pushed forward by itself.
    """

    def __init__(self, step: Any, state: State, meta: Meta, batch: Any) -> None:
        run = step.evaluation(state, meta, batch)
        since = closures.sequence_number()
        named = named_leaves(state.params)
        trained = run.moving(named)
        sources = {name: source(named[name], True) for name in trained}
        with torch.enable_grad(), twice_differentiable():
            versions = versions_of(named)
            run.value, run.out = run.evaluated({**named, **sources})
            run.check()
            check_unwritten(versions)
            others = [t for n, t in named.items() if n not in sources]
            others += _tree.flatten(meta.loss)[0]
            self._others = [t for t in others if isinstance(t, Tensor) and t.requires_grad]
            self._trained = [named[name] for name in trained]
            self._sources = list(sources.values())
            first = torch.autograd.grad(
                run.total,
                [*self._sources, *self._others],
                retain_graph=True,
                create_graph=not step.first_order,
                allow_unused=True,
            )
            self._first = first
            own = first[: len(self._sources)]
            check_found(own)
            if not step.first_order:
                second_order.guard(run.total, own, self._sources, trained.__getitem__, since)
            self._grads = [None if g is None else g.detach().requires_grad_() for g in own]
            grads = dict(zip(trained, self._grads, strict=True))
            if step.grad_transform is not None:
                # One that writes in place must find no leaves.
                grads = {n: None if g is None else g.clone() for n, g in grads.items()}
            if step.proximal:
                grads = {n: run.pulled(n, g, named[n]) for n, g in grads.items()}
            found = dict.fromkeys(named) | grads
            params, opt = run.updated(found)
        self.first_order = step.first_order
        self.state = State(params, run.buffers, opt, state.time + 1)
        self.out = _tree.map(lambda t: t.detach() if isinstance(t, Tensor) else t, run.out)
        leaves = _tree.flatten((state.params, state.opt, meta))[0]
        self._given = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        self._outputs = _tree.flatten(self.state)[0]
        self._aux = _tree.flatten(run.out)[0]
        moved = [g for g in self._grads if g is not None]
        known = [*self._sources, *self._given, *self._others, *moved]
        shown = [*_only(self._outputs), *_only(self._aux), *_only(own)]
        self.suspects = closures.suspects(shown, known, since, step.roots)
        """Leaves that the step used and was not given."""
        self._rule = Pushforward(_only(self._outputs), [*self._given, *moved])
        kind = _Rows if step.first_order else Pushforward
        self._loss = kind(_only(self._aux), [*self._sources, *self._others])

    def push(
        self, tangents: Mapping[int, Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Tangents of the new state's leaves and of the outputs', given those of leaves by id."""
        loss = [tangents.get(id(t)) for t in (*self._trained, *self._others)]
        changes = zip(self._grads, self._gradients(loss), strict=True)
        moved = [change for grad, change in changes if grad is not None]
        given = [tangents.get(id(t)) for t in self._given]
        return (
            _spread(self._outputs, self._rule([*given, *moved])),
            _spread(self._aux, self._loss(loss)),
        )

    def _gradients(self, tangents: list[Tensor | None]) -> list[Tensor | None]:
        """How the inner gradient changes along a direction of the loss's inputs."""
        pairs = [
            (first, tangent)
            for first, tangent in zip(self._first, tangents, strict=True)
            if first is not None and tangent is not None and first.requires_grad
        ]
        if self.first_order or not pairs:
            return [None] * len(self._sources)
        found = torch.autograd.grad(
            [first for first, _ in pairs],
            self._sources,
            [tangent for _, tangent in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        return list(found)


class _Rows:
    """A :class:`Pushforward` that takes only first derivatives of outputs that are numbers."""

    def __init__(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        self._rows = [_Row(t, inputs) if _is_number(t) else None for t in outputs]
        self._rest = Pushforward([t for t in outputs if not _is_number(t)], inputs)

    def __call__(self, tangents: list[Tensor | None]) -> list[Tensor | None]:
        rest = iter(self._rest(tangents))
        return [next(rest) if row is None else row(tangents) for row in self._rows]


class _Row:
    """The derivative of one number along a direction, out of its gradient."""

    def __init__(self, output: Tensor, inputs: list[Tensor]) -> None:
        self._like, self._row = output.detach(), [None] * len(inputs)
        if output.requires_grad and inputs:
            ones = torch.ones_like(output)
            found = torch.autograd.grad(output, inputs, ones, retain_graph=True, allow_unused=True)
            self._row = list(found)

    def __call__(self, tangents: list[Tensor | None]) -> Tensor | None:
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
