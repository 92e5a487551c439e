"""Linear layers and convolutions whose weight gradient may be left without values.

A step that is computed again for its derivative gives new weights that are known already. If the
rule is linear in the gradient, the derivative does not depend on the gradient's values either, only
on its graph: a third of the work of the inner backward pass is then for nothing.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_local = threading.local()


class Scope:
    """One evaluation of a loss. While it is ``open``, gradients of some weights have no values.

    Layers hold it from their forward on: backward passes may run in other threads.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.weights = {id(weight) for weight in weights}
        self.open = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        self.open = True
        try:
            yield
        finally:
            self.open = False


@contextlib.contextmanager
def valueless() -> Iterator[None]:
    """The next evaluation may leave out values of its gradient; they are NaN then."""
    before = getattr(_local, "asked", False)
    _local.asked = True
    try:
        yield
    finally:
        _local.asked = before


def scope_of(weights: Iterable[Tensor]) -> Scope | None:
    """For an evaluation by these weights, if its gradient need not have values."""
    return Scope(weights) if getattr(_local, "asked", False) else None


@contextlib.contextmanager
def within(scope: Scope | None) -> Iterator[None]:
    """Evaluate in a scope. What is evaluated inside of that, as by another loop, is not in it."""
    before = getattr(_local, "asked", False), getattr(_local, "scope", None)
    _local.asked, _local.scope = False, scope
    try:
        yield
    finally:
        _local.asked, _local.scope = before


def _scope(weight: Tensor) -> Scope | None:
    """The scope, if the gradient by just this tensor is what is left out.

    Not by one that was computed, as by a parametrization: its derivative may need the values.
    """
    scope = getattr(_local, "scope", None)
    return scope if scope is not None and id(weight) in scope.weights else None


def linear_forward(self: nn.Linear, input: Tensor) -> Tensor:
    scope = _scope(self.weight)
    if scope is None or not _plain(input, self.weight):
        return F.linear(input, self.weight, self.bias)
    return _Linear.apply(scope, input, self.weight, self.bias)  # type: ignore[return-value]


def convolution_forward(self: nn.Conv2d, input: Tensor) -> Tensor:
    scope = _scope(self.weight)
    known = self.padding_mode == "zeros" and not isinstance(self.padding, str)
    if scope is None or not known or input.dim() != 4 or not _plain(input, self.weight):
        return self._conv_forward(input, self.weight, self.bias)
    how = (self.stride, self.padding, self.dilation, False, (0, 0), self.groups)
    return _Convolution.apply(scope, how, input, self.weight, self.bias)  # type: ignore[return-value]


def _plain(input: Tensor, weight: Tensor) -> bool:
    """Whether the formulas below hold: real numbers of one kind, and no transforms around."""
    return (
        input.dtype == weight.dtype
        and input.is_floating_point()
        and input.dim() > 1
        and not torch.is_autocast_enabled(input.device.type)
        and not torch._C._are_functorch_transforms_active()
    )


def _unknown(like: Tensor, *shape: int) -> Tensor:
    """NaN, so that whoever uses it after all is found out."""
    return like.new_full((), math.nan).expand(shape)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scope: Scope, x, weight, bias):
        ctx.scope = scope
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        (g,) = grads
        x, weight = ctx.saved_tensors
        _, x_needs, w_needs, b_needs = ctx.needs_input_grad
        gw = None
        if w_needs and ctx.scope.open:
            gw = _LinearWeight.apply(g, x)
        elif w_needs:
            gw = g.flatten(0, -2).mT @ x.flatten(0, -2)
        gb = g.flatten(0, -2).sum(0) if b_needs else None
        return None, g @ weight if x_needs else None, gw, gb


class _LinearWeight(torch.autograd.Function):
    """``gᵀ x`` without its value."""

    @staticmethod
    def forward(ctx: Any, g, x):
        ctx.save_for_backward(g, x)
        return _unknown(x, g.shape[-1], x.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        (v,) = grads
        g, x = ctx.saved_tensors
        return F.linear(x, v) if ctx.needs_input_grad[0] else None, g @ v


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scope: Scope, how: Any, x, weight, bias):
        ctx.scope, ctx.how = scope, how
        ctx.save_for_backward(x, weight)
        return torch.convolution(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        (g,) = grads
        x, weight = ctx.saved_tensors
        *_, x_needs, w_needs, b_needs = ctx.needs_input_grad
        skipped = w_needs and ctx.scope.open
        gx, gw, gb = _backward(g, x, weight, ctx.how, (x_needs, w_needs and not skipped, b_needs))
        if skipped:
            gw = _ConvolutionWeight.apply(g, x, weight.shape, ctx.how)
        return None, None, gx, gw, gb


class _ConvolutionWeight(torch.autograd.Function):
    """The derivative of ``⟨g, x ∗ w⟩`` by ``w``, without its value."""

    @staticmethod
    def forward(ctx: Any, g, x, shape, how):
        ctx.how = how
        ctx.save_for_backward(g, x)
        return _unknown(x, *shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        (v,) = grads
        g, x = ctx.saved_tensors
        g_needs, x_needs, *_ = ctx.needs_input_grad
        gg = torch.convolution(x, v, None, *ctx.how) if g_needs else None
        gx = _backward(g, x, v, ctx.how, (True, False, False))[0] if x_needs else None
        return gg, gx, None, None


def _backward(g: Tensor, x: Tensor, weight: Tensor, how: Any, needed: Any) -> Any:
    if not any(needed):
        return None, None, None
    return torch.ops.aten.convolution_backward(g, x, weight, [weight.shape[0]], *how, needed)
