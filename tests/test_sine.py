"""The demo: small runs of it, and what it says of bad values."""

import json

import pytest

from innerloop.experiments import sine

SMALL = ["--iterations", "3", "--tasks", "2", "--held-out", "4"]


def test_same_seed_same_result(tmp_path):
    found = []
    for name in ("first", "second"):
        assert sine.main([*SMALL, "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name / "fits.png").stat().st_size > 0
        found.append(json.loads((tmp_path / name / "result.json").read_text()))
    assert found[0]["mean_squared_error"] == found[1]["mean_squared_error"]


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
