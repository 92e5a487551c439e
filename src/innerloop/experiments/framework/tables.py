"""Tables of text that the results of all commands share."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligns the first column to the left and the others to the right.

    >>> print(table([["", "loss"], ["SGD", "0.5"], ["Adam", "0.25"]]))
          loss
    SGD    0.5
    Adam  0.25
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if k else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def plus_minus(mean: float, spread: float | None, digits: int = 3, unit: str = "") -> str:
    """A number and its spread; one seed has none.

    >>> plus_minus(0.5, 0.25), plus_minus(50, None, digits=1, unit=" %")
    ('0.500 ± 0.250', '50.0 %')
    """
    around = "" if spread is None else f" ± {spread:.{digits}f}"
    return f"{mean:.{digits}f}{around}{unit}"
