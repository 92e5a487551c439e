"""One call of an inner loop, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from innerloop import _tree
from innerloop.adapted import Adapted
from innerloop.backward import Backward
from innerloop.state import Meta, State, buffers_of
from innerloop.step import InnerStep
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

    def adapted(
        self, batches: Any, carried: State | None, keep: Callable[[State], None]
    ) -> Adapted:
        start = self.state if carried is None else carried
        state, outs = unroll(self.step, start, self.meta, batches, self.backward)
        plain = {name: buffer.detach() for name, buffer in state.buffers.items()}
        state = state._replace(buffers=plain)
        if self.own:
            state = state._replace(params=self._owned(state.params))
        keep(_tree.map(lambda v: v.detach() if isinstance(v, Tensor) else v, state))
        assert self.step.model is not None
        step, loss = self.step, self.step.loss
        if step.loss_model is not None:
            loss = step.loss_model.bind(self.meta.loss, buffers_of("loss", state.buffers))
        return Adapted(step.model, step.rule, state, outs, loss)  # type: ignore[arg-type]

    def _owned(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = {p.data_ptr() for p in self.state.params.values()}
        return {n: p.clone() if p.data_ptr() in given else p for n, p in params.items()}
