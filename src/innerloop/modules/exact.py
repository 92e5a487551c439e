"""Methods and kernels of a replica that can be differentiated twice."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from innerloop.nn import attention, norms
from innerloop.nn.batch_norm import batch_norm_forward, is_transformed
from innerloop.nn.embedding import embedding


class Composed(TorchFunctionMode):
    """While it is active, some functions of torch are composed: slower, with every derivative."""

    def __init__(self, functions: dict[Any, Any]) -> None:
        super().__init__()
        self.functions = functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.functions.get(func, func)(*args, **(kwargs or {}))


def composed_norms() -> Composed:
    """Attention and norms, whose third derivatives torch has wrong."""
    return Composed({**norms.COMPOSED, **attention.COMPOSED})


class _Depth(threading.local):
    """Nesting depth of inner losses in this thread; from the second on, norms are composed."""

    losses = 0
    methods = 0
    mode: Composed

    def __enter__(self) -> None:
        self.losses += 1
        if self.losses == 2:
            self.mode = composed_norms()
            self.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.losses == 2:
            self.mode.__exit__(*error)
        self.losses -= 1


_DEPTH = _Depth()


def twice_differentiable() -> AbstractContextManager[Any]:
    """An inner loss is computed inside; in the loss of another loop, third derivatives are right.

    What a thread does here does not reach others.
    """
    return composed_norms() if torch.compiler.is_compiling() else _DEPTH


def compose_attention(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method in which attention can be differentiated twice, whoever calls it.

    A recomputation during backward calls methods deep inside a model, so each one sees to it.
    """

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # which fuses what is composed
            with composed_norms():
                return function(*args, **kwargs)
        if _DEPTH.methods:
            return function(*args, **kwargs)
        _DEPTH.methods += 1
        try:
            with Composed(attention.COMPOSED):
                return function(*args, **kwargs)
        finally:
            _DEPTH.methods -= 1

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


_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NORMS = (nn.LayerNorm.forward, nn.InstanceNorm1d.forward)
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)


def exact_methods(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Methods to use in a replica in place of those of a class.

    The user's own compose attention, since they may call attention. Some of torch's forwards have a
    second derivative that is missing, wrong, or slow; these are replaced.
    """
    exact = {name: compose_attention(member) for name, member in own_methods(kind).items()}
    if issubclass(kind, _ATTENTION):
        # Under a mode, they do not take torch's path for inference, which has no derivative.
        exact["forward"] = compose_attention(kind.forward)
    elif _is_batch_norm(kind):
        exact["forward"] = batch_norm_forward
    elif kind.forward in _NORMS:
        exact["forward"] = _compose_if_transformed(kind.forward)
    elif kind in _RECURRENT:
        exact["forward"] = _recurrent_forward(kind)
    elif kind is nn.Embedding:
        exact["forward"] = _embedding_forward
    elif kind is _WeightNorm:
        exact["forward"] = _weight_norm_forward
    return exact


def _is_batch_norm(kind: type[nn.Module]) -> bool:
    """True for a batch norm of torch, or a subclass with its forward."""
    plain = issubclass(kind, _BATCH_NORMS) and not issubclass(kind, LazyModuleMixin)
    return plain and kind.forward is nn.BatchNorm1d.forward


def _compose_if_transformed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A norm's forward whose derivatives are right under ``torch.func`` and in forward mode."""

    def method(self: nn.Module, x: Tensor) -> Tensor:
        if not is_transformed():
            return forward(self, x)
        with composed_norms():
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
    """``forward`` without any derivative of the padding; torch's has one in forward mode."""
    if self.padding_idx is None or self.max_norm is not None or self.sparse:
        return nn.Embedding.forward(self, input)  # type: ignore[arg-type]
    scaled = self.scale_grad_by_freq
    return embedding(input, self.weight, self.padding_idx, scale_grad_by_freq=scaled)  # type: ignore[arg-type]


def _weight_norm_forward(self: nn.Module, g: Tensor, v: Tensor) -> Tensor:
    return scale_to_norm(v, g, vars(self)["dim"])


def scale_to_norm(v: Tensor, g: Tensor, dim: int) -> Tensor:
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
        setattr(module, self.name, scale_to_norm(v, g, self.dim))
