"""Layers that an inner loop runs in another way than ordinary training does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from innerloop.diagnose.report import Layer
from innerloop.diagnose.tracer import Call
from innerloop.modules.exact import _BATCH_NORMS, _RECURRENT
from innerloop.modules.tree import unwrapped

_ATTENTION = "scaled_dot_product_attention"
_MATH = "math kernels of attention: the fused ones have no second derivative"
_NORM = "its own second derivative, which is cheaper than torch's and right under vmap"
_WEIGHT_NORM = "composed of simple operations: torch's own second derivative is wrong on the CPU"
_NO_CUDNN = "without cuDNN, whose recurrent kernels have no second derivative"


def replaced_layers(model: nn.Module, calls: Sequence[Call]) -> tuple[Layer, ...]:
    """By path: what each of them runs on instead."""
    found: dict[str, Layer] = {}
    for name, module in model.named_modules():
        instead = _instead(module)
        if instead is not None:
            path = f"model.{name}" if name else "model"
            found[path] = Layer(path, type(module).__name__, instead)
    for call in calls:
        path = call.place.module or str(call.place)
        if call.op == _ATTENTION and path not in found:
            found[path] = Layer(path, _ATTENTION, _MATH)
    return tuple(found.values())


def _instead(module: nn.Module) -> str | None:
    if unwrapped(module) is not module:
        return "the module inside the wrapper: a compiled one cannot be differentiated twice"
    kind = type(module)
    if kind in _BATCH_NORMS:
        return _NORM
    if isinstance(module, nn.MultiheadAttention):
        return _MATH
    if kind in _RECURRENT and any(p.is_cuda for p in module.parameters()):
        return _NO_CUDNN
    hooks = module._forward_pre_hooks.values()
    if kind is _WeightNorm or any(isinstance(hook, WeightNorm) for hook in hooks):
        return _WEIGHT_NORM
    return None
