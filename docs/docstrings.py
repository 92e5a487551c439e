"""Makes Markdown of the docstrings, whose examples are doctests and whose roles are Sphinx's."""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|meth|mod|attr):`~?([^`]+)`")
_MATH = re.compile(r":math:`([^`]+)`")
_COST = re.compile(r"^(Memory|Time|Exact): +", re.MULTILINE)
_LITERAL = re.compile(r"::\n\n((?:(?: {4}.*)?\n?)+)")


def to_markdown(text: str) -> str:
    """Fence doctests and literal blocks; turn roles into code, costs of strategies into a list."""
    text = _DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```", text)
    text = _MATH.sub(r"*\1*", _ROLE.sub(r"`\1`", text))
    text = _COST.sub(r"- **\1:** ", text)
    return _LITERAL.sub(lambda found: f":\n\n{found[1]}", text)


class Docstrings(griffe.Extension):
    """Applies `to_markdown` to every docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
