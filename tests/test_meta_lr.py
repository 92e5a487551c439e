"""`innerloop meta-lr`: what it writes, that meta-updates touch nothing, that it can be stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import innerloop as il
from commands import flags_of, read, read_records, untimed
from innerloop import data
from innerloop.__main__ import main
from innerloop.errors import DivergedError
from innerloop.experiments.meta_lr import figures, problem
from innerloop.experiments.meta_lr import training as meta_lr
from innerloop.experiments.meta_lr.cell import Cell, parameter_groups
from innerloop.models import DenseNetBC

STEPS = 2  # in an epoch


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INNERLOOP_DATA", raising=False)


flags = flags_of("meta-lr")


def config(**changed: object) -> meta_lr.Config:
    own = {"growth": 2, "depth": 10, "epochs": 4, "batch": 10, "shapes": 20, "val_part": 0.2}
    own |= {"meta_steps": 2, "meta_batch": 2, "val_batches": 2, "meta_lr": 0.01}
    return meta_lr.Config(**{**own, **changed})  # type: ignore[arg-type]


def cell(arm: str, seed: int = 0, **changed: object) -> Cell:
    settings = config(**changed)
    train, test, _ = problem.load(None, settings.shapes, "cpu")
    return Cell(settings, arm, seed, problem.split(train, test, settings.val_part, seed), STEPS)


def trained(arm: str, epochs: int = 3, **changed: object) -> Cell:
    made = cell(arm, **changed)
    for epoch in range(epochs):
        for number in range(STEPS):
            made.step(epoch, number)
        made.end_epoch(epoch)
    return made


def tensors(made: Cell) -> list[torch.Tensor]:
    """Everything of a run that training changes."""
    state = [v for s in made.optimizer.state.values() for v in s.values()]
    return [*made.model.state_dict().values(), *state]


def rates(made: Cell) -> list[float]:
    return [group["lr"] for group in made.optimizer.param_groups]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meta-lr") / "whole"
    torch.set_default_dtype(torch.float64)
    assert main(flags(folder)) == 0
    return folder


# The method. --------------------------------------------------------------------------------------


def test_the_paper_has_299_groups_and_077_million_parameters() -> None:
    model = DenseNetBC(growth=12, depth=100)
    assert len(parameter_groups(model, "tensor")) == 299
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == 0.77
    paper = meta_lr.Config.configure({}, "paper")
    assert (paper.depth, paper.growth, paper.epochs, paper.seeds) == (100, 12, 300, 3)
    assert (paper.meta_steps, paper.meta_batch, paper.val_batches) == (15, 16, 10)
    assert (paper.batch, paper.val_part, paper.meta_lr) == (64, 0.01, 1e-3)
    assert paper.milestones == (150, 225)


@pytest.mark.parametrize("backward", ["remat", "tape"])
def test_a_meta_update_that_is_thrown_away_touches_nothing(backward: str) -> None:
    plain, thrown = trained("fixed"), trained("discarded", backward=backward)
    learned = thrown.inner
    assert learned is not None and learned.hyper["lr"].unique().numel() > 1
    assert all(torch.equal(a, b) for a, b in zip(tensors(plain), tensors(thrown), strict=True))
    assert rates(plain) == rates(thrown)
    used = trained("meta")
    assert not all(torch.equal(a, b) for a, b in zip(tensors(plain), tensors(used), strict=True))


def test_learned_rates_are_used() -> None:
    made = trained("meta")
    assert made.inner is not None
    assert rates(made) == pytest.approx(made.inner.hyper["lr"].tolist())
    assert len(set(rates(made))) > 1


def smooth(module: nn.Module) -> None:
    """Without kinks: a finite difference across one is no derivative."""
    for name, child in module.named_children():
        if isinstance(child, nn.ReLU):
            setattr(module, name, nn.Softplus())
        smooth(child)


def test_the_gradient_of_rates_is_that_of_finite_differences() -> None:
    """From warm momentum on, in float64."""
    made = cell("meta")
    smooth(made.model)
    made.step(0, 0)
    made.model.double()
    for state in made.optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].double()
    train, val = ([(x.double(), y) for x, y in part] for part in made.meta_batches(0))
    inner = made._inner()
    (slopes,) = torch.autograd.grad(inner(train, val), [inner.settings["lr"]])
    for group in (0, 5, -1):
        values = []
        for change in (1e-5, -1e-5):
            moved = made._inner()
            moved.settings["lr"].data[group] += change
            values.append(moved(train, val).item())
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(slopes[group].item(), rel=2e-6)


def test_rates_do_not_become_negative() -> None:
    made = trained("meta", meta_lr=0.5)
    assert min(rates(made)) == 0
    made = trained("meta", meta_lr=0.5, transform="log")
    assert min(rates(made)) > 0


def test_the_schedule_divides_by_ten_twice() -> None:
    made = cell("multistep", epochs=4)
    seen = []
    for epoch in range(4):
        seen.append(rates(made)[0])
        made.step(epoch, 0)
        made.end_epoch(epoch)
    assert seen == pytest.approx([0.1, 0.1, 0.01, 0.001])
    assert set(rates(trained("fixed"))) == {0.1}


def test_without_warm_state_another_gradient_is_learned_from() -> None:
    # The first step of Adam is the sign of the gradient; the second shows its size.
    warm, cold = trained("meta", epochs=2), trained("meta", epochs=2, warm=False)
    assert rates(warm) != rates(cold)
    assert warm.inner is not None and warm.inner.optimizer is warm.optimizer
    assert cold.inner is not None and not cold.inner.optimizer.state


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({"groups": "one"}, 1),
        ({"groups": "part"}, 8),
        ({"groups": "one", "per": "parameter"}, 29),
        ({"learn": "lr,momentum,weight_decay"}, 29),
        ({"optimizer": "adamw", "learn": "lr,betas,weight_decay"}, 29),
        ({"optimizer": "rmsprop", "backward": "binomial"}, 29),
    ],
    ids=str,
)
def test_everything_in_the_optimizer_can_be_learned(changed: dict, count: int) -> None:
    made = trained("meta", epochs=1, **changed)
    assert made.inner is not None
    before = cell("meta", **changed).optimizer.param_groups
    assert len(before) == count
    for name in made.config.learned:
        assert len(made.inner.hyper[name]) == count
        moved = [
            a[name] != b[name] for a, b in zip(made.optimizer.param_groups, before, strict=True)
        ]
        assert any(moved)


# Data. ------------------------------------------------------------------------------------------


def testproblem_are_mirrored_and_shifted_by_at_most_four() -> None:
    images = torch.rand(64, 3, 32, 32) + 1
    moved = problem.augment(images, problem.stream(0))
    seen = set()
    for before, after in zip(images, moved, strict=True):
        padded = torch.nn.functional.pad(before, [4] * 4)
        turned = torch.nn.functional.pad(before.flip(-1), [4] * 4)
        found = [
            (mirrored, down, across)
            for mirrored, whole in enumerate((padded, turned))
            for down in range(9)
            for across in range(9)
            if torch.equal(whole[:, down : down + 32, across : across + 32], after)
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert {m for m, _, _ in seen} == {0, 1}
    assert {d for _, d, _ in seen} == {a for _, _, a in seen} == set(range(9))


def test_parts_are_disjoint_and_normalized() -> None:
    shapes = problem.coloured_shapes(200, problem.stream(1))
    found = problem.split(shapes, shapes, 0.1, seed=3)
    assert (len(found.train.labels), len(found.val.labels)) == (180, 20)
    both = torch.cat([found.train.images, found.val.images]).flatten(1)
    assert len(both.unique(dim=0)) == len(shapes.images.flatten(1).unique(dim=0)) == 200
    plain = problem.normalize(found.train.images, found).double()
    assert plain.mean((0, 2, 3)).abs().max() < 1e-5
    assert (plain.std((0, 2, 3)) - 1).abs().max() < 1e-5
    other = problem.split(shapes, shapes, 0.1, seed=4)
    assert not torch.equal(other.val.images, found.val.images)


def test_validation_batches_use_all_before_one_comes_again() -> None:
    rows = torch.cat(problem.draw_rows(10, 4, 5, problem.stream(0)))
    assert rows.bincount().tolist() == [2] * 10


# The command. -----------------------------------------------------------------------------------


def test_the_result_is_that_of_the_last_epoch(whole: Path) -> None:
    found = read_records(whole)
    assert [(r["arm"], r["epoch"]) for r in found] == [
        (arm, epoch) for arm in ("fixed", "multistep", "meta") for epoch in (1, 2, 3, 4)
    ]
    result = read(whole)
    assert "synthetic" in result["data"]
    for arm, values in result["arms"].items():
        last = [r["test_error"] for r in found if r["arm"] == arm and r["epoch"] == 4]
        assert values["errors"] == last
        assert values["mean"] == pytest.approx(sum(last) / len(last))


def test_the_same_seed_gives_the_same_result(whole: Path, tmp_path: Path) -> None:
    assert main(flags(tmp_path / "again")) == 0
    assert untimed(tmp_path / "again") == untimed(whole)
    assert cell("fixed", 1).step(0, 0) != cell("fixed", 0).step(0, 0)


def test_what_is_learned_by_its_logarithm_goes_far_enough() -> None:
    made = cell("meta", learn="lr,momentum", meta_lr=0.02)
    rates = {g["lr"] for g in made.meta_optimizer.param_groups}
    assert rates == {0.02, 0.2}


def test_colours_are_measured_exactly() -> None:
    images = torch.randint(0, 256, (37, 3, 8, 8), dtype=torch.uint8)
    mean, deviation = problem._statistics(images)
    pixels = images.transpose(0, 1).flatten(1).double() / 255
    torch.testing.assert_close(mean.flatten(), pixels.mean(1).float())
    torch.testing.assert_close(deviation.flatten(), pixels.std(1).float())


# What goes wrong. ---------------------------------------------------------------------------------


def test_a_run_that_diverges_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Cell.step

    def diverging(made: Cell, epoch: int, number: int) -> float:
        if made.arm == "meta" and epoch == 1:
            made._check(float("nan"), epoch)
        return step(made, epoch, number)

    monkeypatch.setattr(Cell, "step", diverging)
    assert main(flags(tmp_path / "run", arms="meta, fixed")) == 0
    assert "diverged with seed 0" in capsys.readouterr().out
    arms = read(tmp_path / "run")["arms"]
    assert arms["meta"]["diverged"] == [0] and arms["meta"]["errors"] == []
    assert arms["fixed"]["diverged"] == [] and len(arms["fixed"]["errors"]) == 1
    assert (tmp_path / "run" / "test-error.png").exists()


def test_both_milestones_may_fall_on_one_epoch() -> None:
    made = cell("multistep", epochs=2)
    made.step(0, 0)
    made.end_epoch(0)
    assert rates(made)[0] == pytest.approx(0.001)


def test_the_environment_says_nothing_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(flags(tmp_path / "run", arms="fixed")) == 0
    monkeypatch.setenv("INNERLOOP_DATA", str(tmp_path / "nowhere"))
    assert main(["meta-lr", "--resume", str(tmp_path / "run")]) == 0


def test_a_run_that_diverges_in_its_last_step_has_no_error() -> None:
    """The loss is that before the step: it is the predictions that are not finite."""
    records: list[dict[str, object]] = []
    made = cell("fixed", epochs=1, lr=1e30)
    made.steps = 1
    made.advance(0, records)
    assert made.diverged and made.error is None
    assert "diverged" in records[0] and "test_error" not in records[0]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--lr", "1e-50", "--transform", "log"],
        ["--momentum", "0.99999999", "--learn", "lr,momentum"],
        ["--weight-decay", "1e-46", "--learn", "weight_decay"],
    ],
)
def test_what_cannot_be_learned_is_refused_before_other_arms_are_trained(
    wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cell, "advance", lambda *_: pytest.fail("it began to train"))
    assert main([*flags(tmp_path / "run"), *wrong]) == 2


def test_each_of_the_betas_has_a_row_of_its_own() -> None:
    betas = [[0.9, 0.999], [0.8, 0.998]]
    epochs = [{"epoch": epoch, "learned": {"betas": betas, "lr": [0.1, 0.2]}} for epoch in (1, 2)]
    runs = {("meta", seed): epochs for seed in range(3)}
    both = figures.draw_learned("betas", runs).axes
    assert [axes.get_ylabel() for axes in both] == ["betas[0]", "", "", "betas[1]", "", ""]
    lines = [line.get_ydata()[0] for line in both[3].get_lines()]
    assert lines == [0.999, 0.998]
    assert len(figures.draw_learned("lr", runs).axes) == 3


def test_a_meta_update_that_diverges_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training that goes on is untouched by it: it is that at a fixed rate."""

    def diverging(*_: object, **__: object) -> None:
        raise DivergedError("in this test")

    monkeypatch.setattr(il, "meta_update", diverging)
    assert main(flags(tmp_path / "run", arms="meta,fixed")) == 0
    assert "meta-updates diverged and were left out" in capsys.readouterr().out
    arms = read(tmp_path / "run")["arms"]
    assert arms["meta"]["errors"] == arms["fixed"]["errors"] and arms["meta"]["skipped"] > 0


def test_a_run_does_not_go_on_with_otherproblem(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p.name: p.read_bytes() for p in whole.iterdir() if p.is_file()}
    real = problem.load

    def other(*args: Any) -> Any:
        train, test, source = real(*args)
        return train, data.Labelled(255 - test.images, test.labels), source

    monkeypatch.setattr(problem, "load", other)
    assert main(["meta-lr", "--resume", str(whole)]) == 2
    assert "The run was on" in capsys.readouterr().err
    assert before == {p.name: p.read_bytes() for p in whole.iterdir() if p.is_file()}
