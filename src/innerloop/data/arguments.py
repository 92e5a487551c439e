"""Arguments of the readers: integers of any library, and the place of a dataset."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from innerloop.data.refusals import refusal

SEEDS = (-(2**63), 2**64 - 1)  # the range of torch's generators


def check_integer(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Return an integer of Python, NumPy or torch in a range as an int; refuse anything else."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise refusal(
            f"You gave {name}={value!r}.",
            f"a whole number, {bounds}.",
            "a fraction, a string or a number outside that range has no meaning here.",
            f"for example {name}=5.",
        )
    return number


def data_root(root: Path | str | None) -> Path:
    """Return the given folder or file, or ``$INNERLOOP_DATA``."""
    named = root if root is not None else os.environ.get("INNERLOOP_DATA")
    if not named:
        raise refusal(
            "You named no folder with data.",
            "the folder that holds the dataset's archives, or their unpacked folders.",
            "only 'glyphs' comes with the package.",
            "root=..., or --data, or set INNERLOOP_DATA.",
        )
    return Path(named).expanduser()


def find_file(
    root: Path, folders: Iterable[str], names: Iterable[str], expected: str, write: str
) -> Path:
    """Return the first path ``root/folder/name`` that exists."""
    candidates = [Path(folder, name) for folder in folders for name in names]
    for path in candidates:
        if (root / path).exists():
            return root / path
    raise refusal(
        f"{root} has none of {', '.join(map(str, candidates))}.",
        f"{expected}.",
        "these are the names and places of the dataset's own files.",
        f"{write}.",
    )
