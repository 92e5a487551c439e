"""An experiment of independent parts: in turn, or side by side in several processes."""

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
from innerloop.experiments.framework.state import Resumable


class Part(Resumable, abc.ABC):
    """Units of work that depend on no other part, such as one method with one seed."""

    @abc.abstractmethod
    def advance(self, unit: int, records: list[dict[str, Any]]) -> dict[str, str]:
        """Does the unit of this number, appends its records; returns what the bar shows."""

    def outcome(self) -> dict[str, Any]:
        """Values that the result needs beside the records."""
        return {}


@dataclasses.dataclass
class _Progress:
    """Progress of one part."""

    units: int
    done: int = 0
    state: dict[str, Any] | None = None
    """Of a part that was begun and is in no process yet."""
    outcome: dict[str, Any] | None = None
    """Of a part that has ended."""
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def left(self) -> int:
        return self.units - self.done


class Parts(Experiment):
    """Every process takes some of the parts, so sums are in the same order with any number of them.

    The records are in the order of the parts, whoever made them.
    """

    def __init__(self, units: Sequence[int]) -> None:
        self._places = [_Progress(number) for number in units]
        self._ranks: Ranks = ALONE
        self._hands: list[list[int]] = []  # numbers of the parts of each process
        self._work: list[int] = []  # units left to each process when the parts were dealt out
        self._rounds = 0
        self._part: Part | None = None

    @abc.abstractmethod
    def make(self, number: int) -> Part:
        """Builds the part of this number, at its start."""

    @property
    def total(self) -> int:
        return sum(place.units for place in self._places)

    @property
    def outcomes(self) -> list[dict[str, Any]]:
        """The outcome of each part; empty for one that has not ended."""
        return [place.outcome or {} for place in self._places]

    def share(self, ranks: Ranks) -> None:
        if ranks.size > len(self._places):
            raise InnerLoopError(
                f"torchrun started {ranks.size} processes for {len(self._places)} parts that can "
                "run side by side. Start as many at most, or ask for more seeds."
            )
        self._ranks = ranks

    def _deal(self) -> None:
        """Deals out what is left of the parts."""
        left = [number for number, place in enumerate(self._places) if place.left]
        self._hands = [left[rank :: self._ranks.size] for rank in range(self._ranks.size)]
        self._work = [sum(self._places[n].left for n in hand) for hand in self._hands]

    @property
    def _hand(self) -> list[int]:
        return self._hands[self._ranks.rank] if self._hands else []

    @property
    def _current(self) -> int | None:
        """The number of the part at which this process is at work."""
        return next((number for number in self._hand if self._places[number].left), None)

    # --- work ---------------------------------------------------------------------------------

    def advance(self) -> dict[str, str]:
        if not self._hands:
            self._deal()
        self._rounds += 1
        self.width = sum(self._rounds <= units for units in self._work)
        number = self._current
        if number is None:
            return {}
        place = self._places[number]
        part = self._part = self._part or self._start_part(number)
        found: list[dict[str, Any]] = []
        shown = part.advance(place.done, found)
        place.done += 1
        before = sum(other.units for other in self._places[:number])
        for record in found:
            record["iteration"] = before + record.get("iteration", place.done)
        place.records += found
        if not place.left:
            place.outcome, self._part = part.outcome(), None
        self._order_records()
        return shown

    def _start_part(self, number: int) -> Part:
        part, place = self.make(number), self._places[number]
        if place.state is not None:
            part.load_state_dict(place.state)
            place.state = None
        return part

    def _order_records(self) -> None:
        self.records = [record for place in self._places for record in place.records]

    # --- state --------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Sends the progress of each process's parts to the others."""
        if self._ranks.size == 1:
            return
        buffer = io.BytesIO()
        torch.save({number: self._describe_part(number) for number in self._hand}, buffer)
        for rank, data in enumerate(self._ranks.gather(buffer.getvalue())):
            if rank != self._ranks.rank:
                known = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
                for number, place in known.items():
                    self._places[number] = _Progress(**place)
        self._order_records()

    def _describe_part(self, number: int) -> dict[str, Any]:
        place = vars(self._places[number])
        if self._part is not None and number == self._current:
            return place | {"state": self._part.state_dict()}
        return dict(place)

    def state_dict(self) -> dict[str, Any]:
        parts = [self._describe_part(number) for number in range(len(self._places))]
        return {"source": self.source, "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["source"] != self.source:
            raise InnerLoopError(
                f"The run was on {state['source']}; here is {self.source}. Name the folder of its "
                "data with --data."
            )
        self._places = [_Progress(**place) for place in state["parts"]]
        self._order_records()
