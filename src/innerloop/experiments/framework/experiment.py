"""An experiment as units of work, which can be shown, stopped, resumed and finished."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.command_line import WRONG, Parser, parse, path, program
from innerloop.experiments.framework.ranks import ALONE, Ranks, join_group, restarts
from innerloop.experiments.framework.run import Run, Stop, stoppable
from innerloop.experiments.framework.settings import Settings, as_json, flag, from_json, refuse
from innerloop.experiments.framework.state import Resumable

STOPPED = 130
"""The exit code of a run that was stopped."""
_SAVE_AFTER = 60.0  # seconds without a record


class Experiment(Resumable, abc.ABC):
    """A command's work, unit after unit, from its settings to its result.

    Everything that the units to come depend on is in ``state_dict``: a run that is stopped and
    resumed ends as one that was not.
    """

    unit: str = "updates"

    done: int = 0
    """Units of work so far."""
    width: int = 1
    """Units that all processes together did in the last round."""
    seconds: float = 0.0
    """Time they took, in all sessions."""
    records: list[dict[str, Any]]
    """Measurements on the way, a line of metrics.jsonl each."""

    @property
    @abc.abstractmethod
    def total(self) -> int:
        """Units of work in all."""

    @abc.abstractmethod
    def advance(self) -> dict[str, str]:
        """Does one unit, appends its measurements to the records; returns what the bar shows."""

    @abc.abstractmethod
    def share(self, ranks: Ranks) -> None:
        """Divides the work over the processes that ``torchrun`` started."""

    @property
    def source(self) -> str:
        """The data. A run is not resumed on other data, nor shared over it."""
        return ""

    @property
    def new_records(self) -> list[dict[str, Any]]:
        """The records that are in no checkpoint yet."""
        return [record for record in self.records if "seconds" not in record]

    def exchange(self) -> None:
        """Shares progress among processes, where each works by itself."""

    @abc.abstractmethod
    def result(self) -> dict[str, Any]:
        """The findings of the run, when all units are done."""

    @abc.abstractmethod
    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        """Saves figures of the result."""

    @abc.abstractmethod
    def describe(self, result: dict[str, Any]) -> str:
        """The result in words and tables, for the terminal."""

    def save(self, run: Run) -> None:
        """Saves the progress and the records."""
        run.write_metrics(self.records)
        own = {"done": self.done, "seconds": self.seconds, "records": self.records}
        run.save(own | {"state": self.state_dict()})

    def resume(self, state: dict[str, Any]) -> None:
        """Goes on from a state that :meth:`save` saved."""
        try:
            self.done, self.seconds = state["done"], state["seconds"]
            self.records = state["records"]
            self.load_state_dict(state["state"])
        except InnerLoopError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InnerLoopError(
                f"The run cannot go on from its checkpoint ({type(error).__name__}: {error}), "
                "which is of another run or of another version of innerloop. Start again with "
                "another --out."
            ) from error


def work(experiment: Experiment, run: Run, stop: Stop, bar: Any, ranks: Ranks = ALONE) -> bool:
    """Goes on until the end, or until asked to stop. Returns True at the end."""
    saved = time.monotonic()
    while experiment.done < experiment.total:
        began = time.perf_counter()
        shown = experiment.advance()
        experiment.done += experiment.width
        experiment.seconds += time.perf_counter() - began
        bar.advance(shown, experiment.width)
        late = time.monotonic() - saved > _SAVE_AFTER
        asked, late, news = ranks.any(stop.asked, late, bool(experiment.new_records))
        asked = asked and experiment.done < experiment.total
        if not (asked or late or news):
            continue
        experiment.exchange()
        found = experiment.new_records
        for record in found:
            record["seconds"] = experiment.seconds
        if ranks.first:
            bar.record(found)
            experiment.save(run)
        saved = time.monotonic()
        if asked:
            return False
    return True


def carry_out(
    experiment: Experiment,
    settings: Settings,
    run: Run,
    *,
    resume: bool = False,
    quiet: bool = False,
    ranks: Ranks = ALONE,
) -> dict[str, Any] | None:
    """Runs the experiment to its result; ``None`` if it is asked to stop before."""
    from innerloop.experiments.framework.progress import Bar

    experiment.share(ranks)
    ranks.agree(_common_settings(settings) | {"data": experiment.source})
    experiment.records = []
    with contextlib.ExitStack() as stack:
        ranks.broadcast(lambda: stack.enter_context(run.lock()))
        if not resume:
            ranks.broadcast(run.check_new)
        elif state := run.load(ranks):
            experiment.resume(state)
        hidden = quiet or not ranks.first
        try:
            if ranks.first:
                run.write_config(as_json(settings))
            with stoppable() as stop, contextlib.closing(Bar(experiment, run, hidden)) as bar:
                if not work(experiment, run, stop, bar, ranks):
                    return None
            result = experiment.result() | {"seconds": experiment.seconds}
            if ranks.first:
                experiment.share(ALONE)  # the others take no part in figures
                experiment.draw(run.folder, result)
                run.write_result(result)
        except OSError as error:
            raise InnerLoopError(
                f"{run.folder} cannot be written: {error}. What was written before is whole. Make "
                f"room, then go on with --resume {shlex.quote(str(run.folder))}."
            ) from error
    return result


def run_command(
    name: str,
    about: str | None,
    kind: type[Settings],
    make: Callable[[Any], Experiment],
    argv: Sequence[str] | None,
    next_step: str,
) -> int:
    """``innerloop NAME``: settings from a preset and flags, a run or its continuation, the end."""
    parser = Parser(f"innerloop {name}", description=about)
    parser.add_argument("--preset", help="paper or quick (quick)")
    parser.add_argument("--resume", type=path, metavar="PATH", help="continue the run in a folder")
    given = parse(kind, argv, parser)
    preset, folder = given.pop("preset"), given.pop("resume")
    run: Run | None = None
    try:
        if folder is None:
            settings = with_data_folder(kind.configure(given, preset or "quick"))
            run = Run(settings.out, settings.keep)
        else:
            run = Run(folder)
            settings = _resume_settings(from_json(kind, run.config()), given, preset, folder)
            run.keep = settings.keep
        with join_group(getattr(settings, "device", "cpu")) as ranks:
            resume = folder is not None or _is_started_again(run, settings, ranks)
            experiment = make(settings)
            result = carry_out(experiment, settings, run, resume=resume, ranks=ranks)
    except InnerLoopError as error:
        print(error, file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return _report_stop(name, run)
    if not ranks.first:
        return STOPPED if result is None else 0
    if result is None:
        return _report_stop(name, run)
    print(experiment.describe(result))
    for figure in sorted(run.folder.glob("*.png")):
        print(figure)
    print(next_step.format(innerloop=program()))
    return 0


def _common_settings(settings: Settings) -> dict[str, Any]:
    """The settings that all processes must have; folders may have other names elsewhere."""
    found = as_json(settings).items()
    return {flag(name): value for name, value in found if name not in ("out", "data")}


def _is_started_again(run: Run, settings: Settings, ranks: Ranks) -> bool:
    """Tests whether ``torchrun`` has started this run before. Another one is not written over."""
    (again,) = ranks.any(restarts() > 0)  # machines count their restarts each for itself

    def find() -> bool:
        if again and run.exists and run.config() == as_json(settings):
            return True
        run.check_new()
        return False

    return ranks.broadcast(find)


def _report_stop(name: str, run: Run | None) -> int:
    how = f"{program()} {name} --resume"
    more = f" Go on with: {how} {shlex.quote(str(run.folder))}" if run and run.exists else ""
    print(f"Stopped.{more}")
    return STOPPED


def with_data_folder(settings: Any) -> Any:
    """Writes the folder of the data out: a run goes on with the data it was started with."""
    if not settings.reads_data:
        return settings
    where = settings.data or os.environ.get("INNERLOOP_DATA")
    return dataclasses.replace(settings, data=absolute(where)) if where else settings


def absolute(path: str | Path) -> Path:
    """The absolute path, also of ``~/data``, which a shell leaves as it is in ``--data=~/data``."""
    return Path(path).expanduser().absolute()


def _resume_settings(settings: Any, given: dict[str, Any], preset: str | None, folder: Path) -> Any:
    """The settings of the run. Flags beside --resume must agree with them, except for folders.

    The run and its data may have been moved, and other checkpoints may be kept.
    """
    if preset is not None:
        refuse("preset", preset, "left out with --resume", "the run has its settings")
    if "out" in given and os.path.realpath(given["out"]) != os.path.realpath(folder):
        refuse("out", given["out"], f"{folder}, as --resume names it, or left out")
    changed = {"out": folder}
    if "data" in given:
        changed["data"] = absolute(given["data"])
    if "keep" in given:
        changed["keep"] = given["keep"]
    for name, value in given.items():
        if name not in changed and getattr(settings, name) != value:
            refuse(name, value, f"{getattr(settings, name)}, as the run was started with")
    return dataclasses.replace(settings, **changed)
