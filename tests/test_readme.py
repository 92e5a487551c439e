"""The Python examples of the README and of each page of the documentation run.

The examples of one page run in order, in one namespace.
"""

import ast
import itertools
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples(page):
    """The Python blocks of a page, each after as many blank lines as there are lines before it.

    Tracebacks then show the line number in the page.
    """
    text = page.read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield "\n" * text.count("\n", 0, block.start(1)) + block[1]


@pytest.fixture
def no_trace_of_install():
    """Forget what `install()` put in place of `higher`, so that other tests do not see it."""
    before = {name: module for name, module in sys.modules.items() if _is_higher(name)}
    yield
    for name in list(filter(_is_higher, sys.modules)):
        del sys.modules[name]
    sys.modules.update(before)


def _is_higher(name):
    return name.split(".")[0] == "higher"


def run(page, first=None):
    """Execute the examples of a page, or only some of them; return what they defined."""
    namespace = {"__name__": page.stem}
    for example in itertools.islice(examples(page), first):
        exec(compile(example, str(page), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page, no_trace_of_install):
    run(page)


def test_the_demo_runs_the_first_example():
    first = (ROOT / "examples" / "first.py").read_text(encoding="utf-8")
    shown = ast.parse(next(examples(ROOT / "README.md"))).body
    assert [ast.dump(s) for s in ast.parse(first).body[1:]] == [ast.dump(s) for s in shown]
    demo = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndemo:")[2]
    assert "examples/first.py" in demo.partition("\n\n")[0]


def test_the_first_example_does_what_the_readme_says():
    """A gradient reaches all that is learned, the meta-optimizer moves it, adaptation helps."""
    found = run(ROOT / "README.md", first=1)
    inner, meta_loss, adapted = (found[name] for name in ("inner", "meta_loss", "adapted"))
    assert meta_loss.shape == ()
    learned = dict(inner.named_parameters())
    assert {id(p) for p in found["model"].parameters()} < {id(p) for p in learned.values()}
    assert all(p.grad.isfinite().all() and p.grad.any() for p in learned.values())
    assert 0 < abs(inner.hyper["lr"].item() - 0.4) < 2e-3
    assert adapted.losses.shape == (5,)
    assert adapted.losses[-1] < adapted.losses[0]
    assert adapted(found["query"][0][0]).shape == (10, 2)


@pytest.mark.parametrize("line", ["assert False", "an error of syntax"])
def test_a_wrong_example_is_noticed(line, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"```python\nx = 1\n```\n\nText.\n\n```python\n{line}\n```\n")
    with pytest.raises((AssertionError, SyntaxError)):
        run(page)


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f": {page.name}\n" in text for page in PAGES[1:])
