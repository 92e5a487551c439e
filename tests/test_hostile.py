"""Files and flags from anywhere end in a clear error or a right result, in nothing else.

``INNERLOOP_FUZZ=20 pytest tests/test_hostile.py tests/test_data_readers.py`` tries 20 times as
many, and says how many (in one process: without ``-n``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import pickle
import random
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostile import TIMES, TRIED
from innerloop.__main__ import main
from innerloop.errors import InnerLoopError
from innerloop.experiments.estimate import training as estimate
from innerloop.experiments.framework.run import Run
from innerloop.experiments.framework.settings import as_json, from_json
from innerloop.experiments.hyperopt import training as hyperopt
from innerloop.experiments.learned_loss import training as learned_loss
from innerloop.experiments.learned_optimizer import training as learned_optimizer
from innerloop.experiments.maml import training as maml
from innerloop.experiments.maml_rl import training as maml_rl
from innerloop.experiments.meta_lr import training as meta_lr
from innerloop.experiments.sine import training as sine

NAMES = [field.name for field in dataclasses.fields(maml.Config)]
KINDS: list[type] = [
    module.Config
    for module in (
        *(estimate, hyperopt, learned_loss, learned_optimizer),
        *(maml, maml_rl, meta_lr, sine),
    )
]
NUMBERS = st.integers(-3, 3) | st.integers() | st.floats()
VALUES = st.none() | st.booleans() | NUMBERS | st.text(max_size=12) | st.lists(st.integers())
CASES = settings(
    max_examples=400 * TIMES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def changes(kind: type) -> st.SearchStrategy[tuple[type, dict[str, Any]]]:
    """Settings of an experiment, of which some are anything."""
    names = [field.name for field in dataclasses.fields(kind)]
    changed = st.dictionaries(st.sampled_from(names) | st.text(max_size=8), VALUES, max_size=4)
    return st.tuples(st.just(kind), changed)


@CASES
@given(st.sampled_from(KINDS).flatmap(changes))
def test_configurations(case: tuple[type, dict[str, Any]]) -> None:
    TRIED["configurations"] += 1
    kind, changed = case
    whole = as_json(kind()) | changed
    with contextlib.suppress(InnerLoopError):
        found = as_json(from_json(kind, whole))
        paths = {name: str(Path(whole[name])) for name in ("data", "out") if found.get(name)}
        assert found == whole | paths


@CASES
@given(st.text(max_size=30) | st.recursive(VALUES, lambda v: st.lists(v, max_size=3)))
def test_files_of_settings(tmp_path: Path, content: Any) -> None:
    TRIED["files of settings"] += 1
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "config.json").write_text(text)
    with contextlib.suppress(InnerLoopError):
        from_json(maml.Config, Run(tmp_path).config())


FLAGS = st.sampled_from(["--" + name.replace("_", "-") for name in NAMES if name != "device"])


@CASES
@given(st.lists(st.tuples(FLAGS, st.text(max_size=6) | NUMBERS.map(str)), min_size=1, max_size=3))
def test_command_lines(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    """All are refused: the last flag is wrong whatever the others are."""
    TRIED["command lines"] += 1
    words = [word for pair in pairs for word in pair]
    silent = contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO())
    with silent[0], silent[1], contextlib.suppress(SystemExit):
        assert main(["maml", *words, "--out", str(tmp_path / "run"), "--way", "1"]) == 2
    assert not (tmp_path / "run").exists()


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Some bytes exchanged, cut out, doubled, or the end missing."""
    out = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 8, 64])):
        at = chance.randrange(len(out)) if out else 0
        kind = chance.randrange(4)
        if kind == 0 and out:
            out[at] = chance.randrange(256)
        elif kind == 1:
            del out[at : at + chance.randrange(1, 64)]
        elif kind == 2:
            out[at:at] = out[at : at + chance.randrange(1, 64)]
        else:
            del out[chance.randrange(len(out) // 2, len(out) + 1) :]
    return bytes(out)


def test_damaged_checkpoints(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save({"number": 1})
    run.save({"number": 2})
    path = tmp_path / "checkpoint.pt"
    whole, chance = path.read_bytes(), random.Random(0)
    for _ in range(500 * TIMES):
        TRIED["damaged checkpoints"] += 1
        content = damaged(whole, chance)
        path.write_bytes(content)
        state = run.load()
        assert state == {"number": 2 if content == whole else 1}


def test_foreign_checkpoints_with_a_right_checksum(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save({"number": torch.arange(3)})
    path = tmp_path / "checkpoint.pt"
    whole, chance = path.read_bytes()[32:], random.Random(0)

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "evil",)

    evil = io.BytesIO()
    torch.save({"a": Evil()}, evil)
    contents = [damaged(whole, chance) for _ in range(300 * TIMES)]
    contents += [evil.getvalue(), pickle.dumps(Evil()), b"", b"[1]"]
    for content in contents:
        TRIED["foreign checkpoints"] += 1
        path.write_bytes(hashlib.sha256(content).digest() + content)
        with contextlib.suppress(InnerLoopError):
            assert isinstance(run.load(), dict)
    assert not (tmp_path / "evil").exists()
