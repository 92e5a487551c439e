"""Which unit of a call is compiled, and the call with it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from innerloop.backward import Auto, Binomial, Remat, Tape, Truncated
from innerloop.call import Prepared, TaskRun
from innerloop.compiled._chunks import Chunks
from innerloop.compiled._program import NotCompilableError, Programs
from innerloop.compiled._step import CompiledStep
from innerloop.compiled._whole import TooLargeError, whole
from innerloop.errors import InnerLoopError, four_part
from innerloop.step.mapped import NotBatchableError
from innerloop.tasks import Way, auto, loop, vmap

_UNITS = ("auto", "whole", "step")
_OPERATIONS = 3000  # more take minutes to compile
_STEPS = 20  # more are not even recorded as a whole
_SMALL = 100_000  # weights: with fewer, tasks are batched


class Compiler:
    """What ``InnerLoop.compile`` leaves behind: the programs, and which unit they are of."""

    def __init__(self, unit: str, options: dict[str, Any] | None, backend: str) -> None:
        if unit not in _UNITS:
            raise InnerLoopError(
                four_part(
                    f"You gave compile({unit!r}).",
                    "'auto', 'whole' or 'step'.",
                    "either a whole meta-step becomes one program, or one step and its derivative.",
                    "inner.compile(), which chooses by size.",
                )
            )
        if backend not in ("inductor", "eager"):
            raise InnerLoopError(
                four_part(
                    f"You gave backend={backend!r}.",
                    "'inductor', or 'eager' to run what was recorded as it is.",
                    "the recorded programs contain inner and outer gradients already.",
                    "inner.compile(backend='inductor').",
                )
            )
        self.unit, self.options, self.backend = unit, options, backend
        self.programs = Programs(options, backend)
        self.chosen: str | None = None
        """The unit of the last call."""
        self._large: set[Any] = set()
        """What is not compiled as a whole."""
        self.refused: set[str] = set()
        self.used = False
        """Whether the last call ran compiled."""
        self._last: tuple[Any, Prepared] | None = None

    def known(self, key: Any, make: Callable[[], Prepared], alike: bool) -> Prepared:
        """What a call is made of; what was made for the last one if they are alike."""
        if alike and self._last is not None and self._last[0] == key:
            return self._last[1]
        made = make()
        self._last = (key, made) if alike else None
        return made

    def __deepcopy__(self, memo: Any) -> Compiler:
        return Compiler(self.unit, self.options, self.backend)

    def __reduce__(self) -> Any:
        return Compiler, (self.unit, self.options, self.backend)

    def __repr__(self) -> str:
        made = f"{self.programs.count} compiled"
        return f"compile({self.unit!r}): {self.chosen or 'no call yet'}, {made}"

    def refuse(self, why: str) -> None:
        """Say once that calls run uncompiled, and why."""
        self.used = False
        if why not in self.refused:
            self.refused.add(why)
            warnings.warn(
                f"The inner loop cannot be compiled: {why}. It runs uncompiled, with the same "
                "result.",
                stacklevel=2,
            )

    def loss(self, run: Prepared, batches: list[Any], val: Any, value: Any, key: Any) -> Tensor:
        """L_val of one task."""

        def function(tree: Any) -> Tensor:
            state, meta, own, held = tree
            simple = _in_one_graph(run.backward)
            alone = dataclasses.replace(run, state=state, meta=meta, backward=simple)
            state, outs = alone.unrolled(_repeated(batches, own), None)
            return value(*alone.adapted(state, outs).measured, held)

        if self._whole(key, len(batches)):
            try:
                return self._joint(run, batches, val, function, key)
            except TooLargeError:
                self._large.add(key)
        run = self.by_steps(run, key)
        state, outs = run.unrolled(batches, None)
        return value(*run.adapted(state, outs).measured, val)

    def losses(self, tasks: TaskRun, way: Way, key: Any) -> Tensor:
        """L_val of every task. [tasks]"""
        run = tasks.prepared
        if isinstance(way, vmap) and way.running_stats == "frozen":
            raise NotCompilableError("running statistics that are frozen are not compiled")

        def function(tree: Any) -> Tensor:
            state, meta, own, held = tree
            alone = dataclasses.replace(
                run, state=state, meta=meta, backward=_in_one_graph(run.backward)
            )
            again = dataclasses.replace(
                tasks, prepared=alone, batches=_repeated(tasks.batches, own), val=held
            )
            found = loop().run(again).losses if singly else again.together()[2]
            assert found is not None
            return found

        for singly in (isinstance(way, loop), True):
            if not self._whole((key, singly), len(tasks.batches)) or (
                singly and self.unit == "auto"
            ):
                continue
            try:
                return self._joint(run, list(tasks.batches), tasks.val, function, (key, singly))
            except NotBatchableError:
                continue
            except TooLargeError:
                self._large.add((key, singly))
                break
        small = sum(p.numel() for p in run.state.params.values()) < _SMALL
        if isinstance(way, auto):
            way = way.chosen or (vmap() if small else loop())
        stepwise = dataclasses.replace(tasks, prepared=self.by_steps(run, key))
        try:
            ended = way.tried(stepwise) if isinstance(way, vmap) else way.run(stepwise)
        except NotBatchableError:
            ended = loop().run(stepwise)
        assert ended.losses is not None
        return ended.losses

    def by_steps(self, run: Prepared, key: Any) -> Prepared:
        """The same with compiled steps."""
        self.chosen = "step"
        return dataclasses.replace(
            run,
            using=lambda step: CompiledStep(step, self.programs, key),
            backward=_over_steps(run.backward),
        )

    def _whole(self, key: Any, steps: int) -> bool:
        long = self.unit == "auto" and steps > _STEPS
        return self.unit != "step" and not long and key not in self._large

    def _joint(
        self, run: Prepared, batches: list[Any], val: Any, function: Any, key: Any
    ) -> Tensor:
        distinct = list({id(batch): batch for batch in batches}.values())
        pattern = tuple(next(i for i, d in enumerate(distinct) if d is b) for b in batches)
        limit = _OPERATIONS if self.unit == "auto" else 10**9
        tree = (run.state, run.meta, distinct, val)
        found = whole(self.programs, (key, pattern), tree, function, limit)
        self.chosen = "whole"
        return found


def _repeated(batches: Any, distinct: list[Any]) -> list[Any]:
    """The distinct ones in the places of the batches they stand for."""
    order = {key: i for i, key in enumerate({id(batch): None for batch in batches})}
    return [distinct[order[id(batch)]] for batch in batches]


def _in_one_graph(backward: Any) -> Any:
    """A strategy with the same gradient that needs no recomputation."""
    if isinstance(backward, Tape | Remat | Binomial | Auto):
        return Tape()
    if isinstance(backward, Truncated):
        return dataclasses.replace(backward, within=Tape())
    raise NotCompilableError(f"{backward} looks at values on its way")


def _over_steps(backward: Any) -> Any:
    """A tape over compiled steps keeps states only, as ``Remat`` does."""
    if isinstance(backward, Tape | Remat | Auto):
        return Chunks()
    if isinstance(backward, Binomial | Truncated):
        return backward
    raise NotCompilableError(f"{backward} differentiates steps in its own way")
