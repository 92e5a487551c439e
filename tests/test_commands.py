"""All commands: what a run writes, that it can be stopped anywhere, what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from commands import flags_of, stop_and_resume, untimed
from innerloop import data
from innerloop.__main__ import main
from innerloop.experiments.estimate.training import Comparison as Estimate
from innerloop.experiments.hyperopt.training import Search
from innerloop.experiments.learned_loss.problem import PROBLEMS
from innerloop.experiments.learned_loss.training import LearningLosses
from innerloop.experiments.learned_optimizer import tuned
from innerloop.experiments.learned_optimizer.training import Comparison as LearnedOptimizer
from innerloop.experiments.maml.training import Training as Maml
from innerloop.experiments.maml_rl.training import Training as MamlRl
from innerloop.experiments.meta_lr.training import MetaLr
from innerloop.experiments.sine import training as sine


class Case(NamedTuple):
    """A command in tests."""

    experiment: type
    figures: set[str]
    stops: tuple[int, ...]
    """Units in which Ctrl-C comes: within a part, and between two."""


CASES = {
    "sine": Case(sine.Comparison, {"fits"}, (1, 3, 5)),
    "maml": Case(Maml, {"accuracy", "learned-lr", "episodes"}, (1, 2, 5)),
    "meta-lr": Case(MetaLr, {"test-error", "learned-lr"}, (8, 21)),
    "hyperopt": Case(Search, {"search", "found"}, (3, 17)),
    "maml-rl": Case(MamlRl, {"returns", "training", "episodes"}, (1, 2)),
    "learned-loss": Case(LearningLosses, {"curves", "shape-sines"}, (5, 7)),
    "learned-optimizer": Case(LearnedOptimizer, {"quadratics"}, (1, 3, 5)),
    "estimate": Case(Estimate, {"metrics", "weights"}, (2, 3, 8)),
}
NAMES = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Little data, and few rates to choose from."""
    glyphs = data.glyphs(train=30, val=8, test=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("INNERLOOP_DATA", raising=False)
        patch.setattr(data, "load", lambda *_, **__: glyphs)
        patch.setattr(sine, "CHOICE_SINES", 3)
        patch.setattr(tuned, "RATES", (0.001, 0.01, 0.1))
        fewer = dataclasses.replace(PROBLEMS["sines"], rates=PROBLEMS["sines"].rates[:2])
        patch.setitem(PROBLEMS, "sines", fewer)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Undisturbed runs, each made by the first test that needs it."""
    return {"": tmp_path_factory.mktemp("runs")}


def finished(runs: dict[str, Path], name: str, **changed: str) -> Path:
    key = f"{name} {changed}"
    if key not in runs:
        runs[key] = runs[""] / str(len(runs))
        assert main(flags_of(name)(runs[key], **changed)) == 0
    return runs[key]


@NAMES
def test_a_run_writes_all_it_should(name: str, runs: dict[str, Path]) -> None:
    folder = finished(runs, name)
    for file in ("config.json", "result.json"):
        assert (folder / file).stat().st_size > 0
    assert list(folder.glob("events.out.tfevents*"))
    for ending in ("png", "svg"):
        assert {p.stem for p in folder.glob(f"*.{ending}")} == CASES[name].figures


@NAMES
def test_another_seed_gives_another_result(
    name: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    assert main(flags_of(name)(tmp_path / "other", seed="5")) == 0
    assert untimed(tmp_path / "other") != untimed(finished(runs, name))


@pytest.mark.parametrize(
    ("name", "after", "changed"),
    [
        *((name, after, {}) for name, case in CASES.items() for after in case.stops),
        ("maml", 3, {"tasks_by": "vmap"}),
        ("maml", 3, {"inner_optim": "adam", "multi_step_epochs": "2"}),
        ("learned-optimizer", 1, {"by": "pes", "samples": "2", "seeds": "1"}),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_result(
    name: str, after: int, changed: dict[str, str], runs: dict[str, Path], tmp_path: Path
) -> None:
    whole = finished(runs, name, **changed)
    stop_and_resume(flags_of(name)(tmp_path / "run", **changed), CASES[name].experiment, after)
    assert untimed(tmp_path / "run") == untimed(whole)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sine --iterations 0", "--iterations must be at least 1, not 0."),
        ("sine --inner-lr nan", "--inner-lr must be above 0, not nan."),
        ("sine --held-out 2", "--held-out must be at least 3, not 2."),
        ("sine --seed -1", "--seed must be from 0 to"),
        ("maml --model resnet8", "resnet-8"),
        ("maml --dataset omniglott", "omniglot"),
        ("maml --way 1", "at least 2"),
        ("maml --tasks 1000001", "from 1 to 1000000, not 1000001"),
        ("maml --iterations 1" + "0" * 400, "more than"),
        ("maml --model densenet-bc-/../../x", "densenet-bc-12-100"),
        ("maml --model densenet-bc-1000-1000", "weights"),
        ("maml --size 32", "--dataset folder"),
        ("maml --dataset folder --size 0", "from 1 to 1024"),
        ("maml --meta-lr-end 1", "at most"),
        ("maml --preset papr", "paper"),
        ("maml --backward taped", "tape"),
        ("maml --precision bf61", "bf16"),
        ("maml --nonfinite skipp", "skip"),
        ("maml --learn-betas", "sgd"),
        ("maml --learn-betas --inner-optim adamw", "adamw. It is for --inner-optim adam,"),
        ("maml --device nowhere", "device"),
        ("maml --resume no-such-folder", "no-such-folder"),
        ("maml --inner-optm sgd", "--inner-optim"),
        ("maml --way five", "--way"),
        ("meta-lr --arms fixed,meat", "meta"),
        ("meta-lr --arms fixed,fixed", "once"),
        ("meta-lr --learn lr,beta", "lr"),
        ("meta-lr --learn momentum --optimizer adamw", "betas"),
        ("meta-lr --learn momentum --momentum 0", "above 0"),
        ("meta-lr --depth 12", "multiple of 6"),
        ("meta-lr --lr 0", "above 0"),
        ("meta-lr --val-part 1", "above 0 and below 1, not 1.0"),
        ("meta-lr --val-part 0.0001 --shapes 20", "--val-part"),
        ("meta-lr --data no-such-folder", "no-such-folder"),
        ("hyperopt --what weight-decays", "weight-decay"),
        ("hyperopt --noise 1", "below 1"),
        ("hyperopt --seeds 1000000000000", "from 1"),
        ("hyperopt --scouts 1 --starts 2", "at most the scouts"),
        ("hyperopt --starts 3 --updates 5", "half of the updates"),
        ("hyperopt --train 1500", "--train"),
        ("hyperopt --what task-weights --dataset cifar10", "digits"),
        ("hyperopt --what task-weights --labelled 301", "at most"),
        ("maml-rl --world moon", "--world must be one of"),
        ("maml-rl --discount 1.5", "--discount must be from 0 to 1, not 1.5"),
        ("maml-rl --seed 1000001", "--seed must be such that all seeds are below"),
        ("learned-loss --problem sine", "sines"),
        ("learned-loss --form weighed", "weighted"),
        ("learned-loss --steps 200", "horizon"),
        ("learned-loss --inner-clip 0", "above 0"),
        ("learned-loss --momentum 1", "below 1"),
        ("learned-optimizer --optimizer lst", "--optimizer"),
        ("learned-optimizer --window 3", "--window must be a divisor"),
        ("learned-optimizer --longer 3", "--longer"),
        ("learned-optimizer --samples 3", "even"),
        ("learned-optimizer --digits-held-out 3", "a multiple of 4"),
        ("estimate --arms proxy,reinfroce", "reinforce"),
        ("estimate --samples 5", "even"),
        ("estimate --rare 300", "at most"),
        ("estimate --sample 4", "--samples"),
    ],
)
def test_wrong_settings_are_refused_before_any_work(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([*words.split(), "--out", str(tmp_path / "run")])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", ["maml --way 4", "learned-loss --steps 1"])
def test_other_settings_beside_resume_are_refused(
    words: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    name, flag, value = words.split()
    assert main([name, "--resume", str(finished(runs, name)), flag, value]) == 2
    assert flag in capsys.readouterr().err
