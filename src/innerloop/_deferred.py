"""Weight gradients whose values are computed only if somebody looks at them.

A step that is computed again for its derivative gives new weights that are known already. If the
rule is linear in the gradient, the derivative does not depend on the gradient's values either, only
on its graph: a third of the work of the inner backward pass is then for nothing. So the products
that give gradients of weights are put off. Whatever sees such a gradient during the backward pass,
a hook as well as another operation, gets its values as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from innerloop import _tree
from innerloop.errors import InnerLoopError

_local = threading.local()
_aten = torch.ops.aten
_MM, _CONVOLUTION = _aten.mm.default, _aten.convolution_backward.default
_VIEWS = frozenset({_aten.t.default, _aten.view.default, _aten.transpose.int, _aten.detach.default})


class StaleError(InnerLoopError):
    """What a product was put off with has been written to before anybody asked for it."""


# Who asks for it. ---------------------------------------------------------------------------------


@contextlib.contextmanager
def valueless() -> Iterator[None]:
    """The next evaluation may leave out values of its gradient; they are NaN then."""
    before = getattr(_local, "asked", False)
    _local.asked = True
    try:
        yield
    finally:
        _local.asked = before


@contextlib.contextmanager
def claimed() -> Iterator[bool]:
    """Whether that was asked for; what is evaluated inside, as by another loop, is not told so."""
    before = getattr(_local, "asked", False)
    _local.asked = False
    try:
        yield before and not torch._C._are_functorch_transforms_active()
    finally:
        _local.asked = before


# The products. ------------------------------------------------------------------------------------


class _Deferred(Tensor):
    """A tensor without memory: its values are computed when an operation needs them."""

    _compute: Callable[[], Tensor] | None
    _value: Tensor
    _shape_only: Tensor

    # Results are ordinary tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, compute: Callable[[], Tensor], like: Tensor, device: torch.device) -> Any:
        new = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        new._compute, new._shape_only = compute, like
        return new

    @property
    def known(self) -> bool:
        return self._compute is None

    def value(self) -> Tensor:
        if self._compute is not None:
            self._value = self._compute()
            self._compute = None
        return self._value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func in _VIEWS and isinstance(first, _Deferred) and not first.known:
            like = func(first._shape_only, *args[1:])
            return _Deferred(lambda: func(first.value(), *args[1:]), like, first.device)
        args, kwargs = _tree.map(_known, (args, kwargs or {}))
        return func(*args, **kwargs)


def _known(value: Any) -> Any:
    return value.value() if isinstance(value, _Deferred) else value


def _deferred(function: Callable[..., Tensor], args: Sequence[Any], shape: Sequence[int]) -> Tensor:
    given = [(t, t._version) for t in args if isinstance(t, Tensor)]

    def compute() -> Tensor:
        if any(t._version != version for t, version in given):
            raise StaleError("a gradient was written to")
        return function(*map(_known, args)).contiguous()

    first = given[0][0]
    like = torch.empty(tuple(shape), dtype=first.dtype, device="meta")
    return _Deferred(compute, like, first.device)


class _Deferring(TorchDispatchMode):
    """During a backward pass, puts off the products that have the shape of a weight's gradient."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        weights = list(weights)
        self.shapes = {tuple(w.shape) for w in weights}
        self.shapes |= {shape[::-1] for shape in self.shapes if len(shape) == 2}
        self.storages = {w.untyped_storage()._cdata for w in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _MM and not kwargs and all(map(_is_plain, args)):
            shape = (args[0].shape[0], args[1].shape[1])
            if shape in self.shapes and not any(map(self._is_weight, args)):
                return _deferred(func, args, shape)
        if func is _CONVOLUTION and not kwargs and all(map(_is_plain, args[:3])):
            g, _, weight, *_, needed = args
            if needed[1] and tuple(weight.shape) in self.shapes:
                return self._convolution(g, weight, args[:-1], needed)
        return func(*args, **kwargs or {})

    def _is_weight(self, tensor: Tensor) -> bool:
        """A product with a weight is a gradient by something else."""
        own = isinstance(tensor, _Deferred)
        return not own and tensor.untyped_storage()._cdata in self.storages

    def _convolution(self, g: Tensor, weight: Tensor, args: Any, needed: Any) -> Any:
        by_input = _CONVOLUTION(*args, [True, False, False])[0] if needed[0] else None
        # Not by the same kernel, which would compute the weight's too.
        by_bias = g.sum([d for d in range(g.dim()) if d != 1]) if needed[2] else None

        def by_weight(*args: Any) -> Tensor:
            return _CONVOLUTION(*args, [False, True, False])[1]

        return by_input, _deferred(by_weight, args, weight.shape), by_bias


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter, _Deferred) and tensor.layout is torch.strided


def deferring(weights: Iterable[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Take gradients by these weights inside; then hand them to :func:`settled`."""
    return _Deferring(weights)


class _Settle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Any) -> Tensor:
        if grad.known:
            return grad.value().clone()
        # NaN, so that whoever uses it after all is found out.
        return torch.full((), math.nan, dtype=grad.dtype, device=grad.device).expand(grad.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def settled(grads: Sequence[Tensor | None]) -> list[Any]:
    """Ordinary tensors with the graphs of these: NaN where nobody has asked for the values."""
    return [_Settle.apply(g) if isinstance(g, _Deferred) else g for g in grads]
