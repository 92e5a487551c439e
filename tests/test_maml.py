"""`innerloop maml`: what it writes, that it can be stopped anywhere, that it learns."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import datasets
from commands import flags_of, read, read_records, untimed
from innerloop import data
from innerloop.__main__ import main
from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.run import Run
from innerloop.experiments.framework.settings import from_json
from innerloop.experiments.maml import training as maml
from innerloop.experiments.maml.learner import step_weights

flags = flags_of("maml")


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


def test_each_epoch_has_a_record(whole: Path) -> None:
    assert (whole / "checkpoint.pt").stat().st_size > 0
    records = read_records(whole)
    assert [r["iteration"] for r in records] == [2, 4, 6]
    # One rate for each step and each tensor of the model.
    assert torch.tensor(records[0]["learned"]["lr"]).shape[0] == 2
    result = read(whole)
    assert 0 <= result["accuracy"] <= 1 and result["test_tasks"] == 8
    assert len(result["epochs"]) == 2


# The parts of MAML++, against plain torch. --------------------------------------------------------


def by_hand(training: maml.Training, episode: data.Episode, weights: list[float], order: int):
    """The weighted query losses after each of the steps of SGD, meaned over tasks."""
    model, rate = training.learner.model, training.config.inner_lr
    start = dict(model.named_parameters())
    total = torch.zeros((), dtype=torch.float64)
    for (x, y), (qx, qy) in ((b, q) for b, q in zip(*map(each_task, episode), strict=True)):
        params = start
        for weight in weights:
            loss = cross_entropy(functional_call(model, params, (x,)), y)
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=order == 2)
            updated = [p - rate * g for p, g in zip(params.values(), grads, strict=True)]
            params = dict(zip(params, updated, strict=True))
            total = total + weight * cross_entropy(functional_call(model, params, (qx,)), qy)
    return total / len(episode.support.y)


def each_task(batch: data.Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(batch.x.double(), batch.y, strict=True))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("weights", [[0.0, 0.0, 1.0], [0.5, 0.3, 0.2]])
@pytest.mark.parametrize("way", ["loop", "vmap"])
def test_losses_and_orders_are_those_of_plain_torch(
    weights: list[float], order: int, way: str
) -> None:
    config = maml.Config(model="mlp", filters=6, tasks=2, steps=3, precision="float64")
    training = maml.Training(dataclasses.replace(config, tasks_by=way))
    learner, episode = training.learner, training.sampler.sample()
    learner.inner.first_order = order == 1
    params = list(learner.model.parameters())
    loss = learner.loss(episode.to(torch.float64), weights)
    expected = by_hand(training, episode, weights, order)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    for found, wanted in zip(
        torch.autograd.grad(loss, params), torch.autograd.grad(expected, params), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_the_epochs_decide_on_weights_and_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    update = maml.FewShot.update

    def noting(self, episode, weights, first_order):
        seen.append((list(weights), first_order))
        return update(self, episode, weights, first_order)

    monkeypatch.setattr(maml.FewShot, "update", noting)
    changed = {"multi_step_epochs": "2", "first_order_epochs": "1"}
    assert main(flags(tmp_path / "run", **changed)) == 0
    assert [first for _, first in seen] == [True] * 2 + [False] * 4
    assert [w for w, _ in seen] == [[0.5, 0.5]] * 2 + [[0.25, 0.75]] * 2 + [[0.0, 1.0]] * 2


def test_the_meta_rate_follows_a_cosine(whole: Path) -> None:
    records = read_records(whole)
    expected = [1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * k / 3)) / 2 for k in range(3)]
    assert [r["meta_lr"] for r in records] == pytest.approx(expected, rel=1e-12)


def test_inner_adam_starts_from_the_outer_moments() -> None:
    training = maml.Training(maml.Config(model="mlp", filters=6, tasks=2, inner_optim="adam"))
    learner, episode = training.learner, training.sampler.sample()
    cold = learner.probabilities(episode)
    learner.update(episode, [0.0] * 4 + [1.0], first_order=False)
    before = learner.probabilities(episode)
    for p in learner.model.parameters():
        inner, outer = learner.optimizer.state[p], learner.meta_optimizer.state[p]
        assert inner.keys() == outer.keys() and outer["exp_avg"].abs().max() > 0
        assert all(torch.equal(inner[name], outer[name]) for name in outer)
        outer["exp_avg"].mul_(-100)
    assert not torch.equal(cold, before)
    assert (learner.probabilities(episode) - before).abs().max() > 1e-3


def test_only_inner_adam_does() -> None:
    training = maml.Training(maml.Config(model="mlp", filters=6, tasks=2, inner_optim="adamw"))
    learner, episode = training.learner, training.sampler.sample()
    learner.update(episode, [0.0] * 4 + [1.0], first_order=False)
    learner.probabilities(episode)
    assert not any(learner.optimizer.state.values())


def test_an_epoch_without_moments_is_measured_without() -> None:
    """All its updates may have been left out."""
    training = maml.Training(maml.Config(model="mlp", filters=6, tasks=2, inner_optim="adam"))
    learner, episode = training.learner, training.sampler.sample()
    learned = {name: value.clone() for name, value in learner.inner.state_dict().items()}
    moments = copy.deepcopy(learner.meta_optimizer.state_dict())
    cold = learner.probabilities(episode)
    for _ in range(2):
        learner.update(episode, [0.0] * 4 + [1.0], first_order=False)
    learner.inner.load_state_dict(learned)
    learner.meta_optimizer.load_state_dict(moments)
    assert torch.equal(learner.probabilities(episode), cold)


def test_the_result_is_the_mean_prediction_of_the_best_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[maml.Training] = []
    result = maml.Training.result
    monkeypatch.setattr(maml.Training, "result", lambda self: (made.append(self), result(self))[1])
    changed = {"ensemble": "2", "inner_optim": "adam", "inner_lr": "0.1", "test_tasks": "40"}
    assert main(flags(tmp_path / "run", **changed)) == 0
    (training,) = made
    values = [r["val_accuracy"] for r in training.records]
    assert sorted(values)[-2:] == sorted(entry["val_accuracy"] for entry in training.best)
    said = []
    for entry in training.best:
        training.learner.inner.load_state_dict(entry["learned"])
        training.learner.meta_optimizer.load_state_dict(entry["moments"])
        one, labels = training.probabilities(training.splits.test, 40, maml._TEST_SEED)
        said.append(one)
    accuracy = (torch.stack(said).mean(0).argmax(-1) == labels).double().mean()
    found = read(tmp_path / "run")["accuracy"]
    assert found == pytest.approx(accuracy.item(), abs=1e-12)


def test_inner_adam_learns_its_betas(tmp_path: Path) -> None:
    assert main(flags(tmp_path / "run", inner_optim="adam")) == 0
    assert (tmp_path / "run" / "learned-betas.png").exists()
    last = read_records(tmp_path / "run")[-1]
    betas = torch.tensor(last["learned"]["betas"])
    assert betas.min() > 0 and betas.max() < 1
    assert betas.unique().numel() > 2


@pytest.mark.parametrize("way", ["threads", "vmap"])
def test_ways_agree(whole: Path, tmp_path: Path, way: str) -> None:
    assert main(flags(tmp_path / way, tasks_by=way)) == 0
    ours, theirs = (
        [r["train_loss"] for r in read_records(folder)] for folder in (whole, tmp_path / way)
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
            found.append([r["train_loss"] for r in read_records(tmp_path / str(threads))])
    finally:
        torch.set_num_threads(before)
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_weights_of_steps() -> None:
    for epoch in range(12):
        weights = step_weights(5, epoch, 10)
        assert sum(weights) == pytest.approx(1)
        assert weights[-1] >= max(weights[:-1]) - 1e-12
    assert step_weights(5, 10, 10) == [0, 0, 0, 0, 1]


def test_a_run_is_not_written_over(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(whole)) == 2
    assert "--resume" in capsys.readouterr().err


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
@pytest.mark.parametrize("changed", [{}, {"inner_optim": "adam", "tasks_by": "vmap"}])
def test_killed_at_random_20_times(tmp_path: Path, changed: dict[str, str]) -> None:
    """SIGKILL at any moment loses nothing that matters."""
    changed = {"iterations": "1000", "epoch": "5"} | changed
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "innerloop"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *flags(tmp_path / "whole", **changed)], env=environment, check=True)

    def epochs() -> int:
        path = folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    chance = random.Random(0)
    for _ in range(20):
        before, started = epochs(), (folder / "config.json").exists()
        how = ["maml", "--resume", str(folder)] if started else flags(folder, **changed)
        process = subprocess.Popen(
            [*command, *how], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
        while process.poll() is None and epochs() == before:
            time.sleep(0.01)
        time.sleep(0.2 * chance.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert before < epochs() < 200  # in the middle of its work
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


def test_pictures_of_several_sizes_are_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()  # real pictures
    monkeypatch.setenv("INNERLOOP_CACHE", str(tmp_path / "cache"))
    files = datasets.folder_files(size=20) | {
        name: content for name, content in datasets.folder_files(size=24).items() if "/1" in name
    }
    datasets.write_folder(tmp_path / "pictures", files)
    own = {"dataset": "folder", "data": str(tmp_path / "pictures"), "way": "3", "query": "1"}
    assert main(flags(tmp_path / "run", **own)) == 2
    assert "--size 32" in capsys.readouterr().err
    assert main(flags(tmp_path / "run", **own, size="12")) == 0
    kept = from_json(maml.Config, Run(tmp_path / "run").config())
    assert kept.size == 12
    for size in (12, 16):  # one is in the cache
        pixels = maml.load_images(dataclasses.replace(kept, size=size)).train.pixels
        assert pixels.shape[1:] == (3, size, size)
    assert main(["maml", "--resume", str(tmp_path / "run"), "--size", "16"]) == 2


def test_a_dense_net_of_any_size_is_built() -> None:
    config = maml.Config.configure({"model": "densenet-bc-4-10"}, "quick")
    assert config.filters is None and maml.Training(config).learner.model is not None
    with pytest.raises(InnerLoopError):
        maml.Training(maml.Config.configure({"model": "densenet-bc-4-11"}, "quick"))


def test_tasks_that_diverge_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(tmp_path / "run", inner_lr="1e30", nonfinite="skip")) == 0
    last = read_records(tmp_path / "run")[-1]
    assert last["skipped"] == 6 and last["diverged"] > 0 and last["train_loss"] is None
    assert "Left out: 6 updates" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [1, 2])
def test_measured_tasks_that_diverge_are_guesses(steps: int) -> None:
    # With one step, the losses are finite: the numbers overflow in the last step.
    config = maml.Config(model="mlp", filters=8, tasks=2, inner_lr=1e30, steps=steps)
    training = maml.Training(config)
    assert training.accuracies(training.splits.val, 4, 0).tolist() == [1 / config.way] * 4
    assert training.learner.diverged == 4


def test_tasks_beyond_those_measured_are_not_counted() -> None:
    """Meta-batches of two: the fourth task is computed, and left out."""
    training = maml.Training(maml.Config(model="mlp", filters=8, tasks=2, inner_lr=1e30, steps=1))
    assert len(training.accuracies(training.splits.val, 3, 0)) == 3
    assert training.learner.diverged == 3


def test_a_run_ends_though_test_tasks_diverge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = maml.Training.result

    def spoiled(self: maml.Training) -> dict:
        self.best[0]["learned"]["settings.lr"].fill_(1e30)
        return real(self)

    monkeypatch.setattr(maml.Training, "result", spoiled)
    assert main(flags(tmp_path / "run")) == 0
    result = read(tmp_path / "run")
    assert result["diverged"] == 8 and math.isfinite(result["accuracy"])
    assert "diverged: 8 in 2 times 8 tasks" in capsys.readouterr().out


@pytest.mark.parametrize("split", ["val", "test"])
def test_other_pictures_to_measure_are_noticed(
    split: str, glyphs: data.Splits, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    other = data.glyphs(train=30, val=8, test=8, seed=1)
    mixed = glyphs._replace(**{split: getattr(other, split)})
    monkeypatch.setattr(data, "load", lambda *_, **__: mixed)
    assert main(["maml", "--resume", str(whole)]) == 2
    assert "The images are not those" in capsys.readouterr().err


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
