"""What a computation must not do while it is batched, spread over threads, or recorded."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch._C._functorch import get_interpreter_stack, get_unwrapped, is_batchedtensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from innerloop.nn.embedding import embedding, plain_embedding


class ForeignError(Exception):
    """What was done that has no place in another order, or in a recording."""


_READS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__}
_NUMBERS = {
    *(Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__complex__),
    *(Tensor.__index__, Tensor.__contains__, Tensor.is_nonzero, torch.is_nonzero),
    *(Tensor.equal, torch.equal, Tensor.allclose, torch.allclose),
}


_MADE = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}


def _within(values: Any) -> list[Any]:
    """What lists and tuples hold, at any depth."""
    if not isinstance(values, list | tuple):
        return [values]
    return [leaf for value in values for leaf in _within(value)]


class Watch(TorchFunctionMode):
    """Refuses a draw from a generator before it is made and, with ``reads``, a look at values."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            raise ForeignError("it draws from a torch.Generator of its own")
        if self._reads and func in _READS:
            raise ForeignError(f"it looks at values by .{func.__name__}()")
        if self._reads and func in _MADE and not all(map(_recorded, _within(args))):
            raise ForeignError(f"it makes a tensor of values of others by {func.__name__}()")
        if self._reads and func in _NUMBERS and not all(map(_recorded, args)):
            # Those of tensors that are recorded, the recording itself refuses.
            raise ForeignError(
                f"it looks at values of a tensor from outside by .{func.__name__}(): "
                "they would stay as they are now"
            )
        return func(*args, **kwargs)


class NumberWatch(TorchDispatchMode):
    """Refuses that torch itself reads a number from a tensor from outside, as ``alpha=tensor``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not _recorded(args[0]):
            raise ForeignError(
                "it uses a tensor from outside as a number: it would stay as it is now"
            )
        return func(*args, **(kwargs or {}))


def _recorded(value: Any) -> bool:
    """Not a tensor, or one that the recording under way knows, because it made it."""
    if not isinstance(value, Tensor):
        return True
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, has_proxy_slot

    mode = get_proxy_mode()
    return mode is not None and has_proxy_slot(value, mode.tracer)


def saved_tensor_hooks() -> Any:
    """The innermost hooks for saved tensors around this call, to pack and to unpack, or None."""
    return _autograd._top_saved_tensors_default_hooks(True)


def _median(input: Tensor) -> Tensor:
    return _shared(input, torch.median(input.detach()))


def _nanmedian(input: Tensor) -> Tensor:
    return _shared(input, torch.nanmedian(input.detach()))


def _shared(input: Tensor, value: Tensor) -> Tensor:
    """The value, whose gradient is shared by all that are equal to it."""
    equal = input == value
    moved = torch.where(equal, input - input.detach(), 0.0)
    return value + moved.sum() / equal.sum() if input.is_floating_point() else value


def _is_mapped_once() -> bool:
    stack = get_interpreter_stack()
    return stack is not None and len(stack) == 1


_OF_ALL = {
    **dict.fromkeys((torch.max, Tensor.max), torch.amax),
    **dict.fromkeys((torch.min, Tensor.min), torch.amin),
    **dict.fromkeys((torch.median, Tensor.median), _median),
    **dict.fromkeys((torch.nanmedian, Tensor.nanmedian), _nanmedian),
}
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class BatchedWatch(Watch):
    """The same inside ``vmap``, with what it has wrong put right.

    Its rule for embeddings forgets the padding. And what is batched says that it requires no grad,
    since derivatives are taken outside; a loss may ask, to regularize what is trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seed = torch.default_generator.initial_seed()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func == _REQUIRES_GRAD:
            return _requires_grad(args[0])
        if torch.default_generator.initial_seed() != self._seed:
            # Tasks would have numbers of their own in spite of it.
            raise ForeignError("it sets the seed of torch's random numbers")
        hooks = saved_tensor_hooks()
        if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
            # It would call the function again outside, with tensors that exist only inside.
            raise ForeignError(
                "it computes a part again in the backward, by torch.utils.checkpoint"
            )
        if func in _OF_ALL and len(args) + len(kwargs or {}) == 1 and _is_mapped_once():
            # Its rule gives all of the gradient to one of several equal values.
            return _OF_ALL[func](*args, **(kwargs or {}))
        if func is functional.embedding:
            return embedding(*args, **(kwargs or {}))
        if func is torch.embedding:
            return plain_embedding(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def asked(trained: Mapping[str, bool], named: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """While it is active, the tensors ``named`` say that they require grad as ``trained`` has it.

    A loss that asks means the model's parameters. What stands for them may differ, where no graph
    is wanted.
    """
    differing = {
        id(tensor): trained[name]
        for name, tensor in named.items()
        if name in trained and isinstance(tensor, Tensor) and tensor.requires_grad != trained[name]
    }
    return _Said(differing) if differing else nullcontext()


class _Said(TorchFunctionMode):
    def __init__(self, answers: dict[int, bool]) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func == _REQUIRES_GRAD and id(args[0]) in self._answers:
            return self._answers[id(args[0])]
        return func(*args, **(kwargs or {}))


def _requires_grad(value: Tensor) -> bool:
    while not value.requires_grad and is_batchedtensor(value):
        value = get_unwrapped(value)
    return value.requires_grad


class Draws:
    """The random state of Python and of NumPy at one moment, and of generators of one's own."""

    def __init__(self, others: Sequence[Any] = ()) -> None:
        self._python = random.getstate()
        module = sys.modules.get("numpy")
        self._numpy = module.random if module is not None else None
        self._state = self._numpy.get_state() if self._numpy is not None else None
        self._others = [(other, _state(other)) for other in others]

    def undone(self) -> bool:
        """Go back to it; whether there was anything to undo."""
        changed = random.getstate() != self._python
        if changed:
            random.setstate(self._python)
        if self._numpy is not None and self._state is not None:
            now = self._numpy.get_state()
            if (
                now[2] != self._state[2]
                or (now[1] != self._state[1]).any()
                or now[3:] != self._state[3:]
            ):
                self._numpy.set_state(self._state)
                changed = True
        for other, state in self._others:
            if _state(other) != state:
                _set_state(other, state)
                changed = True
        return changed


def _state(generator: Any) -> bytes:
    if isinstance(generator, random.SystemRandom):
        return b""
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    bits = getattr(generator, "bit_generator", None)
    return pickle.dumps(generator.get_state() if bits is None else bits.state)


def _set_state(generator: Any, state: bytes) -> None:
    bits, found = getattr(generator, "bit_generator", None), pickle.loads(state)
    if isinstance(generator, random.Random):
        generator.setstate(found)
    elif bits is None:
        generator.set_state(found)
    else:
        bits.state = found
