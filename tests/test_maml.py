"""`innerloop maml`: what it writes, that it can be stopped anywhere, that it learns."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from commands import flags_of, untimed
from innerloop import data
from innerloop.__main__ import main
from innerloop.errors import InnerLoopError
from innerloop.experiments import maml
from innerloop.experiments._command_line import from_json
from innerloop.experiments._few_shot import step_weights
from innerloop.experiments._run import Run

TINY = {
    "--model": "mlp",
    "--filters": "8",
    "--steps": "2",
    "--tasks": "2",
    "--query": "2",
    "--iterations": "6",
    "--epoch": "2",
    "--val-tasks": "4",
    "--test-tasks": "8",
    "--ensemble": "2",
    "--tasks-by": "loop",
}


flags = flags_of("maml", TINY)


@pytest.fixture(scope="module")
def glyphs() -> data.Splits:
    return data.glyphs(train=30, val=8, test=8)


@pytest.fixture(autouse=True)
def few_glyphs(glyphs: data.Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, runs draw fewer of them."""
    monkeypatch.setattr(data, "load", lambda *_, **__: glyphs)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    assert main(flags(tmp_path / "whole")) == 0
    return tmp_path / "whole"


def test_a_run_writes_all_it_should(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "metrics.jsonl", "checkpoint.pt", "result.json"):
        assert (whole / name).stat().st_size > 0
    assert {p.name for p in whole.glob("*.png")} == {
        "accuracy.png",
        "learned-lr.png",
        "episodes.png",
    }
    assert list(whole.glob("events.out.tfevents*"))
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [r["iteration"] for r in records] == [2, 4, 6]
    # One rate for each step and each tensor of the model.
    assert torch.tensor(records[0]["learned"]["lr"]).shape[0] == 2
    result = json.loads((whole / "result.json").read_text())
    assert 0 <= result["accuracy"] <= 1 and result["test_tasks"] == 8
    assert len(result["epochs"]) == 2


def test_the_same_seed_gives_the_same_result(whole: Path, tmp_path: Path) -> None:
    assert main(flags(tmp_path / "again")) == 0
    assert untimed(tmp_path / "again") == untimed(whole)
    assert main(flags(tmp_path / "other", seed="1")) == 0
    assert untimed(tmp_path / "other") != untimed(whole)


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_stopped_run_goes_on_to_the_same_result(
    whole: Path, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "stopped"
    advance = maml.Training.advance

    def asking(training: maml.Training) -> dict[str, str]:
        if training.done == after - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return advance(training)

    with monkeypatch.context() as patch:
        patch.setattr(maml.Training, "advance", asking)
        assert main(flags(folder)) == 130
    assert not (folder / "result.json").exists()
    assert main(["maml", "--resume", str(folder)]) == 0
    assert untimed(folder) == untimed(whole)


def test_multi_step_losses_and_orders(tmp_path: Path) -> None:
    changed = {"multi_step_epochs": "2", "first_order_epochs": "1"}
    assert main(flags(tmp_path / "run", **changed)) == 0


def test_inner_adam_learns_its_betas(tmp_path: Path) -> None:
    assert main(flags(tmp_path / "run", inner_optim="adam")) == 0
    assert (tmp_path / "run" / "learned-betas.png").exists()
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    betas = torch.tensor(last["learned"]["betas"])
    assert betas.min() > 0 and betas.max() < 1
    assert betas.unique().numel() > 2


@pytest.mark.parametrize("way", ["threads", "vmap"])
def test_ways_agree(whole: Path, tmp_path: Path, way: str) -> None:
    assert main(flags(tmp_path / way, tasks_by=way)) == 0
    ours, theirs = (
        [json.loads(line)["train_loss"] for line in (p / "metrics.jsonl").read_text().splitlines()]
        for p in (whole, tmp_path / way)
    )
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("way", ["loop", "vmap"])
def test_the_number_of_threads_changes_rounding_only(tmp_path: Path, way: str) -> None:
    changed = {"model": "vgg", "filters": "8", "tasks_by": way}
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert main(flags(tmp_path / str(threads), **changed)) == 0
            lines = (tmp_path / str(threads) / "metrics.jsonl").read_text().splitlines()
            found.append([json.loads(line)["train_loss"] for line in lines])
    finally:
        torch.set_num_threads(before)
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_weights_of_steps() -> None:
    for epoch in range(12):
        weights = step_weights(5, epoch, 10)
        assert sum(weights) == pytest.approx(1)
        assert weights[-1] >= max(weights[:-1]) - 1e-12
    assert step_weights(5, 10, 10) == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--model", "resnet8"], "resnet-8"),
        (["--dataset", "omniglott"], "omniglot"),
        (["--way", "1"], "at least 2"),
        (["--inner-lr", "nan"], "above 0"),
        (["--meta-lr-end", "1"], "at most"),
        (["--preset", "papr"], "paper"),
        (["--backward", "taped"], "tape"),
        (["--learn-betas"], "sgd"),
        (["--device", "nowhere"], "device"),
        (["--resume", "no-such-folder"], "no-such-folder"),
        (["--inner-optm", "sgd"], "--inner-optim"),
        (["--way", "five"], "--way"),
    ],
)
def test_wrong_settings_are_refused(
    wrong: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["maml", *wrong, "--out", str(tmp_path / "run")])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_written_over(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(whole)) == 2
    assert "--resume" in capsys.readouterr().err


def test_resuming_with_other_settings_is_refused(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["maml", "--resume", str(whole), "--way", "4"]) == 2
    assert "--way" in capsys.readouterr().err


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.save({"a": torch.zeros(3)})
    run.save({"a": torch.ones(3)})
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-7])
    state = run.load()
    assert state is not None and state["a"].sum() == 0
    assert "damaged" in capsys.readouterr().out


def test_a_configuration_of_unknown_settings_is_refused() -> None:
    with pytest.raises(InnerLoopError, match="inner_lr"):
        from_json(maml.Config, {"inner_lrr": 0.1})
    with pytest.raises(InnerLoopError, match="way"):
        from_json(maml.Config, {"way": "5"})


@pytest.mark.slow
def test_killed_at_random_20_times(tmp_path: Path) -> None:
    """SIGKILL at any moment loses nothing that matters."""
    changed = {"iterations": "60", "epoch": "3"}
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "innerloop"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *flags(tmp_path / "whole", **changed)], env=environment, check=True)
    chance = random.Random(0)
    for kill in range(20):
        started = (folder / "config.json").exists()
        how = ["maml", "--resume", str(folder)] if started else flags(folder, **changed)
        process = subprocess.Popen(
            [*command, *how], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
        time.sleep(3 + 4 * chance.random() + 0.1 * kill)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run([*command, "maml", "--resume", str(folder)], env=environment)
    assert done.returncode == 0
    assert untimed(folder) == untimed(tmp_path / "whole")


# What is noticed before any work, and what is survived. -------------------------------------------


def test_too_few_classes_are_noticed_before_any_work(
    tmp_path: Path, glyphs: data.Splits, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(tmp_path / "run", way="9")) == 2
    assert "The val split cannot be used" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_pictures_must_be_square(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = data.glyphs(train=8, val=8, test=8)
    narrow = [data.Images(p.pixels[..., :20].clone(), p.offsets, p.names) for p in drawn]
    monkeypatch.setattr(data, "load", lambda *_, **__: data.Splits(*narrow))
    assert main(flags(tmp_path / "run")) == 2
    assert "28 high and 20 wide" in capsys.readouterr().err


def test_a_dense_net_of_any_size_is_built() -> None:
    config = maml.configured({"model": "densenet-bc-4-10"}, "quick")
    assert config.filters is None and maml.Training(config).learner.model is not None
    with pytest.raises(InnerLoopError):
        maml.Training(maml.configured({"model": "densenet-bc-4-11"}, "quick"))


def test_tasks_that_diverge_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(tmp_path / "run", inner_lr="1e30", nonfinite="skip")) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["skipped"] == 6 and last["diverged"] > 0 and last["train_loss"] is None
    assert "Left out: 6 updates" in capsys.readouterr().out


def test_a_validation_task_that_diverges_is_told_in_the_words_of_the_command() -> None:
    training = maml.Training(maml.Config(model="mlp", filters=8, tasks=2, inner_lr=1e30))
    with pytest.raises(InnerLoopError, match="--nonfinite skip"):
        training.accuracies(training.splits.val, 2, 0)


def test_the_diverging_task_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    training = maml.Training(maml.Config(model="mlp", filters=8, tasks=4, nonfinite="stop"))
    episode = training.sampler.sample()
    episode.support.x[2] = torch.nan
    learner = training.learner
    with pytest.raises(InnerLoopError, match=r"task 3 is not finite in step 1, with weights as"):
        learner.update(episode, [0.0] * 4 + [1.0], first_order=False)


def test_a_run_goes_on_with_data_that_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, glyphs: data.Splits
) -> None:
    asked = []

    def load(*_: object, root: Path | None = None, **__: object) -> data.Splits:
        asked.append(root)
        return glyphs

    monkeypatch.setattr(data, "load", load)
    monkeypatch.setenv("INNERLOOP_DATA", str(tmp_path / "first"))
    out = tmp_path / "run"
    assert main(flags(out, dataset="omniglot")) == 0
    monkeypatch.delenv("INNERLOOP_DATA")
    assert main(["maml", "--resume", str(out)]) == 0
    assert main(["maml", "--resume", str(out), "--data", str(tmp_path / "second")]) == 0
    assert asked == [tmp_path / "first", tmp_path / "first", tmp_path / "second"]
