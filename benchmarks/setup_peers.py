"""An environment in which innerloop and its predecessor can be imported side by side."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE / ".venv"
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")

# torch goes first and alone, so that no dependency of the others can choose its version.
_INSTALLS = (["torch==2.13.0"], ["higher==0.2.1"], ["matplotlib"], ["-e", str(HERE.parent)])
_PROBE = "import torch, higher, matplotlib, innerloop; innerloop.InnerLoop"

_SETUP_FAILED = 3  # exit code


class SetupError(Exception):
    """The environment of the benchmarks could not be made."""


def _works() -> bool:
    if not PYTHON.exists():
        return False
    probe = subprocess.run([PYTHON, "-W", "ignore", "-c", _PROBE], capture_output=True)
    return probe.returncode == 0


def create() -> None:
    """Make `benchmarks/.venv` and install what is compared, unless it is there."""
    if _works():
        return
    print(f"Installing torch, higher and others into {ENVIRONMENT} (once) ...", flush=True)
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    for what in _INSTALLS:
        command = [str(PYTHON), "-m", "pip", "install", "--quiet", *what]
        if subprocess.run(command).returncode != 0:
            raise SetupError(
                f"`{' '.join(command)}` failed (see pip's message above). The benchmarks compare "
                f"two packages in one interpreter, so both must be installable here. Make pip "
                f"able to install {what[-1]}, or run the benchmarks with a Python that can "
                f"already import torch, higher, matplotlib and innerloop."
            )
    if not _works():
        raise SetupError(
            f"Everything was installed into {ENVIRONMENT}, but `{_PROBE}` fails there. Run "
            f'{PYTHON} -c "{_PROBE}" to see why.'
        )


def ensure(needed: tuple[str, ...]) -> None:
    """If this Python lacks a package, replace this process by one whose Python has them all."""
    if all(map(importlib.util.find_spec, needed)):
        return
    try:
        create()
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_SETUP_FAILED)
    sys.stdout.flush()
    os.execv(PYTHON, [str(PYTHON), *sys.argv])


if __name__ == "__main__":
    try:
        create()
    except SetupError as error:
        sys.exit(str(error))
