"""Builds the errors of this room. An error about a file names it, and what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from innerloop.errors import InnerLoopError, four_part

COMPLETE = "the path of a complete copy, laid out as the dataset's own"


def refusal(wrote: str, needed: str, why: str, write: str) -> InnerLoopError:
    """Return an error of four parts."""
    return InnerLoopError(four_part(wrote, needed, why, write))


def unusable_file(
    path: Path | str, problem: str, expected: str, write: str = COMPLETE
) -> InnerLoopError:
    """Return the error for a file that cannot be used."""
    why = "images are read only from files that are complete and laid out as the dataset's own."
    return refusal(f"{path}: {problem}.", f"{expected}.", why, f"{write}.")


@contextmanager
def reading(path: Path | str, expected: str) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into one clear error.

    A damaged file can make the archive and image libraries raise nearly anything.
    """
    try:
        yield
    except (InnerLoopError, ImportError):
        raise
    except Exception as error:
        problem = f"it cannot be read ({str(error) or type(error).__name__})"
        raise unusable_file(path, problem, expected) from error
