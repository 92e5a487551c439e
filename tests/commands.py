"""Commands of `innerloop` in tests: their words, and what a run of one found."""

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from innerloop.__main__ import main


def flags_of(name: str, settings: Mapping[str, str]) -> Callable[..., list[str]]:
    """``flags(out, **changed)``: the command with these settings and some changed."""

    def flags(out: Path, **changed: str) -> list[str]:
        own = {**settings, **{"--" + k.replace("_", "-"): v for k, v in changed.items()}}
        return [name, *(word for pair in own.items() for word in pair), "--out", str(out)]

    return flags


def read(path: Path) -> dict[str, Any]:
    """The result of a run."""
    return json.loads((path / "result.json").read_text())


def without_times(found: Any) -> Any:
    """What was found except how long it took."""
    if isinstance(found, dict):
        return {k: without_times(v) for k, v in found.items() if k not in ("seconds", "cpu")}
    return [without_times(v) for v in found] if isinstance(found, list) else found


def untimed(path: Path) -> str:
    """Everything a run found except how long it took."""
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return json.dumps(without_times([*map(json.loads, lines), read(path)]))


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
