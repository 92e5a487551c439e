"""`innerloop sweep --engine ray`: a real cluster on this machine, killed and stopped midway."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import untimed
from innerloop.__main__ import main
from innerloop.experiments.sweep import ray_engine as _ray_engine

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install ray")
GRID = ["--dataset", "glyphs", "--way", "3", "--shot", "1", "--model", "mlp"]
GRID += ["--inner-optim", "sgd", "--seed", "0", "1"]
SMALL = ["--filters", "4", "--steps", "2", "--tasks", "2", "--query", "1", "--epoch", "5"]
SMALL += ["--iterations", "120", "--val-tasks", "2", "--test-tasks", "2", "--tasks-by", "loop"]
NAMES = [f"glyphs-3w1s-mlp-sgd-seed{seed}" for seed in (0, 1)]
LIMIT = 600.0


def sweep(out: Path, *engine: str) -> subprocess.Popen:
    """In a session of its own, as from a terminal: Ctrl-C goes to all of its processes."""
    words = [*GRID, "--out", str(out), *engine, "--", *SMALL]
    return subprocess.Popen(
        [sys.executable, "-m", "innerloop", "sweep", *words],
        # Ray's workers give way to any other process if not told otherwise.
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == code, said
    return said


def workers(pid: int) -> list[int]:
    """The processes below this one in which a run is under way."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = []
    try:
        for child in map(int, children.read_text().split()):
            title = Path(f"/proc/{child}/cmdline").read_bytes()
            found += [child] if title.startswith(b"ray::glyphs") else workers(child)
    except OSError:  # ended while it was looked at
        pass
    return found


def raylet(pid: int) -> bool:
    """Tests for the process that starts workers."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    titles = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    return any(b"raylet/raylet" in title for title in titles)


def gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    return not Path(f"/proc/{pid}").exists()


def under_way(process: subprocess.Popen, out: Path, epochs: int) -> int:
    """A worker, once one of the runs has validated so often."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until and process.poll() is None:
        known = [(out / name / "metrics.jsonl") for name in NAMES]
        if any(p.exists() and p.read_text().count("\n") >= epochs for p in known):
            return workers(process.pid)[0]
        time.sleep(0.05)
    raise AssertionError("no run got so far")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("sweep") / "whole"
    finish(sweep(out))
    return [untimed(out / name) for name in NAMES]


@pytest.mark.slow
@needs_ray
def test_a_killed_worker_loses_nothing(whole: list[str], tmp_path: Path) -> None:
    process = sweep(tmp_path, "--engine", "ray")
    first = under_way(process, tmp_path, 3)
    os.kill(first, signal.SIGKILL)
    second = under_way(process, tmp_path, 10)
    assert second != first
    os.kill(second, signal.SIGKILL)
    assert finish(process).count(": finished, ") == 2
    assert [untimed(tmp_path / name) for name in NAMES] == whole


@pytest.mark.slow
@needs_ray
def test_stopped_by_ctrl_c_it_goes_on(whole: list[str], tmp_path: Path) -> None:
    process = sweep(tmp_path, "--engine", "ray")
    worker = under_way(process, tmp_path, 3)
    os.killpg(process.pid, signal.SIGINT)
    said = finish(process, code=130)
    assert said.count(": stopped") == 2 and "Traceback" not in said
    assert gone(worker)
    assert not any((tmp_path / name / "result.json").exists() for name in NAMES)
    finish(sweep(tmp_path, "--engine", "ray"))
    assert [untimed(tmp_path / name) for name in NAMES] == whole


@pytest.mark.slow
@needs_ray
def test_stopped_while_a_worker_starts(tmp_path: Path) -> None:
    process = sweep(tmp_path, "--engine", "ray")
    until = time.monotonic() + LIMIT
    while not (found := workers(process.pid)) and time.monotonic() < until:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process, code=130).count(": stopped") == 2
    assert gone(found[0])
    assert not any((tmp_path / name / "result.json").exists() for name in NAMES)


@pytest.mark.slow
@needs_ray
def test_stopped_while_the_cluster_starts(tmp_path: Path) -> None:
    process = sweep(tmp_path / "s", "--engine", "ray")
    until = time.monotonic() + LIMIT
    while not raylet(process.pid) and time.monotonic() < until:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    said = finish(process, code=130)
    assert said.splitlines()[-1] == "Stopped." and "Traceback" not in said
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
@needs_ray
def test_a_run_whose_worker_dies_too_often_has_failed(tmp_path: Path) -> None:
    process = sweep(tmp_path, "--engine", "ray", "--retries", "0")
    os.kill(under_way(process, tmp_path, 3), signal.SIGKILL)
    said = finish(process, code=1)
    assert said.count(": failed") == 1 and said.count(": finished") == 1


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (["--engine", "rey"], "Did you mean ray?"),
        (["--engine", "ray", "--jobs", "2"], "--jobs must be left out with --engine ray, not 2"),
        (["--address", "auto"], "--address must be left out with --engine local"),
        (["--cpus-per-run", "1"], "--cpus-per-run must be left out"),
        (["--engine", "local", "--retries", "1"], "--retries must be left out"),
        (["--engine", "ray", "--cpus-per-run", "0"], "at least 1"),
        (["--engine", "ray", "--cpus-per-run", "100000"], "the cores of this machine"),
        (
            ["--engine", "ray", "--gpus-per-run", "nan"],
            "--gpus-per-run must be at least 0, not nan",
        ),
        (["--engine", "ray", "--retries", "-1"], "--retries must be at least 0, not -1"),
        (["--jobs", "0"], "--jobs must be a few, at least 1, not 0"),
    ],
)
def test_wrong_combinations_are_refused_before_any_work(
    engine: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s"
    assert main(["sweep", *GRID, *engine, "--out", str(out), "--", *SMALL]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_without_ray_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ray_engine.importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "s"
    assert main(["sweep", *GRID, "--engine", "ray", "--out", str(out), "--", *SMALL]) == 2
    assert "pip install '.[ray]'" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
@needs_ray
def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    out = tmp_path / "s"
    said = finish(sweep(out, "--engine", "ray", "--address", "127.0.0.1:1"), code=2)
    assert "--address 127.0.0.1:1" in said and "Traceback" not in said
    assert not out.exists()
