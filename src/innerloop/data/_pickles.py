"""Reads the pickles of CIFAR without running anything in them.

A pickle is a program. These files need a dictionary of strings, numbers, lists and one array of
bytes; so only the instructions that build these are let through, and the four names that the files
use for arrays lead to the small stand-ins below, not to numpy.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import torch
from torch import Tensor

# What Python 2 (the official files) and Python 3 write at protocol 2 for such content.
INSTRUCTIONS = {
    *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINUNICODE", "BINSTRING", "SHORT_BINSTRING"),
}


DEEPEST = 200
_GROWING = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")  # what they put into


class Refused(ValueError):
    """The pickle holds something that such a file does not need."""

    def __str__(self) -> str:
        """Say that it was found and not run."""
        return f"it holds {super().__str__()}"


class Array:
    """Stands in for an array of bytes while it is unpickled."""

    def __init__(self, *_: object) -> None:
        """Ignore the placeholder's type and shape: the state brings the real ones."""
        self.shape: tuple[int, ...] = ()
        self.content = b""

    def __setstate__(self, state: Any) -> None:
        """Take the shape and the bytes; refuse every element type but uint8."""
        _, shape, kind, fortran, content = state
        if not isinstance(kind, Kind) or kind.name not in ("u1", b"u1"):
            raise Refused("an array that is not of type uint8")
        if fortran or not isinstance(content, bytes) or not all(type(n) is int for n in shape):
            raise Refused("an array that is not laid out row by row in bytes")
        self.shape, self.content = tuple(shape), content

    def tensor(self) -> Tensor:
        """Return the array as a tensor."""
        return torch.frombuffer(bytearray(self.content), dtype=torch.uint8).view(self.shape)


class Kind:
    """Stands in for an array's element type."""

    def __init__(self, name: object, *_: object) -> None:
        """Keep the type's short name."""
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and alignment: bytes have none."""


class Encoded:
    """Stands in for the function with which Python 3 writes bytes at protocol 2."""

    def __new__(cls, text: object, encoding: object) -> bytes:
        """Return the bytes."""
        if not isinstance(text, str) or encoding != "latin1":
            raise Refused(f"an encoding {encoding!r}")
        return text.encode("latin1")

    def __setstate__(self, state: object) -> None:
        """Never called; without it a pickle could set attributes of this class."""


STAND_INS = {
    "numpy.core.multiarray._reconstruct": Array,
    "numpy._core.multiarray._reconstruct": Array,
    "numpy.ndarray": Array,
    "numpy.dtype": Kind,
    "_codecs.encode": Encoded,
}


class _Unpickler(pickle.Unpickler):
    """Knows the stand-ins and no other name."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in STAND_INS:
            raise Refused(f"the name {name}, which could run code")
        return STAND_INS[name]


def load_pickle(content: bytes) -> dict[bytes, Any]:
    """Return the dictionary in a pickle; raise :class:`Refused` at anything unneeded."""
    _check_instructions(content)
    if nesting(content) > DEEPEST:
        raise Refused(f"objects that are nested more than {DEEPEST} deep")
    found = _Unpickler(io.BytesIO(content), fix_imports=False, encoding="bytes").load()
    if not isinstance(found, dict):
        raise Refused(f"a {type(found).__name__} where a dictionary is needed")
    return found


def nesting(content: bytes) -> int:
    """How deeply the objects of a pickle are nested, found without making them.

    Python takes the hash of nested tuples by recursion without an end, down to a crash.
    """
    stack: list[int | None] = []  # depths; None is a mark
    memo: dict[Any, int] = {}
    deepest = 0
    for instruction, argument, _ in pickletools.genops(content):
        name, before = instruction.name, [kind.name for kind in instruction.stack_before]
        if "PUT" in name or name == "MEMOIZE":
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1] or 0
            continue
        if "GET" in name:
            stack.append(memo[argument])
            continue
        if name == "MARK":
            stack.append(None)
            continue
        inside = []
        if "mark" in before:
            while (depth := stack.pop()) is not None:
                inside.append(depth)
            before = before[: before.index("mark")]
        inside += [stack.pop() or 0 for _ in before]
        grown = inside.pop() if name in _GROWING else 0
        depth = max(grown, 1 + max(inside, default=0))
        deepest = max(deepest, depth)
        stack += [depth for _ in instruction.stack_after]
    return deepest


def _check_instructions(content: bytes) -> None:
    for instruction, argument, _ in pickletools.genops(content):
        name = instruction.name
        if name in ("FRAME", "MEMOIZE"):
            raise Refused(
                "a pickle of protocol 4 or newer, where the official files have protocol 2; "
                "write it again with pickle.dump(content, file, protocol=2)"
            )
        if name not in INSTRUCTIONS:
            raise Refused(f"the instruction {name}")
        # The memo is an array: a single huge index would take all the memory.
        if name == "LONG_BINPUT" and int(argument or 0) > len(content):
            raise Refused(f"a memo of {argument} entries")
        if name == "GLOBAL" and str(argument).replace(" ", ".") not in STAND_INS:
            raise Refused(f"the name {str(argument).replace(' ', '.')}, which could run code")
