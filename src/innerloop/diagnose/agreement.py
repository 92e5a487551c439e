"""Which gradients agree with finite differences: one by one, or many at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from innerloop.diagnose.difference import Noise, compared
from innerloop.diagnose.meta_parameters import MetaParameter
from innerloop.diagnose.report import Difference
from innerloop.diagnose.untouched import Untouched

Grads = Mapping[str, Tensor | None]
Group = Sequence[MetaParameter]


class Agreement:
    """Compares gradients of L_val, which ``evaluate`` computes, with its finite differences."""

    def __init__(
        self, evaluate: Callable[[], float], noise: Noise, untouched: Untouched, grads: Grads
    ) -> None:
        self.evaluate, self.noise = evaluate, noise
        self.untouched, self.grads = untouched, grads

    def of(self, phi: Group, checks: int, exact: bool) -> dict[str, Difference]:
        """By name. Of more than ``checks``, those of a part are moved together.

        Where a group of them differs, it is halved until it is known which ones do; there is no
        point in that if the gradient is approximate (not ``exact``).
        """
        found: dict[str, Difference] = {}
        for group in self._groups(phi, checks):
            found |= self._halved(group) if exact else self._together(group)
        return found

    def _groups(self, phi: Group, checks: int) -> list[list[MetaParameter]]:
        """Each by itself; if these are too many, the largest parts as groups.

        What has no gradient is not mixed with what has one: it could only differ.
        """
        parts: dict[tuple[str, bool], list[MetaParameter]] = {}
        for p in phi:
            grad = self.grads.get(p.name)
            parts.setdefault((p.part, grad is None or not bool(grad.any())), []).append(p)
        count, groups = len(phi), []
        for part in sorted(parts.values(), key=len, reverse=True):
            if count > checks:
                groups.append(part)
                count -= len(part) - 1
            else:
                groups += [[p] for p in part]
        return groups

    def _halved(self, group: Group) -> dict[str, Difference]:
        found = self._together(group)
        if len(group) == 1 or found[group[0].name].verdict != "differs":
            return found
        middle = len(group) // 2
        return self._halved(group[:middle]) | self._halved(group[middle:])

    def _together(self, group: Group) -> dict[str, Difference]:
        moved = [p.tensor for p in group]
        grads = [self.grads.get(p.name) for p in group]

        def evaluate() -> float:
            self.untouched.restore(moved)
            try:
                return self.evaluate()
            except Exception:
                # Moved out of its range, as a beta above 1. A smaller width may do.
                return math.nan

        def run() -> Difference:
            return compared(evaluate, self.noise, moved, grads, seed=len(group))

        result, failure = self.untouched.attempt(run)
        if failure is not None:
            result = Difference("not judged", why=f"{failure.kind}: {failure.message}")
        elif len(group) > 1:
            others = "1 other" if len(group) == 2 else f"{len(group) - 1} others"
            result = result._replace(why=f"together with {others}")
        return {p.name: result for p in group}
