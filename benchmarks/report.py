"""The measured times as a table for people and as JSON for programs."""

from __future__ import annotations

import datetime
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from timing import Spread, ratio, spread
from workloads import Workload


class Row(NamedTuple):
    """One side of one workload against that workload's reference."""

    workload: str
    about: str
    side: str
    reference: str
    milliseconds: Spread
    reference_milliseconds: Spread
    ratio: Spread
    target: float | None
    difference: float  # largest relative difference of the float64 results

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return "pass" if self.ratio.median <= self.target else "MISS"


def rows(workload: Workload, times: dict[str, list[float]], difference: float) -> list[Row]:
    """One row per side other than the reference; only innerloop is held to the target."""
    *others, reference = workload.sides
    in_ms = {side: spread([1e3 * t for t in times[side]]) for side in workload.sides}
    return [
        Row(
            workload.name,
            workload.about,
            side,
            reference,
            in_ms[side],
            in_ms[reference],
            ratio(times[side], times[reference]),
            workload.target if side == "innerloop" else None,
            difference,
        )
        for side in others
    ]


_HEADER = ("workload", "compared", "ms", "ms", "ratio", "quartiles", "target", "")
_WIDTHS = (18, 22, 10, 10, 7, 15, 8, 5)


def _line(cells: tuple[str, ...]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:2], _WIDTHS[:2], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[2:], _WIDTHS[2:], strict=True)]
    return " ".join(left + right).rstrip()


def header() -> str:
    title = _line(_HEADER)
    return f"{title}\n{'-' * len(_line(tuple('x' * width for width in _WIDTHS)))}"


def line(row: Row) -> str:
    """For example `maml  innerloop / higher  812.1  901.4  0.901  0.893-0.912  <= 1.00  pass`."""
    return _line(
        (
            row.workload,
            f"{row.side} / {row.reference}",
            f"{row.milliseconds.median:.3f}",
            f"{row.reference_milliseconds.median:.3f}",
            f"{row.ratio.median:.3f}",
            f"{row.ratio.low:.3f}-{row.ratio.high:.3f}",
            "" if row.target is None else f"<= {row.target:.2f}",
            row.verdict,
        )
    )


def about(threads: int) -> dict[str, object]:
    """Where and how the numbers were measured."""
    versions: dict[str, str] = {}
    for name in ("torch", "higher", "innerloop"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed: on the path"
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "versions": versions,
    }


def write(path: Path, about: dict[str, object], results: list[Row]) -> None:
    """One JSON object: where and how it was measured, then the rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [
        row._asdict()
        | {
            "milliseconds": row.milliseconds._asdict(),
            "reference_milliseconds": row.reference_milliseconds._asdict(),
            "ratio": row.ratio._asdict(),
            "verdict": row.verdict,
        }
        for row in results
    ]
    path.write_text(json.dumps(about | {"rows": entries}, indent=2) + "\n")
