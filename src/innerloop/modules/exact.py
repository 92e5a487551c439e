"""Choosing kernels that can be differentiated twice."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from innerloop.guard.watch import embedding
from innerloop.nn.batch_norm import batch_norm_forward, is_transformed
from innerloop.nn.norms import ComposedNorms


class _MathAttention:
    """While any thread is inside, attention runs on the kernels that have a second derivative.

    The fused kernels of ``scaled_dot_product_attention`` have none, on the CPU either. The switch
    is one for the whole process, so entries are counted and the last to leave restores it.

    Inside itself, in a loop in the loss of another, third derivatives are right too.
    """

    def __init__(self) -> None:
        self.local = threading.local()
        self._lock = threading.Lock()
        self._inside = 0
        self._before = (True, True, True)

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = (
                    cuda.flash_sdp_enabled(),
                    cuda.mem_efficient_sdp_enabled(),
                    cuda.cudnn_sdp_enabled(),
                )
                _switch(False, False, False)
            self._inside += 1
        self.local.depth = getattr(self.local, "depth", 0) + 1
        if self.local.depth == 2:
            self.local.norms = ComposedNorms()
            self.local.norms.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.local.depth == 2:
            self.local.norms.__exit__(kind, error, trace)
        self.local.depth -= 1
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                _switch(*self._before)


def _switch(flash: bool, efficient: bool, cudnn: bool) -> None:
    cuda.enable_flash_sdp(flash)
    cuda.enable_mem_efficient_sdp(efficient)
    cuda.enable_cudnn_sdp(cudnn)


twice_differentiable = _MathAttention()


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs with kernels that can be differentiated twice, whoever calls it.

    A recomputation during backward calls methods deep inside a model, so each one sees to it.
    """
    local = twice_differentiable.local

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        if getattr(local, "depth", 0):
            return function(*args, **kwargs)
        with twice_differentiable:
            return function(*args, **kwargs)

    return method


def own_methods(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The methods that a user's class and its bases define, torch's own classes left out."""
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, nn.Module) and not base.__module__.startswith("torch."):
            for name, member in vars(base).items():
                if type(member) is types.FunctionType and not name.startswith("__"):
                    found[name] = member
    return found


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NORMS = (nn.LayerNorm.forward, nn.InstanceNorm1d.forward)
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)


def exact_methods(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Methods to use in a replica in place of those of a class.

    The user's own are guarded, since they may call attention. Some of torch's forwards have a
    second derivative that is missing, wrong, or slow; these are replaced.
    """
    methods = own_methods(kind)
    if issubclass(kind, nn.MultiheadAttention):
        methods.setdefault("forward", kind.forward)
    exact = {name: guarded(member) for name, member in methods.items()}
    if _is_batch_norm(kind):
        exact["forward"] = batch_norm_forward
    elif kind.forward in _NORMS:
        exact["forward"] = _composed_if_transformed(kind.forward)
    elif kind in _RECURRENT:
        exact["forward"] = _recurrent_forward(kind)
    elif kind is nn.Embedding:
        exact["forward"] = _embedding_forward
    elif kind is _WeightNorm:
        exact["forward"] = _weight_norm_forward
    return exact


def _is_batch_norm(kind: type[nn.Module]) -> bool:
    """One of torch's, or one that has its forward."""
    plain = issubclass(kind, _BATCH_NORMS) and not issubclass(kind, LazyModuleMixin)
    return plain and kind.forward is nn.BatchNorm1d.forward


def _composed_if_transformed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """With norms whose derivatives are right under ``torch.func`` and in forward mode."""

    def method(self: nn.Module, x: Tensor) -> Tensor:
        if not is_transformed():
            return forward(self, x)
        with ComposedNorms():
            return forward(self, x)

    return method


def _recurrent_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """The forward without cuDNN, whose recurrent kernels have no second derivative."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not any(p is not None and p.is_cuda for p in self._parameters.values()):
            return kind.forward(self, *args, **kwargs)
        with torch.backends.cudnn.flags(enabled=False):
            return kind.forward(self, *args, **kwargs)

    return forward


def _embedding_forward(self: nn.Module, input: Tensor) -> Tensor:
    """Without any derivative of the padding, forward-mode ones too, which torch's has."""
    if self.padding_idx is None or self.max_norm is not None or self.sparse:
        return nn.Embedding.forward(self, input)  # type: ignore[arg-type]
    scaled = self.scale_grad_by_freq
    return embedding(input, self.weight, self.padding_idx, scale_grad_by_freq=scaled)  # type: ignore[arg-type]


def _weight_norm_forward(self: nn.Module, g: Tensor, v: Tensor) -> Tensor:
    return normalized(v, g, vars(self)["dim"])


def normalized(v: Tensor, g: Tensor, dim: int) -> Tensor:
    """``g * v / ||v||``, the norm over all dimensions but ``dim`` (over all for ``dim=-1``).

    torch's own ``_weight_norm`` has a second derivative that is silently wrong on the CPU (2.13),
    so it is composed here.
    """
    over = [d for d in range(v.dim()) if dim == -1 or d != dim % v.dim()]
    return v * (g / torch.linalg.vector_norm(v, dim=over, keepdim=dim != -1))


class ExactWeightNorm:
    """The hook of ``torch.nn.utils.weight_norm`` with a right second derivative."""

    def __init__(self, hook: WeightNorm) -> None:
        self.name = hook.name
        self.dim = hook.dim

    def __call__(self, module: nn.Module, inputs: object) -> None:
        v, g = getattr(module, f"{self.name}_v"), getattr(module, f"{self.name}_g")
        setattr(module, self.name, normalized(v, g, self.dim))
