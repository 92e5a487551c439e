"""Reading the folders of runs. One that cannot be read gives a remark, not an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from innerloop.experiments.report.paper import Setup

# They say where a run was made and what it left there, not what it computes.
_PLACES = ("out", "data", "device", "keep")
# With rotated training images, as the runs count them.
_WHOLE = {"omniglot": 4 * 23_000 + 1_000 + 8_460, "mini-imagenet": 60_000}
_OWN = ("folder", "cifar-fs")  # whatever lies in the folder is the dataset


class Remark(NamedTuple):
    """A fault of a folder, or a fact about it."""

    folder: Path
    text: str


class Result(NamedTuple):
    """The end of a run: accuracy and the half-width of its 95 % interval, both in [0, 1]."""

    accuracy: float
    interval: float
    epochs: list[int]
    """Whose mean prediction it is, the best first."""
    seconds: float
    pictures: dict[str, int]
    """Images in each split of the data; empty if an older version did not record them."""
    skipped: int
    """Updates that were left out."""
    diverged: int
    """Adaptations to test tasks that diverged, so that their predictions are guesses."""

    def __str__(self) -> str:
        return f"{100 * self.accuracy:.2f} % ± {100 * self.interval:.2f}"

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
    setup: Setup
    records: list[dict[str, Any]]
    result: Result | None

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def settings(self) -> str:
        """The settings, besides the seed, that decide the result; equal for runs to average."""
        # One that is not set is as one that an older version did not have.
        known = decisive_settings(self.config).items()
        rest = {name: v for name, v in known if name != "seed" and v is not None}
        if self.result is not None:
            rest["pictures"] = self.result.pictures
        return json.dumps(rest, sort_keys=True)


def decisive_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide the result; the folder of the data only if it is the user's own."""
    places = [name for name in _PLACES if name != "data" or config["dataset"] not in _OWN]
    return {name: value for name, value in config.items() if name not in places}


def read_runs(folders: Sequence[Path]) -> tuple[list[FoundRun], list[Remark]]:
    """The runs in these folders and below them, each once, and remarks on them."""
    runs: dict[Path, FoundRun | None] = {}
    remarks: list[Remark] = []
    for folder in folders:
        found = sorted(path.parent for path in folder.rglob("config.json"))
        if not found:
            exists = "holds no run: there is no config.json in it or below it"
            remarks.append(Remark(folder, exists if folder.exists() else "does not exist"))
        for path in found:
            if path.resolve() not in runs:
                runs[path.resolve()] = _read_run(path, remarks)
    return [run for run in runs.values() if run is not None], remarks


def _read_run(folder: Path, remarks: list[Remark]) -> FoundRun | None:
    """The run in a folder; ``None`` with a remark if it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
        setup, result = _setup(config), read_result(folder)
        records = _read_records(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"is left out: it is not a run of innerloop maml, or damaged ({error!r})"
        remarks.append(Remark(folder, text))
        return None
    if result is not None:
        count, whole = sum(result.pictures.values()), _WHOLE.get(setup.dataset, 0)
        if 0 < count < whole:
            text = f"has {count} of the {whole} images of {setup.dataset}, which the paper had"
            remarks.append(Remark(folder, text))
        if result.flaws:
            remarks.append(Remark(folder, result.flaws))
    return FoundRun(folder, config, setup, records, result)


def _setup(config: dict[str, Any]) -> Setup:
    dataset = config["dataset"]
    if dataset in _OWN:
        dataset = f"{dataset} {config.get('data') or 'INNERLOOP_DATA'}"
    model, inner_optim = config["model"].lower(), config["inner_optim"].lower()
    return Setup(dataset, int(config["way"]), int(config["shot"]), model, inner_optim)


def read_result(folder: Path) -> Result | None:
    """The result in a folder; ``None`` if there is none yet."""
    path = folder / "result.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    return Result(
        float(found["accuracy"]),
        float(found["interval"]),
        found.get("epochs") or [found["epoch"]],
        float(found["seconds"]),
        found.get("pictures", {}),
        found.get("skipped", 0),
        found.get("diverged", 0),
    )


def _read_records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    for record in records:
        float(record["val_accuracy"])  # raises where a line is of something else
    return records
