"""The command line: ``innerloop COMMAND``, the experiments."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from innerloop.experiments.framework.allocator import keep_freed_memory
from innerloop.experiments.framework.settings import nearest

COMMANDS = {
    "maml": "few-shot classification by MAML++",
    "meta-lr": "learning rates learned while training goes on",
    "hyperopt": "hyperparameters by gradient or at random",
    "maml-rl": "policies that adapt to goals and physics",
    "learned-optimizer": "learned optimizers against tuned ones",
    "learned-loss": "learns a loss that trains networks in few steps",
    "estimate": "metrics without a gradient, and a proxy",
    "sweep": "many runs of maml: the paper's grid, or parts",
    "report": "tables and a page of the results of runs",
    "data": "fetch datasets",
    "sine": "MAML on sines, a first example",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command with its arguments."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: innerloop COMMAND ... (innerloop COMMAND --help says more)\n")
        for name, about in COMMANDS.items():
            print(f"  {name:{width}}  {about}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f" Did you mean {near}?" if near else ""
        print(
            f"innerloop: there is no command {name!r}.{hint} See innerloop --help.", file=sys.stderr
        )
        return 2
    if argv is None:  # otherwise this process belongs to the caller
        keep_freed_memory()
    try:
        command = importlib.import_module(f"innerloop.experiments.{name.replace('-', '_')}")
        return command.main(rest) or 0
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] == "innerloop":
            raise
        print(
            f"innerloop {name} needs the package {missing.name!r}, which is not installed. "
            "Install it with: pip install '.[experiments]' in a clone",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
