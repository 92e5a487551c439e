"""`innerloop estimate`: what it writes, that it can be stopped anywhere, that it learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from commands import flags_of, read, read_records
from innerloop.__main__ import main
from innerloop.experiments.estimate import problem as rare
from innerloop.experiments.estimate.settings import ARMS

flags = flags_of("estimate")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("estimate") / "whole"
    assert main(flags(folder)) == 0
    return folder


def test_all_methods_begin_alike_and_learn(whole: Path) -> None:
    records = read_records(whole)
    cells = [(seed, arm) for seed in (0, 1) for arm in ARMS]
    assert [(r["seed"], r["arm"], r["update"]) for r in records] == [
        (*cell, update) for cell in cells for update in (0, 2, 3)
    ]
    # All ways begin alike, and each moves what it learns.
    starts = [r for r in records if r["update"] == 0 and r["seed"] == 0]
    assert len({json.dumps([r["f1"], r["cross_entropy"], r["learned"]]) for r in starts}) == 1
    ends = [r["learned"] for r in records if r["update"] == 3]
    assert len({json.dumps(end) for end in ends}) == len(cells)
    assert all(min(abs(w - 1) for w in end["weights"]) > 0 for end in ends)


def test_the_result_is_that_of_the_last_records(whole: Path) -> None:
    records = read_records(whole)
    found = read(whole)["arms"]
    assert list(found) == ["start", *ARMS]
    for arm in ARMS:
        last = [r["f1"] for r in records if (r["arm"], r["update"]) == (arm, 3)]
        assert found[arm]["f1"]["each"] == last
        assert found[arm]["f1"]["mean"] == pytest.approx(sum(last) / 2)
    first = [r["f1"] for r in records if (r["arm"], r["update"]) == ("proxy", 0)]
    assert found["start"]["f1"]["each"] == first


def test_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    said = torch.tensor([1, 1, 1, 0, 0, 0, 0], dtype=torch.bool)
    wanted = torch.tensor([1, 0, 0, 1, 1, 1, 0], dtype=torch.bool)
    precision, recall = 1 / 3, 1 / 4
    expected = 2 * precision * recall / (precision + recall)
    assert rare.f1(said, wanted).item() == pytest.approx(expected)
    nothing = torch.zeros(3, dtype=torch.bool)
    assert rare.f1(nothing, nothing) == 0


def test_the_parts_of_a_search_share_no_drawing() -> None:
    found = rare.draw_search(seed=0, characters=4, common=10, rare=3, noise=0.1)
    for part in found:
        assert part.character.bincount().tolist() == [3, 10, 10, 10]
        assert torch.equal(part.target, part.character == 0)
    rows = torch.cat([part.features for part in found])
    assert len(rows.unique(dim=0)) == 3 * 33


@pytest.mark.slow
def test_what_learns_by_the_metric_beats_what_learns_by_the_proxy(tmp_path: Path) -> None:
    assert main(["estimate", "--seeds", "2", "--out", str(tmp_path / "run")]) == 0
    found = read(tmp_path / "run")["arms"]
    f1 = {arm: values["f1"]["mean"] for arm, values in found.items()}
    assert f1["reinforce"] > f1["proxy"] + 0.1
    assert f1["evolution"] > f1["proxy"] + 0.1
