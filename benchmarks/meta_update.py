"""One meta-update as in the paper's learning-rate experiment: DenseNet-BC(k=12, depth=100), 15
inner steps, batch 16, ten validation batches, 299 learned rates. Memory and time of innerloop and
of `higher`, each measured in processes of its own; gradients are compared first.

Works from any Python: where a package is missing, it makes an environment of its own first
(`setup_peers.py`) and runs itself there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import setup_peers

if TYPE_CHECKING:
    from memory_report import Target
    from meta_update_point import Size

_HERE = Path(__file__).resolve().parent
_TOLERANCE = 1e-8
_MEMORY, _TIME = 0.5, 1.0  # targets, of higher
_HEADROOM = 0.8  # of the memory that is available
_DISAGREEMENT = 1  # exit code; a missed target is a result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sides", default="Remat", help="of innerloop, as Remat,Remat(3),Tape")
    parser.add_argument("--steps", type=int, default=15, help="inner steps (default: 15)")
    parser.add_argument("--rounds", type=int, default=3, help="of timing (default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: 2)")
    parser.add_argument("--out", type=Path, default=_HERE / "results", help="benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    return parser.parse_args()


def _compare(sides: list[str], size: Size) -> None:
    """Every side must give the same gradient, in float64, before anything is measured."""
    import torch

    import agreement
    import meta_update_point
    from workloads import Case

    small = size._replace(steps=2, batch=4, val_batches=2)
    cases = {}
    for side in [*sides, "higher"]:
        run = meta_update_point.build(side, small, torch.float64).run
        cases[side] = Case(run, lambda run=run: {"rates": [run()]})
    difference = agreement.check("meta-update", cases, _TOLERANCE)
    print(f"same gradients: {difference:.1e} relative at 2 steps, batch 4\n", flush=True)


def _measure(side: str, size: Size, threads: int, malloc: dict[str, str]) -> dict[str, Any]:
    """One number from a new process, or the reason why there is none."""
    import fresh

    limit = int(_HEADROOM * fresh.available())
    how = ["--threads", str(threads), "--limit", str(limit)]
    command = [sys.executable, str(_HERE / "meta_update_point.py"), side, *map(str, size), *how]
    done = subprocess.run(command, env=fresh.environment(malloc), capture_output=True, text=True)
    if done.returncode == 0:
        found = json.loads(done.stdout.splitlines()[-1])
    else:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        found = {"failed": lines[-1][:120]}
    # At once: a long run that is stopped has not been for nothing.
    print(f"{side:10} J = {size.steps:<3} {found}", flush=True)
    return found


def _memory(side: str, size: Size, threads: int) -> dict[str, Any]:
    """Extra peak memory; where it would not fit, continued from fewer steps along a line."""
    import fresh

    few = [size._replace(steps=n) for n in (1, 2)]
    known = [_measure(side, s, threads, fresh.OWN_MAPPINGS) for s in few]
    if failed := [k for k in known if "failed" in k]:
        return failed[0]
    low, high = (k["extra"] for k in known)
    predicted = high + (high - low) * (size.steps - 2)
    if predicted > _HEADROOM * fresh.available():
        return {"extra": predicted, "predicted": True}
    return _measure(side, size, threads, fresh.OWN_MAPPINGS) | {"predicted": False}


def _fitting(size: Size, memory: dict[str, Any]) -> Size:
    """The same with as many steps as fit for every side."""
    import fresh

    most = max(m["extra"] for m in memory.values())
    share = min(1.0, 0.5 * fresh.available() / most)
    return size._replace(steps=max(1, int(share * size.steps)))


def _rounds(sides: list[str], size: Size, rounds: int, threads: int) -> dict[str, list[Any]]:
    import fresh

    found: dict[str, list[Any]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            found[side].append(_measure(side, size, threads, fresh.DEFAULTS))
    return found


def _targets(
    side: str, memory: dict[str, Any], times: dict[str, list[Any]], steps: int
) -> list[Target]:
    import timing
    from memory_report import Target

    note = "higher's is extrapolated from 1 and 2 steps" if memory["higher"]["predicted"] else ""
    ratio = memory[side]["extra"] / memory["higher"]["extra"]
    found = [Target(f"memory, {side} / higher", ratio, _MEMORY, detail=note)]
    pairs = zip(times[side], times["higher"], strict=True)
    both = [pair for pair in pairs if not any("failed" in one for one in pair)]
    if not both:
        print(f"{side}: no round in which both could be timed; no ratio of times")
        return found
    # In the same processes as the times: what either keeps of freed memory is in it.
    kept = statistics.median(ours["extra"] / theirs["extra"] for ours, theirs in both)
    text = f"memory of the timed processes, {side} / higher"
    found.append(Target(text, kept, _MEMORY, detail=f"J = {steps}"))
    for what in ("seconds", "processor_seconds"):
        ours, theirs = ([pair[k][what] for pair in both] for k in range(2))
        spread = timing.ratio(ours, theirs)
        note = f"J = {steps}, quartiles {spread.low:.3f}-{spread.high:.3f}"
        text = f"{what.replace('_', ' ')}, {side} / higher"
        found.append(Target(text, spread.median, _TIME, detail=note))
    return found


def _report(args: argparse.Namespace, sides: list[str], size: Size) -> None:
    import memory_report
    import report

    about = report.about(args.threads)
    print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
    _compare(sides, size)
    memory: dict[str, Any] = {}
    for side in [*sides, "higher"]:
        memory[side] = _memory(side, size, args.threads)
        if "failed" in memory[side]:
            sys.exit(f"error: {side} could not be measured: {memory[side]['failed']}")
    fitting = _fitting(size, memory)
    times = _rounds([*sides, "higher"], fitting, args.rounds, args.threads)
    targets = [t for side in sides for t in _targets(side, memory, times, fitting.steps)]
    print("\n# targets", *map(memory_report.target_line, targets), sep="\n")
    content = about | {"size": size._asdict(), "memory": memory, "times": times}
    content |= {"timed_steps": fitting.steps}
    content["targets"] = [t._asdict() | {"verdict": t.verdict} for t in targets]
    path = args.out / f"meta-update-{str(about['time']).replace(':', '').partition('+')[0]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"\n{path}")


def main() -> None:
    args = _arguments()
    if not sys.platform.startswith("linux"):
        sys.exit("benchmarks/meta_update.py reads peak memory from /proc, which only Linux has.")
    setup_peers.ensure(("torch", "higher", "innerloop"))
    warnings.filterwarnings("ignore", module="higher")
    import torch

    from agreement import DisagreementError
    from meta_update_point import Size

    torch.set_num_threads(args.threads)
    size = Size(3, 2, 2, 10) if args.quick else Size(steps=args.steps)
    try:
        _report(args, args.sides.split(","), size)
    except DisagreementError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_DISAGREEMENT)


if __name__ == "__main__":
    main()
