"""Corrections of torch's rules for ``vmap``, and refusals of what has no place under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_interpreter_stack, get_unwrapped, is_batchedtensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from innerloop.errors import NotBatchableError
from innerloop.nn.embedding import embedding, plain_embedding
from innerloop.tasks.way import saved_tensor_hooks


class NoGenerators(TorchFunctionMode):
    """Refuses draws from a generator of the user's own."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if kwargs and kwargs.get("generator") is not None:
            raise NotBatchableError("it draws from a torch.Generator of its own")
        return func(*args, **(kwargs or {}))


class Corrections(NoGenerators):
    """While it is active, functions under ``vmap`` have the derivatives they have in a loop.

    torch's rule for embeddings forgets the padding, and those for the extremes of a whole tensor
    give all of the gradient to one of several equal values. What is batched says that it requires
    no grad, since derivatives are taken outside; a loss may ask, to regularize what is trained.
    """

    def __init__(self) -> None:
        super().__init__()
        compiling = torch.compiler.is_compiling()
        self._seed = None if compiling else torch.default_generator.initial_seed()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._seed is not None:
            if func == _REQUIRES_GRAD:
                return _requires_grad(args[0])
            if torch.default_generator.initial_seed() != self._seed:
                # Tasks would have numbers of their own in spite of it.
                raise NotBatchableError("it sets the seed of torch's random numbers")
            hooks = saved_tensor_hooks()
            if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
                # It would call the function again outside, with tensors that exist only inside.
                why = "it computes a part again in the backward, by torch.utils.checkpoint"
                raise NotBatchableError(why)
        if func in _OF_ALL and len(args) + len(kwargs or {}) == 1 and _is_mapped_once():
            return _OF_ALL[func](*args, **(kwargs or {}))
        if func is functional.embedding:
            return embedding(*args, **(kwargs or {}))
        if func is torch.embedding:
            return plain_embedding(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def _requires_grad(value: Tensor) -> bool:
    while not value.requires_grad and is_batchedtensor(value):
        value = get_unwrapped(value)
    return value.requires_grad


def _is_mapped_once() -> bool:
    if torch.compiler.is_compiling():
        return True  # Dynamo does not see the stack
    stack = get_interpreter_stack()
    return stack is not None and len(stack) == 1


def _median(input: Tensor) -> Tensor:
    return _share_gradient(input, torch.median(input.detach()))


def _nanmedian(input: Tensor) -> Tensor:
    return _share_gradient(input, torch.nanmedian(input.detach()))


def _share_gradient(input: Tensor, value: Tensor) -> Tensor:
    """The value, whose gradient is shared by all elements that are equal to it."""
    equal = input == value
    moved = torch.where(equal, input - input.detach(), 0.0)
    return value + moved.sum() / equal.sum() if input.is_floating_point() else value


_OF_ALL = {
    **dict.fromkeys((torch.max, Tensor.max), torch.amax),
    **dict.fromkeys((torch.min, Tensor.min), torch.amin),
    **dict.fromkeys((torch.median, Tensor.median), _median),
    **dict.fromkeys((torch.nanmedian, Tensor.nanmedian), _nanmedian),
}
