"""Bytes: what a computation allocates, and what is free."""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from innerloop import _tree
from innerloop.errors import InnerLoopError, four_part


def parse_size(memory: Any) -> int | float:
    """Bytes as an ``int``, a fraction of the free memory as a ``float``."""
    size = _parse_text(memory) if isinstance(memory, str) else memory
    if type(size) is int and size > 1:
        return size
    if type(size) is float and 0 < size <= 1:
        return size
    raise InnerLoopError(
        four_part(
            f"You wrote memory={memory!r}.",
            "a size such as '2GB' or '512MiB', a number of bytes, or a fraction of what is free.",
            "the strategy is chosen so that it fits.",
            "Auto(memory='2GB') or Auto(memory=0.5).",
        )
    )


def _parse_text(text: str) -> int | None:
    found = re.fullmatch(r"\s*(\d*\.?\d+)\s*(?:([kmgt])(i?))?b?\s*", text.lower())
    if found is None:
        return None
    number, unit, binary = found.groups()
    power = 0 if unit is None else 1 + "kmgt".index(unit)
    return int(float(number) * (1024 if binary else 1000) ** power)


def available(device: torch.device) -> int:
    """The bytes that could be allocated now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):
        line = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
        free = free if line is None else int(line[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # in a container, which may have less
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free


def size_of(leaves: Iterable[Any], besides: Iterable[Any] = ()) -> int:
    """The bytes of the tensors among ``leaves`` that do not share memory with ``besides``."""
    known = {t.untyped_storage().data_ptr() for t in besides if isinstance(t, Tensor)}
    storages = [t.untyped_storage() for t in leaves if isinstance(t, Tensor)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for pointer, size in sizes.items() if pointer not in known)


def readable(size: float) -> str:
    """A number of bytes for people to read."""
    for unit, power in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= power:
            return f"{size / power:.3g} {unit}"
    return f"{size:.0f} B"


class Meter(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make inside the block, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.detach.default:  # as batches are, which are there anyway
            for tensor in _tree.tensors(out):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        try:
            pointer, size = storage.data_ptr(), storage.nbytes()
        except RuntimeError:  # a tensor of zeros in forward mode, which has no memory
            return
        if size and pointer not in self._known:
            self.now += size
            self.peak = max(self.peak, self.now)
            self._known.add(pointer)
            weakref.finalize(storage, self._forget, pointer, size)

    def _forget(self, pointer: int, size: int) -> None:
        self.now -= size
        self._known.discard(pointer)
