"""Memory and time of one meta-step as inner steps are added: innerloop's strategies and `higher`.

Every point is measured in processes of its own. Works from any Python: where a package is missing,
it makes an environment of its own first (`setup_peers.py`) and runs itself there.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import setup_peers

if TYPE_CHECKING:
    from fresh import Limits, Point
    from memory_report import Ratio, Target
    from timing import Times

_RESULTS = Path(__file__).resolve().parent / "results"
_TOLERANCE, _COMPARED_STEPS = 1e-10, 3
_BUDGETS = ("1GB", "2GB", "8GB")

# Exit code. A missed target is a result, not a failure: it is printed, and the code stays 0.
_DISAGREEMENT = 1


class _Timed(NamedTuple):
    """A target for time: `side` may take `limit` times as long as `reference`.

    `apart` is the number of rounds in which every run has a new process, once with glibc's defaults
    and once with `fresh.KEPT`; `together` that of rounds in one process, where memory has been
    touched before; 0: not measured so.
    """

    problem: str
    side: str
    reference: str
    steps: int
    limit: float
    apart: int
    together: int


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is measured, on which networks."""

    conv: str = "conv"
    gpt: str = "gpt"
    steps: tuple[int, ...] = (1, 2, 5, 8, 10, 20, 50, 100, 200)
    sides: tuple[str, ...] = ()  # none: all
    auto_steps: int = 100
    timed: tuple[_Timed, ...] = (
        _Timed("conv", "Remat", "Tape", 10, 1.25, apart=9, together=15),
        _Timed("gpt", "Remat", "higher", 20, 1.0, apart=5, together=5),
        _Timed("gpt", "Remat compiled", "higher", 20, 1.0, apart=3, together=0),
    )


_QUICK = _Plan(
    conv="tiny-conv",
    gpt="tiny-gpt",
    steps=(1, 2),
    auto_steps=5,
    timed=(
        _Timed("tiny-conv", "Remat", "Tape", 3, 1.25, apart=1, together=3),
        _Timed("tiny-gpt", "Remat", "higher", 3, 1.0, apart=1, together=3),
        _Timed("tiny-gpt", "Remat compiled", "higher", 3, 1.0, apart=1, together=0),
    ),
)


class _Found(NamedTuple):
    points: list[Point]
    ratios: list[Ratio]
    targets: list[Target]


# --- the parts --------------------------------------------------------------------------------


def _progress(point: Point) -> None:
    memory = "" if point.extra is None else f"{point.extra / 1e6:8.0f} MB"
    time = "" if point.seconds is None else f"{point.seconds:8.2f} s"
    name = f"{point.problem:10}{point.side:12} J = {point.steps:<4}"
    print(f"{name}{memory}{time}  {point.note}".rstrip(), flush=True)


def _sweep(problem: str, plan: _Plan, limits: Limits) -> _Found:
    import fresh
    import memory_report
    import unrolls

    points = []
    for side in plan.sides or memory_report.SIDES:
        for point in fresh.sweep(problem, side, plan.steps, limits):
            _progress(point)
            points.append(point)
    print(f"\n{memory_report.tables(unrolls.PROBLEMS[problem].about, points)}", flush=True)
    return _Found(points, [], memory_report.memory_targets(problem, points))


def _conv(plan: _Plan, limits: Limits) -> _Found:
    return _sweep(plan.conv, plan, limits)


def _gpt(plan: _Plan, limits: Limits) -> _Found:
    return _sweep(plan.gpt, plan, limits)


def _auto(plan: _Plan, limits: Limits) -> _Found:
    import fresh
    import memory_report

    found = _Found([], [], [])
    for budget in _BUDGETS:
        point = fresh.measure(plan.gpt, f"Auto({budget})", plan.auto_steps, limits)
        _progress(point)
        if point.auto is not None:
            print(f"{point.auto['table']}\n")
        found.points.append(point)
        found.targets.append(memory_report.auto_target(point))
    return found


def _ratios(plan: _Plan, limits: Limits) -> _Found:
    """Times in rounds, so that both sides meet the same machine in every one."""
    import memory_report

    found = _Found([], [], [])
    for timed in plan.timed:
        if plan.sides and timed.side not in plan.sides:
            continue
        for where, times in _times(timed, limits):
            ours, theirs = times[timed.side], times[timed.reference]
            row = memory_report.Ratio.of(timed, where, ours, theirs)
            print(memory_report.ratio_line(row), flush=True)
            found.ratios.append(row)
            found.targets.append(memory_report.ratio_target(row, timed.limit))
    return found


def _times(timed: _Timed, limits: Limits) -> Iterator[tuple[str, Times]]:
    import fresh
    import timing
    import unrolls

    sides = (timed.side, timed.reference)
    where = "each in its own process"
    for settings, malloc in (("", fresh.DEFAULTS), (", freed memory kept", fresh.KEPT)):
        clocks = {
            side: partial(fresh.seconds, timed.problem, side, timed.steps, limits, malloc)
            for side in sides
        }
        counts = dict.fromkeys(sides, 1)
        yield f"{where}{settings}", timing.rounds(clocks, counts, timed.apart)
    if timed.together:
        runs = {side: unrolls.case(timed.problem, side, timed.steps).run for side in sides}
        yield "in one process", timing.interleaved(runs, timed.together)


class _Part(NamedTuple):
    problems: tuple[str, ...]  # fields of the plan
    run: Callable[[_Plan, Limits], _Found]


_PARTS = {
    "conv": _Part(("conv",), _conv),
    "gpt": _Part(("gpt",), _gpt),
    "auto": _Part(("gpt",), _auto),
    "ratios": _Part(("conv", "gpt"), _ratios),
}


# --- the command ------------------------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=_PARTS, help="one part (default: all)")
    parser.add_argument("--steps", metavar="J,J,...", help="numbers of inner steps, as 1,2,5")
    parser.add_argument("--sides", metavar="A,B,...", help="as higher,Remat (auto has its own)")
    parser.add_argument("--max-seconds", type=float, default=1800, help="per point (default: 1800)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: 2)")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="default: benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="tiny networks: does it run at all?")
    return parser.parse_args()


def _plan(args: argparse.Namespace) -> _Plan:
    plan = _QUICK if args.quick else _Plan()
    if args.sides is not None:
        plan = dataclasses.replace(plan, sides=tuple(args.sides.split(",")))
    if args.steps is None:
        return plan
    return dataclasses.replace(plan, steps=tuple(sorted(map(int, args.steps.split(",")))))


def _compare(plan: _Plan, names: list[str]) -> None:
    """Every side must give the same gradient, in float64, before anything is measured."""
    import torch

    import agreement
    import memory_report
    import unrolls

    for field in dict.fromkeys(field for name in names for field in _PARTS[name].problems):
        problem = getattr(plan, field)
        timed = [t.side for t in plan.timed if t.problem == problem and "ratios" in names]
        cases = {
            side: unrolls.case(problem, side, _COMPARED_STEPS, torch.float64)
            for side in dict.fromkeys([*reversed(memory_report.SIDES), *timed])
        }
        difference = agreement.check(problem, cases, _TOLERANCE)
        print(
            f"same gradients: {problem:10} {difference:.1e} relative at J = {_COMPARED_STEPS}",
            flush=True,
        )


def _measure(args: argparse.Namespace, about: dict[str, object], path: Path) -> _Found:
    import memory_report
    from fresh import Limits

    names = [args.only] if args.only else [*_PARTS]
    plan, limits = _plan(args), Limits(args.max_seconds, args.threads)
    _compare(plan, names)
    found = _Found([], [], [])
    for name in names:
        print(f"\n# {name}", flush=True)
        for known, new in zip(found, _PARTS[name].run(plan, limits), strict=True):
            known.extend(new)
        memory_report.write(path.with_suffix(".json"), about, *found)
    return found


def main() -> None:
    args = _arguments()
    if not sys.platform.startswith("linux"):
        sys.exit("benchmarks/memory.py reads peak memory from /proc, which only Linux has.")
    setup_peers.ensure(("torch", "higher", "matplotlib", "innerloop"))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # run.py says why
    warnings.filterwarnings("ignore", module="higher")
    import torch

    import memory_curves
    import memory_report
    import report
    from agreement import DisagreementError

    torch.set_num_threads(args.threads)
    about = report.about(args.threads)
    print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
    path = args.out / f"memory-{str(about['time']).replace(':', '').partition('+')[0]}"
    try:
        found = _measure(args, about, path)
    except DisagreementError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_DISAGREEMENT)
    promised = "targets (tiny networks: shows only that it runs)" if args.quick else "targets"
    print(f"\n# {promised}", *map(memory_report.target_line, found.targets), sep="\n")
    written = [path.with_suffix(".json"), *memory_curves.draw(path, found.points)]
    print(f"\n{', '.join(map(str, written))}")


if __name__ == "__main__":
    main()
