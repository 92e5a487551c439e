"""An experiment of independent parts: one after another, or side by side in several processes."""

from __future__ import annotations

import abc
import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import torch

from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.experiment import Experiment
from innerloop.experiments.framework.ranks import ALONE, Ranks


class Part(abc.ABC):
    """Units of work that depend on no other part, such as one way to learn with one seed."""

    @abc.abstractmethod
    def advance(self, unit: int, records: list[dict[str, Any]]) -> dict[str, str]:
        """Do the unit of this number, append what was measured; say what the bar shows."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def kept(self) -> dict[str, Any]:
        """What is needed of it when all are done, beside its records."""
        return {}


@dataclasses.dataclass
class _Place:
    """How far a part is."""

    units: int
    done: int = 0
    state: dict[str, Any] | None = None
    """Of a part that was begun and is in no process yet."""
    kept: dict[str, Any] | None = None
    """Of a part that has ended."""
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    told: int = 0
    """Records that were asked for."""

    @property
    def left(self) -> int:
        return self.units - self.done


class Parts(Experiment):
    """Every process takes some of the parts, so sums are in the same order with any number of them.

    The records are in the order of the parts, whoever made them.
    """

    def __init__(self, units: Sequence[int]) -> None:
        self._places = [_Place(number) for number in units]
        self._ranks: Ranks = ALONE
        self._own: list[int] | None = None  # numbers of the parts left to this process
        self._hand: list[int] = []  # the same, when they were dealt out
        self._work: list[int] = []  # units left to each process, as they were shared
        self._rounds = 0
        self._part: Part | None = None

    @abc.abstractmethod
    def make(self, number: int) -> Part:
        """The part of this number, at its start."""

    @property
    def total(self) -> int:
        return sum(place.units for place in self._places)

    @property
    def kept(self) -> list[dict[str, Any]]:
        """What each part left, when all are done."""
        return [place.kept or {} for place in self._places]

    def share(self, ranks: Ranks) -> None:
        if ranks.size > len(self._places):
            raise InnerLoopError(
                f"torchrun started {ranks.size} processes for {len(self._places)} parts that can "
                "run side by side. Start as many at most, or ask for more seeds."
            )
        self._ranks = ranks

    def _shared(self) -> list[int]:
        """The parts of this process: what is left is dealt out in turn."""
        if self._own is None:
            left = [number for number, place in enumerate(self._places) if place.left]
            hands = [left[rank :: self._ranks.size] for rank in range(self._ranks.size)]
            self._work = [sum(self._places[n].left for n in hand) for hand in hands]
            self._hand = hands[self._ranks.rank]
            self._own = [*self._hand]
        return self._own

    # --- work ---------------------------------------------------------------------------------

    def advance(self) -> dict[str, str]:
        own = self._shared()
        self._rounds += 1
        self.width = sum(self._rounds <= units for units in self._work)
        if not own:
            return {}
        place = self._places[own[0]]
        part = self._part = self._part or self._begun(own[0])
        found: list[dict[str, Any]] = []
        shown = part.advance(place.done, found)
        place.done += 1
        before = sum(other.units for other in self._places[: own[0]])
        for record in found:
            record["iteration"] = before + record.get("iteration", place.done)
        place.records += found
        if not place.left:
            place.kept, self._part = part.kept(), None
            own.pop(0)
        self._in_order()
        return shown

    def _begun(self, number: int) -> Part:
        part, place = self.make(number), self._places[number]
        if place.state is not None:
            part.load_state_dict(place.state)
            place.state = None
        return part

    def _in_order(self) -> None:
        self.records = [record for place in self._places for record in place.records]

    @property
    def has_news(self) -> bool:
        return any(len(place.records) > place.told for place in self._places)

    def news(self) -> list[dict[str, Any]]:
        found = [record for place in self._places for record in place.records[place.told :]]
        for place in self._places:
            place.told = len(place.records)
        return found

    # --- state --------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Every process tells the others how far its parts are."""
        if self._ranks.size == 1:
            return
        buffer = io.BytesIO()
        torch.save({number: self._described(number) for number in self._hand}, buffer)
        for rank, data in enumerate(self._ranks.gathered(buffer.getvalue())):
            if rank != self._ranks.rank:
                told = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
                self._learn(told)
        self._in_order()

    def _described(self, number: int) -> dict[str, Any]:
        place, state = self._places[number], self._places[number].state
        if self._part is not None and self._own and self._own[0] == number:
            state = self._part.state_dict()
        known = {"done": place.done, "kept": place.kept, "records": place.records}
        return known | {"state": state}

    def _learn(self, told: dict[int, dict[str, Any]]) -> None:
        for number, known in told.items():
            place = self._places[number]
            place.done, place.kept, place.state = known["done"], known["kept"], known["state"]
            place.records = known["records"]

    def state_dict(self) -> dict[str, Any]:
        described = [self._described(number) for number in range(len(self._places))]
        parts = [known | {"records": len(known["records"])} for known in described]
        return {"source": self.source, "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["source"] != self.source:
            raise InnerLoopError(
                f"The run was on {state['source']}; here is {self.source}. Name the folder of its "
                "data with --data."
            )
        start = 0
        for place, known in zip(self._places, state["parts"], strict=True):
            if type(known["done"]) is not int or not 0 <= known["done"] <= place.units:
                raise ValueError(f"{known['done']!r} of {place.units} {self.unit} are done")
            place.done, place.kept, place.state = known["done"], known["kept"], known["state"]
            place.records = self.records[start : start + known["records"]]
            place.told = len(place.records)
            start += known["records"]
