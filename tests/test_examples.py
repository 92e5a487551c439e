"""Every file in examples/ runs, in a short version, and stays short."""

import importlib.util
import math
from pathlib import Path

import pytest

from innerloop import algorithms

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def loaded(path):
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, capsys):
    """Those with a `main` in a short version; others are as short as they are."""
    example = loaded(path)
    if hasattr(example, "main"):
        value = example.main(iterations=2)
        assert isinstance(value, float) and math.isfinite(value)
    assert capsys.readouterr().out.strip(), "it says what it found"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_explained(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert text.startswith('"""')
    assert ("def main(" in text) == text.endswith('if __name__ == "__main__":\n    main()\n')


METHODS = (
    *("maml", "first_order_maml", "reptile", "anil"),
    *("meta_sgd", "maml_plus_plus", "imaml", "cavia"),
)


def test_the_methods_have_an_example_each():
    others = {"maml_rl", "learned_loss", "learned_optimizer", "meta_lr", "reinforce", "evolution"}
    others |= {"example_weights", "task_weights", "first"}
    assert {*METHODS} | others == {path.stem for path in EXAMPLES}
    assert all(hasattr(algorithms, name) for name in METHODS)


def test_learned_rates_help_the_loop_they_are_shown_in(capsys):
    """They stay above 0, and the loop ends lower than without the lines that learn them."""
    path = next(path for path in EXAMPLES if path.stem == "meta_lr")
    learned = loaded(path)
    text = path.read_text(encoding="utf-8")
    plain = {}
    left_out = ("il.meta_update", "inner.write_to")
    exec("\n".join(x for x in text.splitlines() if x.strip().split("(")[0] not in left_out), plain)
    capsys.readouterr()
    assert plain["optimizer"].param_groups[0]["lr"] == 1e-4
    rates = [group["lr"] for group in learned.optimizer.param_groups]
    assert all(rate > 0 for rate in rates) and len(set(rates)) == 4
    ours, theirs = (m["loss"](m["model"], m["held_out"]) for m in (vars(learned), plain))
    assert ours < 0.8 * theirs
