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
from innerloop.step.state import Meta, State, buffers_of
from innerloop.step.step import InnerStep
from innerloop.tasks.axis import of_task, sliced, spread, stacked
from innerloop.tasks.batched import batched, over_tasks
from innerloop.unroll import unroll


@dataclasses.dataclass(frozen=True)
class Prepared:
    """One call of an :class:`InnerLoop`, as plain data: a step, where it starts, and φ."""

    step: InnerStep
    state: State
    meta: Meta
    backward: Backward
    own: bool = False
    """Whether weights that no step has changed are copied, to be kept by the caller."""

    def unrolled(self, batches: Any, carried: State | None) -> tuple[State, Any]:
        """The state after one step for each batch, and the outputs."""
        start = self.state if carried is None else carried
        state, outs = unroll(self.step, start, self.meta, batches, self.backward)
        plain = {name: buffer.detach() for name, buffer in state.buffers.items()}
        state = state._replace(buffers=plain)
        if self.own:
            state = state._replace(params=self._owned(state.params))
        return state, outs

    def adapted(self, state: State, outs: Any) -> Adapted:
        """The model at the end of training."""
        step = self.step
        assert step.model is not None
        return Adapted(step.model, step.rule, state, outs)

    def measured(self, state: State) -> tuple[Any, Any]:
        """The model and the loss, as a validation loss is computed with them."""
        step = self.step
        assert step.model is not None
        model = step.model.bind(self.weights(state), buffers_of("", state.buffers))
        return model, self.loss(state.buffers)

    def weights(self, state: State) -> Mapping[str, Tensor]:
        """The final weights as a validation loss gets them, which may ask what requires grad."""
        learned = any([p.requires_grad for p in state.params.values()])
        if torch.is_grad_enabled() and not learned:
            return state.params  # a loss without a graph stays one
        return self.step.as_trained(state.params)

    def loss(self, buffers: Mapping[str, Tensor]) -> Callable[..., Any]:
        """The loss with its weights and buffers, if it has any."""
        step = self.step
        if step.loss_model is None:
            return step.loss
        return step.loss_model.bind(self.meta.loss, buffers_of("loss", buffers))

    def _owned(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = {p.data_ptr() for p in self.state.params.values()}
        return {n: p.clone() if p.data_ptr() in given else p for n, p in params.items()}


@dataclasses.dataclass(frozen=True)
class TaskRun:
    """One call with several tasks: training and, if asked for, a measurement of each."""

    prepared: Prepared
    batches: Sequence[Any]
    val: Any
    count: int
    value: Callable[[Any, Any, Any], Tensor] | None
    """``value(model, loss, val)``: the measurement."""
    carried: Sequence[State] | None = None

    def one(self, task: int, of: Callable[[Any], Any] | None = None) -> tuple[State, Any, Any]:
        """The final state, the outputs and the loss of one task.

        ``of`` gives what is to be used in the place of a leaf.
        """
        run, batches, val, carried = self.prepared, self.batches, self.val, self.carried
        run = dataclasses.replace(run, backward=run.backward.for_tasks(self.count))
        if of is not None:
            state, meta = _tree.map(of, (run.state, run.meta))
            run = dataclasses.replace(run, state=state, meta=meta)
            distinct = {id(batch): _tree.map(of, batch) for batch in batches}
            batches, val = [distinct[id(batch)] for batch in batches], _tree.map(of, val)
        start = None if carried is None else carried[task]
        state, outs = run.unrolled(of_task(batches, task), start)
        if self.value is None:
            return state, outs, None
        return state, outs, self.value(*run.measured(state), sliced(val, task))

    def without_writes(self, buffers: frozenset[str]) -> TaskRun:
        """The same with buffers that stay as they are."""
        step = dataclasses.replace(self.prepared.step, constant_buffers=buffers)
        return dataclasses.replace(self, prepared=dataclasses.replace(self.prepared, step=step))

    def together(self) -> tuple[State, Any, Any]:
        """The same for all tasks at once; everything has a leading task axis."""
        step = batched(self.prepared.step)
        start = spread(self.prepared.state, self.count)
        carried = None if self.carried is None else stacked(list(self.carried), shared=True)
        run = dataclasses.replace(self.prepared, step=step, state=start)
        state, outs = run.unrolled(self.batches, carried)
        outs = _tree.map(lambda v: v.transpose(0, 1) if isinstance(v, Tensor) else v, outs)
        return state, outs, None if self.value is None else self._values(state)

    def _values(self, state: State) -> Tensor:
        step, value = self.prepared.step, self.value
        assert step.model is not None and value is not None

        def one(params: Any, buffers: Any, val: Any) -> Tensor:
            model = step.model.bind(params, buffers_of("", buffers))  # type: ignore[union-attr]
            return value(model, self.prepared.loss(buffers), val)

        return over_tasks(one, self.prepared.weights(state), state.buffers, self.val)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that require grad, each once."""
        distinct = {id(batch): batch for batch in (*self.batches, self.val)}
        leaves = _tree.tensors((self.prepared.state, self.prepared.meta, list(distinct.values())))
        found = {id(t): t for t in leaves if t.requires_grad}
        return list(found.values())

    @property
    def mark(self) -> tuple[int, bool, int]:
        """A key for what decides how the tasks can be run."""
        step = self.prepared.step
        assert step.model is not None
        return id(step.model.source), step.model.source.training, id(step.loss)

    @property
    def device(self) -> torch.device:
        leaves = _tree.leaves(self.prepared.state.params)
        return next((t.device for t in leaves if isinstance(t, Tensor)), torch.device("cpu"))
