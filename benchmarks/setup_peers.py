"""The environments of the benchmarks: one in which innerloop and its predecessor can be imported
side by side, and one for each peer whose dependencies should not choose theirs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).resolve().parent
_PYTHON = "Scripts/python.exe" if sys.platform == "win32" else "bin/python"
_SETUP_FAILED = 3  # exit code


class Environment(NamedTuple):
    """What is installed into a folder, in this order, and a program that shows that it works."""

    folder: Path
    installs: tuple[list[str], ...]
    probe: str

    @property
    def python(self) -> Path:
        return self.folder / _PYTHON


# torch goes first and alone, so that no dependency of the others can choose its version.
_TORCH = ["torch==2.13.0"]
MAIN = Environment(
    _HERE / ".venv",
    (_TORCH, ["higher==0.2.1"], ["matplotlib"], ["numpy"], ["-e", str(_HERE.parent)]),
    "import torch, higher, matplotlib, numpy, innerloop; innerloop.InnerLoop",
)
TORCHOPT = Environment(
    _HERE / ".venv-torchopt", (_TORCH, ["numpy"], ["torchopt"]), "import torch, torchopt, numpy"
)
JAX = Environment(_HERE / ".venv-jax", (["jax"], ["optax"]), "import jax, optax, numpy")


class SetupError(Exception):
    """An environment of the benchmarks could not be made."""


def _works(environment: Environment) -> bool:
    if not environment.python.exists():
        return False
    probe = [environment.python, "-W", "ignore", "-c", environment.probe]
    return subprocess.run(probe, capture_output=True).returncode == 0


def create(environment: Environment) -> Path:
    """The environment's Python, with everything installed; nothing is done if it is there."""
    if _works(environment):
        return environment.python
    names = ", ".join(what[-1] for what in environment.installs)
    print(f"Installing {names} into {environment.folder} (once) ...", flush=True)
    venv.create(environment.folder, with_pip=True, clear=True)
    for what in environment.installs:
        command = [str(environment.python), "-m", "pip", "install", "--quiet", *what]
        if subprocess.run(command).returncode != 0:
            raise SetupError(
                f"`{' '.join(command)}` failed (see pip's message above). Make pip able to "
                f"install {what[-1]}, or run with another Python."
            )
    if not _works(environment):
        raise SetupError(
            f"Everything was installed into {environment.folder}, but `{environment.probe}` fails "
            f'there. Run {environment.python} -c "{environment.probe}" to see why.'
        )
    return environment.python


def ensure(needed: tuple[str, ...]) -> None:
    """If this Python lacks a package, replace this process by one whose Python has them all."""
    if all(map(importlib.util.find_spec, needed)):
        return
    try:
        python = create(MAIN)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_SETUP_FAILED)
    sys.stdout.flush()
    os.execv(python, [str(python), *sys.argv])


if __name__ == "__main__":
    try:
        for one in (MAIN, TORCHOPT, JAX):
            create(one)
    except SetupError as error:
        sys.exit(str(error))
