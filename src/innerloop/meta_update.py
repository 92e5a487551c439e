"""Algorithm 1 whole: meta-parameters updated in the middle of an ordinary training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from innerloop.errors import InnerLoopError, RequirementError, four_part
from innerloop.inner_loop import InnerLoop


def meta_update(
    inner: InnerLoop,
    train: Any,
    val: Any,
    meta_optimizer: torch.optim.Optimizer,
    updates: int = 1,
    *,
    tasks: bool = False,
) -> list[Tensor]:
    """Update the meta-parameters ``updates`` times by the exact meta-gradient (Algorithm 1).

    Every time, training starts from a copy of the model and of the optimizer's state as they are
    now, runs over ``train``, and is measured on ``val``; the model, the optimizer and their
    gradients are left as they are, except for what ``inner`` learns. ``train`` and ``val`` may be
    functions without arguments that give new data for every update. Returns the validation losses.

    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> loss = lambda model, x: (model(x) - 1).square().mean()
    >>> inner = InnerLoop(model, optimizer, loss, learn=("lr",))
    >>> meta = torch.optim.Adam(inner.parameters(), lr=1e-3)
    >>> x = torch.ones(4, 1)
    >>> losses = meta_update(inner, [x] * 5, x, meta, updates=3)
    >>> inner.write_to(optimizer)  # the learned rate, for the ordinary training that goes on
    >>> optimizer.param_groups[0]["lr"] > 0.01
    True
    """
    phi = _learned(inner, meta_optimizer, updates)
    losses = []
    for _ in range(updates):  # line 1
        # Lines 2 to 9 are the forward of the loop, lines 10 to 15 its backward.
        value = inner(_given(train), _given(val), tasks=tasks)
        value = value.mean() if tasks else value
        grads = torch.autograd.grad(value, phi, allow_unused=True)
        if all(grad is None for grad in grads):
            raise RequirementError(
                four_part(
                    "No meta-parameter of the inner loop has an influence on the validation loss.",
                    "at least one that has.",
                    "a gradient that reaches nothing updates nothing.",
                    "innerloop.diagnose(inner, train, val), which says where the path ends.",
                )
            )
        kept = [p.grad for p in phi]
        for param, grad in zip(phi, grads, strict=True):
            param.grad = grad
        meta_optimizer.step()  # line 16
        for param, grad in zip(phi, kept, strict=True):
            param.grad = grad
        losses.append(value.detach())
    return losses


def _learned(inner: Any, meta_optimizer: Any, updates: Any) -> list[Tensor]:
    if not isinstance(updates, int) or isinstance(updates, bool) or updates < 0:
        raise InnerLoopError(
            four_part(
                f"You gave updates={updates!r}.",
                "a whole number.",
                "it counts meta-updates.",
                "meta_update(inner, train, val, meta_optimizer, updates=1).",
            )
        )
    known = {id(p) for p in inner.parameters()}
    phi = [p for group in meta_optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not any(id(p) in known for p in phi):
        raise InnerLoopError(
            four_part(
                "You gave a meta-optimizer that has none of the inner loop's parameters.",
                "an optimizer over meta-parameters.",
                "it would never update them.",
                "torch.optim.Adam(inner.parameters(), lr=1e-3).",
            )
        )
    return phi


def _given(data: Any | Callable[[], Any]) -> Any:
    return data() if callable(data) else data
