"""L_val at given weights, as a leaf of its own graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from innerloop.inner_loop import InnerLoop
from innerloop.modules.replica import Template
from innerloop.step.state import State, buffers_of


def as_leaves(template: Template, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights without what led to them; those that are not frozen can be differentiated by."""
    own = template.params
    return {
        name: p.detach().requires_grad_() if own[name].requires_grad else p.detach()
        for name, p in params.items()
    }


def replica(template: Template, state: State, params: Mapping[str, Tensor]) -> nn.Module:
    """The model with these weights, and with the buffers that training left."""
    return template.bind(params, buffers_of("", state.buffers))


def measured(inner: InnerLoop, module: nn.Module, val: Any) -> Any:
    """What the validation loss returns, without what it returns besides."""
    measure: Any = inner.loss if inner.val_loss is None else inner.val_loss
    out = measure(module, val)
    return out[0] if isinstance(out, tuple) and out else out
