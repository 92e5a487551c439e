"""An experiment as units of work, which can be shown, stopped, resumed and finished."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.command_line import (
    Parser,
    as_json,
    flag,
    from_json,
    parse,
    place,
    program,
    refuse,
)
from innerloop.experiments.framework.ranks import ALONE, Ranks, joined, launch, restarted
from innerloop.experiments.framework.run import KEPT, Run, stoppable, unwritable

STOPPED, WRONG = 130, 2
_SAVE_AFTER = 60.0  # seconds without a record


class Experiment(abc.ABC):
    """What a command does, unit after unit, from its settings to its result.

    Everything that the units to come depend on is in ``state_dict``: a run that is stopped and
    resumed ends as one that was not.
    """

    unit: ClassVar[str] = "updates"

    done: int = 0
    """Units of work so far."""
    width: int = 1
    """Units that all processes together did in the last round."""
    seconds: float = 0.0
    """Time they took, in all sessions."""
    records: list[dict[str, Any]]
    """What was measured on the way, a line of metrics.jsonl each."""
    _told: int = 0

    @property
    @abc.abstractmethod
    def total(self) -> int:
        """Units of work in all."""

    @abc.abstractmethod
    def advance(self) -> dict[str, str]:
        """Do one unit, append to the records what was measured; say what the bar shows."""

    @abc.abstractmethod
    def share(self, ranks: Ranks) -> None:
        """Divide the work over the processes that ``torchrun`` started."""

    @property
    def source(self) -> str:
        """Which data it is about: a run is not gone on with on other data, nor shared over it."""
        return ""

    @property
    def has_news(self) -> bool:
        """Whether this process has records that :meth:`news` has not told."""
        return len(self.records) > self._told

    def news(self) -> list[dict[str, Any]]:
        """The records since it was last asked for them."""
        found = self.records[self._told :]
        self._told += len(found)
        return found

    def exchange(self) -> None:  # noqa: B027
        """Let every process know what the others did, where each works by itself."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @abc.abstractmethod
    def result(self) -> dict[str, Any]:
        """What the run found, when all units are done."""

    @abc.abstractmethod
    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        """Pictures of it."""

    @abc.abstractmethod
    def told(self, result: dict[str, Any]) -> str:
        """The result in words and tables, for the terminal."""

    def _whole_state(self) -> dict[str, Any]:
        own = {"done": self.done, "seconds": self.seconds, "records": self.records}
        return own | {"state": self.state_dict()}

    def _load_whole_state(self, state: dict[str, Any]) -> None:
        with _belonging():
            self.done, self.seconds = state["done"], float(state["seconds"])
            self.records = state["records"]
            if type(self.done) is not int or not 0 <= self.done <= self.total:
                raise ValueError(f"{self.done!r} of {self.total} {self.unit} are done")
            if not (isinstance(self.records, list) and all(type(r) is dict for r in self.records)):
                raise TypeError("its records are none")
            self._told = len(self.records)
            self.load_state_dict(state["state"])


@contextlib.contextmanager
def _belonging(resumed: bool = True) -> Iterator[None]:
    """What a checkpoint of another run, or a forged one, may lead to."""
    try:
        yield
    except _FOREIGN as error:
        if not resumed or isinstance(error, InnerLoopError):
            raise
        raise InnerLoopError(
            f"The run cannot go on from its checkpoint ({type(error).__name__}: {error}). If "
            "memory was short, or another process of the run died, go on again: nothing is lost. "
            "Otherwise the checkpoint is of another run or of another version of innerloop: start "
            "again with another --out."
        ) from error


_FOREIGN = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)
_FOREIGN += (AssertionError,)


def work(experiment: Experiment, run: Run, stop: Any, bar: Any, ranks: Ranks = ALONE) -> bool:
    """Go on to the end, or until asked to stop. Whether it is the end."""
    saved = time.monotonic()
    resumed = experiment.done > 0
    while experiment.done < experiment.total:
        began = time.perf_counter()
        with _belonging(resumed):
            shown = experiment.advance()
        resumed = False
        experiment.done += experiment.width
        experiment.seconds += time.perf_counter() - began
        bar.advance(shown, experiment.width)
        late = time.monotonic() - saved > _SAVE_AFTER
        asked, late, news = ranks.any(stop.asked, late, experiment.has_news)
        asked = asked and experiment.done < experiment.total
        if not (asked or late or news):
            continue
        experiment.exchange()
        found = experiment.news()
        for record in found:
            record["seconds"] = experiment.seconds
        if ranks.first:
            run.write_metrics(experiment.records)
            bar.record(found)
            run.save(experiment._whole_state())
        saved = time.monotonic()
        if asked:
            return False
    return True


def carry_out(
    experiment: Experiment,
    config: Any,
    run: Run,
    *,
    resume: bool = False,
    quiet: bool = False,
    ranks: Ranks = ALONE,
) -> dict[str, Any] | None:
    """Run it to its result, or until it is asked to stop: then there is none."""
    from innerloop.experiments.framework.progress import Bar

    experiment.share(ranks)
    ranks.agree("data", {"pictures or numbers": experiment.source})
    experiment.records = []
    with contextlib.ExitStack() as stack:
        ranks.told(lambda: stack.enter_context(run.held(new=not resume)))
        ranks.told(run.go_on if resume else lambda: run.start(as_json(config), launch()))
        state = run.load(ranks) if resume else None
        if state is not None:
            experiment._load_whole_state(state)
        try:
            with stoppable() as stop, Bar(experiment, run, quiet or not ranks.first) as bar:
                if not work(experiment, run, stop, bar, ranks):
                    return None
            with _belonging(state is not None):
                result = experiment.result() | {"seconds": experiment.seconds}
            if ranks.first:
                experiment.share(ALONE)  # the others have nothing to do with pictures
                with run.drawing() as folder:
                    experiment.draw(folder, result)
                run.write_result(result)
        except OSError as error:
            raise InnerLoopError(unwritable(run.folder, "", error)) from error
    return result


def command(
    name: str,
    about: str | None,
    config: type,
    configured: Callable[[dict[str, Any], str], Any],
    make: Callable[[Any], Experiment],
    argv: Sequence[str] | None,
    next_step: str,
) -> int:
    """``innerloop NAME``: settings from a preset and flags, a run or its continuation, the end."""
    parser = Parser(f"innerloop {name}", description=about)
    parser.add_argument("--preset", help="paper or quick (quick)")
    parser.add_argument(
        "--resume", type=place, metavar="PATH", help="go on with the run in a folder"
    )
    parser.add_argument("--keep", type=int, metavar="N", help=f"checkpoints to keep ({KEPT})")
    given = parse(config, argv, parser)
    preset, resume, keep = (given.pop(name) for name in ("preset", "resume", "keep"))
    run: Run | None = None
    try:
        if keep is not None and keep < 1:
            refuse("keep", keep, "at least 1")
        if resume is None:
            settings = _placed(configured(given, preset or "quick"))
            run = Run(settings.out, keep or KEPT)
        else:
            run = Run(resume)
            run.keep = keep or run.kept()
            settings = _resumed(from_json(config, run.config()), given, preset, resume)
        with joined(getattr(settings, "device", "cpu")) as ranks:
            ranks.agree("settings", _shared(settings))
            go_on = resume is not None or _goes_on(run, settings, ranks)
            experiment = make(settings)
            result = carry_out(experiment, settings, run, resume=go_on, ranks=ranks)
    except InnerLoopError as error:
        print(error, file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return _stopped(name, run)
    if not ranks.first:
        return STOPPED if result is None else 0
    if result is None:
        return _stopped(name, run)
    print(experiment.told(result))
    for path in sorted(run.folder.glob("*.png")):
        print(path)
    print(next_step.format(innerloop=program()))
    return 0


def _shared(settings: Any) -> dict[str, Any]:
    """The settings that all processes must have; folders may have other names elsewhere."""
    found = {flag(name): value for name, value in as_json(settings).items()}
    return {name: value for name, value in found.items() if name not in ("--out", "--data")}


def _goes_on(run: Run, settings: Any, ranks: Ranks) -> bool:
    """Whether ``torchrun`` has started this run before. Another one is not written over."""
    (again,) = ranks.any(restarted())  # machines count their restarts each for itself

    def found() -> bytes | None:
        if again and run.started_by(launch(), as_json(settings)):
            return b""
        run.check_new()
        return None

    return ranks.told(found) is not None


def _stopped(name: str, run: Run | None) -> int:
    how = f"{program()} {name} --resume"
    more = f" Go on with: {how} {shlex.quote(str(run.folder))}" if run and run.known else ""
    print(f"Stopped.{more}")
    return STOPPED


def _placed(config: Any) -> Any:
    """With the folder of the data written out: a run goes on with the data it was started with."""
    if not getattr(config, "reads_data", False):
        return config
    where = config.data or os.environ.get("INNERLOOP_DATA")
    return dataclasses.replace(config, data=absolute(where)) if where else config


def absolute(path: str | Path) -> Path:
    """Also of ``~/data``, which a shell leaves as it is in ``--data=~/data``."""
    return Path(path).expanduser().absolute()


def _resumed(config: Any, given: dict[str, Any], preset: str | None, folder: Path) -> Any:
    """The settings of the run; what is written beside --resume must agree, but for places.

    The run and its data may have been moved.
    """
    if preset is not None:
        refuse("preset", preset, "left out with --resume: the run has its settings")
    moved = {"data": absolute(given["data"])} if "data" in given else {}
    moved["out"] = folder
    if "out" in given and os.path.realpath(given["out"]) != os.path.realpath(folder):
        refuse("out", given["out"], f"{folder}, as --resume names it, or left out")
    for name, value in given.items():
        if name not in moved and getattr(config, name) != value:
            refuse(name, value, f"{getattr(config, name)}, as the run was started with")
    return dataclasses.replace(config, **moved)
