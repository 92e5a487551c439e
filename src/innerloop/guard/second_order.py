"""Operations without a right second derivative: detection, and errors that name them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from innerloop.errors import RequirementError, four_part
from innerloop.guard import graph

_ONCE = once_differentiable.__code__.co_filename
_DEAD_ENDS = {
    *("torch::autograd::NotImplemented", "torch::autograd::Error"),
    # Second derivatives that exist in name only: they raise when they are run.
    *("CdistBackwardBackward0", "PdistBackwardBackward0", "StandardGammaGradBackward0"),
    *("EmbeddingBagBackwardBackward0", "EmbeddingBagDenseBackwardBackward0"),
    *("CudnnRnnBackwardBackward0", "MiopenRnnBackwardBackward0"),
}
# torch 2.13 gives these a second derivative, but a wrong one (found by gradgradcheck on the CPU).
_WRONG = ("WeightNormInterfaceBackward0",)
# torch 2.13's second derivatives of these take mean and deviation for constants (pytorch#186256).
_NORMS = {"NativeLayerNormBackward0", "NativeBatchNormBackward0"}
_NORMS_TWICE = ("NativeLayerNormBackwardBackward0", "NativeBatchNormBackwardBackward0")
_REMEDIES = {
    "weight_norm": "v * (g / v.norm()) composed by hand, or torch.nn.utils.parametrizations."
    "weight_norm, whose forward is replaced in the patched model.",
    "scaled_dot_product": "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) around it.",
    "cudnn_rnn": "torch.backends.cudnn.flags(enabled=False) around the forward.",
    "cdist": "(x[:, None] - y[None]).square().sum(-1), and its root if need be.",
    "pdist": "(x[:, None] - x[None]).square().sum(-1), and its root if need be.",
    "embedding_bag": "torch.nn.Embedding and a sum or mean of its output.",
}
_OTHERWISE = (
    "the same operation composed of differentiable ones, or first_order=True (of innerloop_ctx or "
    "InnerLoop) to do without second derivatives."
)


_clean: set[Any] = set()
"""Kinds of nodes whose gradients were found to have no dead end."""


class Guard:
    """Looks at the first inner gradient of a call for derivatives that are missing or wrong.

    An operation without a second derivative raises a clear error when, and only when, a backward
    reaches it. As long as one is there, the gradients of the following steps are looked at too.
    """

    def __init__(self) -> None:
        self.is_done = False
        """True if no further gradient needs a look."""

    def look(
        self,
        loss: Tensor,
        grads: Sequence[Tensor | None],
        sources: Mapping[str, Tensor],
        since: int,
    ) -> None:
        """``grads`` are the gradients of ``loss`` by ``sources``, made with a graph."""
        names = list(sources).__getitem__
        self.is_done = not guard(loss, grads, list(sources.values()), names, since)


def guard(
    loss: Tensor,
    grads: Sequence[Tensor | None],
    params: Sequence[Any],
    names: Callable[[int], str],
    since: int = 0,
) -> bool:
    """Make dead ends of the graph raise a clear error when they are reached; True if it has any.

    ``grads`` are the inner gradients, made with a graph; ``params`` the weights they belong to, by
    whose ``grad_fn`` the step ends. Nodes older than ``since`` are not of this step. The graph of
    the gradients is searched only if the loss has operations that have not been searched before.
    """
    ends = {p.grad_fn for p in params if p.grad_fn is not None}
    forward = graph.nodes([loss.grad_fn], ends, since)[0]
    kinds = {(type(node), node.name()) for node in forward}
    norms = _NORMS.intersection([name for _, name in kinds])
    by_batch = bool(norms) and any(n.name() in norms and _by_batch(n) for n in forward)
    if by_batch:
        for node in {g.grad_fn for g in grads if g is not None and g.grad_fn is not None}:
            node.register_hook(_only_twice)
    if kinds <= _clean:
        return by_batch
    involved = _leading_to(params, forward, ends)
    for node in involved:
        if node.name() in _NORMS_TWICE and _by_batch(node):
            raise RequirementError(_third(_op_of(node)))
        if _differentiable_once(node) or node.name() in _WRONG:
            raise RequirementError(_message(_op_of(node), node, params, names))
    gradient_nodes = graph.nodes([g.grad_fn for g in grads if g is not None], [*ends, *forward])[0]
    dead = [node for node in gradient_nodes if node.name() in _DEAD_ENDS]
    for node in dead:
        message = _message(_op_of(node), node, params, names)
        node.register_prehook(functools.partial(_refuse, message))
    if not dead:
        _clean.update((type(node), node.name()) for node in involved)
    return by_batch or bool(dead)


def _leading_to(params: Sequence[Any], nodes: Sequence[Any], ends: set[Any]) -> list[Any]:
    """Those nodes from which a weight is reached: only they are differentiated."""
    leaves = {id(p) for p in params}
    users: dict[Any, list[Any]] = {}
    for node in nodes:
        for following, _ in node.next_functions:
            users.setdefault(following, []).append(node)
    queue = [n for n in users if n in ends or id(getattr(n, "variable", None)) in leaves]
    involved: dict[Any, None] = {}
    for node in queue:  # which grows meanwhile
        new = [user for user in users.get(node, ()) if user not in involved]
        involved.update(dict.fromkeys(new))
        queue += new
    return list(involved)


def _by_batch(norm: Any) -> bool:
    """Not a batch norm by running statistics, which is linear."""
    return getattr(norm, "_saved_training", True) and getattr(norm, "_saved_train", True)


def _refuse(message: str, grads: Any) -> None:
    raise RequirementError(message)


def _only_twice(grads: Sequence[Tensor | None], _: Any) -> Any:
    """Refuse derivatives of what has just been derived, if anybody asks for them."""
    if not torch.is_grad_enabled():
        return None
    return tuple(None if g is None else _Ended.apply(g) for g in grads)


class _Ended(torch.autograd.Function):
    """A tensor whose further derivatives torch would have wrong."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RequirementError(_third("a layer norm or a batch norm"))


def _third(op: str) -> str:
    return four_part(
        f"The inner loss uses {op}, and you ask for a third derivative of it, as for a penalty on "
        "gradients in the loss.",
        "operations with a right third derivative.",
        "torch takes mean and deviation for constants there, and would silently be wrong.",
        "the norm composed of x.var(...), x.mean(...) and .rsqrt(); nn.BatchNorm1d to 3d as they "
        "are in the model, whose third derivatives are right here; or an InnerLoop in the loss in "
        "place of gradients of your own.",
    )


def _differentiable_once(node: Any) -> bool:
    """True if the node's backward is marked ``once_differentiable``.

    Such a backward returns constants, without an error, when the gradient it gets is one.
    """
    backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
    code = getattr(backward, "__code__", None)
    return code is not None and code.co_filename == _ONCE and hasattr(backward, "__wrapped__")


def _op_of(node: Any) -> str:
    """The operation a node belongs to, in the spelling of torch's functions.

    A dead end does not tell its operation but in the error it raises, so it is made to raise it.
    """
    custom = getattr(type(node), "_forward_cls", None)
    if custom is not None:
        return custom.__name__
    if node.name() not in ("torch::autograd::NotImplemented", "torch::autograd::Error"):
        words = re.findall(r"[A-Z][a-z0-9]*", re.sub(r"(Backward0?)+$", "", node.name()))
        return "_".join(words).lower() or node.name()
    for count in range(1, 13):
        try:
            node(*[torch.zeros(())] * count)
        except TypeError:
            continue
        except RuntimeError as error:
            named = re.search(r"aten::_?(\w+?)(_backward)? is not", str(error))
            return named[1] if named else "a function marked once_differentiable"
    return "an operation"


def _message(op: str, node: Any, params: Sequence[Any], names: Callable[[int], str]) -> str:
    where = _nearest_weight(node, params, names)
    return four_part(
        f"The inner loss uses {op}"
        + (f", in or after the module of {where!r}" if where else "")
        + ", whose second derivative torch does not have or gets wrong.",
        "operations with a second derivative (Requirement IIIb).",
        "the meta-gradient is the derivative of an inner gradient.",
        next((text for key, text in _REMEDIES.items() if key in op), _OTHERWISE),
    )


def _nearest_weight(node: Any, params: Sequence[Any], names: Callable[[int], str]) -> str | None:
    places = {id(p) if p.grad_fn is None else p.grad_fn: i for i, p in enumerate(params)}
    for below in graph.nodes([node])[0]:
        key = id(below.variable) if hasattr(below, "variable") else below
        if key in places:
            return names(places[key])
    return None
