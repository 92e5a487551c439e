"""The outer step: clipped, in mixed precision, and never along a gradient that is not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from commands import flags_of, read_records
from innerloop import data
from innerloop.__main__ import main
from innerloop.errors import InnerLoopError
from innerloop.experiments.maml.learner import FewShot, OuterStep

flags = flags_of("maml")


@pytest.fixture(autouse=True)
def few_glyphs(monkeypatch: pytest.MonkeyPatch) -> None:
    glyphs = data.glyphs(train=12, val=6, test=6)
    monkeypatch.setattr(data, "load", lambda *_, **__: glyphs)


def outer(**options: object) -> tuple[nn.Parameter, OuterStep]:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    return weight, OuterStep(torch.optim.SGD([weight], lr=1.0), **options)  # type: ignore[arg-type]


def test_a_gradient_is_clipped_by_its_norm() -> None:
    weight, step = outer(clip=1.0)
    step.step((weight * torch.tensor([30.0, 40.0])).sum(), str)
    torch.testing.assert_close(weight.detach(), torch.tensor([2.4, 3.2]), rtol=1e-6, atol=0)


def test_a_small_gradient_is_not_clipped() -> None:
    weight, step = outer(clip=100.0)
    step.step(weight.sum(), str)
    assert weight.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_skipped_and_counted(bad: float) -> None:
    weight, step = outer(nonfinite="skip")
    step.step((weight * bad).sum(), str)
    assert weight.tolist() == [3.0, 4.0] and step.skipped == 1
    step.step(weight.sum(), str)
    assert weight.tolist() == [2.0, 3.0] and step.skipped == 1
    _, other = outer(nonfinite="skip")
    other.load_state_dict(step.state_dict())
    assert other.skipped == 1


def test_what_is_not_finite_stops_and_says_where() -> None:
    weight, step = outer()
    with pytest.raises(InnerLoopError, match="the place"):
        step.step((weight * float("nan")).sum(), lambda: "the place")
    assert weight.tolist() == [3.0, 4.0]


def test_half_precision_is_blamed_for_what_is_not_finite() -> None:
    for options, blamed in (({"precision": "fp16"}, True), ({}, False)):
        weight, step = outer(**options)
        with pytest.raises(InnerLoopError) as error:
            step.step((weight * float("nan")).sum(), str)
        assert ("--precision fp16 is the likely cause" in str(error.value)) is blamed
        assert ("Write --precision bf16 or float32" in str(error.value)) is blamed


def test_a_scaled_loss_gives_the_same_update() -> None:
    weight, step = outer(precision="fp16")
    step.step(weight.square().sum() / 2, str)
    assert weight.tolist() == [0.0, 0.0]


def test_an_overflow_lowers_the_scale() -> None:
    weight, step = outer(precision="fp16")
    before = step.state_dict()["scaler"]["scale"]
    step.step((weight * 1e304).sum(), str)  # finite, but not when it is scaled up
    assert step.skipped == 1 and weight.tolist() == [3.0, 4.0]
    assert step.state_dict()["scaler"]["scale"] < before


def test_what_no_scale_makes_finite_stops() -> None:
    weight, step = outer(precision="fp16")
    with pytest.raises(InnerLoopError, match="the place"):
        step.step((weight * float("nan")).sum(), lambda: "the place")
    weight, step = outer(precision="fp16")
    with pytest.raises(InnerLoopError, match="the place"):
        for _ in range(40):  # a finite loss whose gradient is not
            step.step((weight - weight).sqrt().sum(), lambda: "the place")
    assert step.skipped == 16  # 65536 is halved down to 1
    assert weight.tolist() == [3.0, 4.0]


def test_skipped_updates_do_not_lower_the_scale_for_ever() -> None:
    weight, step = outer(precision="fp16", nonfinite="skip")
    for _ in range(300):
        step.step((weight * float("inf")).sum(), str)
    assert step.skipped == 300 and step.state_dict()["scaler"]["scale"] == 1
    step.step(weight.square().sum() / 2, str)
    assert weight.tolist() == [0.0, 0.0]


def losses(folder: Path) -> list[float]:
    return [record["train_loss"] for record in read_records(folder)]


@pytest.mark.parametrize("way", ["loop", "vmap"])
def test_bfloat16_inner_loops_learn_alike(way: str, tmp_path: Path) -> None:
    for precision in ("float32", "bf16"):
        assert main(flags(tmp_path / precision, precision=precision, tasks_by=way)) == 0
    single, half = losses(tmp_path / "float32"), losses(tmp_path / "bf16")
    assert single != half
    assert half == pytest.approx(single, rel=0.05)


def test_a_run_that_diverges_says_in_which_task_and_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(tmp_path / "run", inner_lr="1e30")) == 2
    said = capsys.readouterr().err
    assert "not finite" in said and "task" in said and "step 2" in said
    assert "weights as large as" in said


def test_a_run_may_leave_such_updates_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, calls = FewShot.loss, []

    def at_times(learner: FewShot, *args: Any) -> torch.Tensor:
        calls.append(loss(learner, *args))
        return calls[-1] * {2: math.nan, 3: math.inf}.get(len(calls), 1.0)

    monkeypatch.setattr(FewShot, "loss", at_times)
    assert main(flags(tmp_path / "run", nonfinite="skip")) == 0
    last = read_records(tmp_path / "run")[-1]
    assert last["skipped"] == 2
