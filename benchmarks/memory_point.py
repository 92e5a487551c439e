"""Measure one meta-step in this process, which must be new: its extra peak memory and its time.

`memory.py` starts this once for every number; the result is one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _status(field: str) -> int:
    """Bytes, from /proc/self/status: `VmRSS` is what is resident now, `VmHWM` its highest value."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def settle() -> int:
    """Give free memory back to the system and forget the peak so far. Returns what is resident."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # Where this is forbidden the peak of the warm-up counts too. That was one step of the same
    # kind, which needs no more than many do.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def measured(run: Callable[[], object]) -> dict[str, float]:
    """Extra peak memory in bytes, and seconds."""
    before = settle()
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    return {"extra": _status("VmHWM") - before, "seconds": seconds}


def _choice(strategy: Any) -> dict[str, Any] | None:
    """What `Auto` forecast and chose; None for other strategies."""
    forecast = getattr(strategy, "forecast", None)
    if forecast is None:
        return None
    row = next(row for row in forecast.rows if row.strategy == forecast.chosen)
    return {
        "strategy": str(row.strategy),
        "forecast": row.peak_bytes,
        "budget": forecast.budget,
        "table": str(forecast),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problem")
    parser.add_argument("side")
    parser.add_argument("steps", type=int)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--limit", type=int, required=True, help="bytes of data, then it fails")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    resource.setrlimit(resource.RLIMIT_DATA, (args.limit, args.limit))
    warnings.simplefilter("ignore")
    import torch

    import unrolls

    torch.set_num_threads(args.threads)
    unrolls.build(args.problem, args.side).run(1)
    run, model, strategy = unrolls.build(args.problem, args.side)
    result = measured(lambda: run(args.steps))
    parameters = sum(p.nbytes for p in model.parameters())
    print(json.dumps({**result, "parameters": parameters, "auto": _choice(strategy)}))


if __name__ == "__main__":
    main()
