"""The Python examples of the README and of each page of the documentation run.

The examples of one page run in order, in one namespace.
"""

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


def test_the_readme_has_examples():
    assert len(list(examples(ROOT / "README.md"))) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page, no_trace_of_install):
    namespace = {"__name__": page.stem}
    for example in examples(page):
        exec(compile(example, str(page), "exec"), namespace)
