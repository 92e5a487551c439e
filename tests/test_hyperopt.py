"""`innerloop hyperopt`: the gradients are right, compute is counted alike, runs can be stopped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import innerloop as il
from commands import flags_of, read, read_records
from innerloop.__main__ import main
from innerloop.errors import DivergedError, InnerLoopError
from innerloop.experiments.hyperopt import problem as problems
from innerloop.experiments.hyperopt import training as hyperopt
from innerloop.experiments.hyperopt.cell import Cell
from innerloop.experiments.hyperopt.losses import transform
from innerloop.experiments.hyperopt.problem import Points, split
from innerloop.experiments.hyperopt.settings import RANGES
from innerloop.experiments.hyperopt.training import _better, _recovery

pytest.importorskip("sklearn")

WHATS = tuple(RANGES)


flags = flags_of("hyperopt")


def settings(**changed: Any) -> hyperopt.Config:
    small = {"train": 20, "val": 15, "width": 6, "steps": 3, "labelled": 10, "starts": 1}
    return hyperopt.Config(**{**small, **changed})


def tiny(what: str, size: int = 8, **changed: Any) -> problems.Problem:
    """A problem on images of noise, always the same."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(60, 1, size, size, generator=generator, dtype=torch.float32)
    points = Points(noise, torch.arange(60) % 10)
    parts = split(points, None, train=20, val=20, noise=0.3, seed=0)
    return problems.build(settings(what=what, **{"steps": 4, "batch": 12, **changed}), parts, 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "whole"
    assert main(flags(folder)) == 0
    return folder


# --- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize("what", WHATS)
def test_every_kind_of_hyperparameters(what: str, tmp_path: Path) -> None:
    assert main(flags(tmp_path / "run", what=what, seeds="1")) == 0
    folder = tmp_path / "run"
    assert {p.name for p in folder.glob("*.png")} == {"search.png", "found.png"}
    result = read(folder)
    assert result["counted_cost"] == 3 and result["trainings"] == 3 + 2 * 3 + 1
    for columns in result["rows"].values():
        assert all(len(values) == 1 for values in columns.values())
        assert all(0 <= a <= 1 for a in columns["test_accuracy"])
    assert ("recovered" in result) == (what == "example-weights")
    count = {"weight-decay": 8, "augmentation": 8, "task-weights": 8, "label-smoothing": 10}
    assert result["hyperparameters"] == count.get(what, 20)
    assert len(result["names"]) == count.get(what, 0)


def test_the_best_of_all_trials_is_reported(whole: Path) -> None:
    records = read_records(whole)
    assert [(r["seed"], r["arm"]) for r in records] == [
        (seed, arm) for seed in (0, 1) for arm in ("references", "gradient", "random", "shared")
    ]
    for record in records:
        if record["arm"] == "references":
            continue
        assert record["trials"] == len(record["least"]) == (6 if "grad" in record["arm"] else 10)
        assert record["least"] == sorted(record["least"], reverse=True)
        # The training with the reported hyperparameters gives the loss by which they were chosen.
        assert record["val_loss"] == pytest.approx(record["least"][-1], rel=1e-6)
        if record["arm"] == "shared":
            assert len(set(record["numbers"])) == 1
    # Scouts are the first trials of random search.
    assert records[1]["least"][:3] == records[2]["least"][:3]


def test_the_table_has_every_way_and_every_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(tmp_path / "run", seed="7")) == 0
    said, rows = capsys.readouterr().out, read(tmp_path / "run")["rows"]
    assert "3 scouts, 2 updates" in said and "10 trainings' worth" in said
    by_seed = said[said.index("Validation loss with seed") :].splitlines()
    assert by_seed[0].split()[-2:] == ["7", "8"]
    for line, arm in zip(by_seed[1:], ("gradient", "random", "shared"), strict=False):
        assert line.split()[-2:] == [f"{value:.4f}" for value in rows[arm]["val_loss"]]


def test_data_are_read_for_their_checksum_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(hyperopt, "digest", lambda *parts: calls.append(parts) or "sum")
    search = hyperopt.Search(hyperopt.Config.configure({}, "quick"))
    assert {search.state_dict()["source"] for _ in range(3)} == {"digits (sum)"}
    assert len(calls) == 1


def test_another_seed_gives_another_result(whole: Path, tmp_path: Path) -> None:
    assert main(flags(tmp_path / "other", seed="1", seeds="1")) == 0
    ours, theirs = read(whole)["rows"], read(tmp_path / "other")["rows"]
    # A seed's result does not depend on those before it.
    assert {arm: {m: v[1:] for m, v in row.items()} for arm, row in ours.items()} == theirs
    assert ours["random"]["val_loss"][0] != theirs["random"]["val_loss"][0]


def test_a_training_that_diverges_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(flags(tmp_path / "run", inner_lr="1e30")) == 2
    error = capsys.readouterr().err
    assert "smaller --inner-lr" in error and "seed 0" in error


def test_a_trial_that_diverges_is_only_a_bad_one() -> None:
    config = settings(starts=1, updates=1)
    bad = tiny("weight-decay", inner_lr=1e30)
    assert math.isnan(bad.value(bad.start))
    cell = Cell(config, bad, 0, "random")
    assert cell.trial(0) == math.inf
    assert cell.best is None
    with pytest.raises(InnerLoopError, match="--inner-lr"):
        cell._record()
    cell.problem = tiny("weight-decay")
    assert cell.trial(1) < math.inf
    assert cell._record()["least"][0] is None


def test_an_update_that_diverges_goes_halfway_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(scouts=0, starts=1, updates=3)
    cell = Cell(config, tiny("weight-decay"), 0, "gradient")
    assert cell.trial(0) < math.inf
    best, tried = cell.best, cell.raw
    assert best is not None and tried is not None

    def diverging(*_: object, **__: object) -> None:
        raise DivergedError("in this test")

    with monkeypatch.context() as patch:
        patch.setattr(il, "meta_update", diverging)
        assert cell.trial(1) == math.inf
    torch.testing.assert_close(cell.raw, (best + tried) / 2)
    assert cell.best is best and cell.trial(2) < math.inf


def test_the_gradient_starts_at_the_best_scouts_and_goes_on_from_the_best_of_all() -> None:
    config = settings(scouts=4, starts=2, updates=9)
    assert config.each == 2
    problem = tiny("weight-decay")
    cell, random = (Cell(config, problem, 0, arm) for arm in ("gradient", "random"))
    scouts = [cell.trial(k) for k in range(4)]
    assert scouts == [random.trial(k) for k in range(4)]
    first, second = sorted(scouts)[:2]
    found = [cell.trial(4 + k) for k in range(9)]
    best = min(scouts + found[:4])
    assert [found[0], found[2], found[4]] == pytest.approx([first, second, best], rel=1e-6)
    # The point after the last update is measured too.
    last = cell.raw
    assert last is not None and cell.trial(13) == problem.value(last)


@pytest.mark.parametrize(
    ("given", "starts"), [({}, 2), ({"updates": 3}, 1), ({"updates": 4}, 2), ({"scouts": 0}, 1)]
)
def test_fewer_scouts_or_updates_have_fewer_starts(given: dict[str, int], starts: int) -> None:
    assert hyperopt.Config.configure(given, "quick").starts == starts


def test_without_scouts_it_starts_in_the_middle() -> None:
    config = settings(scouts=0, starts=1, updates=2)
    problem = tiny("weight-decay")
    middle = problem.value(problem.start)
    assert Cell(config, problem, 0, "gradient").trial(0) == pytest.approx(middle, rel=1e-6)


# --- counting -----------------------------------------------------------------------------------


def test_all_trials_of_the_gradient_are_counted() -> None:
    config = hyperopt.Config(scouts=5, updates=4, backward="remat")
    assert config.costs == [1] * 5 + [4] * 4 + [1]
    assert config.arms["gradient"] == 10
    assert config.arms["random"] == config.arms["shared"] == 22


def test_the_cost_of_an_update() -> None:
    cost = {b: hyperopt.Config(backward=b, steps=100).cost for b in ("tape", "remat", "binomial")}
    # With 8 slots, 45 steps are reached by two repetitions and 165 by three.
    assert cost == {"tape": 3, "remat": 4, "binomial": 6}
    assert hyperopt.Config(backward="binomial", steps=45).cost == 5
    assert hyperopt.Config(meta_cost=7).cost == 7


def test_an_update_takes_no_more_passes_than_counted() -> None:
    """Forward passes of the net: those of the steps, and those taken again."""
    for backward, again in (("tape", 0), ("remat", 1), ("binomial", 2)):
        problem = tiny("weight-decay", backward=backward, steps=20)
        calls = []
        problem.inner.model.register_forward_hook(lambda *_, c=calls: c.append(1))
        problem.value(problem.start)
        assert len(calls) == 20 + 1  # and the validation
        calls.clear()
        problem.inner(problem.batches, problem.split.val).backward()
        assert 20 * max(again, 1) < len(calls) <= 20 * (1 + again) + 1


# --- the problems -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", WHATS)
def test_the_gradient_is_that_of_the_validation_loss(what: str) -> None:
    """Against a finite difference along a random direction, in float64."""
    problem = in_double(tiny(what, backward="remat"))
    problem.inner(problem.batches, problem.split.val).backward()
    assert problem.raw.grad is not None
    direction = torch.randn_like(problem.raw)
    slope = (problem.raw.grad * direction).sum().item()
    start, small = problem.raw.detach().clone(), 1e-5
    ends = [problem.value(start + sign * small * direction) for sign in (1, -1)]
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * small), rel=1e-4)
    assert abs(slope) > 1e-9


def in_double(problem: problems.Problem) -> problems.Problem:
    inner = problem.inner.double()
    raw = next(inner.parameters())

    def double(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if floating else value

    batches = [type(b)(*map(double, b)) for b in problem.batches]
    parts = problem.split
    val = Points(*map(double, parts.val))
    return problem._replace(inner=inner, raw=raw, batches=batches, split=parts._replace(val=val))


def test_weight_decays_are_those_of_sgd() -> None:
    """A training with learned decays is the training with torch's own optimizer."""
    problem = tiny("weight-decay")
    raw = torch.linspace(math.log(1e-3), 0, 8, dtype=torch.float32)
    found = problem.value(raw)
    model = problems.net(torch.Size([1, 8, 8]), 6, 10, seed=1)
    groups = [
        {"params": [p], "weight_decay": decay.item()}
        for p, decay in zip(model.parameters(), raw.exp(), strict=True)
    ]
    sgd = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    for batch in problem.batches:
        sgd.zero_grad()
        cross_entropy(model(batch.x), batch.y).backward()
        sgd.step()
    expected = cross_entropy(model(problem.split.val.x), problem.split.val.y).item()
    assert found == pytest.approx(expected, rel=1e-5)


def test_equal_weights_are_no_weights() -> None:
    problem = tiny("example-weights")
    values = [problem.value(torch.full_like(problem.raw, math.log(w))) for w in (1.0, 1e-3)]
    plain = tiny("weight-decay")
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert values[0] == pytest.approx(plain.value(torch.full_like(plain.raw, -100.0)), rel=1e-5)


def test_weight_zero_is_a_point_less() -> None:
    problem = tiny("example-weights", batch=20)
    problem.set(torch.tensor([0.0] * 10 + [-100.0] * 10))
    batch = problem.batches[0]
    chosen = batch.which < 10
    model = problem.inner.model
    expected = cross_entropy(model(batch.x[chosen]), batch.y[chosen])
    torch.testing.assert_close(problem.inner.loss(model, batch), expected)


def test_smoothing_is_that_of_torch() -> None:
    problem = tiny("label-smoothing")
    problem.set(torch.full_like(problem.raw, math.log(0.2)))
    batch, model = problem.batches[0], problem.inner.model
    expected = cross_entropy(model(batch.x), batch.y, label_smoothing=0.2)
    torch.testing.assert_close(problem.inner.loss(model, batch), expected)


def test_a_change_by_nothing_changes_nothing_and_a_shift_shifts() -> None:
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(transform(x, torch.zeros(2, 8)), x)
    amounts = torch.zeros(2, 8)
    amounts[:, 0] = 2 / 8  # a pixel: the picture is two units wide
    torch.testing.assert_close(transform(x, amounts)[..., :-1], x[..., 1:])
    amounts = torch.zeros(2, 8)
    amounts[:, 2] = math.pi / 2
    turned = transform(x, amounts)
    assert any(torch.allclose(turned, torch.rot90(x, k, (2, 3)), atol=1e-6) for k in (1, 3))


def test_only_some_points_have_a_class() -> None:
    """The class of a point without one has no influence, its auxiliary labels have."""
    problem = tiny("task-weights", batch=20)
    batch, model, loss = problem.batches[0], problem.inner.model, problem.inner.loss
    before = loss(model, batch)
    hidden = batch.which >= 10
    other = torch.where(hidden, (batch.y + 1) % 10, batch.y)
    torch.testing.assert_close(loss(model, batch._replace(y=other)), before)
    shown = torch.where(hidden, batch.y, (batch.y + 1) % 10)
    assert loss(model, batch._replace(y=shown)) != before
    loss.labels[batch.which[hidden]] = 1 - loss.labels[batch.which[hidden]]
    assert loss(model, batch) != before


def test_parts_have_no_point_in_common_and_noise_changes_labels_only() -> None:
    points = Points(torch.arange(50.0).view(50, 1, 1, 1), torch.arange(50) % 10)
    noisy, clean = (split(points, None, train=20, val=15, noise=n, seed=3) for n in (0.4, 0.0))
    parts = [part.x.flatten() for part in (noisy.train, noisy.val, noisy.test)]
    assert torch.cat(parts).unique().numel() == 50
    for a, b in zip(parts, (clean.train, clean.val, clean.test), strict=True):
        assert torch.equal(a, b.x.flatten())
    assert (noisy.train.y != noisy.clean).sum() == 8
    assert torch.equal(noisy.clean, clean.train.y) and torch.equal(noisy.val.y, clean.val.y)
    own = Points(points.x[:12], points.y[:12])
    assert len(split(points, own, train=30, val=20, noise=0, seed=0).test.y) == 12
    with pytest.raises(InnerLoopError, match="--train"):
        split(points, None, train=30, val=15, noise=0, seed=0)


def test_every_point_comes_once_before_any_comes_again() -> None:
    points = Points(torch.zeros(10, 1, 2, 2), torch.arange(10))
    batches = problems.make_batches(points, 5, 4, torch.Generator().manual_seed(0))
    order = torch.cat([b.which for b in batches])
    assert len(order) == 20
    assert all(half.unique().numel() == 10 for half in order.split(10))
    assert all(torch.equal(points.y[b.which], b.y) for b in batches)


def test_draws_are_log_uniform_in_the_range() -> None:
    problem = tiny("weight-decay")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([problem.draw(generator) for _ in range(500)])
    low, high = math.log(1e-5), 0.0
    assert low <= drawn.min() < low + 0.1 and high - 0.1 < drawn.max() <= high
    assert drawn.mean().item() == pytest.approx((low + high) / 2, abs=0.2)
    assert problem.draw(generator, shared=True).unique().numel() == 1


def test_convolutions_for_larger_pictures() -> None:
    problem = tiny("augmentation", size=16)
    assert any(isinstance(m, torch.nn.Conv2d) for m in problem.inner.model.modules())
    assert math.isfinite(problem.value(problem.start))


# --- the summary --------------------------------------------------------------------------------


def test_ties_are_no_wins() -> None:
    assert _better([1.0, 2.0, 3.0], [1.0, 3.0, 2.0], "val_loss") == 1
    assert _better([1.0, 2.0, 4.0], [1.0, 3.0, 2.0], "test_accuracy") == 1


def test_recovered_is_a_share_of_what_was_lost() -> None:
    accuracy = {"noisy labels": [0.6, 0.9], "clean labels": [0.8, 0.9], "gradient": [0.7, 0.95]}
    rows = {name: {"test_accuracy": values} for name, values in accuracy.items()}
    arm = [{"numbers": [1.0, 0.5, 0.1]}] * 2
    plain = [{"wrong": [False, False, True]}] * 2
    found = _recovery({"gradient": arm, "references": plain}, rows)
    assert found["recovered"] == [pytest.approx(0.5), None]
    assert found["recovered_of_mean"] == pytest.approx(0.75)
    assert found["mean_weights"] == {"right": [0.75, 0.75], "wrong": [0.1, 0.1]}


@pytest.mark.slow
def test_learned_weights_recover_half_of_what_wrong_labels_cost(tmp_path: Path) -> None:
    arguments = ["--what", "example-weights", "--seeds", "2", "--out", str(tmp_path / "run")]
    assert main(["hyperopt", *arguments]) == 0
    result = read(tmp_path / "run")
    assert result["recovered_of_mean"] >= 0.5
    assert result["better"]["random"]["val_loss"] == 2


def test_one_seed_has_no_spread() -> None:
    assert hyperopt._mean_text([0.5], True) == "50.0 %"
    assert hyperopt._mean_text([1.0, 3.0], False) == "2.000 ± 1.414"
