"""Options of glibc's malloc for processes that the command line starts."""

from __future__ import annotations

import contextlib
import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names, from malloc.h
_NEVER, _LARGE = -1, 1 << 30


def keep_freed_memory() -> None:
    """Makes this process keep the memory it frees.

    Every step frees its activations, and the next one needs as much. By default glibc returns
    large blocks to the system in between, which then clears each page anew. Settings of the user,
    and other allocators, are left alone.
    """
    own = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    if any(name.startswith(own) for name in os.environ):
        return
    with contextlib.suppress(OSError, TypeError):
        library = ctypes.CDLL(None)
        if hasattr(library, "gnu_get_libc_version"):  # others may have another mallopt
            library.mallopt(_MMAP_THRESHOLD, _LARGE)
            library.mallopt(_TRIM_THRESHOLD, _NEVER)
