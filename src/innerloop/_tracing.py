"""Whether a computation is being recorded, so that its values cannot be looked at."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

_local = threading.local()


def active() -> bool:
    return torch.compiler.is_compiling() or getattr(_local, "active", False)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """What is computed inside is recorded for compilation."""
    before, _local.active = getattr(_local, "active", False), True
    try:
        yield
    finally:
        _local.active = before


def readable(tensor: Tensor) -> bool:
    """Whether checks may look at a tensor's values."""
    return not active() and not is_functorch_wrapped_tensor(tensor)
