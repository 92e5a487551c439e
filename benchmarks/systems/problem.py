"""A case with its weights and data, as arrays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from peer_cases import Case

EPS = 1e-4  # Adam's; larger than usual, see `workloads.py`
BETAS = (0.9, 0.999)

Array = Any  # of the library at hand
Gradients = dict[str, Any]  # by what is learned; that of `init` is a list, in the weights' order


class MetaStep(NamedTuple):
    """One way of one system, ready. `remark`: what it chose, once it has run."""

    run: Callable[[], Gradients]
    remark: Callable[[], str] = str


class Problem(NamedTuple):
    """Batches are pairs of inputs and labels; `train` has one for every step.

    With tasks, every array of a batch has a leading task axis.
    """

    case: Case
    weights: dict[str, Array]
    groups: list[int]  # of each weight
    train: list[tuple[Array, Array]]
    val: tuple[Array, Array]
    rate: Array  # [groups], or [steps]
    betas: Array  # [2]

    def rates(self, rate: Array, step: int) -> list[Array]:
        """The learning rate of each weight."""
        if self.case.per == "step":
            return [rate[step]] * len(self.groups)
        return [rate[group] for group in self.groups]

    @property
    def classes(self) -> bool:
        return self.case.data in ("images", "text")


def load(case: Case, path: Path, dtype: str, convert: Callable[[Any], Array]) -> Problem:
    """Floating-point numbers in `dtype`; everything as arrays of a library."""
    found = dict(numpy.load(path))

    def array(name: str) -> Array:
        value = found[name]
        return convert(value.astype(dtype) if value.dtype.kind == "f" else value)

    weights = {n.removeprefix("weights/"): array(n) for n in found if n.startswith("weights/")}
    groups = found["groups"].tolist()
    x, y = array("train_x"), array("train_y")
    train = [(x[b], y[b]) for b in range(case.batches)]
    count = case.steps if case.per == "step" else max(groups) + 1
    return Problem(
        case,
        weights,
        groups,
        train if case.fresh else train * case.steps,
        (array("val_x"), array("val_y")),
        convert(numpy.full(count, case.rate, dtype)),
        convert(numpy.array(BETAS, dtype)),
    )
