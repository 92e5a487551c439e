"""One evaluation of an inner loss for all tasks at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from innerloop.errors import InnerLoopError, four_part
from innerloop.step.evaluation import Evaluation
from innerloop.step.gradient import check_loss
from innerloop.step.mapped import NotBatchableError, mapped
from innerloop.step.state import State, named_leaves


class TaskEvaluation(Evaluation):
    """An :class:`Evaluation` whose weights, buffers and batch have a leading task axis."""

    def evaluated(self, named: dict[str, Tensor]) -> tuple[Tensor, Any]:
        def one(named: Any, buffers: Any, batch: Any) -> Any:
            run = _OneTask(self.step, self.state._replace(buffers=buffers), self.meta, batch)
            value, out = run.evaluated(named)
            _check_scalar(value)
            return value, out, run.buffers

        value, out, buffers = mapped(one, named, self.state.buffers, self.batch)
        self.keep("", buffers)
        return value, out

    def check(self) -> None:
        check_loss(self.total)

    @property
    def total(self) -> Tensor:
        return self.value.sum()

    def updated(self, grads: Mapping[str, Any]) -> tuple[Any, Any]:
        """The rule's part of a step, task by task: norms and the like are of one task."""
        step, state, meta = self.step, self.state, self.meta
        if step.evaluates:
            raise NotBatchableError(
                f"the optimizer {step.rule.family.name}: each task searches for its own steps"
            )

        def one(params: Any, present: Any, opt: Any, buffers: Any) -> Any:
            own = State(params, buffers, opt, state.time)
            run = _OneTask(step, own, meta, None)
            run.value = self.value
            found = dict.fromkeys(named_leaves(params)) | present
            new, opt = step.updated(own, meta, found, run)
            return new, opt, run.buffers

        present = {name: grad for name, grad in grads.items() if grad is not None}
        new, opt, buffers = mapped(one, state.params, present, state.opt, self.buffers)
        self.keep("", buffers)
        return new, opt

    def elsewhere(self, params: Any) -> tuple[Tensor, Any]:
        raise AssertionError("rules that evaluate the loss are not batched")


class _OneTask(Evaluation):
    """An evaluation inside ``vmap``; what needs to look at values is done outside."""

    def keep(self, part: str, found: Mapping[str, Tensor]) -> None:
        prefix = f"{part}:" if part else ""
        self.buffers = {**self.buffers, **{prefix + name: b for name, b in found.items()}}


def _check_scalar(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        with torch.no_grad():
            check_loss(value)
        raise InnerLoopError(
            four_part(
                f"Your loss returned {type(value).__name__} for one task.",
                "a real tensor with one value, or a tuple that begins with one.",
                "the inner gradient is that of a scalar.",
                "loss.mean() or loss.sum().",
            )
        )
