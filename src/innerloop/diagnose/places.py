"""Where in the user's own code something happens: a line, and a module of the model."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = str(Path(__file__).parents[1]) + os.sep
# Layers and wrappers of ours that run inside the user's model.
_INSIDE_MODELS = (os.path.join(_OWN, "nn") + os.sep, os.path.join(_OWN, "_kernels.py"))
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = os.path.join(_LIBRARY, "site-packages") + os.sep
_DISPATCH = tuple(os.path.join(_TORCH, name) for name in ("overrides.py", "_tensor.py"))


class Place(NamedTuple):
    """A line of the user's, and the module of the model that was running."""

    file: str
    line: int
    code: str
    module: str = ""

    def __str__(self) -> str:
        at = f"{_short(self.file)}:{self.line}" if self.file else ""
        inside = f"in {self.module}" if self.module else ""
        text = ", ".join(part for part in (at, inside) if part)
        code = self.code if len(self.code) <= 80 else f"{self.code[:78]} …"
        return f"{text}: {code}" if code else text


def _short(file: str) -> str:
    try:
        relative = os.path.relpath(file)
    except ValueError:
        return file
    return file if relative.startswith("..") else relative


def is_own(file: str) -> bool:
    """Whether a file is of this library and does not run inside the user's model."""
    return file.startswith(_OWN) and not file.startswith(_INSIDE_MODELS)


def is_users(file: str) -> bool:
    """Whether a file is neither of torch, of this library, nor of Python's own."""
    if file.startswith((_TORCH, _OWN, "<frozen")):
        return False
    return file.startswith(_PACKAGES) or not file.startswith(_LIBRARY)


def caller(frame: FrameType | None, function: Any) -> FrameType | None:
    """The frame that called a function of torch's, dispatching and the function itself left out."""
    own = getattr(function, "__code__", None)
    while frame is not None and (
        frame.f_code.co_filename in _DISPATCH or (frame.f_code is own and own is not None)
    ):
        frame = frame.f_back
    return frame


def outward(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """A frame and those that called it, up to our own code."""
    while frame is not None and not is_own(frame.f_code.co_filename):
        yield frame, frame.f_lineno
        frame = frame.f_back


def place_of(frame: FrameType | None, paths: Mapping[int, str]) -> Place:
    """The user's line that led to a frame, and the module it was in."""
    innermost = ""
    for current, line in outward(frame):
        path = _module_path(current, paths)
        innermost = innermost or path
        if is_users(current.f_code.co_filename):
            return _at(current, line, path or innermost)
    return Place("", 0, "", innermost)


def user_place(frames: Iterable[tuple[FrameType, int]]) -> Place | None:
    """The innermost line of the user's in a traceback that comes after code of ours."""
    found = None
    entered = False
    for frame, line in frames:
        file = frame.f_code.co_filename
        entered = entered or file.startswith(_OWN)
        if entered and is_users(file):
            found = _at(frame, line, "")
    return found


def _at(frame: FrameType, line: int, module: str) -> Place:
    code = frame.f_code
    text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    return Place(code.co_filename, line, text, module)


def _module_path(frame: FrameType, paths: Mapping[int, str]) -> str:
    if frame.f_code.co_varnames[:1] != ("self",):
        return ""
    return paths.get(id(frame.f_locals.get("self")), "")
