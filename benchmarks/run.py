"""Time innerloop against `higher`, in one interleaved run, and print the ratios.

Works from any Python: where torch, higher or innerloop are missing, it makes an environment of its
own first (`setup_peers.py`) and runs itself there.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import setup_peers

if TYPE_CHECKING:
    from report import Row
    from workloads import Case, Workload

_RESULTS = Path(__file__).resolve().parent / "results"

# Exit codes. A missed target is a result, not a failure: it is printed, and the code stays 0.
_DISAGREEMENT = 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="workloads whose name starts with NAME")
    parser.add_argument("--repeats", type=int, help="rounds (default: chosen per workload)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: 2)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="default: results/<time>.json")
    parser.add_argument("--profile", metavar="NAME", help="show where NAME spends its time")
    return parser.parse_args()


def _selected(prefix: str | None) -> list[Workload]:
    from workloads import WORKLOADS

    chosen = [w for w in WORKLOADS if w.name.startswith(prefix or "")]
    if not chosen:
        sys.exit(f"No workload starts with {prefix!r}. There are: {[w.name for w in WORKLOADS]}")
    return chosen


def _libraries() -> dict[str, ModuleType | None]:
    return {
        "innerloop": importlib.import_module("innerloop"),
        "higher": importlib.import_module("higher"),
        "plain": None,
    }


def _build(workload: Workload, dtype_name: str) -> dict[str, Case]:
    import torch

    libraries = _libraries()
    dtype = getattr(torch, dtype_name)
    return {side: workload.build(libraries[side], dtype) for side in workload.sides}


def _benchmark(workloads: list[Workload], repeats: int | None) -> list[Row]:
    """Compare all, then time all: a disagreement anywhere stops the run before the first time."""
    import agreement
    import report
    import timing

    differences = {}
    for workload in workloads:
        differences[workload.name] = agreement.check(workload.name, _build(workload, "float64"))
        print(f"same results: {workload.name:18} {differences[workload.name]:.1e} relative")
    print(f"\n{report.header()}", flush=True)
    results: list[Row] = []
    for workload in workloads:
        runs = {side: case.run for side, case in _build(workload, "float32").items()}
        times = timing.interleaved(runs, repeats or workload.repeats)
        new = report.rows(workload, times, differences[workload.name])
        print("\n".join(map(report.line, new)), flush=True)
        results += new
    return results


def _profile(workloads: list[Workload]) -> None:
    import profiling

    for workload in workloads:
        print(f"\n##### {workload.name}: {workload.about}")
        profiling.show({side: case.run for side, case in _build(workload, "float32").items()})


def main() -> None:
    args = _arguments()
    setup_peers.ensure(("torch", "higher", "innerloop"))
    # Read once, when torch loads its threads. By default they spin while they wait, so that on busy
    # cores each waits for one that the others keep from running: some 10 times slower, all sides.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.filterwarnings("ignore", module="higher")
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

    import report
    from agreement import DisagreementError

    torch.set_num_threads(args.threads)
    if args.profile:
        _profile(_selected(args.profile))
        return
    about = report.about(args.threads)
    print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
    try:
        results = _benchmark(_selected(args.only), args.repeats)
    except DisagreementError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_DISAGREEMENT)
    path = args.json or _RESULTS / f"{str(about['time']).replace(':', '')}.json"
    report.write(path, about, results)
    missed = sum(row.verdict == "MISS" for row in results)
    print(f"\n{missed} of {sum(row.target is not None for row in results)} targets missed. {path}")


if __name__ == "__main__":
    main()
