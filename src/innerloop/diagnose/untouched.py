"""Running somebody's code again and again from the same point, and leaving no trace of it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.diagnose.failures import Failure, failure
from innerloop.guard.randomness import Randomness, devices_of
from innerloop.inner_loop import InnerLoop


class Untouched:
    """The weights, gradients, batches and random numbers as they are now, to be put back."""

    def __init__(self, inner: InnerLoop, data: Any) -> None:
        self.inner = inner
        self.carried = inner._carried
        self.weights = [_Kept(t) for t in _distinct(_owned(inner))]
        self.batches = [_Kept(t) for t in _distinct(_tree.flatten(data)[0])]
        self.random = Randomness(devices_of(k.tensor for k in (*self.weights, *self.batches)))
        self.python = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy = None if numpy is None else (numpy.random, numpy.random.get_state())
        self.changed: set[str] = set()
        """What some run has written to: ``"weights"`` or ``"batches"``."""

    def restore(self, moved: Sequence[Tensor] = ()) -> set[str]:
        """Put everything back but ``moved``; what had changed."""
        self.inner._carried = self.carried
        changed = set()
        skipped = {id(t) for t in moved}
        for what, every in (("weights", self.weights), ("batches", self.batches)):
            kept = [k for k in every if id(k.tensor) not in skipped]
            if any([k.restored() for k in kept]):
                changed.add(what)
        self.random.set()
        random.setstate(self.python)
        if self.numpy is not None:
            module, state = self.numpy
            module.set_state(state)
        return changed

    def attempt(self, run: Callable[[], Any]) -> tuple[Any, Failure | None]:
        """What ``run`` returns from here, or the exception it raises."""
        self.restore()
        try:
            return run(), None
        except Exception as error:
            return None, failure(error)
        finally:
            self.changed |= self.restore()


class _Kept:
    """One tensor: its memory, its content, and its gradient."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.data = tensor.data
        self.content = self.data.clone()
        self.grad = tensor.grad if tensor.is_leaf else None
        self.grad_content = None if self.grad is None else self.grad.detach().clone()

    def restored(self) -> bool:
        """Put it back; whether its content had changed."""
        changed = self.tensor.data_ptr() != self.data.data_ptr()
        if changed:
            self.tensor.data = self.data
        if not _same(self.data, self.content):
            changed = True
            self.data.copy_(self.content)
        if self.tensor.is_leaf and self.tensor.grad is not self.grad:
            self.tensor.grad = self.grad
        if self.grad is not None and self.grad_content is not None:
            self.grad.data.copy_(self.grad_content)
        return changed


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _owned(inner: InnerLoop) -> Iterator[Any]:
    for module in (inner, inner.model):
        yield from module.parameters()
        yield from module.buffers()
    if isinstance(inner.optimizer, torch.optim.Optimizer):
        for entry in (*inner.optimizer.state.values(), *inner.optimizer.param_groups):
            yield from (v for v in entry.values() if isinstance(v, Tensor))


def _distinct(leaves: Iterable[Any]) -> list[Tensor]:
    found = (t for t in leaves if isinstance(t, Tensor) and t.layout is torch.strided)
    return list({id(t): t for t in found if not t.is_meta}.values())
