"""One call of an inner loop, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.adapted import Adapted
from innerloop.backward import Backward
from innerloop.guard import losses
from innerloop.guard.writes import check_unwritten, versions_of
from innerloop.modules.replica import Template
from innerloop.step.state import Meta, State, buffers_of
from innerloop.step.step import InnerStep
from innerloop.tasks.axis import slice_batches, slice_task, spread, stack_tasks
from innerloop.tasks.batched import batched
from innerloop.unroll import unroll


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an :class:`InnerLoop`, as plain data: a step, where it starts, and φ."""

    step: InnerStep
    template: Template
    state: State
    meta: Meta
    backward: Backward
    val_loss: Callable[..., Any] | None = None
    """The validation loss, if it is not the loss."""

    def train(self, batches: Any, carried: State | None = None) -> tuple[State, Any]:
        """The state after one step for each batch, and the outputs."""
        start = self.state if carried is None else carried
        state, outs = unroll(self.step, start, self.meta, batches, self.backward)
        plain = {name: buffer.detach() for name, buffer in state.buffers.items()}
        return state._replace(buffers=plain), outs

    def measure(self, state: State, val: Any) -> Tensor:
        """L_val of the trained model, of one task or of all. [], [tasks]"""

        def one(params: Any, buffers: Any, val: Any) -> Tensor:
            model = self.template.bind(params, buffers_of("", buffers))
            loss = self._loss(buffers) if self.val_loss is None else self.val_loss
            versions = versions_of(params)
            value = loss(model, val)
            check_unwritten(params, versions)
            return _as_scalar(value)

        return self.step.map_tasks(one, self._weights(state), state.buffers, val)

    def adapted(self, state: State, outs: Any) -> Adapted:
        """The model at the end of training; weights that no step has changed are copied."""
        given = {p.data_ptr() for p in self.state.params.values()}
        own = {n: p.clone() if p.data_ptr() in given else p for n, p in state.params.items()}
        return Adapted(self.template, self.step.rule, state._replace(params=own), outs)

    def _weights(self, state: State) -> Mapping[str, Tensor]:
        """The final weights as a validation loss gets them, which may ask what requires grad."""
        learned = any([p.requires_grad for p in state.params.values()])
        if torch.is_grad_enabled() and not learned:
            return state.params  # a loss without a graph stays one
        return self.step.as_trained(state.params)

    def _loss(self, buffers: Mapping[str, Tensor]) -> Callable[..., Any]:
        """The loss with its weights and buffers, if it has any."""
        if self.step.loss_model is None:
            return self.step.loss
        return self.step.loss_model.bind(self.meta.loss, buffers_of("loss", buffers))


@dataclasses.dataclass(frozen=True)
class TaskRun:
    """One call with several tasks: training and, if asked for, a measurement of each."""

    call: Call
    batches: Sequence[Any]
    val: Any
    count: int
    measured: bool
    carried: Sequence[State] | None = None

    def one(
        self, task: int, stand_in: Callable[[Any], Any] = lambda leaf: leaf
    ) -> tuple[State, Any, Tensor | None]:
        """The final state, the outputs and the loss of one task, with stand-ins for all leaves."""
        state, meta = _tree.map(stand_in, (self.call.state, self.call.meta))
        backward = self.call.backward.for_tasks(self.count)
        call = dataclasses.replace(self.call, state=state, meta=meta, backward=backward)
        carried = None if self.carried is None else self.carried[task]
        state, outs = call.train(slice_batches(self.batches, task, stand_in), carried)
        if not self.measured:
            return state, outs, None
        return state, outs, call.measure(state, slice_task(self.val, task, stand_in))

    def without_writes(self, buffers: frozenset[str]) -> TaskRun:
        """The same with buffers that stay as they are."""
        step = dataclasses.replace(self.call.step, constant_buffers=buffers)
        return dataclasses.replace(self, call=dataclasses.replace(self.call, step=step))

    def together(self) -> tuple[State, Any, Tensor | None]:
        """The same for all tasks at once; everything has a leading task axis."""
        state = spread(self.call.state, self.count)
        call = dataclasses.replace(self.call, step=batched(self.call.step), state=state)
        carried = None if self.carried is None else stack_tasks(list(self.carried), shared=True)
        state, outs = call.train(self.batches, carried)
        outs = _tree.map(lambda v: v.transpose(0, 1) if isinstance(v, Tensor) else v, outs)
        losses = call.measure(state, self.val) if self.measured else None
        return state, outs, losses

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that require grad, each once."""
        distinct = {id(batch): batch for batch in (*self.batches, self.val)}
        leaves = _tree.tensors((self.call.state, self.call.meta, list(distinct.values())))
        return list({id(t): t for t in leaves if t.requires_grad}.values())

    @property
    def device(self) -> torch.device:
        params = self.call.state.params.values()
        return next((t.device for t in params), torch.device("cpu"))


def _as_scalar(value: Any) -> Tensor:
    """The value of a validation loss as a 0-d tensor."""
    value = value[0] if isinstance(value, tuple) and value else value
    if isinstance(value, int | float) and not torch.is_grad_enabled():
        # A number has no gradient, and none is asked for.
        value = torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        raise losses.not_a_val_loss(value)
    return value.reshape(())
