"""The demo: small runs of it, and what it says of bad values."""

import copy
import json

import pytest
import torch

from innerloop.experiments import sine

SMALL = ["--iterations", "3", "--tasks", "2", "--held-out", "4"]


@pytest.fixture(autouse=True)
def few_sines(monkeypatch):
    """Rates are chosen on as few sines as the rest of these small runs has."""
    monkeypatch.setattr(sine, "CHOICE_SINES", 3)


def test_same_seed_same_result(tmp_path):
    found = []
    for name in ("first", "second"):
        assert sine.main([*SMALL, "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name / "fits.png").stat().st_size > 0
        found.append(json.loads((tmp_path / name / "result.json").read_text()))
    assert found[0]["mean_squared_error"] == found[1]["mean_squared_error"]
    assert found[0]["learning_rate"]["maml"] == found[1]["learning_rate"]["maml"]


def test_both_nets_are_treated_alike():
    """They see the same sines from the same weights; none of them is held out."""
    config = sine.parse(SMALL)
    first, second = ([sines for sines, _ in sine._training(config, name)] for name in "ab")
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.support[1], b.support[1]) and torch.equal(a.query[1], b.query[1])
    weights = [sine.build_net(config.seed).state_dict()["0.weight"] for _ in range(2)]
    assert torch.equal(*weights)


def test_the_initial_weights_and_the_rate_are_learned():
    config = sine.parse(SMALL)
    inner = sine.train_maml(config)
    assert 0 < inner.hyper["lr"].item() != pytest.approx(config.inner_lr)
    before = sine.build_net(config.seed).state_dict()
    after = inner.model.state_dict()
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_the_baseline_gets_the_rate_that_is_best():
    """Found again by trying each rate by itself."""
    net = sine.build_net(0)
    sines = sine.draw_sines(torch.Generator().manual_seed(0), 3)
    _, best = sine.with_best_rates(net, sines)

    def error(rate, steps):
        total = 0.0
        for task in range(3):
            own = copy.deepcopy(net)
            optimizer = torch.optim.SGD(own.parameters(), lr=rate)
            for _ in range(steps):
                optimizer.zero_grad()
                x, y = (t[task] for t in sines.support)
                (own(x) - y).square().mean().backward()
                optimizer.step()
            x, y = (t[task] for t in sines.query)
            total += (own(x) - y).square().mean().item()
        return total

    for steps, rate in best.items():
        assert error(rate, steps) <= min(error(r, steps) for r in sine.RATES) * (1 + 1e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--iterations", "0"],
        ["--tasks", "-1"],
        ["--steps", "0"],
        ["--inner-lr", "nan"],
        ["--meta-lr", "0"],
        ["--held-out", "2"],
        ["--seed", "-1"],
    ],
    ids=" ".join,
)
def test_bad_values_are_refused_before_any_work(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        sine.main([*arguments, "--out", str(tmp_path / "out")])
    assert f"{arguments[0]} {arguments[1]} cannot work" in capsys.readouterr().err.replace(
        "0.0 cannot", "0 cannot"
    )
    assert not (tmp_path / "out").exists()


def test_a_file_in_place_of_the_folder(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert sine.main([*SMALL, "--out", str(file)]) == 1
    assert "Cannot write" in capsys.readouterr().err


def test_divergence_is_explained(tmp_path, capsys):
    out = str(tmp_path / "out")
    assert sine.main([*SMALL, "--steps", "40", "--inner-lr", "1e6", "--out", out]) == 1
    assert "--inner-lr" in capsys.readouterr().err
