"""The folder of a run: settings, metrics, checkpoints that are never half written, the result."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.ranks import ALONE, Ranks

CONFIG, METRICS, RESULT = "config.json", "metrics.jsonl", "result.json"
_LOCK = ".lock"
_DIGEST = 32  # bytes of the checksum before a checkpoint


class Run:
    """The folder of one run."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        """Checkpoints, the newest included: one may be torn by what made the run stop."""

    @property
    def exists(self) -> bool:
        """True if a run was started here."""
        return (self.folder / CONFIG).exists()

    def check_new(self) -> None:
        """Refuses a folder that already holds a run: it is not written over."""
        if self.exists:
            raise InnerLoopError(
                f"{self.folder} holds a run already. Continue it with --resume "
                f"{shlex.quote(str(self.folder))}, or name another folder with --out."
            )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other processes out."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            held = FileLock(self.folder / _LOCK).acquire(timeout=0)
        except Timeout as error:
            raise InnerLoopError(
                f"Another process is at work on the run in {self.folder}. Wait for it, or stop "
                "it; then resume."
            ) from error
        except OSError as error:
            raise InnerLoopError(
                f"The run's folder {self.folder} cannot be written to: {error}. Name another one."
            ) from error
        with held:
            yield

    # --- settings and results -------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """The settings of the run."""
        path = self.folder / CONFIG
        try:
            found = json.loads(path.read_text())
            if not isinstance(found, dict):
                raise ValueError("it holds no settings")
        except (OSError, ValueError) as error:
            raise InnerLoopError(
                f"{self.folder} cannot be resumed: {path.name} cannot be read ({error}). Needed is "
                "the folder of a run, as --out named it."
            ) from error
        return found

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes the settings."""
        self._write_json(CONFIG, config)

    def write_metrics(self, records: list[dict[str, Any]]) -> None:
        """Writes all records: after a crash the file may have more than the checkpoint."""
        lines = "".join(json.dumps(_standard(record)) + "\n" for record in records)
        self._replace(METRICS, lines.encode())

    def write_result(self, value: Any) -> None:
        """Writes the last file: with it, a run is finished."""
        self._write_json(RESULT, _standard(value))

    def _write_json(self, name: str, value: Any) -> None:
        self._replace(name, (json.dumps(value, indent=2) + "\n").encode())

    # --- checkpoints ----------------------------------------------------------------------------

    def checkpoints(self) -> list[Path]:
        """Paths of the checkpoints, the newest first."""
        found = self.folder.glob("checkpoint*.pt")
        return sorted(found, key=lambda path: (len(path.name), path.name))

    def _checkpoint(self, age: int) -> Path:
        return self.folder / (f"checkpoint-{age}.pt" if age else "checkpoint.pt")

    def save(self, state: dict[str, Any]) -> None:
        """Saves a checkpoint with a checksum; keeps the last ``keep``."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        data = buffer.getvalue()
        before = self.checkpoints()
        for age, path in reversed(list(enumerate(before, 1))):
            if age < self.keep:
                path.replace(self._checkpoint(age))
            elif age > 1:
                path.unlink()
        self._replace(self._checkpoint(0).name, hashlib.sha256(data).digest() + data)

    def load(self, ranks: Ranks = ALONE) -> dict[str, Any] | None:
        """The newest state that is whole; ``None`` without one.

        The first process reads it for all: the others need not see the folder.
        """
        data = ranks.broadcast(self._newest)
        if data is None:
            return None
        try:
            # Not to the accelerator of the process that wrote it: every one has its own.
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # what torch raises for foreign content is not one class
            reason = str(error).partition("\n")[0]
            raise InnerLoopError(
                f"{self._checkpoint(0)} is no checkpoint of a run: {reason}. Remove the folder and "
                "start again, or name that of another run."
            ) from error

    def _newest(self) -> bytes | None:
        """The content of the newest checkpoint that is whole. Removes damaged ones after it."""
        damaged = []
        for path in self.checkpoints():
            content = path.read_bytes()
            digest, data = content[:_DIGEST], content[_DIGEST:]
            if hashlib.sha256(data).digest() == digest:
                for other in damaged:
                    print(f"{other} is damaged; the one before it is used.")
                    other.unlink()
                return data
            damaged.append(path)
        if damaged:
            raise InnerLoopError(
                f"{self.folder} cannot be resumed: no checkpoint in it is whole. Remove the folder "
                "and start again."
            )
        return None

    def _replace(self, name: str, data: bytes) -> None:
        """Writes aside, syncs, renames: at any moment the file is the old one or the new one."""
        aside = self.folder / f".{name}"
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self.folder / name)


def _standard(value: Any) -> Any:
    """Replaces infinity and NaN, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {name: _standard(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_standard(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Stop:
    """A request to stop: the first Ctrl-C asks, the second one interrupts."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, number: int, _: Any) -> None:
        """Handles a signal. A terminal that is closed may send several."""
        if self.asked and number in (signal.SIGINT, signal.SIGTERM):
            raise KeyboardInterrupt
        self.asked = True


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """Turns Ctrl-C, SIGTERM and a closed terminal into a request to stop at a checkpoint."""
    stop = Stop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup and signal.getsignal(hangup) is signal.SIG_DFL:  # nohup ignores it
        numbers.append(hangup)
    before = {}
    for number in numbers:
        with contextlib.suppress(ValueError):  # not in the main thread
            before[number] = signal.signal(number, stop.ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
