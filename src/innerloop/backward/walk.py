"""Algorithm 1's walk over the steps, in any order of visits.

Climbing, steps are taken without a graph and the order says which states to keep. Descending, a
step is taken once more from a kept state, with a graph of its own, and the gradient of the state
after it (B of the paper) is pulled back to the state before it. The gradients of the
meta-parameters (A) are summed. The activations of one segment exist at a time. With ``ahead``, the
last segment keeps the graph of the climb and is not taken again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from innerloop import _tree
from innerloop._tree import differentiable
from innerloop.backward.attach import attach
from innerloop.backward.orders import Action, Advance, Drop, Keep, Load, Reverse
from innerloop.backward.segment import Grads, Segment, StandIns
from innerloop.backward.strategy import (
    check_visible,
    columns,
    connect,
    cut,
    grads_of_step,
    run_plainly,
    stack_outputs,
)
from innerloop.errors import RequirementError, four_part
from innerloop.guard import closures
from innerloop.guard.randomness import Autocast, Randomness, devices_of, restore_randomness
from innerloop.guard.writes import Unwritten
from innerloop.step.protocol import Step, fold

Order = Callable[[], Iterator[Action]]


def walk(
    step: Step, state: Any, meta: Any, batches: Sequence[Any], order: Order, ahead: bool
) -> tuple[Any, Any]:
    """Fold ``step`` over the batches; the backward follows ``order``."""
    if not torch.is_grad_enabled() or not len(batches):
        return run_plainly(step, state, meta, batches)
    check_visible(_tree.leaves(state))
    before = Randomness(devices_of(_tree.leaves(state)))
    try:
        return Walk(step, state, meta, batches, order, ahead).result()
    except closures.ComputedOutsideError:
        before.set()
        state, outs = fold_in_graph(step, state, meta, batches)
        return state, stack_outputs(outs)


def fold_in_graph(
    step: Step, state: Any, meta: Any, batches: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """The plain loop by torch's own recomputation, with one state kept for each step.

    A tensor that was computed outside and closed over is then an ordinary part of the graph, and
    the gradient can be differentiated again.
    """

    unmodified = Unwritten()
    unmodified.add(_tree.leaves((state, meta)))
    compared: list[tuple[Tensor, Tensor]] = []

    def compare() -> None:
        pairs = list(compared)
        compared.clear()
        compare_norms(pairs)

    def take(state: Any, meta: Any, batch: Any) -> tuple[Any, Any]:
        unmodified.add(_tree.leaves(batch))
        first: list[Tensor] = []
        is_forward = True

        def probe(loss: Tensor) -> None:
            if not first:
                first.append(loss)
            elif not is_forward:
                if not compared:  # all at once after the backward, by one read on the host
                    Variable._execution_engine.queue_callback(compare)
                compared.append((loss, first[0]))

        probed = step.with_probe(probe)

        def check_and_step(state: Any, meta: Any, batch: Any) -> tuple[Any, Any]:
            unmodified.check()
            return probed(state, meta, batch)

        found = checkpoint(check_and_step, state, meta, batch, use_reentrant=False)
        is_forward = False  # the inner gradient recomputes parts of the step already
        return found

    before = Randomness(devices_of(_tree.leaves(state)))
    try:
        return fold(take, state, meta, batches)
    except RuntimeError as error:
        if "saved tensor" not in str(error):
            raise
        # torch.func.grad in a step does not admit torch's recomputation (pytorch#122729).
        before.set()
        return fold(step, state, meta, batches)


class Kept(NamedTuple):
    """A state, and the random state of the moment before its step."""

    state: Any
    randomness: Randomness


class Walk:
    """One run of the loop: the states kept by the climb, and the descent."""

    def __init__(
        self,
        step: Step,
        state: Any,
        meta: Any,
        batches: Sequence[Any],
        order: Order,
        ahead: bool,
    ) -> None:
        self.step, self.meta, self.batches, self.order = step, meta, batches, order
        self.plain_meta = _tree.map(_tree.detach, meta)
        self.state, self.start = state, _tree.leaves(state)
        self.devices = devices_of(self.start)
        self.autocast = Autocast(self.devices)
        self.kept: dict[int, Kept] = {}
        self.outs: list[Any] = []
        self.norms: list[Sequence[Tensor]] = []
        """The norms of each step's results, by which a step is recognized when taken again."""
        self.learned_batches: dict[int, Any] = {}
        """Batches with tensors that require grad. Fetched again, they could be other tensors."""
        self.unmodified = Unwritten()
        self.unmodified.add(_tree.leaves((state, meta)))
        own = [_tree.detach(leaf) for leaf in self.start]
        self.first = Kept(_tree.fill(state, own), Randomness(self.devices))
        self.original = {id(new): old for new, old in zip(own, self.start, strict=True)}
        """By the id of a state leaf that no step has replaced, the tensor that was given."""
        self.stand_ins = StandIns(self.original, meta)
        self.recomputed_step = step.with_start(self.stand_ins.all)
        """The step as a segment takes it: only stand-ins of the caller need a view."""
        self.constants: set[int] = set()
        """The ids of leaves of the final state that have no derivative."""
        self.segment: Segment | None = None
        """The steps that the descent begins with, if they have their graph already."""
        self.closed_over: list[Tensor] = []
        self.observer: closures.Observer | None = None
        """Sees the steps of the first climb."""
        with torch.no_grad(), self.autocast.restore():
            final = self._climb(ahead)
        self.final_state, self.final = final, _tree.leaves(final)
        self.constants.update(map(id, step.constants(final)))

    # Climb. -------------------------------------------------------------------------------------

    def _climb(self, ahead: bool) -> Any:
        """Keep what the order keeps before its first reversal, and go on to the last state."""
        observer = self.observer = closures.Observer()
        self.first_step = self.step.with_observer(observer.look)
        self.later_step = self.first_step.with_start(())
        reverse, working = self._advance_to_reversal()
        self.pending: tuple[Reverse, Kept] | None = (reverse, working)
        if ahead:
            final = self._climb_with_graph(reverse, working, observer)
        else:
            final = self._take(working, Advance(*reverse)).state
        now = Randomness(self.devices, self.first.randomness)
        self.is_random = now.cpu is not self.first.randomness.cpu or bool(self.devices)
        self.closed_over = list(observer.found.values())
        self.unmodified.add(self.closed_over)
        self.observer, self.later_step = None, self.step.with_start(())
        return final

    def _climb_with_graph(
        self, reverse: Reverse, working: Kept, observer: closures.Observer
    ) -> Any:
        """Take the last steps with their graph, which the descent then need not make."""
        segment = self._take_again(reverse, working)
        leaves, older = segment.find_closures()
        if older:
            raise closures.ComputedOutsideError(older[0])
        # Leaves that the steps made for themselves may be among them; their gradient is unused.
        observer.found.update((id(leaf), leaf) for leaf in leaves)
        segment.closed_over = leaves
        self.segment = segment
        for out in segment.outs:
            self.outs.append(_tree.map(_tree.detach, out))
        originals = self.stand_ins.originals
        detached = dict(zip(map(id, self.start), _tree.leaves(self.first.state), strict=True))

        def detach_or_restore(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and not leaf.requires_grad:
                self.constants.add(id(leaf))
            given = originals.get(id(leaf))
            return _tree.detach(leaf) if given is None else detached.get(id(given), given)

        return _tree.map(detach_or_restore, segment.state)

    def _advance_to_reversal(self) -> tuple[Reverse, Kept]:
        self.actions = self.order()
        working = self.first
        for action in self.actions:
            if isinstance(action, Reverse):
                return action, working
            working = self._move(working, action)
        raise AssertionError("an order without a reversal")

    def _restore(self, working: Kept) -> None:
        """Set the random state of a step; once is enough if no step draws random numbers."""
        if self.is_random:
            working.randomness.set()

    def _move(self, working: Kept, action: Action) -> Kept:
        if isinstance(action, Keep):
            self.kept[action.at] = working
        elif isinstance(action, Drop):
            del self.kept[action.at]
        elif isinstance(action, Load):
            working = self.kept[action.at]
        elif isinstance(action, Advance):
            if self.observer is None:
                self._restore(working)
            working = self._take(working, action)
        return working

    def _take(self, working: Kept, action: Advance) -> Kept:
        """Take steps without a graph; the first time, an observer sees what they close over."""
        state, observer = working.state, self.observer
        for j in range(*action):
            batch = self._batch(j)
            step = self.first_step if j == 0 and observer is not None else self.later_step
            state, out = step(state, self.plain_meta, _tree.map(cut, batch))
            if observer is not None:
                observer.settle()
                self.outs.append(out)
                self.norms.append(_norms_of(state, out))
        return Kept(state, Randomness(self.devices, working.randomness))

    def _batch(self, j: int) -> Any:
        if j in self.learned_batches:
            return self.learned_batches[j]
        if type(self.batches) is list:
            batch = self.batches[j]
        else:
            with torch.enable_grad():  # a batch may be computed only now, out of learned data
                batch = self.batches[j]
        if j >= len(self.outs):  # for the first time
            tensors = _tree.tensors(batch)
            self.unmodified.add(tensors)
            if any([t.requires_grad for t in tensors]):
                self.learned_batches[j] = batch
        return batch

    # The result. --------------------------------------------------------------------------------

    def result(self) -> tuple[Any, Any]:
        """The final state and the stacked outputs, connected to the inputs."""
        check_visible(_tree.leaves((self.final, self.outs[-1])))
        self.columns = columns(self.outs)
        leaves = [self.original.get(id(leaf), leaf) for leaf in self.final]
        fixed = self.constants | self.original.keys()
        self.moved = [
            i for i, t in enumerate(self.final) if differentiable(t) and id(t) not in fixed
        ]
        given = _tree.tensors((self.start, self.meta, self.learned_batches))
        tensors = [t for t in (*given, *self.closed_over) if t.requires_grad]
        self.inputs = list({id(t): t for t in tensors}.values())
        outs = self.columns
        if self.inputs:
            leaves, outs = connect(
                leaves,
                outs,
                self.moved,
                lambda values: attach(values, self.inputs, self.descend, self.descend_with_graph),
            )
        return _tree.fill(self.final_state, leaves), _tree.fill(self.outs[0], outs)

    # Descent. -----------------------------------------------------------------------------------

    def descend(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs, given those of the connected results."""
        self.unmodified.check()
        self.sums: dict[int, Tensor] = {}
        self.compared: list[tuple[Tensor, Tensor]] = []
        """Norms of the second time, each with that of the first."""
        self.is_searched = self.segment is not None
        above: Grads = [None] * len(self.final)
        for i, grad in zip(self.moved, grads, strict=False):
            above[i] = grad
        shown = grads[len(self.moved) :]
        shown = None if all([grad is None for grad in shown]) else shown
        with restore_randomness(self.devices), self.autocast.restore():
            self.first.randomness.set()
            for reverse, working in self._reversals():
                above = self._reverse(reverse, working, above, shown)
        self.kept.clear()  # not to be held as long as the loss is
        compare_norms(self.compared)
        return [self.sums.get(id(t)) for t in self.inputs]

    def _reversals(self) -> Iterator[tuple[Reverse, Kept]]:
        """The reversals of the order with their states."""
        if self.pending is None:
            # An earlier backward has used up what was kept: climb again.
            with torch.no_grad():
                self.pending = self._advance_to_reversal()
        pending, self.pending = self.pending, None
        yield pending
        del pending
        working = self.first
        for action in self.actions:
            if isinstance(action, Reverse):
                yield action, working
            else:
                with torch.no_grad():
                    working = self._move(working, action)

    def _reverse(
        self, reverse: Reverse, working: Kept, above: Grads, shown: Sequence[Tensor | None] | None
    ) -> Grads:
        """B before the steps, out of B after them."""
        segment, self.segment = self.segment, None
        if segment is None:
            self._restore(working)
            segment = self._take_again(reverse, working)
            if reverse.stop <= len(self.norms):
                self._note(_norms_of(segment.leaves, segment.outs[-1]), reverse.stop - 1)
        suspects = None
        if not self.is_searched:
            leaves, older = segment.find_closures()
            if older:
                raise closures.closure_error(None, older[0], self.step.roots)
            suspects, self.is_searched = closures.Suspects(leaves), True
            del leaves
        outs = None
        if shown is not None:
            outs = [grads_of_step(self.columns, shown, j) for j in range(*reverse)]
        below = segment.pull(above, outs, self._add)
        del segment
        if suspects is not None:
            working.randomness.set()
            suspects.refuse(
                lambda: self._take_again(reverse, working).find_closures()[0], self.step.roots
            )
        return below

    def _take_again(self, reverse: Reverse, working: Kept) -> Segment:
        batches = [self._batch(j) for j in range(*reverse)]
        return Segment(
            self.recomputed_step, working.state, batches, self.stand_ins, self.closed_over
        )

    def _note(self, norms: Sequence[Tensor], step: int) -> None:
        """Keep the norms of a step that was taken again, to compare all of them at once."""
        self.compared += pair_norms(norms, self.norms[step])

    def _add(self, tensor: Tensor, grad: Tensor) -> None:
        known = self.sums.get(id(tensor))
        self.sums[id(tensor)] = grad if known is None else known + grad

    def descend_with_graph(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """:meth:`descend` with a graph, for gradients that are differentiated again.

        Every input has a stand-in, so that each gradient is a partial derivative even if one input
        was computed from another.
        """
        self.unmodified.check()
        closed = {id(t) for t in self.closed_over}
        targets = [t if id(t) in closed else t.view_as(t) for t in self.inputs]
        stand_ins = {id(old): new for old, new in zip(self.inputs, targets, strict=True)}

        def stand_in(leaf: Any) -> Any:
            return stand_ins.get(id(leaf), leaf)

        state = _tree.map(stand_in, self.state)
        batches = [_tree.map(stand_in, self._batch(j)) for j in range(len(self.batches))]
        with restore_randomness(self.devices), self.autocast.restore():
            self.first.randomness.set()
            final, outs = fold_in_graph(self.step, state, _tree.map(stand_in, self.meta), batches)
        values: list[Tensor] = []
        connect(_tree.leaves(final), columns(outs), self.moved, lambda v: values.extend(v) or v)
        pairs = zip(values, grads, strict=True)
        live = [(v, g) for v, g in pairs if g is not None and v.requires_grad]
        if not live:
            return [None] * len(targets)
        outputs, cotangents = zip(*live, strict=True)
        found = torch.autograd.grad(
            outputs, targets, cotangents, create_graph=True, allow_unused=True
        )
        return list(found)


def _norms_of(state: Any, out: Any) -> Sequence[Tensor]:
    """The norms of all tensors in a state and an output, to compare a recomputed step by."""
    tensors = _tree.tensors((state, out))
    leaves = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    return torch._foreach_norm(leaves) if leaves else ()  # type: ignore[attr-defined]


def pair_norms(now: Sequence[Tensor], then: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The norms of a recomputed step, each with that of the first time."""
    if len(now) != len(then):
        raise _not_the_same()
    return list(zip(now, then, strict=True))


def compare_norms(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Raises if recomputed steps differ from the first ones. The only read on the host."""
    if not pairs or pairs[0][0].is_meta:
        return
    device = pairs[0][0].device
    tolerance = _TOLERANCES[min(now.dtype.itemsize for now, _ in pairs)]
    norms = torch.stack([norm.to(device) for pair in pairs for norm in pair]).tolist()
    for now, then in zip(norms[::2], norms[1::2], strict=True):
        both_nan = now != now and then != then
        if not both_nan and not math.isclose(now, then, rel_tol=tolerance):
            raise _not_the_same()


_TOLERANCES = {8: 1e-9, 4: 1e-5, 2: 1e-2, 1: 1e-2}
"""Relative, by the size of a number in bytes."""


def _not_the_same() -> RequirementError:
    return RequirementError(
        four_part(
            "A step gave another output when it was computed a second time.",
            "a loss that depends only on the model, the batch and torch's own random numbers.",
            "this strategy computes steps again, and the gradient would belong to other steps "
            "than those taken.",
            "torch's random functions without generator= (its own generator is replayed) instead "
            "of a torch.Generator, random or numpy; batches that are the same whenever they are "
            "indexed; or backward=Tape().",
        )
    )
