"""Weight gradients whose values are computed only if somebody looks at them.

A step that is computed again for its derivative gives new weights that are known already. If the
rule is linear in the gradient, the derivative does not depend on the gradient's values either, only
on its graph: a third of the work of the inner backward pass is then for nothing. So large products
that are the gradient of a weight are put off. Whatever sees such a gradient before the rule does
gets its values as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from innerloop import _tree
from innerloop.errors import InnerLoopError

_LARGE = 1 << 14  # numbers in a weight: with smaller ones only, nothing is tried
_WORK = 1 << 23  # multiplications of a product that is put off: less is not worth the trouble

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


def left_out() -> int:
    """How many gradients in this thread were left without values since this was last asked."""
    count = getattr(_local, "count", 0)
    _local.count = 0
    return count


# The products. ------------------------------------------------------------------------------------


class _Deferred(Tensor):
    """A tensor without memory: its values are computed when an operation needs them."""

    _compute: Callable[[], Tensor] | None
    _value: Tensor
    _shape_only: Tensor
    _viewed: _Deferred | None

    # Results are ordinary tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        compute: Callable[[], Tensor],
        like: Tensor,
        device: torch.device,
        viewed: _Deferred | None = None,
    ) -> Any:
        new = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        new._compute, new._shape_only, new._viewed = compute, like, viewed
        return new

    @property
    def known(self) -> bool:
        return self._compute is None or (self._viewed is not None and self._viewed.known)

    def value(self) -> Tensor:
        if self._compute is not None:
            self._value = self._compute()
            self._compute = self._viewed = None
        return self._value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func in _VIEWS and isinstance(first, _Deferred) and not first.known:
            like = func(first._shape_only, *args[1:])
            return _Deferred(lambda: func(first.value(), *args[1:]), like, first.device, first)
        args, kwargs = _tree.map(_known, (args, kwargs or {}))
        return func(*args, **kwargs)


def _known(value: Any) -> Any:
    return value.value() if isinstance(value, _Deferred) else value


def _deferred(function: Callable[..., Tensor], args: Sequence[Any], shape: Sequence[int]) -> Any:
    given = [(t, t._version) for t in args if isinstance(t, Tensor)]

    def compute() -> Tensor:
        if any(t._version != version for t, version in given):
            raise StaleError("a gradient was written to")
        return function(*args).contiguous()

    first = given[0][0]
    like = torch.empty(tuple(shape), dtype=first.dtype, device="meta")
    return _Deferred(compute, like, first.device)


class _Deferring(TorchDispatchMode):
    """During a backward pass, puts off products that go straight to a weight, and nowhere else."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = {get_gradient_edge(w).node: w for w in weights}
        self.shapes = {tuple(w.shape) for w in weights}
        self.shapes |= {shape[::-1] for shape in self.shapes if len(shape) == 2}
        self.storages = {w.untyped_storage()._cdata for w in weights}
        self.lowest: _Deferred | None = None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # By it one sees whether the whole backward pass came out as it had been.
        if self.lowest is not None and error == (None, None, None):
            self.lowest.value()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _MM and not kwargs:
            a, b = args
            shape = a.shape[0], b.shape[1]
            if shape in self.shapes and self._is_gradient(shape, a, b):
                if not self._is_large(shape[0] * shape[1] * a.shape[1]):
                    return func(a, b)
                self.lowest = _deferred(func, args, shape)
                return self.lowest
        elif func is _CONVOLUTION and not kwargs:
            g, x, weight, *_, needed = args
            shape = tuple(weight.shape)
            if needed[1] and shape in self.shapes and self._is_gradient(shape, g, x):
                if not self._is_large(weight.numel() * (g.numel() // max(1, g.shape[1]))):
                    return func(*args)
                return self._convolution(g, shape, args[:-1], needed)
        return func(*args, **kwargs or {})

    def _is_large(self, work: int) -> bool:
        if work < _WORK:
            self.lowest = None
        return work >= _WORK

    def _is_gradient(self, shape: tuple[int, ...], *factors: Tensor) -> bool:
        """Whether this is the gradient of a weight, which nobody is waiting for on the way."""
        for factor in factors:
            if type(factor) is not Tensor or factor.layout is not torch.strided:
                return False
            if factor.untyped_storage()._cdata in self.storages:
                return False  # With a weight as a factor it is the gradient of something else.
        node = torch._C._current_autograd_node()
        for target, _ in () if node is None else node.next_functions:
            if target is None:
                continue
            turned = target.name() == "TBackward0"
            source = target.next_functions[0][0] if turned else target
            weight = None if source is None else self.weights.get(source)
            # A product is computed as it is, or as its transpose and then turned.
            if weight is not None and tuple(weight.shape) in (shape, shape[::-1]):
                return not weight._backward_hooks and not weight.retains_grad
        return False

    def _convolution(self, g: Tensor, shape: tuple[int, ...], args: Any, needed: Any) -> Any:
        by_input = _CONVOLUTION(*args, [True, False, False])[0] if needed[0] else None
        # Not by the same kernel, which would compute the weight's too.
        by_bias = g.sum([d for d in range(g.dim()) if d != 1]) if needed[2] else None

        def by_weight(*args: Any) -> Tensor:
            return _CONVOLUTION(*args, [False, True, False])[1]

        self.lowest = _deferred(by_weight, args, shape)
        return by_input, self.lowest, by_bias


def deferring(weights: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Take gradients by these weights inside; then hand them to :func:`settled`."""
    # Under a mode, torch misses derivatives of some writes in place, as a hook may do them.
    hooked = any(weight._backward_hooks for weight in weights)
    if hooked or all(weight.numel() < _LARGE for weight in weights):
        return contextlib.nullcontext()
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


def settled(grads: Mapping[str, Any], linear: Callable[[], bool]) -> dict[str, Any]:
    """Ordinary tensors with the graphs of these, for a rule that is linear in them or not.

    If it is, values that are not known are NaN.
    """
    found = dict(grads)
    waiting = {name: grad for name, grad in found.items() if isinstance(grad, _Deferred)}
    if waiting and not linear():
        for grad in waiting.values():
            grad.value()
    for name, grad in waiting.items():
        _local.count = getattr(_local, "count", 0) + (not grad.known)
        found[name] = _Settle.apply(grad)
    return found
