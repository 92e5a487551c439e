"""The command line of a settings class: every field is a flag."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from innerloop.experiments.framework.settings import Settings, fields, flag, nearest

WRONG = 2
"""The exit code for a wrong command line."""


class Parser(argparse.ArgumentParser):
    """Suggests the nearest flag for a misspelt one; takes no abbreviations."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        flags = [flag for action in self._actions for flag in action.option_strings]
        for word in unknown:
            if near := nearest(word.partition("=")[0], flags):
                message += f". Did you mean {near}?"
                break
        self.exit(WRONG, f"{self.prog}: {message}\nSee {self.prog} --help.\n")


def program() -> str:
    """The words that start this program in a shell; it need not be on the PATH."""
    if shutil.which("innerloop"):
        return "innerloop"
    return f"{shlex.quote(sys.executable)} -m innerloop"


def parse(settings: type[Settings], argv: Sequence[str] | None, parser: Parser) -> dict[str, Any]:
    """The arguments that were written, by the name of the field or argument."""
    presets = {name: settings.configure({}, name) for name in settings.PRESETS}
    for field in fields(settings):
        if field.kind is bool:
            how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        else:
            how = {"type": _READERS.get(field.kind, field.kind)}
            how["metavar"] = _METAVARS.get(field.kind, "TEXT")
        defaults = {name: getattr(preset, field.name) for name, preset in presets.items()}
        parser.add_argument(
            flag(field.name),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=f"{field.help}{_describe(defaults)}".replace("%", "%%"),
            **how,
        )
    return vars(parser.parse_args(argv))


def _describe(defaults: dict[str, Any]) -> str:
    """The default that a plain command uses, of each preset if they differ."""
    known = {name: value for name, value in defaults.items() if value is not None}
    if not known:
        return ""
    if len(set(defaults.values())) == 1:
        return f" ({next(iter(known.values()))})"
    return f" ({', '.join(f'{name}: {value}' for name, value in known.items())})"


def whole(text: str) -> int:
    """A whole number. One that overflows as a float is refused."""
    value = int(text)
    if abs(value) > 10**30:
        raise argparse.ArgumentTypeError(f"{text[:20]}…, which is more than 10**30")
    return value


def path(text: str) -> Path:
    """A path. An empty one, which would mean the current folder, is refused."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty. Write a path, or . for this folder")
    return Path(text)


whole.__name__ = "int"  # in messages of argparse
_READERS: dict[Any, Any] = {int: whole, Path: path}
_METAVARS = {int: "N", float: "X", Path: "PATH"}
