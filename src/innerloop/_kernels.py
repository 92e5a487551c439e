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
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm


class _MathAttention:
    """While any thread is inside, attention runs on the kernels that have a second derivative.

    The fused kernels of ``scaled_dot_product_attention`` have none, on the CPU either. The switch
    is one for the whole process, so entries are counted and the last to leave restores it.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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


def guarded_methods(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Those methods of a class that may call attention, guarded."""
    methods = own_methods(kind)
    if issubclass(kind, nn.MultiheadAttention):
        methods.setdefault("forward", kind.forward)
    return {name: guarded(member) for name, member in methods.items()}


def recurrent_forward(module: torch.nn.RNNBase, *args: object, **kwargs: object) -> object:
    """The module's forward without cuDNN, whose recurrent kernels have no second derivative."""
    with torch.backends.cudnn.flags(enabled=False):
        return type(module).forward(module, *args, **kwargs)


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


def exact_forward(kind: type[nn.Module], module: nn.Module) -> Callable[..., object] | None:
    """What to run instead of a forward whose second derivative torch lacks or gets wrong.

    ``kind`` is the user's class of ``module``, which may itself be of a class derived from it.
    """
    if kind is _WeightNorm:
        return functools.partial(_exact_weight, vars(module)["dim"])
    if isinstance(module, nn.RNNBase) and _on_cuda(module):
        return functools.partial(recurrent_forward, module)
    return None


def _on_cuda(module: nn.Module) -> bool:
    return any(p is not None and p.is_cuda for p in module._parameters.values())


def _exact_weight(dim: int, g: Tensor, v: Tensor) -> Tensor:
    return normalized(v, g, dim)
