"""Settings of a command: a frozen dataclass whose annotations hold bounds, choices and help."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    NoReturn,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch

from innerloop.errors import InnerLoopError

S = TypeVar("S", bound="Settings")


def flag(name: str) -> str:
    """A field as it is written on the command line."""
    return "--" + name.replace("_", "-")


def nearest(word: str, known: Collection[str]) -> str | None:
    """The known word that was probably meant."""
    return next(iter(difflib.get_close_matches(word, known, 1)), None)


def refuse(
    name: str, value: object, need: str, why: str = "", known: Collection[str] = ()
) -> NoReturn:
    """Refuse a value before any work is done: "--way must be at least 2, not 1."."""
    near = nearest(str(value), known)
    hint = f" Did you mean {near}?" if near else ""
    reason = f": {why}" if why else ""
    raise InnerLoopError(f"{flag(name)} must be {need}, not {value}{reason}.{hint}")


# --- constraints in annotations -------------------------------------------------------------------


class Constraint(Protocol):
    """A condition on one setting, written into its annotation."""

    def check(self, name: str, value: Any) -> None:
        """Refuses a value that does not meet it."""
        ...


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bounds of a number. NaN is outside of all of them, infinity unless ``infinite``.

    >>> print(Bounds(1), Bounds(0, 10), Bounds(0, above=True), Bounds(0, 1, below=True), sep="; ")
    at least 1; from 0 to 10; above 0; from 0 to below 1
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    """The lower bound itself is outside."""
    below: bool = False
    """The upper bound itself is outside."""
    infinite: bool = False

    def check(self, name: str, value: Any) -> None:
        finite = self.infinite or abs(value) < math.inf
        low = value > self.low if self.above else value >= self.low
        high = value < self.high if self.below else value <= self.high
        if not (finite and low and high):
            refuse(name, value, str(self) + (" or inf" if self.infinite else ""))

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        start = f"above {self.low:g} and" if self.above else f"from {self.low:g} to"
        return f"{start} {'below ' if self.below else ''}{self.high}"


class Choice(NamedTuple):
    """One of some words, or with ``several`` a list of them, each once: ``a,b``."""

    names: Collection[str]
    several: bool = False

    def check(self, name: str, value: str) -> None:
        words = split_words(value) if self.several else [value]
        for word in words:
            if word not in self.names:
                refuse(name, word, str(self), known=self.names)
        if len(set(words)) < len(words):
            refuse(name, value, "a list that has each name once")

    def __str__(self) -> str:
        return ("some of " if self.several else "one of ") + ", ".join(self.names)


class Device:
    """A device that this machine has, and that computes."""

    def check(self, name: str, value: str) -> None:
        try:
            torch.ones(1, device=value).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            refuse(name, value, "a device of this machine", str(error).splitlines()[0])


def split_words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


Count = Annotated[int, Bounds(1)]
Rate = Annotated[float, Bounds(0, above=True)]
Seed = Annotated[int, Bounds(0, 10**9 - 1)]
Seeds = Annotated[int, Bounds(1, 10_000)]


# --- the dataclass --------------------------------------------------------------------------------


class Field(NamedTuple):
    """One setting, as its annotation describes it."""

    name: str
    kind: type
    """Without ``None``."""
    optional: bool
    constraints: tuple[Constraint, ...]
    help: str

    def check(self, value: Any) -> None:
        """Refuses a value that breaks a constraint. None is "not set"."""
        for constraint in self.constraints if value is not None else ():
            constraint.check(self.name, value)

    def from_json(self, value: Any) -> Any:
        """The setting from a value of JSON. Refuses one of another type."""
        if value is None and self.optional:
            return None
        accepted = {float: int | float, Path: str}.get(self.kind, self.kind)
        if not isinstance(value, accepted):
            raise InnerLoopError(
                f"The configuration has {self.name} = {value!r}. Needed is a value of type "
                f"{self.kind.__name__}. Correct it, or start a new run with another --out."
            )
        return Path(str(value)) if self.kind is Path else value


@dataclasses.dataclass(frozen=True)
class Settings:
    """Base of the settings of a run. Each field is also a flag."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    keep: Annotated[Count, "checkpoints to keep"] = dataclasses.field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        for field in fields(type(self)):
            field.check(getattr(self, field.name))
        self.check()

    def check(self) -> None:
        """Refuses combinations of settings; each alone is checked by its annotation."""

    @property
    def reads_data(self) -> bool:
        """True if a dataset is read from a folder."""
        return False

    @classmethod
    def preset(cls, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Values of a preset; ``given`` are the settings that were written."""
        return dict(cls.PRESETS[name])

    @classmethod
    def configure(cls: type[S], given: Mapping[str, Any], preset: str) -> S:
        """The preset with the settings that were written instead."""
        Choice(tuple(cls.PRESETS)).check("preset", preset)
        for field in fields(cls):  # before a preset is looked up by one of them
            field.check(given.get(field.name))
        return cls(**{**cls.preset(preset, given), **given})


@functools.cache
def fields(settings: type[Settings]) -> list[Field]:
    """The settings in order."""
    hints = get_type_hints(settings, include_extras=True)
    return [_field(field.name, hints[field.name]) for field in dataclasses.fields(settings)]


def _field(name: str, hint: Any) -> Field:
    notes: list[Any] = []
    optional = False
    while get_origin(hint) in (Annotated, Union, types.UnionType):
        if get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            notes += more
        else:
            hint, _ = get_args(hint)  # X | None
            optional = True
    constraints = tuple(note for note in notes if not isinstance(note, str))
    words = [note for note in notes if isinstance(note, str)]
    words += [str(note) for note in notes if isinstance(note, Choice)]
    return Field(name, hint, optional, constraints, "; ".join(words))


def as_json(settings: Settings) -> dict[str, Any]:
    """Settings in values that JSON has."""
    found = dataclasses.asdict(settings)
    return {name: str(v) if isinstance(v, Path) else v for name, v in found.items()}


def from_json(settings: type[S], values: Mapping[str, Any]) -> S:
    """Settings as :func:`as_json` wrote them. Raises for anything else."""
    known = {field.name: field for field in fields(settings)}
    for name in values:
        if name not in known:
            near = nearest(name, known)
            raise InnerLoopError(
                f"The configuration has {name!r}, which is not a setting."
                + (f" Did you mean {near!r}?" if near else "")
            )
    return settings(**{name: known[name].from_json(value) for name, value in values.items()})
