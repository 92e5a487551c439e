"""One meta-step by innerloop and by its peers: the same weights, the same data, the same gradient,
then time and memory. Prints one table and writes it, with all numbers and a figure.

Works from any Python: it makes the environments that it needs first (`setup_peers.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import peer_cases
import setup_peers
from peer_cases import GROWTH, SYSTEMS, Case

if TYPE_CHECKING:
    from peer_run import Plan, Result

_RESULTS = Path(__file__).resolve().parent / "results"

# Exit code. A missed target, or a peer that fails, is a result: the code stays 0.
_DISAGREEMENT = 1


def _arguments() -> argparse.Namespace:
    names = [case.name for case in peer_cases.CASES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="a,c", help=f"of {', '.join(names)} and {GROWTH}")
    parser.add_argument("--systems", metavar="A,B", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--rounds", type=int, help="default: as many as a minute allows, 5 to 25")
    parser.add_argument("--threads", type=int, default=2, help="default: 2")
    parser.add_argument("--limit", type=float, default=240, help="seconds per call (default: 240)")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="default: benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    args = parser.parse_args()
    # d, e and f are the code of c with other sizes, and take long to compile at any.
    usual = [n for n in names if not (args.quick and n in "def")]
    args.only = args.only.split(",") if args.only else [*usual, GROWTH]
    args.systems = tuple(args.systems.split(",")) if args.systems else SYSTEMS
    for given, known in ((args.only, [*names, GROWTH]), (args.systems, SYSTEMS)):
        if unknown := set(given) - set(known):
            parser.error(f"no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return args


def _cases(args: argparse.Namespace) -> list[Case]:
    chosen = [case for case in peer_cases.CASES if case.name in args.only]
    if args.quick:
        chosen = [peer_cases.tiny(case) for case in chosen]
    if GROWTH in args.only:
        chosen += peer_cases.growth(args.quick)
    return chosen


def _pythons(systems: tuple[str, ...]) -> dict[str, Path | str]:
    """A Python for each system. One that cannot be had is no reason to measure nothing."""
    own = {"torchopt": setup_peers.TORCHOPT, "jax": setup_peers.JAX}
    found: dict[str, Path | str] = dict.fromkeys(SYSTEMS, Path(sys.executable))
    for system, environment in own.items():
        if system in systems:
            try:
                found[system] = setup_peers.create(environment)
            except setup_peers.SetupError as error:
                print(f"warning: {error}", file=sys.stderr)
                found[system] = "not installed"
    return found


def _measure(plan: Plan, case: Case, systems: tuple[str, ...]) -> list[Result]:
    """Gradients first, then time and memory."""
    import peer_data
    import peer_report
    import peer_run

    peer_data.write(case, plan.folder / f"{case.name}.npz")
    results = []
    for result in peer_run.compare(plan, case, systems):
        print(peer_report.agreement_line(result), flush=True)
        results.append(result)
    results = [peer_run.weigh(plan, case, r) for r in peer_run.time(plan, case, results)]
    print(f"\n{peer_report.details(case, results)}\n", flush=True)
    return results


def main() -> None:
    args = _arguments()
    setup_peers.ensure(("torch", "higher", "matplotlib", "numpy", "innerloop"))
    import peer_report
    import report
    from peer_run import Plan

    cases, pythons = _cases(args), _pythons(args.systems)
    about = report.about(args.threads)
    path = args.out / f"peers-{str(about['time']).replace(':', '').partition('+')[0]}"
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(pythons, Path(folder), args.threads, args.limit, args.rounds)
        if args.quick:
            plan = dataclasses.replace(plan, rounds=2, kept={})
        results: list[Result] = []
        for case in cases:
            results += _measure(plan, case, args.systems)
            about["versions"] = plan.versions
            # After every case: a long run that is stopped has not been for nothing.
            written = peer_report.write(path, about, cases, results)
        for worker in (plan.kept or {}).values():
            worker.close()
    print(f"\n{peer_report.summary(cases, results)}\n")
    print("\n".join(map(os.fspath, written)))
    wrong = [r for r in results if r.system == "innerloop" and r.differences and not r.agrees]
    if wrong:
        print(f"error: {len(wrong)} ways of innerloop have another gradient", file=sys.stderr)
        sys.exit(_DISAGREEMENT)


if __name__ == "__main__":
    main()
