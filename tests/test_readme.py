"""The Python examples in the README run, in order, in one namespace."""

import re
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def no_trace_of_install(monkeypatch):
    """Forget what `install()` put in place of `higher`, so that other tests do not see it."""
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [n for n in sys.modules if n.split(".")[0] == "higher"]:
        del sys.modules[name]
    sys.modules.update({n: m for n, m in before.items() if n.split(".")[0] == "higher"})


def test_examples_run(no_trace_of_install):
    text = README.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert blocks
    namespace = {"__name__": "readme"}
    for block in blocks:
        # Blank lines first, so that a traceback shows the line number in the README.
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(README), "exec"), namespace)
