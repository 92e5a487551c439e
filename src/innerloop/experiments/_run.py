"""The folder of a run: settings, metrics, a checkpoint that is never half written, the result."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from innerloop.errors import InnerLoopError
from innerloop.experiments._ranks import ALONE, Ranks

CONFIG, METRICS, RESULT, CHECKPOINT = (
    "config.json",
    "metrics.jsonl",
    "result.json",
    "checkpoint.pt",
)


class Run:
    """One run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def known(self) -> bool:
        """Whether a run was started here."""
        return (self.folder / CONFIG).exists()

    def start(self, config: dict[str, Any]) -> None:
        """Make the folder. A run that is there already is not written over."""
        if self.known:
            raise InnerLoopError(
                f"{self.folder} holds a run already. Continue it with --resume {self.folder}, or "
                "name another folder with --out."
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InnerLoopError(
                f"The run's folder {self.folder} cannot be written to: {error}. Name another one "
                "with --out."
            ) from error
        self.write_json(CONFIG, config)

    def config(self) -> dict[str, Any]:
        path = self.folder / CONFIG
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InnerLoopError(
                f"{self.folder} cannot be resumed: {path.name} cannot be read ({error}). Needed is "
                "the folder of a run, as --out named it."
            ) from error
        if not isinstance(found, dict):
            raise InnerLoopError(f"{path} does not hold settings: an object of names and values.")
        return found

    def write_json(self, name: str, value: Any) -> None:
        self._replace(name, (json.dumps(value, indent=2) + "\n").encode())

    def write_metrics(self, records: list[dict[str, Any]]) -> None:
        """All records so far: after a crash there may be more in the file than was saved."""
        self._replace(METRICS, "".join(json.dumps(r) + "\n" for r in records).encode())

    def save(self, state: dict[str, Any]) -> None:
        """Keep the state with a checksum; the one before stays as long as this is not whole."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        data = buffer.getvalue()
        current, last = self.folder / CHECKPOINT, self.folder / f"last-{CHECKPOINT}"
        if current.exists():
            os.replace(current, last)
        self._replace(CHECKPOINT, hashlib.sha256(data).digest() + data)

    def load(self, ranks: Ranks = ALONE) -> dict[str, Any] | None:
        """The newest state that is whole, or ``None`` if there is none.

        The first process reads it and tells the others: they need not see the same folder.
        """
        data = ranks.told(self._newest() if ranks.first else None)
        if data is None:
            return None
        try:
            found = torch.load(io.BytesIO(data), weights_only=True)
        except Exception as error:  # what torch raises for foreign content is not one class
            raise InnerLoopError(self._foreign(str(error))) from error
        if not isinstance(found, dict):
            raise InnerLoopError(self._foreign(f"it holds a {type(found).__name__}"))
        return found

    def _foreign(self, why: str) -> str:
        first = (why.splitlines() or ["no reason given"])[0]
        return (
            f"{self.folder / CHECKPOINT} is no checkpoint of a run: {first}. Remove the folder and "
            "start again, or name that of another run."
        )

    def _newest(self) -> bytes | None:
        paths = [self.folder / name for name in (CHECKPOINT, f"last-{CHECKPOINT}")]
        found = [path for path in paths if path.exists()]
        for path in found:
            content = path.read_bytes()
            digest, data = content[:32], content[32:]
            if hashlib.sha256(data).digest() == digest:
                return data
            print(f"{path} is damaged; the one before it is used.")
        if found:
            raise InnerLoopError(
                f"{self.folder} cannot be resumed: no checkpoint in it is whole. Remove the folder "
                "and start again."
            )
        return None

    def _replace(self, name: str, data: bytes) -> None:
        """Write aside, sync, rename: a file is the old one or the new one at any moment."""
        try:
            handle, aside = tempfile.mkstemp(dir=self.folder, prefix=f".{name}-")
        except OSError as error:
            raise InnerLoopError(_unwritable(self.folder / name, error)) from error
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(aside, 0o644)
            os.replace(aside, self.folder / name)
            _sync_folder(self.folder)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            if isinstance(error, OSError):
                raise InnerLoopError(_unwritable(self.folder / name, error)) from error
            raise


def _sync_folder(folder: Path) -> None:
    """So that a renamed file is there after a loss of power, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(path: Path, error: OSError) -> str:
    return (
        f"{path} cannot be written: {error}. What was written before is whole. Make room, "
        f"then go on with --resume {path.parent}."
    )


class Stop:
    """Whether the user asked for an end: a first Ctrl-C asks, a second one interrupts."""

    def __init__(self) -> None:
        self.asked = False

    def _ask(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """Ctrl-C, and a polite kill, end the work at the next place where nothing is lost."""
    stop = Stop()
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):  # not in the main thread
            before[number] = signal.signal(number, stop._ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
