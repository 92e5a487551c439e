"""Algorithm 1's walk back over the steps, in any order a schedule gives.

Forwards, steps are taken without a graph and the schedule says which states to keep. Backwards, a
step is taken once more from a kept state, with a graph of its own, and the gradient of the state
after it (B of the paper) is pulled back to the state before it; what falls to the meta-parameters
(A) is added up. Only one step's activations exist at a time. With ``ahead``, the last steps, where
the way down begins, have their graph from the start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop import _deferred, _tree
from innerloop._allocator import keep_freed_for
from innerloop.backward.orders import Action, Advance, Drop, Keep, Load, Reverse
from innerloop.backward.segment import Grads, Segment
from innerloop.backward.strategy import (
    Step,
    by_step,
    check_visible,
    columns,
    connected,
    cut,
    detached,
    differentiable,
    fold,
    is_known,
    stacked,
    taken,
)
from innerloop.errors import RequirementError, four_part
from innerloop.guard import closures
from innerloop.guard.randomness import Autocast, Randomness, Unwritten, devices_of, preserved
from innerloop.step.gradient import refuse_higher


class _Kept(NamedTuple):
    state: Any
    randomness: Randomness


class Walk:
    """One run of the loop: what was kept on the way up, and how to come down again."""

    def __init__(
        self,
        step: Step,
        state: Any,
        meta: Any,
        batches: Sequence[Any],
        schedule: Callable[[], Iterator[Action]],
        ahead: bool = True,
    ) -> None:
        self.step, self.meta, self.batches, self.schedule = step, meta, batches, schedule
        self.ahead, self.depth = ahead, closures.depth()
        self.lean = False
        """Whether steps now leave out values that only their first run is asked for."""
        self.left = 0
        """How many were left out in the last walk."""
        self.roots = getattr(step, "roots", (step,))
        self.start, spec = _tree.flatten(state)
        check_visible(self.start)
        self.devices = devices_of(self.start)
        self.autocast = Autocast(self.devices)
        self.kept: dict[int, _Kept] = {}
        self.outs: list[Any] = []
        self.marks: dict[int, list[Tensor]] = {}
        """A few numbers for each step, by which to see whether it comes out the same again."""
        self.given: dict[int, Tensor] = {}
        """Leaves of batches that require grad."""
        self.learned: dict[int, Any] = {}
        """The batches they are in."""
        self.callers = Unwritten()
        self.callers.add(_tree.flatten((state, meta))[0])
        self.own = [detached(leaf) for leaf in self.start]
        self.original = {id(new): old for new, old in zip(self.own, self.start, strict=True)}
        """By the id of a state leaf that no step has replaced, the tensor that was given."""
        self.constants: set[int] = set()
        """The ids of leaves of the final state that have no derivative."""
        keep_freed_for(self)
        with torch.no_grad(), self.autocast.restored(), closures.watching() as watch:
            final = self._climb(_tree.unflatten(self.own, spec), watch)
        self.final, self.final_spec = _tree.flatten(final)
        constants = getattr(step, "constants", lambda state: ())
        self.constants.update(map(id, constants(final)))
        self.outside = list(watch.found.values())
        self.callers.add(self.outside)

    # Up. ----------------------------------------------------------------------------------------

    def _climb(self, state: Any, watch: closures.Watch) -> Any:
        """Keep what the schedule keeps before its first reversal, and go on to the last state."""
        self.first = _Kept(state, Randomness(self.devices))
        action, working, at = self._until_reversal(self.outs)
        self.pending: tuple[Reverse, _Kept] | None = (action, working)
        self.segment: Segment | None = None
        # With leaves of its own in it, it would take another segment to tell what they are.
        ahead = self.ahead and not watch.made
        segment = self._segment(action, working, first=True) if ahead else None
        leaves, nodes = ([], []) if segment is None else segment.strangers()
        if segment is None or nodes:
            # Something computed earlier is closed over: without a graph, the step can say what.
            working.randomness.set()
            advance = Advance(at, len(self.batches))
            return self._moved(working, at, advance, self.outs)[0].state
        known = [leaf for leaf in leaves if id(leaf) in watch.found]
        suspects = closures.Suspects(leaf for leaf in leaves if id(leaf) not in watch.found)
        with preserved(self.devices):
            outside = suspects.outside(lambda: self._leaves_of(action, working, first=True))
        watch.found.update((id(leaf), leaf) for leaf in outside)
        segment.leaves = [*known, *outside]
        self.segment = segment
        self.outs += [_tree.map(detached, out) for out in segment.outs]
        self.marks[action.stop] = _mark(segment.state, segment.outs[-1])
        caller = segment.unmoved()
        plain = {id(old): new for new, old in zip(self.own, self.start, strict=True)}

        def own(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and not leaf.requires_grad:
                self.constants.add(id(leaf))
            same = caller.get(id(leaf))
            return plain.get(id(same), same) if same is not None else detached(leaf)

        return _tree.map(own, segment.state)

    def _until_reversal(self, outs: list[Any] | None) -> tuple[Reverse, _Kept, int]:
        self.actions = self.schedule()
        working, at = self.first, 0
        for action in self.actions:
            if isinstance(action, Reverse):
                return action, working, at
            working, at = self._moved(working, at, action, outs)
        raise AssertionError("a schedule without a reversal")

    def _moved(
        self, working: _Kept, at: int, action: Action, outs: list[Any] | None
    ) -> tuple[_Kept, int]:
        if isinstance(action, Keep):
            self.kept[action.at] = working
        elif isinstance(action, Drop):
            del self.kept[action.at]
        elif isinstance(action, Load):
            working, at = self.kept[action.at], action.at
            working.randomness.set()
        elif isinstance(action, Advance):
            state, meta = working.state, _tree.map(detached, self.meta)
            for j in range(action.start, action.stop):
                batch = self._batch(j, first=outs is not None)
                state, out = taken(self.step, state, meta, _tree.map(cut, batch))
                if outs is not None:
                    outs.append(_tree.map(detached, out))
                    self.marks[j + 1] = _mark(state, out)
            working = _Kept(state, Randomness(self.devices, working.randomness))
            at = action.stop
        return working, at

    def _batch(self, j: int, first: bool) -> Any:
        if j in self.learned:
            return self.learned[j]
        with torch.enable_grad():  # It may be computed only now, out of learned data.
            batch = self.batches[j]
        if first:
            leaves = [t for t in _tree.flatten(batch)[0] if isinstance(t, Tensor)]
            self.callers.add(leaves)
            given = {id(leaf): leaf for leaf in leaves if leaf.requires_grad}
            if given:
                # Kept: another fetch could give other tensors, which nobody asks a gradient of.
                self.learned[j] = batch
                self.given.update(given)
        return batch

    def _segment(self, action: Reverse, working: _Kept, first: bool) -> Segment:
        steps = range(action.start, action.stop)
        batches = [self._batch(j, first) for j in steps]
        outside = () if first else self.outside
        again = self.lean and not first
        return Segment(self.step, working.state, self.meta, batches, self.original, outside, again)

    def _leaves_of(self, action: Reverse, working: _Kept, first: bool) -> list[Tensor]:
        """The leaves that some steps use without being given them, by taking the steps again."""
        working.randomness.set()
        return self._segment(action, working, first).strangers()[0]

    # Across. ------------------------------------------------------------------------------------

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors that the result depends on and that require grad, each once."""
        named = _tree.flatten(self.meta)[0]
        tensors = [*self.start, *named, *self.given.values(), *self.outside]
        found = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
        return list({id(t): t for t in found}.values())

    def result(self) -> tuple[Any, Any]:
        """The final state and the stacked outputs, connected to the inputs."""
        outs, out_spec = columns(self.outs)
        for column in outs:
            check_visible(column if isinstance(column, list) else ())
        leaves = [self.original.get(id(leaf), leaf) for leaf in self.final]
        inputs = self.inputs
        fixed = self.constants | self.original.keys()
        self.moved = [
            i for i, t in enumerate(self.final) if differentiable(t) and id(t) not in fixed
        ]
        if inputs:
            self.columns = outs
            leaves, outs = connected(
                leaves, outs, self.moved, lambda values: _Connect.apply(self, values, *inputs)
            )
        return _tree.unflatten(leaves, self.final_spec), _tree.unflatten(outs, out_spec)

    # Down. --------------------------------------------------------------------------------------

    def pulled(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs, given those of the connected results."""
        with contextlib.suppress(_deferred.StaleError):
            found = self._pulled(grads, lean=True)
            if not self.left or not _has_nan(found):
                return found
        # Of training that diverged; or something could not do without what was left out.
        return self._pulled(grads, lean=False)

    def _pulled(self, grads: Sequence[Tensor | None], lean: bool) -> list[Tensor | None]:
        self.callers.check()
        _deferred.left_out()
        self.lean, self.left = False, 0
        self.sums: dict[int, Tensor] = {}
        self.changed: list[Tensor] = []
        above: Grads = [None] * len(self.final)
        for i, grad in zip(self.moved, grads, strict=False):
            above[i] = grad
        shown = grads[len(self.moved) :]
        with preserved(self.devices), self.autocast.restored():
            for action, working in self._descent():
                above = self._reversed(action, working, above, shown)
                left = _deferred.left_out()
                self.left += left
                # The first that is computed again is compared with all its values. Then as long
                # as it helps.
                lean = lean and (left > 0 or not self.lean)
                self.lean = lean and len(self.changed) > 0
        # Not to be held as long as somebody holds the loss.
        self.kept.clear()
        if any(map(bool, self.changed)):
            raise RequirementError(_NOT_THE_SAME)
        return [self.sums.get(id(t)) for t in self.inputs]

    def _descent(self) -> Iterator[tuple[Reverse, _Kept]]:
        """The reversals of the schedule with their states; what comes between them is done here."""
        if self.pending is None:
            # An earlier backward has used up what was kept: climb again.
            self.first.randomness.set()
            with torch.no_grad():
                self.pending = self._until_reversal(None)[:2]
        action, working = self.pending
        self.pending = None
        yield action, working
        del working
        at, current = -1, self.first
        for action in self.actions:
            if isinstance(action, Reverse):
                yield action, current
            else:
                with torch.no_grad():
                    current, at = self._moved(current, at, action, None)

    def _reversed(
        self, action: Reverse, working: _Kept, above: Grads, shown: Sequence[Tensor | None]
    ) -> Grads:
        """B before the steps, out of B after them."""
        segment, self.segment = self.segment, None
        if segment is None:
            working.randomness.set()
            segment = self._segment(action, working, first=False)
            now, then = _mark(segment.state, segment.outs[-1]), self.marks[action.stop]
            for new, old in zip(now, then, strict=True):
                differs = ~_same(new, old)
                self.changed.append((differs & ~new.isnan() if self.lean else differs).any())
        steps = range(action.start, action.stop)
        outs = [by_step(self.columns, shown, j) for j in steps]
        below = segment.pulled(above, outs, self.roots, self._add)
        suspects = segment.suspects
        del segment
        suspects.refuse(lambda: self._leaves_of(action, working, first=False), self.roots)
        return below

    def _add(self, tensor: Tensor, grad: Tensor) -> None:
        known = self.sums.get(id(tensor))
        self.sums[id(tensor)] = grad if known is None else known + grad


def _mark(state: Any, out: Any) -> list[Tensor]:
    """The norms of all tensors in a state and an output, which another step would change."""
    by_kind: dict[Any, list[Tensor]] = {}
    leaves = _tree.flatten((state, out))[0]
    check_visible(leaves)
    for leaf in leaves:
        if differentiable(leaf) and leaf.numel():
            by_kind.setdefault((leaf.dtype, leaf.device), []).append(leaf.detach())
    norms = torch._foreach_norm  # type: ignore[attr-defined]
    return [torch.stack(norms(group)) for group in by_kind.values()]


def _same(new: Tensor, old: Tensor) -> Tensor:
    if new.shape != old.shape:
        raise RequirementError(_NOT_THE_SAME)
    tolerance = {8: 1e-9, 4: 1e-5}.get(new.dtype.itemsize, 1e-2)
    return torch.isclose(new, old, rtol=tolerance, equal_nan=True)


def _has_nan(grads: Sequence[Tensor | None]) -> bool:
    return any(grad is not None and bool(grad.isnan().any()) for grad in grads)


_NOT_THE_SAME = four_part(
    "A step gave another output when it was computed a second time.",
    "a loss that depends only on the model, the batch and torch's own random numbers.",
    "this strategy computes steps again, and the gradient would belong to other steps than those "
    "taken.",
    "torch's random functions without generator= (its own generator is replayed) instead of a "
    "torch.Generator, random or numpy; batches that are the same whenever they are indexed; or "
    "backward=Tape().",
)


class _Connect(torch.autograd.Function):
    """Puts the results of a walk into the graph; its backward is the way down."""

    @staticmethod
    def forward(ctx: Any, walk: Walk, values: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.walk = walk
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_higher("This strategy's backward")
        with closures.at_depth(ctx.walk.depth):
            return None, None, *ctx.walk.pulled(grads)


def _any_requires_grad(tree: Any) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in _tree.flatten(tree)[0])


def walk(
    step: Step,
    state: Any,
    meta: Any,
    batches: Sequence[Any],
    schedule: Callable[[], Iterator[Action]],
    ahead: bool,
) -> tuple[Any, Any]:
    """Fold ``step`` over the batches; the backward follows ``schedule``."""
    alone = not torch.is_grad_enabled() or (
        # A step of one's own may use a tensor that it was not given: then the plain loop has it.
        not is_known(step) and not _any_requires_grad((state, meta, list(batches)))
    )
    if not len(batches) or alone:
        state, outs = fold(step, state, meta, batches)
        return state, stacked(outs)
    return Walk(step, state, meta, batches, schedule, ahead).result()
