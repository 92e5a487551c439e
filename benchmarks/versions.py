"""Times rows of the comparison with peers for this checkout and another one, in one run.

    python benchmarks/versions.py ../older --only c,d,e,f

Both run in processes of their own, in turn. Printed is the time of this checkout divided by that of
the other: the median over the rounds and the quartiles. Versions before 0.3 kept freed memory by
themselves; compare with them at equal settings of malloc (docs/fast.md, "Memory on a CPU").
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import peer_data
from peer_cases import CASES, Case

HERE = Path(__file__).parent
LIMIT = 20 * 2**30  # bytes


class Side:
    """A process that computes meta-steps with the sources of one checkout."""

    def __init__(self, checkout: Path, way: str, threads: int) -> None:
        paths = [str(checkout.resolve() / "src"), str(HERE)]
        command = [sys.executable, str(HERE / "peer_worker.py"), "innerloop", way]
        self.process = subprocess.Popen(
            [*command, "--threads", str(threads), "--limit", str(LIMIT)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise SystemExit(answer["error"])
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(case: Case, way: str, checkouts: list[Path], rounds: int, threads: int) -> str:
    """One line: the ratio of the two checkouts."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        peer_data.write(case, data)
        sides = [Side(checkout, way, threads) for checkout in checkouts]
        for side in sides:
            described = dataclasses.asdict(case)
            side.ask(do="prepare", case=described, data=str(data), dtype="float32")
            side.ask(do="first")
        ratios, times = [], []
        for _ in range(rounds):
            ours, theirs = (side.ask(do="time", calls=1, large=False)["seconds"] for side in sides)
            ratios.append(ours / theirs)
            times.append(ours)
        for side in sides:
            side.close()
    low, middle, high = statistics.quantiles(ratios, n=4)
    seconds = statistics.median(times)
    return f"{case.name}  {way:<16} {middle:5.2f} x ({low:.2f} to {high:.2f}), {seconds:.3f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--only", default="c,d,e,f", help="names of rows")
    parser.add_argument("--ways", default="loop,vmap,threads,loop Remat")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    checkouts = [HERE.parent, args.other]
    for case in CASES:
        for way in args.ways.split(",") if case.name in args.only.split(",") else ():
            print(compare(case, way, checkouts, args.rounds, args.threads), flush=True)


if __name__ == "__main__":
    main()
