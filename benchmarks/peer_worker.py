"""The process in which one system computes its meta-steps, as `peers.py` asks by lines of JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peer_cases import Case
from systems.problem import Gradients, MetaStep

_MODULES = {
    "innerloop": "by_innerloop",
    "higher": "by_higher",
    "torch": "by_torch",
    "torch.func": "by_torch",
    "torchopt": "by_torch",
    "jax": "by_jax",
}
_DISTRIBUTIONS = {"innerloop": "torch-innerloop"}
_PACKAGES = {"torch.func": ("torch",), "torch": ("torch",), "jax": ("jax", "optax")}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=_MODULES)
    parser.add_argument("way")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--limit", type=int, required=True, help="bytes of data, then it fails")
    return parser.parse_args()


def _start(system: str, threads: int, dtype: str) -> Any:
    """Fix threads and precision. Returns how arrays are made."""
    if system == "jax":
        import jax

        jax.config.update("jax_enable_x64", dtype == "float64")
        return jax.numpy.asarray
    import torch

    torch.set_num_threads(threads)
    return torch.from_numpy


class _Worker:
    """Every method answers one kind of request."""

    def __init__(self, system: str, way: str, threads: int) -> None:
        self.system, self.way, self.threads = system, way, threads
        self.step: MetaStep | None = None

    def prepare(self, case: dict[str, Any], data: str, dtype: str) -> dict[str, Any]:
        from systems.problem import load

        convert = _start(self.system, self.threads, dtype)
        problem = load(Case(**case), Path(data), dtype, convert)
        module = importlib.import_module(f"systems.{_MODULES[self.system]}")
        self.step = module.build(problem, self.way, self.system)
        packages = _PACKAGES.get(self.system, (self.system,))
        return {"versions": {name: version(_DISTRIBUTIONS.get(name, name)) for name in packages}}

    def gradient(self, path: str) -> dict[str, Any]:
        import numpy

        flat = {
            name: numpy.concatenate(
                [numpy.asarray(p).ravel() for p in (value if name == "init" else [value])]
            )
            for name, value in self._run().items()
        }
        numpy.savez(path, **flat)
        return {}

    def time(self, calls: int, large: bool) -> dict[str, Any]:
        """If processes are large, this one makes room for the others afterwards."""
        import timing
        from memory_point import settle

        if large:
            self._run()  # gets its memory back
        seconds = timing.measure(self._run, calls)
        if large:
            settle()
        return {"seconds": seconds}

    def first(self) -> dict[str, Any]:
        """The first call compiles, chooses and fills caches."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = time.perf_counter()
            self._run()
            seconds = time.perf_counter() - start
        assert self.step is not None
        remarks = [self.step.remark()]
        if self.system == "innerloop":  # what it could not do as told
            remarks += [_shortened(str(warning.message)) for warning in caught]
        return {"seconds": seconds, "remark": "; ".join(filter(None, remarks))}

    def memory(self) -> dict[str, Any]:
        from memory_point import measured

        self._run()
        return measured(self._run)

    def _run(self) -> Gradients:
        assert self.step is not None, "prepare comes first"
        return self.step.run()


def _shortened(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:200]


def main() -> None:
    args = _arguments()
    # Answers go where this process was told to write; what libraries print does not.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # XLA has a thread for each core that it may use, and no other setting that holds everywhere.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    resource.setrlimit(resource.RLIMIT_DATA, (args.limit, args.limit))
    warnings.simplefilter("ignore")
    worker = _Worker(args.system, args.way, args.threads)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:  # whatever a system raises is its result
            answer = {"error": f"{type(error).__name__}: {_shortened(str(error))}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
