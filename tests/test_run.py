"""The folder of a run: whole at any moment, of one process at a time, gone on with as started."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch.distributed import TCPStore

from innerloop.__main__ import main
from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.command_line import WRONG, program
from innerloop.experiments.framework.experiment import STOPPED, carry_out
from innerloop.experiments.framework.run import Run
from innerloop.experiments.framework.settings import Bounds
from innerloop.experiments.maml_rl import training as maml_rl
from innerloop.experiments.sine import training as sine

TINY = ["sine", "--iterations", "2", "--tasks", "1", "--held-out", "3"]


def folder_of(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    with run.lock():
        run.write_config({})
    return run


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def test_a_result_that_diverged_is_null_in_json(tmp_path: Path) -> None:
    """Infinity and NaN are no JSON: what is not Python cannot read them."""
    run = folder_of(tmp_path)
    run.write_result({"mean": math.inf, "seeds": [1.5, math.nan, -math.inf], "at": (0, "x", None)})

    def refuse(name: str) -> None:
        raise ValueError(name)

    found = json.loads((run.folder / "result.json").read_text(), parse_constant=refuse)
    assert found == {"mean": None, "seeds": [1.5, None, None], "at": [0, "x", None]}
    run.write_metrics([{"loss": math.nan}, {"loss": 1.0}])
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse) for line in lines] == [
        {"loss": None},
        {"loss": 1},
    ]


def test_a_damaged_checkpoint_never_replaces_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder_of(tmp_path)
    for number in (1, 2):
        run.save({"number": number})
    damage(run.folder / "checkpoint.pt")
    assert run.load() == {"number": 1}
    assert "the one before it is used" in capsys.readouterr().out

    def full(*_: Any) -> None:
        raise OSError("disk")

    # The next save ends in the middle: after the old one is kept, before the new one is there.
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="disk"):
            run.save({"number": 3})
    assert run.load() == {"number": 1}
    run.save({"number": 3})
    assert run.load() == {"number": 3}


@pytest.mark.parametrize("keep", [1, 2, 4, 10**12])
def test_the_last_checkpoints_are_kept(
    tmp_path: Path, keep: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder_of(tmp_path)
    run.keep = 5
    for number in range(6):
        if number == 5:
            run.keep = keep
        run.save({"number": number})
    kept = min(keep, 6)
    assert len(run.checkpoints()) == kept
    for age in range(kept):
        assert run.load() == {"number": 5 - age}
        damage(run.checkpoints()[0])
    capsys.readouterr()
    with pytest.raises(InnerLoopError, match="no checkpoint in it is whole"):
        run.load()
    assert not capsys.readouterr().out


def test_one_process_at_a_time(tmp_path: Path) -> None:
    run = folder_of(tmp_path)
    with run.lock(), pytest.raises(InnerLoopError, match="Another process"), run.lock():
        pass
    with run.lock():
        pass


def test_of_two_starts_at_once_one_writes_nothing(tmp_path: Path) -> None:
    first = sine.Comparison(sine.Config(iterations=2, tasks=1, held_out=3))
    run = Run(tmp_path / "run")
    with run.lock():
        with pytest.raises(InnerLoopError, match="Another process"):
            carry_out(first, sine.Config(seed=5), run, quiet=True)
        assert [path.name for path in run.folder.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_made_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*TINY, "--out", str(tmp_path / "file" / "run")]) == WRONG
    assert "cannot be written to" in capsys.readouterr().err


def test_a_run_that_is_stopped_while_it_draws_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going on draws the figures again."""

    def torn(_: Figure, path: Path, **__: Any) -> None:
        Path(path).write_bytes(b"half a picture")
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", torn)
        assert main([*TINY, "--out", str(run)]) == STOPPED
    assert not (run / "result.json").exists()
    assert main(["sine", "--resume", str(run)]) == 0
    assert (run / "fits.png").read_bytes().startswith(b"\x89PNG") and (run / "result.json").exists()


def test_how_many_checkpoints_to_keep_is_part_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert main([*TINY, "--out", str(run), "--keep", "4"]) == 0
    seen = []

    def noting(*given: Any, **_: Any) -> None:
        seen.append(given[2].keep)

    with monkeypatch.context() as patch:
        patch.setattr("innerloop.experiments.framework.experiment.carry_out", noting)
        assert main(["sine", "--resume", str(run)]) == STOPPED
    assert seen == [4]
    assert main(["sine", "--resume", str(run), "--keep", "3"]) == 0
    assert Run(run).config()["keep"] == 3


def test_a_run_that_was_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    assert main([*TINY, "--out", str(old)]) == 0
    old.rename(new)
    (new / "result.json").unlink()
    (tmp_path / "link").symlink_to(new)
    for out in (new, tmp_path / "link", tmp_path / "old" / ".." / "new"):
        assert main(["sine", "--resume", str(new), "--out", str(out)]) == 0
    assert (new / "result.json").exists() and not old.exists()
    assert main(["sine", "--resume", str(new), "--out", str(old)]) == WRONG
    error = capsys.readouterr().err
    assert f"--out must be {new}, as --resume names it, or left out, not {old}" in error


def test_the_next_command_can_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "tools" / "innerloop"
    script.parent.mkdir()
    script.touch(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    assert main([*TINY, "--out", str(tmp_path / "run")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(": innerloop sine --steps 5 --out out/sine-5")
    script.unlink()
    monkeypatch.setattr("sys.executable", "/my tools/python")
    assert program() == "'/my tools/python' -m innerloop"


def test_torchrun_goes_on_with_its_own_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert main([*TINY, *out]) == 0
    assert main([*TINY, *out]) == WRONG
    assert "holds a run already" in capsys.readouterr().err
    result = (tmp_path / "run" / "result.json").read_bytes()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main([*TINY, *out]) == 0  # started again, it has nothing left to do
    # With other settings it is another run, and it is not written over.
    assert main([*TINY, "--meta-lr", "0.5", *out]) == WRONG
    assert "holds a run already" in capsys.readouterr().err
    same = json.loads(result)["mean_squared_error"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["mean_squared_error"] == same


@pytest.mark.parametrize("state, said", [({}, "KeyError: 'inner'"), ([], "TypeError")])
def test_a_checkpoint_of_another_version_is_refused(
    state: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--out", str(tmp_path)]) == 0
    Run(tmp_path).save({"done": 1, "seconds": 0.0, "records": [], "state": state})
    assert main(["sine", "--resume", str(tmp_path)]) == WRONG
    error = capsys.readouterr().err
    assert "cannot go on from its checkpoint" in error and said in error


def test_an_interrupt_while_the_result_is_found_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: sine.Comparison) -> dict[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sine.Comparison, "result", interrupted)
        assert main([*TINY, "--out", str(tmp_path / "run")]) == STOPPED
    assert f"--resume {tmp_path / 'run'}" in capsys.readouterr().out
    assert main(["sine", "--resume", str(tmp_path / "run")]) == 0


def test_an_interrupt_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sine.Comparison, "__init__", interrupted)
    assert main([*TINY, "--out", str(tmp_path / "run")]) == STOPPED
    assert capsys.readouterr().out == "Stopped.\n"


def test_pictures_that_cannot_be_written_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sine.Comparison, "draw", full)
    run = tmp_path / "my run"
    assert main([*TINY, "--out", str(run)]) == WRONG
    said = capsys.readouterr().err
    assert "No space left" in said and said.endswith(f" --resume '{run}'.\n")


def test_a_preset_beside_a_run_to_go_on_with_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--out", str(tmp_path / "run")]) == 0
    assert main(["sine", "--resume", str(tmp_path / "run"), "--preset", "paper"]) == WRONG
    assert "--preset" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (["sine", "--keep", "0"], "--keep must be at least 1, not 0"),
        (["maml", "--seed", "18446744073709551615"], "--seed"),
        (["meta-lr", "--seed", "99999999999999999999999"], "--seed"),
        (["estimate", "--seed", "-1"], "--seed"),
        (["maml", "--device", "meta"], "--device"),
        (["maml", "--filters", "99999999999"], "--filters"),
        (["meta-lr", "--growth", "99999999"], "--growth"),
        (["meta-lr", "--optimizer", "rmsprop", "--learn", "momentum"], "--learn"),
        (["meta-lr", "--optimizer", "adamw", "--momentum", "0.5"], "--momentum"),
        (["meta-lr", "--learn", "momentum", "--transform", "log"], "--transform"),
        (["maml", "--learn-betas"], "--learn-betas has no effect with --inner-optim sgd"),
    ],
)
def test_values_that_cannot_be_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--out", str(tmp_path / "run")]) == WRONG
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["maml", "--out", ""],
        ["maml", "--data="],
        ["maml", "--resume", ""],
        ["sweep", "--out", ""],
        ["report", ""],
        ["data", "fetch", "omniglot", "--data", ""],
    ],
)
def test_empty_paths_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "it is empty" in capsys.readouterr().err


def test_flags_are_not_guessed_from_their_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sine", "--iteration", "3"])
    assert "--iterations?" in capsys.readouterr().err


def test_processes_that_do_not_find_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*TINY, "--out", str(tmp_path / "run")]) == WRONG
    assert "torchrun" in capsys.readouterr().err


def member(store: TCPStore, rank: int, program: str, *words: str) -> subprocess.Popen[str]:
    """A process of a group, as torchrun starts it."""
    about = {"WORLD_SIZE": 2, "RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": store.port}
    about |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    command = [sys.executable, "-c", program, *words]
    environment = os.environ | {name: str(value) for name, value in about.items()}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


_LEAVE = """
import pathlib
from innerloop.experiments.framework import ranks as _ranks
with _ranks.join_group("cpu"):
    import torch._dynamo
names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
print(*names)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of threads")
def test_no_thread_of_a_group_outlives_it() -> None:
    """At the interpreter's exit torch aborts a process that still has some, now and then."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = [member(store, k, _LEAVE) for k in range(2)]
    for threads, error in [process.communicate() for process in group]:
        assert threads.split() and "gloo" not in threads, error


_RUN = """
import sys
from innerloop import data
from innerloop.__main__ import main
seed, *words = sys.argv[1:]
few = data.glyphs(train=6, val=6, test=6, drawings=6, seed=int(seed))
data.load = lambda *_, **__: few
sys.exit(main(words))
"""
_FEW = ["maml", "--model", "mlp", "--filters", "4", "--steps", "1", "--query", "1"]
_FEW += ["--iterations", "1", "--val-tasks", "2", "--test-tasks", "2", "--tasks-by", "loop"]


@pytest.mark.parametrize(
    "seeds, tasks, said",
    [((0, 0), (2, 3), "other settings than the first: --tasks 3, not 2"), ((0, 1), (2, 2), "data")],
)
def test_processes_of_different_runs_are_no_group(
    seeds: tuple[int, int], tasks: tuple[int, int], said: str, tmp_path: Path
) -> None:
    """They would add up gradients of different things."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    words = [*_FEW, "--out", str(tmp_path / "run")]
    group = [
        member(store, k, _RUN, str(seeds[k]), *words, "--tasks", str(tasks[k])) for k in range(2)
    ]
    for process in group:
        error = process.communicate()[1]
        assert process.returncode == WRONG, error
        assert said in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_does_not_lie_on_the_device_of_who_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("torch.serialization.location_tag", lambda _: "cuda:3")
        run.save({"number": torch.arange(3)})
    state = run.load()
    assert state is not None and state["number"].device.type == "cpu"


def test_the_last_policy_is_drawn_as_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a run of several seeds, whichever process had the last one."""
    config = maml_rl.Config(
        seeds=2, iterations=1, tasks=2, episodes=2, horizon=3, hidden=4, test_tasks=2
    )
    training = maml_rl.Training(config)
    training.records = []
    while training.done < training.total:
        training.advance()
        training.done += training.width
    drawn: list[maml_rl.Learner] = []
    monkeypatch.setattr(
        maml_rl.figures, "draw_episodes", lambda learner: drawn.append(learner) or Figure()
    )
    training.draw(tmp_path, training.result())
    fresh = maml_rl.Learner(config, 1)
    assert drawn[0].seed == 1
    trained, start = (
        torch.cat([p.detach().flatten() for p in learner.policy.parameters()])
        for learner in (drawn[0], fresh)
    )
    assert not torch.equal(trained, start)


COMMANDS = ("estimate", "hyperopt", "learned-loss", "learned-optimizer")
COMMANDS += ("maml", "maml-rl", "meta-lr", "sine")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_defaults_of_each_preset(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    lines = re.sub(r"\n {10,}", " ", capsys.readouterr().out).splitlines()  # one for each flag
    shown = {line.replace(",", " ").split()[0]: line for line in lines if line}
    room = f"innerloop.experiments.{name.replace('-', '_')}.settings"
    kind = importlib.import_module(room).Config
    quick, paper = (vars(kind.configure({}, preset)) for preset in ("quick", "paper"))
    for setting in quick:
        line = shown["--" + setting.replace("_", "-")]
        if quick[setting] == paper[setting]:
            assert quick[setting] is None or line.endswith(f" ({quick[setting]})")
        else:
            assert quick[setting] is None or f"(quick: {quick[setting]}" in line
            assert paper[setting] is None or f"paper: {paper[setting]})" in line


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        (Bounds(1), [1, 10**9], [0, math.nan, math.inf]),
        (Bounds(0, above=True), [1e-300], [0, -1, math.nan, math.inf]),
        (Bounds(0, above=True, infinite=True), [1e-300, math.inf], [0, math.nan]),
        (Bounds(0, 1, below=True), [0, 0.5], [1, -0.1, math.nan]),
        (Bounds(2, 5), [2, 5], [1, 6]),
    ],
    ids=str,
)
def test_bounds(bounds: Bounds, inside: list[float], outside: list[float]) -> None:
    for value in inside:
        bounds.check("some_name", value)
    for value in outside:
        text = rf"^--some-name must be {bounds}.*, not {value}\.$"
        with pytest.raises(InnerLoopError, match=text):
            bounds.check("some_name", value)
