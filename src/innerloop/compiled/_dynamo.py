"""Keeping ``torch.compile`` from looking into an inner loop, which has a compiler of its own.

``torch.compile(inner)`` wraps the call of a module, and would trace into what is meant to be
recorded as a whole. It only takes frames of Python whose code it was not told to skip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])


def opaque(uncompiled: F, asked: Callable[[Any], None], compiled: Callable[[Any], bool]) -> F:
    """A method that ``torch.compile`` calls as it is.

    ``asked`` gets the object before, and ``compiled`` tells afterwards whether it was.
    """

    @functools.wraps(uncompiled)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        callback = eval_frame.get_eval_frame_callback()
        if callback is None or isinstance(callback, bool):
            return uncompiled(self, *args, **kwargs)
        eval_frame.set_eval_frame(None)
        try:
            asked(self)
            found = uncompiled(self, *args, **kwargs)
            if compiled(self):
                _count_one()
            return found
        finally:
            eval_frame.set_eval_frame(callback)

    method._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = eval_frame._FrameExecStrategy(
        eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    )
    eval_frame.set_code_exec_strategy(method.__code__, skip)  # type: ignore[attr-defined]
    return method  # type: ignore[return-value]


def _count_one() -> None:
    """Tell ``torch.compile(..., fullgraph=True)``, which wants something compiled, that it was."""
    before = eval_frame.set_fullgraph_compiled_frame_count(-1)
    if before >= 0:
        eval_frame.set_fullgraph_compiled_frame_count(before + 1)
