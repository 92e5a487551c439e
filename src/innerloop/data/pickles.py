"""Reads the pickles of CIFAR without running code in them.

A pickle is a program that may call anything by name. Only the names that stand for an array in
these files are known here. They lead to stand-ins that record their arguments: numpy's own
constructors trust the pickled state, and can be made to use raw bytes as pointers.
"""

from __future__ import annotations

import codecs
import io
import pickle
import pickletools
from typing import Any

DEEPEST = 200
_GROWING = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")  # change an object


class Record:
    """Stands in for an array or its element type."""

    def __init__(self, *arguments: object) -> None:
        """Record the arguments of the constructor."""
        self.arguments = arguments
        self.state: Any = ()

    def __setstate__(self, state: object) -> None:
        """Record the state."""
        self.state = state


KNOWN = {
    "numpy.core.multiarray._reconstruct": Record,
    "numpy._core.multiarray._reconstruct": Record,
    "numpy.ndarray": Record,
    "numpy.dtype": Record,
    "_codecs.encode": codecs.encode,  # how Python 3 writes bytes at protocol 2
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in KNOWN:
            raise pickle.UnpicklingError(f"it holds the name {name}, which could run code")
        return KNOWN[name]


def load_pickle(content: bytes) -> dict[bytes, Any]:
    """Return the dictionary in a pickle. Arrays are :class:`Record`, strings are bytes."""
    if nesting(content) > DEEPEST:
        raise pickle.UnpicklingError(f"it holds objects nested more than {DEEPEST} deep")
    found = _Unpickler(io.BytesIO(content), fix_imports=False, encoding="bytes").load()
    if not isinstance(found, dict):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__}, not a dictionary")
    return found


def nesting(content: bytes) -> int:
    """Return how deeply the objects of a pickle are nested, without building them.

    Python hashes nested tuples by recursion without a limit, and crashes.
    """
    stack: list[int | None] = []  # depths; None is a mark
    memo: dict[Any, int] = {}
    deepest = 0
    for instruction, argument, _ in pickletools.genops(content):
        name = instruction.name
        if "PUT" in name or name == "MEMOIZE":
            index = len(memo) if name == "MEMOIZE" else int(argument or 0)
            if index > len(content):  # the unpickler would fill the memory with an empty memo
                raise pickle.UnpicklingError(f"it holds a memo of {index} entries")
            memo[index] = stack[-1] or 0
        elif "GET" in name:
            stack.append(memo[argument])
        elif name == "MARK":
            stack.append(None)
        else:
            operands = _pop_operands(stack, [kind.name for kind in instruction.stack_before])
            grown = operands.pop() if name in _GROWING else 0
            depth = max(grown, 1 + max(operands, default=0))
            deepest = max(deepest, depth)
            stack += [depth for _ in instruction.stack_after]
    return deepest


def _pop_operands(stack: list[int | None], kinds: list[str]) -> list[int]:
    """Remove the depths of an instruction's operands from the stack, the topmost first."""
    operands = []
    if "mark" in kinds:
        while (depth := stack.pop()) is not None:
            operands.append(depth)
        kinds = kinds[: kinds.index("mark")]
    return operands + [stack.pop() or 0 for _ in kinds]
