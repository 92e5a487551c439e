"""The plan of the long runs, the folder they live in, and what each of them has reached.

A plan is a TOML file: the `tag` whose sources the runs use, flags for all runs on a dataset in
`[defaults.DATASET]`, and one `[[run]]` table for each run.

The folder is outside the work tree, so that edits there do not disturb a run:

    plan.toml       the plan as it was last started
    queue.lock      locked while the queue or one of its runs is alive; holds the queue's process id
    venv/           the environment of the runs, which `make long-runs` makes
    source/TAG/     a clone of the repository at the tag
    runs/NAME/      the folder of a run, as `innerloop maml --out` writes it
    notes/NAME.json the queue's notes on a run: tag, process id, processor seconds, exit code
    logs/NAME.log   what the run printed
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

_STOPPED = 130  # exit code of a run that was asked to stop
_COLUMN = {"dataset": str, "way": int, "shot": int, "model": str, "inner_optim": str, "seed": int}
_PLACES = ("data", "out", "keep", "device")  # settings that say nothing about the result
_RUN = {"priority": int, "budget": float, "column": dict}


class PlanError(ValueError):
    """A plan that cannot be used."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run of the plan."""

    name: str
    column: dict[str, Any]
    """Dataset, way, shot, model, inner optimizer and seed: also flags of the command."""
    budget: float
    """Core-hours that the run is expected to take. The command's own limit is `iterations`."""
    priority: int
    """Runs with a smaller number start earlier."""
    flags: dict[str, Any]
    """Further flags of `innerloop maml`, as settings are named in its `config.json`."""

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments of `innerloop maml`, without places."""
        words = []
        for name, value in {**self.column, **self.flags}.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", str(value)]
        return words


@dataclasses.dataclass(frozen=True)
class Plan:
    """The runs, those with the smallest priority first, and the tag of new ones."""

    tag: str
    runs: tuple[Planned, ...]


def read_plan(path: Path) -> Plan:
    """Reads and checks a plan."""
    import tomllib  # pyright: ignore[reportMissingImports]  # Python 3.11, which only this needs

    try:
        found = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"{path} cannot be read: {error}. Needed is a plan in TOML.") from error
    _check_keys(path.name, found, {"tag": str, "run": list}, {"defaults": dict})
    defaults = found.get("defaults", {})
    runs = [
        _planned(f"run {number} of {path.name}", run, defaults)
        for number, run in enumerate(found["run"], start=1)
    ]
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(
                f"{path.name} has two runs called {name}. Each needs a folder of its own. "
                'Give one another seed, or a name: name = "..."'
            )
    return Plan(found["tag"], tuple(sorted(runs, key=lambda run: run.priority)))


def _planned(what: str, run: dict[str, Any], defaults: dict[str, dict[str, Any]]) -> Planned:
    _check_keys(what, run, _RUN, {"name": str, "flags": dict})
    column = run["column"]
    _check_keys(f"The column of {what}", column, _COLUMN, {})
    flags = defaults.get(column["dataset"], {}) | run.get("flags", {})
    for key in flags:
        if key in (*_COLUMN, "out", "data", "resume"):
            raise PlanError(
                f"{what} has {key} among its flags. The queue writes that flag itself, from the "
                "column or from the folder of the runs. Remove it from flags."
            )
    usual = "{dataset}-{way}w{shot}s-{model}-{inner_optim}-{seed}".format(**column)
    return Planned(run.get("name", usual), column, run["budget"], run["priority"], flags)


def _check_keys(
    what: str, found: dict[str, Any], required: dict[str, type], optional: dict[str, type]
) -> None:
    known = required | optional
    for key, value in found.items():
        if key not in known:
            raise PlanError(
                f"{what} has an unknown key {key!r}. Known are {', '.join(known)}. "
                "Settings of innerloop maml belong into flags = { ... }."
            )
        accepted = (int, float) if known[key] is float else (known[key],)
        if type(value) not in accepted:
            raise PlanError(f"{what} has {key} = {value!r}. Needed is a {known[key].__name__}.")
    for key in required:
        if key not in found:
            raise PlanError(f"{what} has no {key}. Write {key} = ... into it.")


@dataclasses.dataclass(frozen=True)
class Folder:
    """Paths of the folder that holds the clones and the runs."""

    root: Path

    @property
    def plan(self) -> Path:
        return self.root / "plan.toml"

    @property
    def lock(self) -> Path:
        return self.root / "queue.lock"

    @property
    def python(self) -> Path:
        return self.root / "venv/bin/python"

    def source(self, tag: str) -> Path:
        return self.root / "source" / tag

    def run(self, name: str) -> Path:
        return self.root / "runs" / name

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"

    def notes(self, name: str) -> dict[str, Any]:
        """The queue's notes on a run; empty before its first start."""
        return _read_json(self._notes(name)) or {}

    def write_notes(self, name: str, notes: dict[str, Any]) -> None:
        replace_file(self._notes(name), json.dumps(notes) + "\n")

    def _notes(self, name: str) -> Path:
        return self.root / "notes" / f"{name}.json"


def replace_file(path: Path, text: str) -> None:
    """Replaces a file in one step, so that a reader never sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    os.replace(aside, path)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def command(folder: Folder, run: Planned, data: Path) -> list[str]:
    """Command line that starts a run, or continues it with the settings it was started with."""
    where = folder.run(run.name)
    begin = [str(folder.python), "-m", "innerloop", "maml"]
    if (where / "config.json").exists():
        return [*begin, "--resume", str(where), "--data", str(data)]
    return [*begin, *run.arguments, "--data", str(data), "--out", str(where)]


def reached(folder: Folder, run: Planned, queue: str) -> dict[str, Any] | None:
    """State, tasks seen and accuracies of a run; `None` before its start.

    `queue` is the state of the queue: running, paused or stopped.
    """
    where = folder.run(run.name)
    config = _read_json(where / "config.json")
    notes = folder.notes(run.name)
    if config is None:
        return {"name": run.name, "state": "failed"} if _failed(notes) else None
    metrics = where / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines]
    curve = [[r["iteration"] * config["tasks"], round(r["val_accuracy"], 4)] for r in records]
    updates = _updates(folder.log(run.name), records, config["iterations"])
    result = _read_json(where / "result.json")
    found = {
        "name": run.name,
        **{key: config[key] for key in _COLUMN},
        "state": _state(result, notes, queue),
        "tag": notes.get("tag"),
        "core_hours": round(notes.get("cpu_seconds", 0) / 3600, 2),
        "budget": run.budget,
        "tasks_seen": updates * config["tasks"],
        "tasks_planned": config["iterations"] * config["tasks"],
        "val_accuracy": max((accuracy for _, accuracy in curve), default=None),
        "settings": {key: config[key] for key in config if key not in (*_COLUMN, *_PLACES)},
        "curve": curve,
    }
    if result is not None:
        found |= {key: result[key] for key in ("accuracy", "interval", "test_tasks")}
    return found


def _updates(log: Path, records: list[dict[str, Any]], total: int) -> int:
    """Updates so far, by the last validation or by the progress bar, which is up to date."""
    shown = re.findall(rf"(\d+)/{total} \[", log.read_text()) if log.exists() else []
    return max([0, *(record["iteration"] for record in records[-1:]), *map(int, shown[-1:])])


def _state(result: Any, notes: dict[str, Any], queue: str) -> str:
    if result is not None:
        return "done"
    if notes.get("pid") is not None and queue != "stopped":
        return queue
    return "failed" if _failed(notes) else "stopped"


def _failed(notes: dict[str, Any]) -> bool:
    """Whether the run ended with an error of its own. One that a signal killed can go on."""
    code = notes.get("exit") or 0
    return code > 0 and code != _STOPPED
