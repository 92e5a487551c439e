"""Memory that is freed and wanted again at once.

Every step of a walk frees its activations, and the next one wants as much; so does every meta-step.
By default glibc returns large blocks to the system in between, which then has to clear each page
anew. As torch does on accelerators, what is freed is therefore kept. Nothing here changes anything
where the user has settings of their own, or another allocator.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's names, from malloc.h
_NEVER, _LARGE = -1, 1 << 30
# Where glibc's own adjustment of the two ends, after a block of 32 MB was freed. Once they are set,
# it adjusts them no more.
_USUAL = (64 << 20, 32 << 20)

_lock = threading.RLock()  # A finalizer may come while it is held.
_holders = 0
_seen: weakref.WeakSet[Any] = weakref.WeakSet()
_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def _glibc() -> Any:
    own = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    if any(name.startswith(own) for name in os.environ):
        return None
    with contextlib.suppress(OSError, TypeError):
        library = ctypes.CDLL(None)
        # Others may have a mallopt with other meanings.
        return library if hasattr(library, "gnu_get_libc_version") else None
    return None


# Looked up once: what counts is how the process was started.
_library = _glibc()


def _hold(change: int) -> None:
    global _holders
    if _library is None:
        return
    with _lock:
        before, _holders = _holders, _holders + change
        if not before:
            _set(_NEVER, _LARGE)
        elif not _holders:
            _set(*_USUAL)
            _library.malloc_trim(0)


def _set(trim: int, mmap: int) -> None:
    _library.mallopt(_MMAP_THRESHOLD, mmap)
    _library.mallopt(_TRIM_THRESHOLD, trim)


def _after_fork() -> None:
    """In a child: whoever held the lock is not there."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def keep_freed() -> None:
    """Let this process keep what it frees from now on."""
    _hold(1)


@contextlib.contextmanager
def freed_kept() -> Iterator[None]:
    """Keep what is freed until the end of a block."""
    _hold(1)
    try:
        yield
    finally:
        _hold(-1)


def keep_freed_for(owner: Any) -> None:
    """Keep what is freed for as long as an object lives."""
    _hold(1)
    weakref.finalize(owner, _hold, -1).atexit = False


def keep_freed_if_again(owner: Any) -> None:
    """The same from the second time on that it is asked for: once is not again."""
    if owner in _owners:
        return
    if owner in _seen:
        _owners.add(owner)
        keep_freed_for(owner)
    _seen.add(owner)


def share_freed() -> None:
    """Have threads that begin after this use the memory that others have freed.

    By default each has an arena of its own, which cannot keep blocks above 64 MB.
    """
    if _library is not None:
        _library.mallopt(_ARENA_MAX, 1)
