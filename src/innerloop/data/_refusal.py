"""One way to say that a file cannot be used: which, what is wrong, what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from innerloop.errors import InnerLoopError, four_part


def refused(path: Path | str, problem: str, expected: str, write: str) -> InnerLoopError:
    """Return the error for a file that cannot be used."""
    return InnerLoopError(
        four_part(
            f"{path}: {problem}.",
            f"{expected}.",
            "pictures come only from files that are whole and laid out as the dataset's own.",
            f"{write}.",
        )
    )


@contextmanager
def reading(path: Path | str, expected: str) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into one clear error.

    A damaged file can make the archive and picture libraries raise nearly anything.
    """
    try:
        yield
    except (InnerLoopError, ImportError):
        raise
    except Exception as error:
        what = str(error) or type(error).__name__
        raise refused(
            path,
            f"it cannot be read ({what})",
            expected,
            "the path of a whole file: copy or download it again",
        ) from error
