"""Errors that a run ended with, and what they say about the graph."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from innerloop.diagnose.places import Place, user_place
from innerloop.diagnose.tracer import Call

_OUT_OF_PLACE = "the same out of place: x = x + y and not x += y, x.relu() and not x.relu_()."
_SECOND = re.compile(r"The inner loss uses (\w+)")


class Failure(NamedTuple):
    """An exception that a run ended with."""

    kind: str
    message: str
    place: Place | None
    step: int | None


def failure(error: Exception) -> Failure:
    """An exception with the user's line that led to it, and the inner step it happened in."""
    place = user_place(traceback.walk_tb(error.__traceback__))
    step = re.search(r"in inner step (\d+)", " ".join(getattr(error, "__notes__", ())))
    return Failure(type(error).__name__, str(error), place, None if step is None else int(step[1]))


def explained(found: Failure) -> tuple[str, str]:
    """What was wrong, and what to write."""
    wrong, _, rest = found.message.partition(" Needed: ")
    if rest:
        return wrong, rest.partition(" Write: ")[2]
    if _is_about_writing(found):
        return "An operation in place overwrote what the gradient needs.", _OUT_OF_PLACE
    return f"The run ended with {found.kind}.", "what the error says; see the line."


def is_about_the_graph(found: Failure) -> bool:
    """Whether an error says that a loss has no gradient, or is no tensor."""
    parts = (
        *("does not require grad", "does not depend", "as the loss", "validation loss returned"),
        "Inference tensors",
    )
    return any(part in found.message for part in parts)


def _is_about_writing(found: Failure) -> bool:
    return any(word in found.message for word in ("inplace operation", "in-place"))


def violated(found: Failure) -> str:
    """The requirement of the paper that an error names."""
    named = re.search(r"Requirement (I+[ab]?)\)", found.message)
    return "" if named is None else named[1]


def places_of(found: Failure, calls: Sequence[Call]) -> tuple[str, ...]:
    """Where the operation is called that an error is about."""
    second = _SECOND.search(found.message)
    if _is_about_writing(found):
        calls = [c for c in calls if c.op.endswith("_") and not c.op.endswith("__")]
    elif second is not None:
        op = second[1].strip("_").lower()
        named = [c for c in calls if op in c.op.lower() or c.op.strip("_") == op]
        by_line = [c for c in calls if op in c.place.code.lower()]
        calls = named or [c._replace(place=c.place._replace(module="")) for c in by_line]
    else:
        return ()
    return tuple(dict.fromkeys(str(call.place) for call in calls))[:3]
