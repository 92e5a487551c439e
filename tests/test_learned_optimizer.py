"""`innerloop learned-optimizer`: what it writes, that it resumes, that the comparison is fair."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import flags_of, read
from innerloop.__main__ import main
from innerloop.experiments.learned_optimizer import figures, tuned
from innerloop.experiments.learned_optimizer import training as learned_optimizer
from innerloop.experiments.learned_optimizer.cell import Cell
from innerloop.experiments.learned_optimizer.problem import (
    FAMILIES,
    Digits,
    Quadratics,
    draw_problems,
)
from innerloop.experiments.learned_optimizer.tuned import best_rates, curves, measure

flags = flags_of("learned-optimizer")


@pytest.fixture(autouse=True)
def few_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "RATES", (0.001, 0.01, 0.1))


def test_the_summary_is_that_of_all_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    assert main(flags(whole)) == 0
    result = read(whole)
    by = result["summary"]["quadratics"]
    assert set(by) == {"lstm", "sgd", "adam", "rmsprop"}
    assert set(by["lstm"]) == {"4", "6"} and set(by["lstm"]["4"]) == {"mean", "final"}
    values = [cell["losses"]["lstm"]["6"]["final"] for cell in result["cells"]]
    assert by["lstm"]["6"]["final"]["mean"] == pytest.approx(sum(values) / 2)
    shown = capsys.readouterr().out
    assert "learned LSTM" in shown and "of 2 seeds" in shown
    assert f"{by['adam']['4']['mean']['mean']:.4g}" in shown


@pytest.mark.parametrize("optimizer", ["mlp", "meta-sgd", "lslr"])
def test_other_optimizers(tmp_path: Path, optimizer: str) -> None:
    assert main(flags(tmp_path / "run", optimizer=optimizer, seeds="1")) == 0
    assert optimizer in read(tmp_path / "run")["summary"]["quadratics"]


def test_by_binomial(tmp_path: Path) -> None:
    assert main(flags(tmp_path / "run", by="binomial", seeds="1", slots="2")) == 0


def test_digits(tmp_path: Path) -> None:
    few = {"problem": "both", "seeds": "1", "digits_episodes": "1", "digits_held_out": "4"}
    assert main(flags(tmp_path / "run", **few)) == 0
    result = read(tmp_path / "run")
    assert set(result["summary"]) == {"quadratics", "digits"}
    assert (tmp_path / "run" / "digits.png").stat().st_size > 0


# What is compared. ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tuned.OPTIMIZERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_all_rates_at_once_are_torchs_optimizer_one_by_one(name: str, kind: str) -> None:
    family = FAMILIES[name]()
    generator = torch.Generator().manual_seed(0)
    family.begin(generator)
    batches = family.draw(generator, 2, 5, unseen=False)
    rates = (0.01, 0.1)
    together = curves(kind, rates, family, batches, 2)
    assert together.shape == (2, 2, 5)
    for r, rate in enumerate(rates):
        for task in range(2):
            model = copy.deepcopy(family.model)
            optimizer = tuned.OPTIMIZERS[kind](model.parameters(), lr=rate)
            for step, batch in enumerate(batches):
                optimizer.zero_grad()
                loss = family.loss(model, [part[task] for part in batch])
                assert together[r, task, step].item() == pytest.approx(loss.item(), rel=1e-4)
                loss.backward()
                optimizer.step()


def test_the_best_rate_by_each_metric() -> None:
    # [rates, tasks, steps]: good early, good late, and one that went astray on the way
    found = torch.tensor([[[3.0, 1.0, 2.0]], [[3.0, 2.0, 1.0]], [[0.0, float("nan"), 0.0]]])
    assert best_rates(found, [2]) == {"2": {"mean": 0.001, "final": 0.01}}
    assert measure(found[0, 0], 2, "mean") == 2.0 and measure(found[0, 0], 2, "final") == 2.0


def test_comparisons_are_made_on_problems_that_nobody_has_seen() -> None:
    """Of digits other images, of quadratics other draws; the same ones for every optimizer."""
    digits = Digits()
    seen, unseen = (half[0] for half in digits.halves)
    assert len(seen) + len(unseen) == 1797
    # Pictures that occur twice in the dataset aside, no picture is in both halves.
    own = {tuple(row) for row in seen.tolist()}
    assert sum(tuple(row) in own for row in unseen.tolist()) <= 2
    draws = [
        next(draw_problems(Quadratics(), 3, 6, seed, unseen))[0][1]
        for seed, unseen in ((2_000_003, True), (2_000_003, True), (1_000_003, False))
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def cell(config: learned_optimizer.Config) -> Cell:
    return Cell(config, "quadratics", Quadratics(), seed=0, rates=dict)


def test_an_episode_goes_on_from_window_to_window() -> None:
    """With a meta rate of almost nothing, its loss is that of one uncut run."""
    config = learned_optimizer.Config(
        problem="quadratics", horizon=6, window=2, longer=6, tasks=3, meta_lr=1e-30
    )
    training = cell(config)
    batches = Quadratics().draw(torch.Generator().manual_seed(0), 3, 6, unseen=False)
    expected = training.curves(batches).mean().item()
    assert training.episode(0) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_lstm_is_belowtuned_adam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert main(["learned-optimizer", "--problem", "quadratics", "--out", str(tmp_path / "o")]) == 0
    by = read(tmp_path / "o")["summary"]["quadratics"]
    assert by["lstm"]["100"]["mean"]["mean"] < by["adam"]["100"]["mean"]["mean"]


# Refusals. ----------------------------------------------------------------------------------------


def test_an_episode_that_diverges_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = learned_optimizer.Config(horizon=6, window=3, tasks=2)
    training = cell(config)
    before = [p.detach().clone() for p in training.learned.parameters()]

    def broken(_: Any) -> torch.Tensor:
        return sum(p.sum() for p in training.learned.parameters()) * math.inf

    monkeypatch.setattr(training, "_loss", broken)
    assert training.episode(0) == math.inf
    for p, old in zip(training.learned.parameters(), before, strict=True):
        assert torch.equal(p, old)
    for p in training.learned.parameters():
        p.data.fill_(1e30)
    batches = training.family.draw(training.generator, 2, 6, unseen=True)
    assert training.curves(batches).shape == (2, 6)


def test_a_comparison_that_diverged_in_one_seed_is_drawn() -> None:
    config = learned_optimizer.Config(problem="quadratics", seeds=2, horizon=2, window=2, longer=2)
    curves = [{"lstm": [1.0, loss, loss], "adam": [1.0, 0.5, 0.2]} for loss in (math.inf, 0.5)]
    result = {
        "cells": [{"problem": "quadratics", "curves": one} for one in curves],
        "rates": {"quadratics": {"adam": {"2": {"mean": 0.1}}}},
    }
    figure = figures.draw_curves(config, "quadratics", result)
    figure.savefig(io.BytesIO())
    assert len(figure.axes[0].lines) == 3


def test_runs_that_diverged_are_named() -> None:
    diverged = {"mean": math.inf, "deviation": math.nan}
    assert learned_optimizer._mean_text(diverged) == "diverged"
