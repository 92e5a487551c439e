"""Memory: bytes that a computation allocates, and bytes available."""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from innerloop import _tree
from innerloop.errors import InnerLoopError, four_part

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parsed(memory: Any) -> int | float:
    """Bytes as a whole number, a share of what is available as a fraction."""
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]i?)?b?\s*", memory.lower())
        with contextlib.suppress(ValueError):
            if found is not None:
                size = int(float(found[1]) * (_UNITS | _BINARY)[found[2] or ""])
                if size > 0:
                    return size
    elif type(memory) is int and memory > 1:
        return memory
    elif type(memory) is float and 0 < memory <= 1:
        return float(memory)
    raise InnerLoopError(
        four_part(
            f"You wrote memory={memory!r}.",
            "a size such as '2GB' or '512MiB', a number of bytes, or a fraction of what is free.",
            "the strategy is chosen so that it fits.",
            "Auto(memory='2GB') or Auto(memory=0.5).",
        )
    )


def available(device: torch.device) -> int:
    """The bytes that could be allocated now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_of_machine(), _of_group())


def _of_machine() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_group() -> int:
    """The memory that a container may still use."""
    with contextlib.suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup")
        limit = int((folder / "memory.max").read_text())
        return limit - int((folder / "memory.current").read_text())
    return 2**62


def size_of(leaves: Iterable[Any], besides: Iterable[Any] = ()) -> int:
    """The bytes of the tensors among ``leaves`` whose memory is not also that of ``besides``."""
    known = {t.untyped_storage().data_ptr() for t in besides if isinstance(t, Tensor)}
    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in leaves
        if isinstance(t, Tensor)
    }
    return sum(size for pointer, size in found.items() if pointer not in known)


def readable(size: float) -> str:
    """A number of bytes for people to read."""
    for unit, power in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= power:
            return f"{size / power:.3g} {unit}"
    return f"{size:.0f} B"


class Meter(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.detach.default:
            return out  # As batches are, which are there anyway.
        for leaf in _tree.flatten(out)[0]:
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        try:
            pointer, size = storage.data_ptr(), storage.nbytes()
        except RuntimeError:  # A tensor of zeros in forward mode, which has no memory.
            return
        if not size or pointer in self._known:
            return
        self.now += size
        self.peak = max(self.peak, self.now)
        self._known[pointer] = weakref.finalize(storage, self._forget, pointer, size)

    def _forget(self, pointer: int, size: int) -> None:
        self.now -= size
        del self._known[pointer]

    def close(self) -> None:
        for finalizer in self._known.values():
            finalizer.detach()


@contextlib.contextmanager
def metered() -> Iterator[Meter]:
    """Count what the block allocates."""
    meter = Meter()
    try:
        with meter:
            yield meter
    finally:
        meter.close()
