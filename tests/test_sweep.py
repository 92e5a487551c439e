"""`innerloop sweep`: which runs there are, and that it goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from innerloop.__main__ import main
from innerloop.experiments import sweep

SMALL = ["--filters", "4", "--steps", "1", "--tasks", "2", "--query", "1", "--iterations", "2"]
SMALL += ["--epoch", "1", "--val-tasks", "2", "--test-tasks", "2", "--tasks-by", "loop"]


def test_the_grid_of_the_paper() -> None:
    chosen = {name: list(values) for name, values in sweep._GRID.items()}
    found = sweep.jobs(Path("out"), chosen, "paper", [])
    # Omniglot 5- and 20-way, mini-ImageNet 5-way; 1 and 5 shots; 5 models, 2 optimizers, 3 seeds.
    assert len(found) == (2 + 1) * 2 * 5 * 2 * 3
    assert len({job.folder for job in found}) == len(found)
    sweep._check(found)


def test_a_sweep_does_what_is_left(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "--dataset", "glyphs", "--way", "3", "--shot", "1", "--model", "mlp"]
    words += ["--inner-optim", "sgd", "--out", str(tmp_path)]
    assert main([*words, "--seed", "0", "--", *SMALL]) == 0
    first = tmp_path / "glyphs-3w1s-mlp-sgd-seed0"
    before = (first / "result.json").stat().st_mtime_ns
    assert main([*words, "--seed", "0", "1", "--jobs", "2", "--", *SMALL]) == 0
    assert "2 runs, 1 finished already" in capfd.readouterr().out
    assert (first / "result.json").stat().st_mtime_ns == before
    assert (tmp_path / "glyphs-3w1s-mlp-sgd-seed1" / "result.json").exists()


def test_wrong_settings_are_refused_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "--dataset", "glyphs", "--model", "vgg", "vvg", "--out", str(tmp_path / "s")]
    assert main(words) == 2
    assert "vgg" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "maml" in capsys.readouterr().out
    assert main(["malm"]) == 2
    assert "Did you mean maml?" in capsys.readouterr().err
