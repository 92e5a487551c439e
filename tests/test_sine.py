"""The demo: small runs of it, and what it says of bad values."""

import copy
import json

import pytest
import torch

from innerloop.experiments.sine import main
from innerloop.experiments.sine import training as sine
from innerloop.experiments.sine.problem import build_net, draw_sines

SMALL = ["--iterations", "3", "--tasks", "2", "--held-out", "4"]


@pytest.fixture(autouse=True)
def few_sines(monkeypatch):
    """Rates are chosen on as few sines as the rest of these small runs has."""
    monkeypatch.setattr(sine, "CHOICE_SINES", 3)


def found(folder):
    result = json.loads((folder / "result.json").read_text())
    return {name: value for name, value in result.items() if name != "seconds"}


def test_both_nets_are_treated_alike(tmp_path, monkeypatch):
    """They see the same sines from the same weights."""
    seen = []

    def noting(*args, **kwargs):
        seen.append(draw_sines(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(sine, "draw_sines", noting)
    run = sine.Comparison(sine.Config.configure({"iterations": 3, "tasks": 2}, "quick"))
    first, second = run.inner.model.state_dict(), run.net.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for step in range(run.total):
        run.done = step
        run.advance()
    for a, b in zip(seen[:3], seen[3:], strict=True):
        assert torch.equal(a.support[1], b.support[1]) and torch.equal(a.query[1], b.query[1])


def test_the_initial_weights_and_the_rate_are_learned():
    run = sine.Comparison(sine.Config.configure({"iterations": 3, "tasks": 2}, "quick"))
    for step in range(3):
        run.done = step
        run.advance()
    assert 0 < run.inner.hyper["lr"].item() != pytest.approx(run.config.inner_lr)
    before, after = build_net(run.config.seed).state_dict(), run.inner.model.state_dict()
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_the_baseline_gets_the_rate_that_is_best():
    """Found again by trying each rate by itself."""
    net = build_net(0)
    sines = draw_sines(torch.Generator().manual_seed(0), 3)
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


def test_a_file_in_place_of_the_folder(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert main([*SMALL, "--out", str(file)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_divergence_is_explained(tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main([*SMALL, "--steps", "40", "--inner-lr", "1e6", "--out", out]) == 2
    assert "a smaller learning rate" in capsys.readouterr().err
