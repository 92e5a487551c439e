"""Fetch datasets: ``innerloop data fetch omniglot --data FOLDER``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from innerloop.data import fetch
from innerloop.data.fetch import SOURCES
from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.command_line import WRONG, Parser, path
from innerloop.experiments.framework.experiment import STOPPED


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("innerloop data", description=__doc__)
    parser.add_argument("action", choices=["fetch"])
    parser.add_argument("name", choices=sorted(SOURCES))
    parser.add_argument("--data", type=path, help="where to put it (default: INNERLOOP_DATA)")
    args = parser.parse_args(argv)
    bars: dict[str, Any] = {}

    def progress(name: str, done: int, total: int | None) -> None:
        if name not in bars:
            bars[name] = tqdm(total=total, desc=name, unit="B", unit_scale=True)
        bars[name].update(done - bars[name].n)

    try:
        for file in fetch(args.name, args.data, progress=progress):
            print(file)
    except InnerLoopError as error:
        print(error, file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("Stopped. The same command downloads what is missing.", file=sys.stderr)
        return STOPPED
    finally:
        for bar in bars.values():
            bar.close()
    return 0
