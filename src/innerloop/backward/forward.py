"""Derivatives carried along with the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop._tree import differentiable
from innerloop.backward.attach import attach
from innerloop.backward.segment import StandIns
from innerloop.backward.strategy import (
    Backward,
    check_visible,
    connect,
    cut,
    parts,
    run_plainly,
    shown,
)
from innerloop.errors import InnerLoopError, RequirementError, four_part
from innerloop.guard.randomness import devices_of, restore_randomness
from innerloop.step.protocol import Linearization, Step, inner_product

Tangents = list[Tensor | None]


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
    """The final state, the outputs, and the derivatives of both along each unit of the inputs."""

    def __init__(
        self, step: Step, state: Any, meta: Any, batches: Sequence[Any], inputs: list[Tensor]
    ) -> None:
        self.inputs, leaves = inputs, _tree.leaves(state)
        check_visible(leaves)
        devices = devices_of(leaves)
        stand_ins = StandIns({}, meta)
        units = [(tensor, unit) for tensor in inputs for unit in _units(tensor)]
        tangents: list[Tangents] = [
            [unit if leaf is tensor else None for leaf in leaves] for tensor, unit in units
        ]
        of_meta = [{id(stand_ins.of(tensor)): unit} for tensor, unit in units]
        outs = _Record(len(batches))
        for j in range(len(batches)):
            batch = _check_batch(batches[j])
            leaves = _as_leaves(_tree.leaves(state), tangents)
            take = partial(_linearize, step, _tree.fill(state, leaves), stand_ins.meta, batch)
            point = take()
            state, self.out = _tree.map(cut, (point.state, point.out))
            values = _tree.leaves(self.out)
            check_visible([*_tree.leaves(state), *values])
            row = list(values)
            for p, known in enumerate(of_meta):
                pairs = zip(leaves, tangents[p], strict=True)
                found = {id(leaf): t for leaf, t in pairs if t is not None}
                tangents[p], of_outs = point.push(known | found)
                row += _with_zeros(of_outs, values)
            outs.write(j, row)
            suspects = point.suspects
            del point
            with restore_randomness(devices):
                suspects.refuse(partial(_leaves_of, take), step.roots)
        self.state, self.tangents, self.columns = state, tangents, outs.columns

    def result(self) -> tuple[Any, Any]:
        """The final state and the stacked outputs, connected to the inputs."""
        final, count = _tree.leaves(self.state), len(_tree.leaves(self.out))
        outs = self.columns[:count]
        reached = [any(along[i] is not None for along in self.tangents) for i in range(len(final))]
        moved = [i for i, t in enumerate(final) if differentiable(t) and reached[i]]
        tangents = []
        for p, along in enumerate(self.tangents, start=1):
            of_outs = self.columns[p * count : (p + 1) * count]
            pushed = [t for i in shown(outs) for t in parts(of_outs[i])]
            tangents.append([along[i] for i in moved] + pushed)
        final, outs = connect(
            final,
            outs,
            moved,
            lambda values: attach(
                values, self.inputs, partial(_contract, tangents, self.inputs), name="Forward"
            ),
        )
        return _tree.fill(self.state, final), _tree.fill(self.out, outs)


def _units(tensor: Tensor) -> Iterator[Tensor]:
    """The directions in which a tensor has a derivative; two for each complex number."""
    for element in range(tensor.numel()):
        for one in (1, 1j) if tensor.is_complex() else (1,):
            unit = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
            unit.view(-1)[element] = one  # type: ignore[assignment]
            yield unit


def _with_zeros(tangents: Tangents, like: Sequence[Any]) -> list[Any]:
    return [
        torch.zeros_like(value) if tangent is None and differentiable(value) else tangent
        for tangent, value in zip(tangents, like, strict=True)
    ]


class _Record:
    """Values of all steps, written into one tensor for each; long runs make many of them."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.columns: list[Any] = []

    def write(self, j: int, values: Sequence[Any]) -> None:
        if not j:
            self.columns = [
                v.new_zeros([self.steps, *v.shape]) if isinstance(v, Tensor) else [] for v in values
            ]
        for i, value in enumerate(values):
            column = self.columns[i]
            if isinstance(column, Tensor) and column.shape[1:] != getattr(value, "shape", None):
                # Outputs of different shapes: a list, as other strategies give.
                column = self.columns[i] = list(column[:j])
            if isinstance(column, Tensor):
                column[j] = value
            else:
                column.append(value)


def _as_leaves(values: Sequence[Any], tangents: Sequence[Tangents]) -> list[Any]:
    """The values, leaves of the graph wherever a tangent arrives."""
    return [
        value.detach().requires_grad_() if any(t[i] is not None for t in tangents) else value
        for i, value in enumerate(map(_tree.detach, values))
    ]


def _check_batch(batch: Any) -> Any:
    for leaf in _tree.tensors(batch):
        if leaf.requires_grad:
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


def _leaves_of(take: Callable[[], Linearization]) -> list[Tensor]:
    """The leaves that a step uses without being given them, by taking it again."""
    return take().suspects.alive


def _contract(
    tangents: Sequence[Tangents], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor]:
    """The gradients of the inputs: products of the outputs' tangents and gradients."""
    products = iter([inner_product(along, grads) for along in tangents])
    found = []
    for like in inputs:
        grad = torch.zeros_like(like, memory_format=torch.contiguous_format)
        numbers = (torch.view_as_real(grad) if grad.is_complex() else grad).view(-1)
        for k in range(numbers.numel()):
            product = next(products)
            if product is not None:
                numbers[k] = product
        found.append(grad)
    return found
