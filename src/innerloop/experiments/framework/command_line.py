"""Frozen dataclasses as command lines: every field is a flag, its annotation the help."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import shlex
import shutil
import sys
import types
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from innerloop.errors import InnerLoopError

C = TypeVar("C")
_WRONG = 2  # the exit code for what was written


class Parser(argparse.ArgumentParser):
    """Answers a misspelt flag with the nearest right one; takes none that is cut short."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        flags = [flag for action in self._actions for flag in action.option_strings]
        for word in unknown:
            if near := nearest(word.partition("=")[0], flags):
                message += f". Did you mean {near}?"
                break
        self.exit(_WRONG, f"{self.prog}: {message}\nSee {self.prog} --help.\n")


def nearest(word: str, known: Collection[str]) -> str | None:
    """What was probably meant."""
    return next(iter(difflib.get_close_matches(word, known, 1)), None)


def program() -> str:
    """How this program was started, in words that can be copied: it need not be on the PATH."""
    if Path(sys.argv[0]).name == "innerloop":
        return _callable(sys.argv[0], "innerloop")
    return _callable(sys.executable, "python") + " -m innerloop"


def _callable(path: str, name: str) -> str:
    """The name, if a shell finds this file by it; otherwise the path."""
    found = shutil.which(name)
    # Not what links lead to: those of all virtual environments lead to one Python.
    same = found is not None and os.path.abspath(found) == os.path.abspath(path)
    return name if same else shlex.quote(path)


def flag(name: str) -> str:
    """A field as it is written on the command line."""
    return "--" + name.replace("_", "-")


def refuse(name: str, value: object, need: str, known: Collection[str] = ()) -> NoReturn:
    """Say that a value cannot be, before any work is done."""
    near = nearest(str(value), known)
    hint = f" Did you mean {near}?" if near else ""
    raise InnerLoopError(f"{flag(name)} {value} cannot be: it must be {need}.{hint}")


def check_choice(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        refuse(name, value, "one of " + ", ".join(known), known)


def check_seed(value: int, count: int = 1) -> None:
    """Small enough for what is made of it, and not more of them than can be listed."""
    if not 0 <= value < _LARGEST_SEED:
        refuse("seed", value, f"from 0 to {_LARGEST_SEED - 1}")
    if not 1 <= count <= _MOST_SEEDS:
        refuse("seeds", count, f"from 1 to {_MOST_SEEDS}")


def check_device(value: str) -> None:
    """One that this machine has, and that computes."""
    import torch

    try:
        torch.ones(1, device=value).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        refuse("device", value, f"a device of this machine ({str(error).splitlines()[0]})")


_LARGEST_SEED = 10**9
_MOST_SEEDS = 10_000


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """One flag for each field. Only what was written appears among the arguments."""
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    for name, hint in get_type_hints(config, include_extras=True).items():
        kind, about = hint, ""
        if get_origin(hint) is Annotated:
            kind, about = get_args(hint)
        default = defaults[name]
        shown = "" if default is None or default is dataclasses.MISSING else f" ({default})"
        kind = _without_none(kind)
        if kind is bool:
            how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        else:
            how = {"type": _KINDS.get(kind, kind), "metavar": _METAVARS.get(kind, "TEXT")}
        parser.add_argument(
            flag(name), dest=name, default=argparse.SUPPRESS, help=about + shown, **how
        )


def _whole(text: str) -> int:
    value = int(text)
    if abs(value) > _LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:20]}…, which is more than {_LARGEST}")
    return value


def place(text: str) -> Path:
    """A path that was written. An empty one would mean the folder one happens to be in."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty. Write a path, or . for this folder")
    return Path(text)


_LARGEST = 10**30
_KINDS: dict[Any, Any] = {int: _whole, Path: place}
_whole.__name__ = "int"  # in messages of argparse
_METAVARS = {int: "N", float: "X", Path: "PATH"}


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return next(k for k in get_args(kind) if k is not type(None))
    return kind


def as_json(config: Any) -> dict[str, Any]:
    """A configuration in values that JSON has."""
    found = dataclasses.asdict(config)
    return {name: str(v) if isinstance(v, Path) else v for name, v in found.items()}


def from_json(config: type[C], values: dict[str, Any]) -> C:
    """A configuration as :func:`as_json` wrote it; anything else is refused."""
    hints = get_type_hints(config)
    for name, value in values.items():
        if name not in hints:
            near = nearest(name, hints)
            raise InnerLoopError(
                f"The configuration has {name!r}, which is not a setting."
                + (f" Did you mean {near!r}?" if near else "")
            )
        if not _fits(value, hints[name]):
            raise InnerLoopError(
                f"The configuration has {name} = {value!r}, which is not {_described(hints[name])}."
            )
    paths = [n for n, hint in hints.items() if _without_none(hint) is Path]
    made = {n: Path(v) if n in paths and v is not None else v for n, v in values.items()}
    return config(**made)


def _fits(value: Any, hint: Any) -> bool:
    if value is None:
        return type(None) in get_args(hint)
    kind = _without_none(hint)
    if type(value) is int and abs(value) > _LARGEST:
        return False
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is Path:
        return type(value) is str and value != ""
    return type(value) is kind


def _described(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
    return names.get(_without_none(hint), "a text")


def parse(
    config: type, argv: Sequence[str] | None, parser: argparse.ArgumentParser
) -> dict[str, Any]:
    """What was written, by the name of the field or argument."""
    add_flags(parser, config)
    return vars(parser.parse_args(argv))
