"""The folder of a run: whole at any moment, of one process at a time, gone on with as started."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import subprocess
import sys
import zipfile
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
from innerloop.experiments.framework.settings import Bounds, as_json, from_json
from innerloop.experiments.maml.settings import Config
from innerloop.experiments.maml_rl import training as maml_rl
from innerloop.experiments.sine import training as sine

TINY = ["sine", "--iterations", "2", "--tasks", "1", "--held-out", "3"]


def folder_of(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    with run.lock(new=True):
        run.start({})
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
    # The next save ends in the middle: after the old one is kept, before the new one is there.
    replace, calls = os.replace, []

    def failing(source: Any, target: Any) -> None:
        calls.append(target)
        if str(target).endswith("/checkpoint.pt"):
            raise OSError("disk")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", failing)
        with pytest.raises(InnerLoopError, match="disk"):
            run.save({"number": 3})
    assert calls
    assert run.load() == {"number": 1}
    run.save({"number": 3})
    assert run.load() == {"number": 3}


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_last_checkpoints_are_kept(tmp_path: Path, keep: int) -> None:
    run = folder_of(tmp_path)
    run.keep = keep
    for number in range(6):
        run.save({"number": number})
    for age in range(keep):
        assert run.load() == {"number": 5 - age}
        damage(run._checkpoints()[age])
    with pytest.raises(InnerLoopError, match="no checkpoint in it is whole"):
        run.load()


def test_fewer_checkpoints_are_kept_from_now_on(tmp_path: Path) -> None:
    run = folder_of(tmp_path)
    run.keep = 5
    for number in range(5):
        run.save({"number": number})
    assert len(run._checkpoints()) == 5
    run.keep = 2
    run.save({"number": 5})
    assert len(run._checkpoints()) == 2


def test_all_checkpoints_may_be_kept(tmp_path: Path) -> None:
    run = folder_of(tmp_path)
    run.keep = 10**12
    for number in range(4):
        run.save({"number": number})
    assert len(run._checkpoints()) == 4


def test_no_checkpoint_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sine", "--keep", "0"]) == 2
    assert "--keep must be at least 1, not 0" in capsys.readouterr().err


def test_if_all_are_damaged_it_does_not_speak_of_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder_of(tmp_path)
    run.save({})
    damage(run.folder / "checkpoint.pt")
    with pytest.raises(InnerLoopError, match="no checkpoint in it is whole"):
        run.load()
    assert "before" not in capsys.readouterr().out


def test_one_process_at_a_time(tmp_path: Path) -> None:
    run = folder_of(tmp_path)
    with run.lock(), pytest.raises(InnerLoopError, match="Another process"), run.lock():
        pass
    with run.lock():
        pass


def test_of_two_starts_at_once_one_writes_nothing(tmp_path: Path) -> None:
    first = sine.Comparison(sine.Config(iterations=2, tasks=1, held_out=3))
    run = Run(tmp_path / "run")
    with run.lock(new=True):
        with pytest.raises(InnerLoopError, match="Another process"):
            carry_out(first, sine.Config(seed=5), run, quiet=True)
        assert [path.name for path in run.folder.iterdir()] == [".lock"]


def test_a_process_that_died_is_no_reason_to_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--out", str(tmp_path)]) == 0
    experiment = sine.Comparison(sine.Config(iterations=2, tasks=1, held_out=3))
    experiment.records, experiment.done = [], 1
    Run(tmp_path).save(experiment._whole_state())

    def died(_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(sine.Comparison, "advance", died)
    assert main(["sine", "--resume", str(tmp_path)]) == WRONG
    error = capsys.readouterr().err
    assert "Connection closed by peer" in error and "go on again: nothing is lost" in error


@pytest.mark.parametrize("name", ["config.json", "checkpoint.pt"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_refused_at_once(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--out", str(tmp_path)]) == 0
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    assert main(["sine", "--resume", str(tmp_path)]) == WRONG
    assert "is not a file" in capsys.readouterr().err


def test_a_name_that_is_too_long_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--out", str(tmp_path / ("a" * 300))]) == WRONG
    assert "cannot be written to" in capsys.readouterr().err


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    run = folder_of(tmp_path)
    left = run.folder / ".checkpoint.pt-abcd1234"
    left.touch()
    drawn = run.folder / ".figures-abcd1234"
    drawn.mkdir()
    (drawn / "half.png").touch()
    with run.lock():
        assert not left.exists() and not drawn.exists()


def test_a_run_that_is_stopped_while_it_draws_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No picture is left torn, and going on draws them."""

    def torn(_: Figure, path: Path, **__: Any) -> None:
        Path(path).write_bytes(b"half a picture")
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", torn)
        assert main([*TINY, "--out", str(run)]) == STOPPED
    assert not (run / "result.json").exists() and not list(run.rglob("*.png"))
    assert main(["sine", "--resume", str(run)]) == 0
    assert (run / "fits.png").read_bytes().startswith(b"\x89PNG") and (run / "result.json").exists()
    assert not list(run.glob(".figures-*"))


def test_how_many_checkpoints_to_keep_is_part_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert Run(run).read_keep() == 3
    Run(run).write_json("config.json", Run(run).config() | {"keep": 0})
    assert main(["sine", "--resume", str(run)]) == WRONG
    assert "keep = 0" in capsys.readouterr().err


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
    script = tmp_path / "my tools" / "innerloop"
    script.parent.mkdir()
    script.touch(0o755)
    monkeypatch.setattr("sys.argv", [str(script)])
    assert main([*TINY, "--out", str(tmp_path / "run")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(f": '{script}' sine --steps 5 --out out/sine-5")
    monkeypatch.setenv("PATH", str(script.parent))
    assert program() == "innerloop"
    monkeypatch.setattr("sys.argv", ["innerloop/__main__.py"])
    assert program() == f"{sys.executable} -m innerloop"
    (script.parent / "python").symlink_to(sys.executable)
    monkeypatch.setattr("sys.executable", str(script.parent / "python"))
    assert program() == "python -m innerloop"


def test_torchrun_goes_on_with_its_own_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "run")]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    assert main([*TINY, *out]) == 0
    result = (tmp_path / "run" / "result.json").read_bytes()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main([*TINY, *out]) == 0  # started again, it has nothing left to do
    # Ids repeat: with other settings it is another run, and it is not written over.
    assert main([*TINY, "--meta-lr", "0.5", *out]) == WRONG
    assert "holds a run already" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    assert main([*TINY, "--seed", "5", *out]) == WRONG
    assert "holds a run already" in capsys.readouterr().err
    same = json.loads(result)["mean_squared_error"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["mean_squared_error"] == same


@pytest.mark.parametrize(
    "forged, said",
    [
        ({"done": 10**9}, "of 4 updates"),
        ({"done": -5}, "of 4 updates"),
        ({"done": 1.5}, "of 4 updates"),
        ({"records": [1]}, "records"),
        ({"records": 3}, "records"),
        ({"seconds": None}, "float"),
        ({"state": {}}, "KeyError"),
        ({"state": []}, "TypeError"),
    ],
)
def test_a_forged_checkpoint_is_refused(
    forged: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--out", str(tmp_path)]) == 0
    experiment = sine.Comparison(sine.Config(iterations=2, tasks=1, held_out=3))
    experiment.records = []
    Run(tmp_path).save(experiment._whole_state() | forged)
    assert main(["sine", "--resume", str(tmp_path)]) == WRONG
    error = capsys.readouterr().err
    assert "cannot go on from its checkpoint" in error and said in error


def test_a_forged_state_is_noticed_at_the_first_unit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--out", str(tmp_path)]) == 0
    experiment = sine.Comparison(sine.Config(iterations=2, tasks=1, held_out=3))
    experiment.records, experiment.done = [], 1
    state = experiment._whole_state()
    state["state"]["running"] = "a"
    Run(tmp_path).save(state)
    assert main(["sine", "--resume", str(tmp_path)]) == WRONG
    assert "cannot go on from its checkpoint" in capsys.readouterr().err


def test_a_checkpoint_that_unpacks_to_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    """A small file could fill any memory."""
    run = folder_of(tmp_path)
    run.save({"number": torch.zeros(10**6)})
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO((run.folder / "checkpoint.pt").read_bytes()[32:])) as plain,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    data = packed.getvalue()
    (run.folder / "checkpoint.pt").write_bytes(hashlib.sha256(data).digest() + data)
    with pytest.raises(InnerLoopError, match="bytes would become"):
        run.load()


def test_deeply_nested_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    assert main(["sine", "--resume", str(tmp_path)]) == WRONG
    assert "cannot be read" in capsys.readouterr().err


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
        (["maml", "--seed", "18446744073709551615"], "--seed"),
        (["meta-lr", "--seed", "99999999999999999999999"], "--seed"),
        (["hyperopt", "--seed", "99999999999999999999999"], "--seed"),
        (["estimate", "--seed", "-1"], "--seed"),
        (["learned-optimizer", "--seed", "10000000000"], "--seed"),
        (["maml", "--device", "meta"], "--device"),
        (["meta-lr", "--device", "meta"], "--device"),
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


def test_empty_paths_of_a_configuration_are_refused() -> None:
    with pytest.raises(InnerLoopError, match="out = '', which is not a path"):
        from_json(sine.Config, as_json(sine.Config()) | {"out": ""})


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


_MEET = """
import sys, time
import torch
from innerloop.experiments.framework import ranks as _ranks
_ranks._CONNECT = float(sys.argv[1])
time.sleep(float(sys.argv[2]))
with _ranks.join_group("cpu") as ranks:
    time.sleep(float(sys.argv[3]))
    assert ranks.sum(torch.ones(1)).item() == 2
print("met")
"""


def meeting(store: TCPStore, rank: int, start: int, *seconds: float) -> subprocess.Popen[str]:
    return member(store, rank, start, _MEET, *map(str, seconds))


def member(
    store: TCPStore, rank: int, start: int, program: str, *words: str
) -> subprocess.Popen[str]:
    """A process of a group that torchrun started for so many times."""
    about = {"WORLD_SIZE": 2, "RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": store.port}
    about |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": start}
    command = [sys.executable, "-c", program, *words]
    environment = os.environ | {name: str(value) for name, value in about.items()}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def test_a_group_that_is_started_again() -> None:
    """Its store has the addresses of those who died; they are not taken for those of others."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    # Restarts are counted by each machine for itself.
    for starts, late in (((0, 0), (0, 0)), ((1, 0), (0, 4)), ((1, 1), (4, 0))):
        group = [meeting(store, k, starts[k], 20, late[k], 0) for k in range(2)]
        assert ["met" in p.communicate()[0] for p in group] == [True, True]


def test_exchanges_may_take_longer_than_connecting() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = [meeting(store, 0, 0, 5, 0, 0), meeting(store, 1, 0, 5, 0, 7)]
    assert ["met" in p.communicate()[0] for p in group] == [True, True]


def test_a_process_that_waits_for_others_in_vain() -> None:
    """It ends soon, so that torchrun starts the group again."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    alone = meeting(store, 0, 0, 2, 0, 0)
    assert "do not find each other" in alone.communicate()[1]
    assert alone.returncode == 1


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
    group = [member(store, k, 0, _LEAVE) for k in range(2)]
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
        member(store, k, 0, _RUN, str(seeds[k]), *words, "--tasks", str(tasks[k])) for k in range(2)
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


def test_the_last_policy_is_drawn_as_it_ended(tmp_path: Path) -> None:
    """After a run of several seeds, whichever process had the last one."""
    config = maml_rl.Config(
        seeds=2, iterations=1, tasks=2, episodes=2, horizon=3, hidden=4, test_tasks=2
    )
    training = maml_rl.Training(config)
    training.records = []
    while training.done < training.total:
        training.advance()
        training.done += training.width
    fresh = maml_rl.Learner(config, 1)
    assert training.learner.seed == 1
    trained, start = (
        torch.cat([p.detach().flatten() for p in learner.policy.parameters()])
        for learner in (training.learner, fresh)
    )
    assert not torch.equal(trained, start)


def test_help_shows_the_defaults_of_each_preset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["maml", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "meta-updates (quick: 300, paper: 75000)" in text
    assert "classes of a task (5)" in text
    assert "one of loop, threads, vmap (vmap)" in text
    quick = Config.configure({}, "quick")
    assert (quick.iterations, quick.way, quick.tasks_by) == (300, 5, "vmap")


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
