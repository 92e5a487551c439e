"""Memory that is freed and wanted again at once."""

from __future__ import annotations

import contextlib
import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for them, from malloc.h
_NEVER, _LARGE = -1, 1 << 30


def keep_freed() -> None:
    """Let this process keep what it frees, instead of handing it back after every meta-step.

    Every meta-step frees its activations, and the next one wants as much. By default glibc returns
    large blocks to the system in between, which then has to clear each page anew. Changes nothing
    where the user has settings of their own, or another allocator.
    """
    own = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    if any(name.startswith(own) for name in os.environ):
        return
    with contextlib.suppress(OSError, TypeError, AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _NEVER)
