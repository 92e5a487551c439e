"""Start a worker, ask it, and stop it when it takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

import fresh

_SCRIPT = Path(__file__).resolve().parent / "peer_worker.py"
_START_UP = 120  # seconds to import a library and to read the data


class Worker:
    """A process of its own."""

    def __init__(
        self,
        command: tuple[Path, str, str],
        threads: int,
        variables: dict[str, str],
        errors: Path,
    ) -> None:
        """`command`: a Python, a system and a way."""
        how = ["--threads", str(threads), "--limit", str(fresh.available())]
        self.closed = False
        self._errors = errors
        python, *what = map(str, command)
        with errors.open("w") as file:
            self._process = subprocess.Popen(
                [python, str(_SCRIPT), *what, *how],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=fresh.environment({"OMP_NUM_THREADS": str(threads)}) | variables,
                start_new_session=True,  # compilers that it starts end with it
            )

    def ask(self, do: str, timeout: float = _START_UP, **what: Any) -> dict[str, Any]:
        """The answer; FailedError if there is none, or none in time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise fresh.FailedError(self._last_words()) from None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self.close()
            raise fresh.FailedError(f"> {timeout:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise fresh.FailedError(self._last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise fresh.FailedError(answer["error"])
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        lines = self._errors.read_text().strip().splitlines() or ["no message"]
        return f"exit code {code}: {lines[-1]}"[:200]

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
