"""Derivatives carried along with the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop._tree import differentiable
from innerloop.backward.attach import attach
from innerloop.backward.strategy import Backward, check_visible, connect, cut, run_plainly
from innerloop.errors import InnerLoopError, RequirementError, four_part
from innerloop.guard.randomness import devices_of, preserved
from innerloop.step.protocol import Linearization, Step

Tangent = list[Tensor | None]


@dataclass(frozen=True)
class Forward(Backward):
    """Carry the derivative of the state by every meta-parameter along, and keep nothing.

    For few numbers to differentiate by and very many steps; more than ``limit`` are refused.

    Memory: the activations of one step, and one state for each number to differentiate by.
    Time:   one second-order product per step for each number.
    Exact:  yes.
    """

    limit: int = 1000

    def run(self, step: Step, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        tensors = [t for t in _tree.tensors((state, meta)) if t.requires_grad]
        inputs = list({id(t): t for t in tensors}.values())
        if not torch.is_grad_enabled() or not len(batches) or not inputs:
            return run_plainly(step, state, meta, batches)
        self._check(inputs)
        return _Run(step, state, meta, batches, inputs).result()

    def _check(self, inputs: Sequence[Tensor]) -> None:
        count = sum(t.numel() for t in inputs)
        if count > self.limit:
            raise InnerLoopError(
                four_part(
                    f"You differentiate by {count} numbers with Forward().",
                    f"at most {self.limit}.",
                    "each of them costs a second-order product in every step and a state.",
                    f"Remat() or Binomial(8), whose cost does not depend on it; or "
                    f"Forward(limit={count}) to do it nevertheless.",
                )
            )


class _Run:
    def __init__(
        self, step: Step, state: Any, meta: Any, batches: Sequence[Any], inputs: list[Tensor]
    ) -> None:
        self.inputs, self.steps = inputs, len(batches)
        self.meta, self.meta_spec = _tree.flatten(meta)
        self.start = _tree.flatten(state)[0]
        check_visible(self.start)
        devices = devices_of(self.start)
        units = [
            (i, element, one)
            for i, t in enumerate(inputs)
            for element in range(t.numel())
            for one in _directions(t)
        ]
        meta_tangents = [[self._unit(t, *unit) for t in self.meta] for unit in units]
        tangents = [[self._unit(t, *unit) for t in self.start] for unit in units]
        state = _tree.map(_tree.detach, state)
        outs = _Record(len(batches))
        out_tangents = [_Record(len(batches)) for _ in units]
        for j in range(len(batches)):
            local, leaves = _as_leaves(_tree.flatten(state), tangents)
            given, meta_leaves = _as_leaves((self.meta, self.meta_spec), meta_tangents)
            batch = _check_batch(batches[j])
            point = _linearize(step, local, given, batch)
            for p in range(len(units)):
                along = [*zip(leaves, tangents[p], strict=True)]
                along += zip(meta_leaves, meta_tangents[p], strict=True)
                known = {id(leaf): t for leaf, t in along if t is not None}
                tangents[p], out = point.push(known)
                out_tangents[p].write(j, _filled(out, _tree.leaves(point.out)))
            state = _tree.map(cut, point.state)
            shown, self.out_spec = _tree.flatten(_tree.map(cut, point.out))
            check_visible([*_tree.leaves(state), *shown])
            outs.write(j, shown)
            suspects = point.suspects
            del point
            with preserved(devices):
                suspects.refuse(partial(_leaves_of, step, local, given, batch), step.roots)
        self.final, self.spec = _tree.flatten(state)
        self.outs, self.tangents = outs.columns, tangents
        self.out_tangents = [record.columns for record in out_tangents]

    def _unit(self, leaf: Any, which: int, element: int, one: complex) -> Tensor | None:
        if leaf is not self.inputs[which]:
            return None
        unit = torch.zeros_like(leaf, memory_format=torch.contiguous_format)
        unit.view(-1)[element] = one  # type: ignore[assignment]
        return unit

    def result(self) -> tuple[Any, Any]:
        moved = [
            i
            for i, t in enumerate(self.final)
            if differentiable(t) and any(along[i] is not None for along in self.tangents)
        ]
        places = range(self.out_spec.num_leaves)
        outs = [self.outs.get(i, [None] * self.steps) for i in places]
        tangents = [
            [self.tangents[p][i] for i in moved] + self._shown(self.out_tangents[p], outs)
            for p in range(len(self.tangents))
        ]
        final, outs = connect(
            self.final,
            outs,
            moved,
            lambda values: attach(
                values, self.inputs, partial(_contract, tangents, self.inputs), name="Forward"
            ),
        )
        return _tree.unflatten(final, self.spec), _tree.unflatten(outs, self.out_spec)

    def _shown(self, tangents: dict[int, Any], outs: Sequence[Any]) -> Tangent:
        """The tangents of what ``connect`` shows of the outputs."""
        found: Tangent = []
        for i, column in enumerate(outs):
            if isinstance(column, Tensor) and differentiable(column):
                found.append(tangents[i])
            elif isinstance(column, list) and all(map(differentiable, column)):
                found += list(tangents[i])
        return found


def _directions(tensor: Tensor) -> tuple[complex, ...]:
    return (1, 1j) if tensor.is_complex() else (1,)


def _filled(tangents: Tangent, like: Sequence[Any]) -> list[Any]:
    """Tangents with zeros for those that are none."""
    return [
        torch.zeros_like(value) if tangent is None and differentiable(value) else tangent
        for tangent, value in zip(tangents, like, strict=True)
    ]


class _Record:
    """Values of all steps, written into one tensor for each; long runs make many of them."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.columns: dict[int, Any] = {}

    def write(self, j: int, values: Sequence[Any]) -> None:
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                if i not in self.columns:
                    self.columns[i] = value.new_zeros([self.steps, *value.shape])
                column = self.columns[i]
                if isinstance(column, Tensor) and column.shape[1:] == value.shape:
                    column[j] = value
                    continue
                # Outputs of different shapes: a list, as other strategies give.
                self.columns[i] = list(column[:j])
            if value is not None:
                self.columns.setdefault(i, []).append(value)


def _as_leaves(flat: Any, tangents: Sequence[Tangent]) -> tuple[Any, list[Any]]:
    """The same tree with leaves of the graph wherever a tangent arrives."""
    values, spec = flat
    reached = [any(t[i] is not None for t in tangents) for i in range(len(values))]
    leaves = [
        value.detach().requires_grad_() if hit else _tree.detach(value)
        for value, hit in zip(values, reached, strict=True)
    ]
    return _tree.unflatten(leaves, spec), leaves


def _check_batch(batch: Any) -> Any:
    for leaf in _tree.flatten(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise RequirementError(
                four_part(
                    f"A batch has a tensor of shape {tuple(leaf.shape)} that requires grad.",
                    "batches without a gradient, with Forward().",
                    "it carries derivatives by the initial state and the meta-parameters only.",
                    "backward=innerloop.Remat(), or .detach() the batch.",
                )
            )
    return batch


def _linearize(step: Step, state: Any, meta: Any, batch: Any) -> Linearization:
    with torch.enable_grad():
        return step.linearize(state, meta, _tree.map(cut, batch))


def _leaves_of(step: Step, state: Any, meta: Any, batch: Any) -> list[Tensor]:
    """The leaves that a step uses without being given them, by taking it again."""
    return _linearize(step, state, meta, batch).suspects.alive


def _contract(
    tangents: Sequence[Tangent], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor]:
    """The gradients of the inputs: products of the outputs' tangents and gradients."""
    numbers = iter([_dot(along, grads) for along in tangents])
    found = []
    for like in inputs:
        count = like.numel() * len(_directions(like))
        mine = [next(numbers) for _ in range(count)]
        value = torch.stack(mine) if mine else torch.zeros(0)
        if like.is_complex():
            value = torch.view_as_complex(value.reshape(-1, 2))
        found.append(value.to(like.device, like.dtype).reshape(like.shape))
    return found


def _dot(column: Tangent, grads: Sequence[Tensor | None]) -> Tensor:
    parts = [
        (t.conj() * g).sum().real if t.is_complex() else (t * g).sum()
        for t, g in zip(column, grads, strict=True)
        if t is not None and g is not None
    ]
    return (
        torch.stack([part.to(parts[0].dtype) for part in parts]).sum() if parts else torch.zeros(())
    )
