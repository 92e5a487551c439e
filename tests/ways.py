"""The table of ways to run tasks, compiled or not, and how far two meta-gradients are apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import innerloop as il


class Engine(NamedTuple):
    """How the tasks of a call are run."""

    name: str
    make: Any
    unit: str | None = None
    """Which unit is compiled, if any is."""

    def __str__(self) -> str:
        return self.name

    @property
    def way(self) -> Any:
        """A new one: what a way found out in another test must not matter."""
        return self.make()

    def ready(self, inner: il.InnerLoop, backend: str = "eager") -> il.InnerLoop:
        """The loop, compiled if this engine compiles; ``"eager"`` runs what Dynamo traced."""
        if self.unit is not None:
            inner.compile(self.unit, backend=backend)
        return inner

    def check(self, inner: il.InnerLoop) -> None:
        """Nothing fell back to another engine."""
        compiler = inner.compiler
        assert (compiler is None) == (self.unit is None)
        if compiler is not None:
            assert compiler.refused is None
            assert compiler.programs > 0


def two_threads() -> il.tasks.Way:
    return il.tasks.threads(2)


def by_rule() -> bool:
    return True


LOOP = Engine("loop", il.tasks.loop)
THREADS = Engine("threads", two_threads)
VMAP = Engine("vmap", il.tasks.vmap)
WHOLE = Engine("whole", by_rule, "whole")
STEP = Engine("step", il.tasks.loop, "step")

ENGINES = [THREADS, VMAP, WHOLE, STEP]
"""Those that are held to the loop."""

SAME = 1e-10
"""Relative distance between two orders of the same operations, in float64."""


def gap(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The distance of two meta-gradients over the norm of all of the expected one.

    Not tensor by tensor: where an exact gradient is 0, what is found is rounding.
    """
    pairs = list(zip(actual, expected, strict=True))
    for a, e in pairs:
        assert a.shape == e.shape
        assert a.dtype == e.dtype
    apart = sum((a - e).detach().norm() ** 2 for a, e in pairs) ** 0.5
    size = sum(e.detach().norm() ** 2 for _, e in pairs) ** 0.5
    return 0.0 if apart == 0 else float(apart / size)


def gradients(value: Tensor, inner: il.InnerLoop, **options: Any) -> list[Tensor]:
    """Of a scalar, by every meta-parameter that asks for one."""
    own = [p for p in inner.parameters() if p.requires_grad]
    return list(torch.autograd.grad(value, own, materialize_grads=True, **options))


def assert_same(actual: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float = SAME):
    found = gap(actual, expected)
    assert found <= tolerance, found


def assert_as_loop(inner: il.InnerLoop, train: Any, val: Any, way: il.tasks.Way) -> None:
    """Losses, and the gradient of their sum with unequal weights."""
    found = []
    for each in (way, il.tasks.loop()):
        losses = inner(train, val, tasks=each)
        weighted = (losses * torch.linspace(0.5, 1.5, len(losses))).sum()
        found.append(([losses], gradients(weighted, inner)))
    assert_same(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])
