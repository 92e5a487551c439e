"""Reading the folders of runs, whatever is in them: a damaged one gives a remark, not an error."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from innerloop.experiments.report.paper import Setup

_LARGEST = {"config.json": 1 << 20, "result.json": 1 << 20, "metrics.jsonl": 1 << 28}
_NEEDED = {"dataset": str, "way": int, "shot": int, "model": str, "inner_optim": str, "seed": int}
_LEAST = {"way": 1, "shot": 1, "seed": 0}
# They say where a run was made and what it left there, not what it computes.
_PLACES = ("out", "data", "device", "keep")
_SPLITS = ("train", "val", "test")
# With rotated training pictures, as the runs count them.
_WHOLE = {"omniglot": 4 * 23_000 + 1_000 + 8_460, "mini-imagenet": 60_000}
_OWN = ("folder", "cifar-fs")  # whatever lies in the folder is the dataset


class Remark(NamedTuple):
    """A fault of a folder, or a fact about it."""

    folder: Path
    text: str


class Result(NamedTuple):
    """The end of a run: accuracy and the half-width of its 95 % interval, both in [0, 1]."""

    accuracy: float
    interval: float | None
    epochs: list[int]
    """Whose mean prediction it is, the best first."""
    seconds: float | None
    pictures: dict[str, int]
    """Images in each split of the data; empty if the run did not record them."""
    skipped: int
    """Updates that were left out."""
    diverged: int
    """Adaptations to test tasks that diverged, so that their predictions are guesses."""

    @property
    def flaws(self) -> str:
        """Reservations about the accuracy; empty without any."""
        flaws = []
        if self.skipped:
            flaws.append(f"left out {self.skipped} update{'s' * (self.skipped != 1)}")
        if self.diverged:
            flaws.append(f"guessed {self.diverged} times at a test task, where adaptation diverged")
        return " and ".join(flaws)


class FoundRun(NamedTuple):
    """One run: its settings, a record for each epoch, and its result if it is finished."""

    folder: Path
    config: dict[str, Any]
    records: list[dict[str, Any]]
    result: Result | None
    dataset: str
    """Its name, with the folder of the data where other runs have another one."""

    @property
    def setup(self) -> Setup:
        c = self.config
        optim = c["inner_optim"].lower()
        return Setup(self.dataset, c["way"], c["shot"], c["model"].lower(), optim)

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def settings(self) -> str:
        """What, besides the seed, decides the result; equal for runs that may be averaged."""
        # One that is not set is as one that an older version did not have.
        known = decisive(self.config).items()
        rest = {name: v for name, v in known if name != "seed" and v is not None}
        if self.result is not None:
            rest["pictures"] = self.result.pictures
        return json.dumps(rest, sort_keys=True)


def decisive(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide the result; the folder of the data only if it is the user's own."""
    places = [name for name in _PLACES if name != "data" or config["dataset"] not in _OWN]
    return {name: value for name, value in config.items() if name not in places}


class UnusableError(Exception):
    """Why a file cannot be used."""


def read_runs(folders: Sequence[Path]) -> tuple[list[FoundRun], list[Remark]]:
    """The runs in these folders and below them, each once, and what is wrong with the others."""
    runs: list[FoundRun] = []
    remarks: list[Remark] = []
    seen: set[Path] = set()
    for folder in folders:
        for path in _candidates(Path(folder), remarks):
            real = path.resolve()
            if real not in seen:
                seen.add(real)
                run = read_run(path, remarks)
                runs += [] if run is None else [run]
    return _name_apart(runs), remarks


def _name_apart(runs: list[FoundRun]) -> list[FoundRun]:
    """With the folder in the name of a dataset of the user's own, where there are several."""
    names = {(run.dataset, _folder(run)) for run in runs if run.dataset in _OWN}
    several = [name for name in _OWN if sum(name == known for known, _ in names) > 1]
    return [
        run._replace(dataset=f"{run.dataset} {_folder(run)}") if run.dataset in several else run
        for run in runs
    ]


def _folder(run: FoundRun) -> str:
    found = run.config.get("data")
    return "INNERLOOP_DATA" if found is None else str(found)


def _candidates(folder: Path, remarks: list[Remark]) -> Iterator[Path]:
    if not folder.is_dir():
        remarks.append(Remark(folder, "is not a folder" if folder.exists() else "does not exist"))
        return
    found = list(_below(folder))
    if not found:
        remarks.append(Remark(folder, "holds no run: there is no config.json in it or below it"))
        return
    yield from found
    for child in sorted(folder.iterdir()) if folder not in found else []:
        hidden = child.name.startswith(".") or child.is_symlink() or not child.is_dir()
        if not hidden and not any(child == p or child in p.parents for p in found):
            remarks.append(Remark(child, "holds no run: there is no config.json in it or below it"))


def _below(folder: Path) -> Iterator[Path]:
    for place, inside, files in os.walk(folder):
        if "config.json" in files:
            inside.clear()
            yield Path(place)
        inside[:] = sorted(name for name in inside if not name.startswith("."))


def read_run(folder: Path, remarks: list[Remark]) -> FoundRun | None:
    """The run in a folder; ``None`` with a remark if its settings cannot be read."""
    try:
        config = _object(folder / "config.json")
        _check_config(config)
    except UnusableError as why:
        remarks.append(Remark(folder, f"is left out: {why}"))
        return None
    records, result = _records(folder, remarks), read_result(folder, remarks)
    count, whole = sum(result.pictures.values()) if result else 0, _WHOLE.get(config["dataset"], 0)
    if 0 < count < whole:
        text = f"has {count} of the {whole} pictures of {config['dataset']}, which the paper had"
        remarks.append(Remark(folder, text))
    if result is not None and result.flaws:
        remarks.append(Remark(folder, result.flaws))
    return FoundRun(folder, config, records, result, config["dataset"])


def _check_config(config: dict[str, Any]) -> None:
    missing = [name for name in _NEEDED if name not in config]
    if missing:
        raise UnusableError(f"config.json has no {', '.join(missing)}")
    for name, kind in _NEEDED.items():
        value = config[name]
        if type(value) is not kind or (kind is int and not _LEAST[name] <= value < 1e9):
            wanted = "a text" if kind is str else f"a whole number from {_LEAST[name]}"
            raise UnusableError(f"config.json has {name} = {_short(value)}, not {wanted}")


def read_result(folder: Path, remarks: list[Remark]) -> Result | None:
    """The result in a folder; ``None`` if there is none, with a remark if it cannot be used."""
    path = folder / "result.json"
    if not os.path.lexists(path):
        return None
    try:
        found = _object(path)
        accuracy = found.get("accuracy")
        if not is_share(accuracy):
            wrong = f"accuracy = {_short(accuracy)}" if "accuracy" in found else "no accuracy"
            raise UnusableError(f"result.json has {wrong}; needed is a number from 0 to 1")
    except UnusableError as why:
        remarks.append(Remark(folder, f"counts as unfinished: {why}"))
        return None
    interval, seconds = found.get("interval"), found.get("seconds")
    if not is_share(interval):
        remarks.append(Remark(folder, "result.json has no interval that is a number from 0 to 1"))
    return Result(
        float(accuracy),
        float(interval) if is_share(interval) else None,
        _epochs(found),
        float(seconds) if _is_number(seconds) and seconds >= 0 else None,
        _pictures(found),
        _count(found.get("skipped")),
        _count(found.get("diverged")),
    )


def _pictures(found: dict[str, Any]) -> dict[str, int]:
    given = found.get("pictures")
    counts = given if isinstance(given, dict) else {}
    return {name: n for name in _SPLITS if (n := _count(counts.get(name)))}


def _count(value: object) -> int:
    return value if type(value) is int and 0 < value < 1e15 else 0


def _epochs(found: dict[str, Any]) -> list[int]:
    several = found.get("epochs")
    some = several if isinstance(several, list) and several else [found.get("epoch")]
    good = [epoch for epoch in some if type(epoch) is int]
    return good if len(good) == len(some) else []


def _records(folder: Path, remarks: list[Remark]) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not os.path.lexists(path):
        remarks.append(Remark(folder, "has no metrics.jsonl: no curves are drawn"))
        return []
    try:
        lines = _text(path).splitlines()
    except UnusableError as why:
        remarks.append(Remark(folder, f"no curves are drawn: {why}"))
        return []
    good, bad = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            record = _record(line)
            good += [] if record is None else [record]
            bad += [number] if record is None else []
    if bad:
        some = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
        text = f"metrics.jsonl: lines left out, without an epoch and a val_accuracy: {some}"
        remarks.append(Remark(folder, text))
    return good


def _record(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or type(found.get("epoch")) is not int:
        return None
    return found if abs(found["epoch"]) < 1e9 and is_share(found.get("val_accuracy")) else None


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        what = str(error) or type(error).__name__
        raise UnusableError(f"{path.name} is not JSON ({what})") from error
    if not isinstance(found, dict):
        raise UnusableError(f"{path.name} holds no object of names and values")
    return found


def _text(path: Path) -> str:
    """A regular file's text: a pipe would wait for ever, a huge file fill the memory."""
    try:
        if not path.is_file():
            raise UnusableError(f"{path.name} is not a file")
        if path.stat().st_size > _LARGEST[path.name]:
            raise UnusableError(f"{path.name} has more than {_LARGEST[path.name] >> 20} MB")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnusableError(f"{path.name} is not text in UTF-8") from error
    except OSError as error:
        raise UnusableError(f"{path.name} cannot be read ({error.strerror})") from error


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e15 and math.isfinite(value)


def is_share(value: object) -> TypeGuard[float]:
    """Tests for a number from 0 to 1, as an accuracy is."""
    return _is_number(value) and 0 <= value <= 1


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
