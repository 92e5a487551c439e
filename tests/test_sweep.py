"""`innerloop sweep`: which runs there are, and that it goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from innerloop.__main__ import main
from innerloop.experiments.framework.settings import as_json
from innerloop.experiments.maml import training as maml
from innerloop.experiments.sweep import command as sweep

SMALL = ["--filters", "4", "--steps", "1", "--tasks", "2", "--query", "1", "--iterations", "2"]
SMALL += ["--epoch", "1", "--val-tasks", "2", "--test-tasks", "2", "--tasks-by", "loop"]
GRID = ["--dataset", "glyphs", "--way", "3", "--shot", "1", "--model", "mlp"]
GRID += ["--inner-optim", "sgd", "--seed", "0"]


def listed(out: Path, *extra: str, grid: list[str] = GRID) -> int:
    return main(["sweep", *grid, "--out", str(out), "--list", "--", *extra])


def begin(out: Path, result: str | None = None, **settings: object) -> Path:
    """A folder as the sweep of the grid leaves it; with a result it is finished."""
    given = {"dataset": "glyphs", "way": 3, "shot": 1, "model": "mlp", "inner_optim": "sgd"}
    config = maml.Config.configure(given | {"seed": 0} | settings, "quick")
    folder = out / f"{config.dataset}-3w1s-mlp-sgd-seed0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(as_json(config)))
    if result is not None:
        (folder / "result.json").write_text(result)
    return folder


def test_the_grid_of_the_paper() -> None:
    chosen = {name: list(values) for name, values in sweep._GRID.items()}
    found = sweep.jobs(Path("out"), chosen, "paper", [])
    # Omniglot 5- and 20-way, mini-ImageNet 5-way; 1 and 5 shots; 5 models, 2 optimizers, 3 seeds.
    assert len(found) == (2 + 1) * 2 * 5 * 2 * 3
    assert len({job.folder for job in found}) == len(found)
    for job in found:
        sweep._check(job)


def test_a_sweep_does_what_is_left(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "--dataset", "glyphs", "--way", "3", "--shot", "1", "--model", "mlp"]
    words += ["--inner-optim", "sgd", "--out", str(tmp_path)]
    assert main([*words, "--seed", "0", "--", *SMALL]) == 0
    first = tmp_path / "glyphs-3w1s-mlp-sgd-seed0"
    before = (first / "result.json").stat().st_mtime_ns
    assert main([*words, "--seed", "0", "1", "--jobs", "2", "--", *SMALL]) == 0
    assert "2 runs, 1 finished already" in capfd.readouterr().out
    assert (first / "result.json").stat().st_mtime_ns == before
    assert (tmp_path / "glyphs-3w1s-mlp-sgd-seed1" / "result.json").exists()


def test_wrong_settings_are_refused_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "--dataset", "glyphs", "--model", "vgg", "vvg", "--out", str(tmp_path / "s")]
    assert main(words) == 2
    assert "vgg" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("flag", "value", "need"),
    [
        ("--seed", "7", "written before --"),
        ("--model", "vgg", "written before --"),
        ("--inner-optim", "adam", "written before --"),
        ("--dataset", "omniglot", "written before --"),
        ("--way", "2", "written before --"),
        ("--shot", "2", "written before --"),
        ("--out", "o", "written before --"),
        ("--preset", "paper", "written before --"),
        ("--resume", "o", "left out"),
    ],
)
def test_what_names_the_folders_is_refused_after_the_dashes(
    flag: str, value: str, need: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert listed(tmp_path, *SMALL, f"{flag}={value}") == 2
    assert capsys.readouterr().err.startswith(f"{flag} must be {need}, not {value}: ")


FINISHED = '{"accuracy": 0.5, "interval": 0.01, "epoch": 1, "seconds": 9}'


@pytest.mark.parametrize("result", [FINISHED, None])
def test_runs_with_other_settings_are_refused(
    result: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path, result, iterations=4)
    assert listed(tmp_path, "--iterations", "4", "--data", "elsewhere") == 0
    assert f"1 runs, {int(result is not None)} finished" in capsys.readouterr().out
    assert listed(tmp_path, "--iterations", "5") == 2
    said = capsys.readouterr().err
    assert "--iterations 4 (asked: 5). " in said and "--out" in said
    assert said.count("asked") == 1
    assert main(["sweep", *GRID, "--preset", "paper", "--out", str(tmp_path)]) == 2
    assert "--epoch 100 (asked: 500)" in capsys.readouterr().err


def test_pictures_of_another_folder_are_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path, FINISHED, dataset="folder", data=Path("a").absolute())
    grid = ["--dataset", "folder", *GRID[2:]]
    assert listed(tmp_path, "--data", "a", grid=grid) == 0
    assert listed(tmp_path, "--data", "b", grid=grid) == 2
    said = f"--data {Path('a').absolute()} (asked: {Path('b').absolute()})."
    assert said in capsys.readouterr().err


def test_a_started_run_is_resumed_with_its_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its data may have moved, and other checkpoints may be kept."""
    flags = ["--seed", "0", "--data=b", "--keep", "4"]
    new = sweep.Job(tmp_path, flags, "paper")
    assert new.words == [*flags, "--preset", "paper", "--out", str(tmp_path)]
    folder = begin(tmp_path)
    assert sweep.Job(folder, flags).words == [*flags, "--resume", str(folder)]
    assert listed(tmp_path, "--data", "b", "--keep", "4") == 0
    assert listed(tmp_path, "--keep", "0") == 2
    assert "--keep must be at least 1, not 0" in capsys.readouterr().err


def test_a_setting_that_is_newer_than_the_run_had_its_default(tmp_path: Path) -> None:
    path = begin(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    del config["nonfinite"]
    path.write_text(json.dumps(config))
    assert listed(tmp_path) == 0
    assert listed(tmp_path, "--nonfinite", "skip") == 2


# Instead of a run: it ends a while after so many signals, and writes how many there were. With 0
# it does not heed them, as a process that is just starting.
STAND_IN = """
import os, signal, sys, time
folder, needed, seen = sys.argv[1], int(sys.argv[2]), []
def note(*_):
    seen.append(1)
    with open(folder + "/told", "w") as file: file.write(str(len(seen)))
for number in (signal.SIGINT, signal.SIGTERM)[: 2 * needed]: signal.signal(number, note)
with open(folder + "/group", "w") as file: file.write(str(os.getpgrp()))
until = time.monotonic() + 20
while len(seen) < (needed or 1) and time.monotonic() < until: time.sleep(0.01)
time.sleep(1)
sys.exit(130 if seen else 0)
"""


@pytest.fixture
def defaults() -> Iterator[None]:
    """Signals as they are in a new process, however the tests were started."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stand_ins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: int
) -> tuple[list[sweep.Job], Callable[..., None]]:
    """Three jobs, and how to send a signal here once the first two have written a file."""

    def command(job: sweep.Job) -> list[str]:
        return [sys.executable, "-c", STAND_IN, str(job.folder), str(needed)]

    def send(number: int, *names: str) -> None:
        for name in names:
            until = time.monotonic() + 20
            while len(list(tmp_path.glob(f"*/{name}"))) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(sweep.Job, "command", property(command))
    monkeypatch.setattr(sweep, "_GLANCE", 0.05)
    return [sweep.Job(tmp_path / str(k), []) for k in range(3)], send


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_reaches_every_run_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defaults: None
) -> None:
    each, send = stand_ins(tmp_path, monkeypatch, 1)
    threading.Thread(target=send, args=(number, "group")).start()
    found = {job.folder.name: kind for job, kind in sweep.outcomes(each, 2)}
    assert found == dict.fromkeys("012", "stopped")
    assert [path.read_text() for path in tmp_path.glob("*/told")] == ["1", "1"]
    # A terminal signals a whole group: the runs are not in that of the sweep.
    assert str(os.getpgrp()) not in [path.read_text() for path in tmp_path.glob("*/group")]
    assert not (tmp_path / "2").exists()
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_second_stop_interrupts_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defaults: None
) -> None:
    each, send = stand_ins(tmp_path, monkeypatch, 2)
    threading.Thread(target=send, args=(signal.SIGINT, "group", "told")).start()
    with pytest.raises(KeyboardInterrupt):
        list(sweep.outcomes(each, 2))
    assert [path.read_text() for path in tmp_path.glob("*/told")] == ["2", "2"]


def test_a_run_that_is_told_while_it_starts_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defaults: None
) -> None:
    each, send = stand_ins(tmp_path, monkeypatch, 0)
    threading.Thread(target=send, args=(signal.SIGTERM, "group")).start()
    assert [kind for _, kind in sweep.outcomes(each, 2)] == ["stopped"] * 3


def test_a_sweep_is_no_group_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its runs would join each other's groups and add up gradients of different runs."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert listed(tmp_path, *SMALL) == 2
    assert "Start it without torchrun" in capsys.readouterr().err


def test_flags_of_runs_may_stand_before_the_dashes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path, iterations=4)
    words = ["sweep", *GRID, "--out", str(tmp_path), "--list", "--iterations=4", "--data", "d"]
    assert main([*words, "--", "--keep", "3"]) == 0
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--modle", "vgg"])
    assert "Did you mean --model?" in capsys.readouterr().err


def test_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "maml" in capsys.readouterr().out
    assert main(["malm"]) == 2
    assert "Did you mean maml?" in capsys.readouterr().err
