"""Operations without a second derivative: found in the graph, and named when they are reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from innerloop.errors import RequirementError, four_part

_DEAD_ENDS = ("torch::autograd::NotImplemented", "torch::autograd::Error")
# torch 2.13 gives these a second derivative, but a wrong one (found by gradgradcheck on the CPU).
_WRONG = ("WeightNormInterfaceBackward0",)
_REMEDIES = {
    "WeightNorm": "v * (g / v.norm()) composed by hand, or torch.nn.utils.parametrizations."
    "weight_norm, whose forward is replaced in the patched model.",
    "ScaledDotProduct": "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) around the forward.",
    "CudnnRnn": "torch.backends.cudnn.flags(enabled=False) around the forward.",
}


def guard(loss: Tensor, grads: Sequence[Tensor | None], params: Sequence[Any], names: Any) -> bool:
    """Make dead ends of the graph raise a clear error when they are reached; whether any exist.

    ``grads`` are the inner gradients, made with a graph; ``params`` the weights they belong to, by
    whose ``grad_fn`` the step ends; ``names`` gives a weight's name for the message.
    """
    ends = {p.grad_fn for p in params if p.grad_fn is not None}
    forward = _nodes([loss.grad_fn], ends)
    for node in forward:
        if _differentiable_once(node) or node.name() in _WRONG:
            raise RequirementError(_message(node, params, names))
    found = False
    known = set(forward)
    for node in _nodes([g.grad_fn for g in grads if g is not None], ends | known):
        if node.name() in _DEAD_ENDS:
            found = True
            source = next((n for n, _ in node.next_functions if n in known), node)
            message = _message(source, params, names)
            node.register_prehook(lambda grads, message=message: _refuse(message))
    return found


def _refuse(message: str) -> None:
    raise RequirementError(message)


def _nodes(starts: Iterable[Any], ends: set[Any]) -> list[Any]:
    seen = set(ends)
    order: list[Any] = []
    stack = [node for node in starts if node is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        order.append(node)
        stack.extend(n for n, _ in node.next_functions if n is not None)
    return order


def _differentiable_once(node: Any) -> bool:
    """Whether the node's backward is marked ``once_differentiable``.

    Such a backward returns constants, without an error, when the gradient it gets is one.
    """
    backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
    code = getattr(backward, "__code__", None)
    return hasattr(backward, "__wrapped__") and "once_differentiable" in getattr(
        code, "co_qualname", code.co_filename if code else ""
    )


def _message(node: Any, params: Sequence[Any], names: Any) -> str:
    op = node.name().rsplit("::", 1)[-1]
    where = _nearest_weight(node, params, names)
    remedy = next((text for key, text in _REMEDIES.items() if key in op), None)
    return four_part(
        f"The inner loss uses {op.removesuffix('0').removesuffix('Backward')}"
        + (f", in or after the module of {where!r}" if where else "")
        + ", whose second derivative torch does not have or gets wrong.",
        "operations with a second derivative (Requirement IIIb).",
        "the meta-gradient is the derivative of an inner gradient.",
        remedy
        or "the same operation composed of differentiable ones, or innerloop_ctx(..., "
        "first_order=True) to do without second derivatives.",
    )


def _nearest_weight(node: Any, params: Sequence[Any], names: Any) -> str | None:
    owners = {p.grad_fn: i for i, p in enumerate(params) if p.grad_fn is not None}
    leaves = {id(p): i for i, p in enumerate(params) if p.grad_fn is None}
    seen, level = set(), [node]
    while level:
        following = []
        for current in level:
            index = owners.get(current)
            if index is None and hasattr(current, "variable"):
                index = leaves.get(id(current.variable))
            if index is not None:
                return names(index)
            for n, _ in current.next_functions:
                if n is not None and n not in seen:
                    seen.add(n)
                    following.append(n)
        level = following
    return None
