"""The folder of a run: settings, metrics, checkpoints that are never half written, the result."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import shlex
import shutil
import signal
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.ranks import ALONE, Ranks

CONFIG, METRICS, RESULT, CHECKPOINT = (
    "config.json",
    "metrics.jsonl",
    "result.json",
    "checkpoint.pt",
)
KEPT = 2
"""Checkpoints, the newest included: one may be torn by what made the run stop."""
_LAUNCH, _LOCK, _FIGURES = ".launch", ".lock", ".figures-"
_KEEP = "keep"
_DIGEST = 32  # bytes of the checksum before a checkpoint


class Run:
    """The folder of one run."""

    def __init__(self, folder: Path, keep: int = KEPT) -> None:
        self.folder, self.keep = folder, keep

    @property
    def known(self) -> bool:
        """Whether a run was started here."""
        return os.path.lexists(self.folder / CONFIG)

    def check_new(self) -> None:
        """Refuses a folder that already holds a run: it is not written over."""
        if self.known:
            raise InnerLoopError(
                f"{self.folder} holds a run already. Continue it with --resume "
                f"{shlex.quote(str(self.folder))}, or name another folder with --out."
            )

    def start(self, config: dict[str, Any], launch: str = "") -> None:
        """Writes the settings, and the name of the launch that may start the run again."""
        self.check_new()
        self._replace(_LAUNCH, launch.encode())
        self.write_json(CONFIG, config | {_KEEP: self.keep})

    def update_keep(self) -> None:
        """Writes the number of checkpoints that are kept from now on."""
        known = self._read_config()
        if known.get(_KEEP) != self.keep:
            self.write_json(CONFIG, known | {_KEEP: self.keep})

    def started_by(self, launch: str, config: dict[str, Any]) -> bool:
        """Tests whether the run here has the same launch and settings: names of launches repeat."""
        with contextlib.suppress(OSError):
            same = self.known and _content(self.folder / _LAUNCH) == launch.encode()
            return same and self.config() == json.loads(json.dumps(config))
        return False

    @contextlib.contextmanager
    def lock(self, new: bool = False) -> Iterator[None]:
        """Keeps other processes out; removes what killed ones left."""
        try:
            if new:
                self.folder.mkdir(parents=True, exist_ok=True)
            held = FileLock(self.folder / _LOCK).acquire(timeout=0)
        except Timeout as error:
            raise InnerLoopError(
                f"Another process is at work on the run in {self.folder}. Wait for it, or stop "
                "it; then go on."
            ) from error
        except OSError as error:
            raise InnerLoopError(
                f"The run's folder {self.folder} cannot be written to: {error}. Name another one."
            ) from error
        with held:
            for name in (CONFIG, METRICS, RESULT, CHECKPOINT, _LAUNCH):
                for aside in self.folder.glob(f".{name}-*"):
                    with contextlib.suppress(OSError):  # writing says what is wrong, if need be
                        aside.unlink()
            for aside in self.folder.glob(f"{_FIGURES}*"):
                shutil.rmtree(aside, ignore_errors=True)
            yield

    def config(self) -> dict[str, Any]:
        """The settings of the experiment."""
        return {name: value for name, value in self._read_config().items() if name != _KEEP}

    def read_keep(self) -> int:
        """The number of checkpoints to keep, as the run's settings have it."""
        found = self._read_config().get(_KEEP, KEPT)
        if type(found) is not int or found < 1:
            raise InnerLoopError(
                f"{self.folder / CONFIG} has {_KEEP} = {found!r}. Needed is a whole number from 1, "
                "of checkpoints. Correct it, or write --keep 2."
            )
        return found

    def _read_config(self) -> dict[str, Any]:
        path = self.folder / CONFIG
        try:
            found = json.loads(_content(path).decode())
        except (OSError, ValueError, RecursionError) as error:
            raise InnerLoopError(
                f"{self.folder} cannot be resumed: {path.name} cannot be read ({error}). Needed is "
                "the folder of a run, as --out named it."
            ) from error
        if not isinstance(found, dict):
            raise InnerLoopError(f"{path} does not hold settings: an object of names and values.")
        return found

    def write_json(self, name: str, value: Any) -> None:
        self._replace(name, (json.dumps(value, indent=2) + "\n").encode())

    def write_result(self, value: Any) -> None:
        """Writes the last file: with it, a run is finished."""
        self.write_json(RESULT, _standard(value))

    @contextlib.contextmanager
    def figure_folder(self) -> Iterator[Path]:
        """A folder for figures, which are moved into the run's when all are whole."""
        aside = Path(tempfile.mkdtemp(dir=self.folder, prefix=_FIGURES))
        try:
            yield aside
            for path in aside.iterdir():
                _sync(path)
                os.replace(path, self.folder / path.name)
            _sync(self.folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def write_metrics(self, records: list[dict[str, Any]]) -> None:
        """Writes all records: after a crash the file may have more than the checkpoint."""
        self._replace(METRICS, "".join(json.dumps(_standard(r)) + "\n" for r in records).encode())

    def save(self, state: dict[str, Any]) -> None:
        """Saves a checkpoint with a checksum; keeps the last ``keep``."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        data = buffer.getvalue()
        current = self.folder / CHECKPOINT
        aside = self._aside(CHECKPOINT, hashlib.sha256(data).digest() + data)
        try:
            # A damaged one must not take the place of the whole one before it.
            if os.path.lexists(current) and _whole(_content(current)) is not None:
                for age in reversed(self._ages()):
                    if age + 1 < self.keep:
                        os.replace(self._checkpoint(age), self._checkpoint(age + 1))
            os.replace(aside, current)
            for age in self._ages():
                if age >= self.keep:
                    self._checkpoint(age).unlink()
            _sync(self.folder)
        except OSError as error:
            raise InnerLoopError(unwritable(self.folder, CHECKPOINT, error)) from error

    def _checkpoint(self, age: int) -> Path:
        path = self.folder / CHECKPOINT
        return path.with_stem(f"{path.stem}-{age}") if age else path

    def _ages(self) -> list[int]:
        """Ages of the checkpoints in the folder, the newest first."""
        stem, suffix = CHECKPOINT.split(".")
        older = self.folder.glob(f"{stem}-*.{suffix}")
        named = [path.stem.removeprefix(f"{stem}-") for path in older]
        ages = sorted({0, *(int(age) for age in named if age.isdecimal())})
        return [age for age in ages if os.path.lexists(self._checkpoint(age))]

    def _checkpoints(self) -> list[Path]:
        """Paths of the checkpoints, the newest first."""
        return [self._checkpoint(age) for age in self._ages()]

    def load(self, ranks: Ranks = ALONE) -> dict[str, Any] | None:
        """The newest state that is whole; ``None`` without one.

        The first process reads it for all: the others need not see the folder.
        """
        data = ranks.broadcast(self._newest)
        if data is None:
            return None
        try:
            _check_readable(data)
            # Not to the accelerator of the process that wrote it: every one has its own.
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
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
        found = self._checkpoints()
        for number, path in enumerate(found):
            try:
                data = _whole(_content(path))
            except OSError as error:
                raise InnerLoopError(
                    f"{self.folder} cannot be resumed: {path.name} cannot be read ({error})."
                ) from error
            if data is not None:
                return data
            more = "; the one before it is used" if number + 1 < len(found) else ""
            print(f"{path} is damaged{more}.")
        if found:
            raise InnerLoopError(
                f"{self.folder} cannot be resumed: no checkpoint in it is whole. Remove the folder "
                "and start again."
            )
        return None

    def _replace(self, name: str, data: bytes) -> None:
        """Writes aside, syncs, renames: at any moment the file is the old one or the new one."""
        aside = self._aside(name, data)
        try:
            os.replace(aside, self.folder / name)
            _sync(self.folder)
        except OSError as error:
            raise InnerLoopError(unwritable(self.folder, name, error)) from error

    def _aside(self, name: str, data: bytes) -> str:
        """Writes a file beside the one of this name, and syncs it."""
        try:
            handle, aside = tempfile.mkstemp(dir=self.folder, prefix=f".{name}-")
        except OSError as error:
            raise InnerLoopError(unwritable(self.folder, name, error)) from error
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(aside, 0o644)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            if isinstance(error, OSError):
                raise InnerLoopError(unwritable(self.folder, name, error)) from error
            raise
        return aside


def _standard(value: Any) -> Any:
    """Replaces infinity and NaN, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {name: _standard(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_standard(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _content(path: Path) -> bytes:
    """A regular file's content: a pipe would wait for ever, a device fill the memory."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a file")
    return path.read_bytes()


def _whole(content: bytes) -> bytes | None:
    """The content of a checkpoint; ``None`` if its checksum is wrong."""
    digest, data = content[:_DIGEST], content[_DIGEST:]
    return data if hashlib.sha256(data).digest() == digest else None


def _check_readable(data: bytes) -> None:
    """Refuses an archive that torch's reader would fill the memory with."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(info.file_size for info in archive.infolist())
        if size > len(data):  # torch writes without compression
            raise ValueError(f"its {len(data)} bytes would become {size}")


def _sync(path: Path) -> None:
    """Makes a file, or a folder's entries, survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unwritable(folder: Path, name: str, error: OSError) -> str:
    """The message for a file of a run, or without a name any of them, that cannot be written."""
    return (
        f"{folder / name} cannot be written: {error}. What was written before is whole. Make room, "
        f"then go on with --resume {shlex.quote(str(folder))}."
    )


class Stop:
    """A request to stop: the first Ctrl-C asks, the second one interrupts."""

    def __init__(self) -> None:
        self.asked = False

    def _ask(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """Turns Ctrl-C and SIGTERM into a request to stop at the next checkpoint."""
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
