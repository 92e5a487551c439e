"""Commands of `innerloop` in tests: their words, and what a run of one found."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from innerloop.__main__ import main

TINY = {
    "sine": "--iterations 3 --tasks 2 --held-out 4",
    "maml": "--model mlp --filters 8 --steps 2 --tasks 2 --query 2 --iterations 6 --epoch 2 "
    "--val-tasks 4 --test-tasks 8 --ensemble 2 --tasks-by loop",
    "meta-lr": "--growth 2 --depth 10 --epochs 4 --batch 10 --seeds 1 --shapes 20 --val-part 0.2 "
    "--meta-steps 2 --meta-batch 2 --val-batches 2 --meta-lr 0.01",
    "hyperopt": "--train 20 --val 15 --width 6 --steps 3 --batch 8 --labelled 10 --scouts 3 "
    "--starts 1 --updates 2 --seeds 2",
    "maml-rl": "--seeds 2 --iterations 2 --tasks 2 --episodes 4 --horizon 6 --hidden 4 "
    "--test-tasks 3 --test-episodes 3",
    "learned-loss": "--seeds 2 --iterations 3 --tasks 2 --steps 2 --horizon 4 --held-out 2 "
    "--problem sines",
    "learned-optimizer": "--problem quadratics --seeds 2 --episodes 2 --horizon 4 --window 2 "
    "--longer 6 --tasks 3 --held-out 4",
    "estimate": "--seeds 2 --characters 3 --common 12 --rare 6 --steps 2 --batch 8 --updates 3 "
    "--every 2 --samples 4 --trained 2",
}
"""Settings with which each command takes a second or two."""


def flags_of(name: str) -> Callable[..., list[str]]:
    """``flags(out, **changed)``: the command with tiny settings and some changed."""

    def flags(out: Path, **changed: str) -> list[str]:
        words = [f"--{k.replace('_', '-')}={v}" for k, v in changed.items()]
        return [name, *TINY[name].split(), *words, "--out", str(out)]

    return flags


def read(path: Path) -> dict[str, Any]:
    """The result of a run."""
    return json.loads((path / "result.json").read_text())


def read_records(path: Path) -> list[dict[str, Any]]:
    """The measurements on the way of a run; none of a command that makes none."""
    file = path / "metrics.jsonl"
    return [*map(json.loads, file.read_text().splitlines())] if file.exists() else []


def without_times(found: Any) -> Any:
    """What was found except how long it took."""
    if isinstance(found, dict):
        return {k: without_times(v) for k, v in found.items() if k not in ("seconds", "cpu")}
    return [without_times(v) for v in found] if isinstance(found, list) else found


def untimed(path: Path) -> str:
    """Everything a run found except how long it took."""
    return json.dumps(without_times([*read_records(path), read(path)]))


def stop_and_resume(words: list[str], experiment: type, unit: int) -> None:
    """Run a command that gets Ctrl-C in this unit, and resume it from its folder, the last word."""
    folder, advance = Path(words[-1]), experiment.advance

    def interrupted(run: Any) -> dict[str, str]:
        if run.done == unit - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return advance(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "advance", interrupted)
        assert main(words) == 130
    assert not (folder / "result.json").exists()
    torch.manual_seed(123)  # the random state is that of the checkpoint
    assert main([words[0], "--resume", str(folder)]) == 0
