"""Algorithm 1's walk back over the steps, in any order a schedule gives.

Forwards, steps are taken without a graph and the schedule says which states to keep. Backwards, a
step is taken once more from a kept state, with a graph of its own, and the gradient of the state
after it (B of the paper) is pulled back to the state before it; what falls to the meta-parameters
(A) is added up. Only one step's activations exist at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop import _captured, _tree
from innerloop._ambient import Autocast, Randomness, devices_of, preserved
from innerloop.backward._schedules import Action, Advance, Drop, Keep, Load, Reverse
from innerloop.backward._strategy import Step, detached, differentiable, stacked
from innerloop.errors import InnerLoopError, RequirementError, four_part


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
    ) -> None:
        self.step, self.batches, self.schedule = step, batches, schedule
        leaves, spec = _tree.flatten(state)
        self.start = leaves
        self.meta, self.meta_spec = _tree.flatten(meta)
        self.devices = devices_of(leaves)
        self.autocast = Autocast(self.devices)
        self.kept: dict[int, _Kept] = {}
        self.outs: list[Any] = []
        self.marks: list[list[Tensor]] = []
        """A few numbers for each step, by which to see whether it comes out the same again."""
        self.given: dict[int, Tensor] = {}
        """Leaves of batches that require grad."""
        self.versions: list[tuple[Any, int]] = []
        """Tensors of the caller and how often they had been written to."""
        self._guard((*leaves, *self.meta))
        own = [detached(leaf) for leaf in leaves]
        self.constant: dict[int, int] = {}
        """By id, state leaves that no step replaces, and their positions at the start."""
        with torch.no_grad(), self.autocast.restored(), _captured.watching() as watch:
            final = self._climb(_tree.unflatten(own, spec))
        self.final, self.final_spec = _tree.flatten(final)
        last = {id(leaf) for leaf in self.final}
        self.constant = {id(leaf): i for i, leaf in enumerate(own) if id(leaf) in last}
        self.outside = watch.tensors
        self._guard(self.outside)

    # Up. ----------------------------------------------------------------------------------------

    def _climb(self, state: Any) -> Any:
        """Keep what the schedule keeps before its first reversal, and go on to the last state."""
        self.first = _Kept(state, Randomness(self.devices))
        action, working, at = self._until_reversal(self.outs)
        self.pending: tuple[Reverse, _Kept] | None = (action, working)
        advance = Advance(at, len(self.batches))
        return self._moved(working, at, advance, self.outs)[0].state

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
            state, meta = working.state, self._meta()
            for j in range(action.start, action.stop):
                state, out = self.step(state, meta, self._batch(j, first=outs is not None))
                if outs is not None:
                    outs.append(_tree.map(detached, out))
                    self.marks.append(_mark(state, out))
            working = _Kept(state, Randomness(self.devices, working.randomness))
            at = action.stop
        return working, at

    def _meta(self) -> Any:
        return _tree.unflatten([detached(leaf) for leaf in self.meta], self.meta_spec)

    def _batch(self, j: int, first: bool) -> Any:
        batch = self.batches[j]
        leaves, spec = _tree.flatten(batch)
        if first:
            self._guard(leaves)
        learned = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not learned:
            return batch
        if first:
            self.given.update((id(leaf), leaf) for leaf in learned)
        return _tree.unflatten([detached(leaf) for leaf in leaves], spec)

    def _guard(self, leaves: Sequence[Any]) -> None:
        self.versions += [
            (leaf, leaf._version)
            for leaf in leaves
            if isinstance(leaf, Tensor) and not leaf.is_inference()
        ]

    # Across. ------------------------------------------------------------------------------------

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors that the result depends on and that require grad, each once."""
        tensors = [*self.start, *self.meta, *self.given.values(), *self.outside]
        found = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
        return list({id(t): t for t in found}.values())

    def result(self) -> tuple[Any, Any]:
        """The final state and the stacked outputs, connected to the inputs."""
        outs = stacked(self.outs)
        out_leaves, out_spec = _tree.flatten(outs)
        leaves = [self._original(leaf) for leaf in self.final]
        inputs = self.inputs
        moved = [i for i, t in enumerate(self.final) if self._varies(t)]
        shown = [i for i, t in enumerate(out_leaves) if differentiable(t)]
        if inputs and (moved or shown):
            self.moved, self.shown = moved, shown
            values = [leaves[i] for i in moved] + [out_leaves[i] for i in shown]
            connected = _Connect.apply(self, values, *inputs)
            for i, tensor in zip(moved, connected, strict=False):
                leaves[i] = tensor
            for i, tensor in zip(shown, connected[len(moved) :], strict=True):
                out_leaves[i] = tensor
        return (
            _tree.unflatten(leaves, self.final_spec),
            _tree.unflatten(out_leaves, out_spec),
        )

    def _original(self, leaf: Any) -> Any:
        position = self.constant.get(id(leaf))
        return leaf if position is None else self.start[position]

    def _varies(self, leaf: Any) -> bool:
        return differentiable(leaf) and id(leaf) not in self.constant

    # Down. --------------------------------------------------------------------------------------

    def pulled(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs, given those of the connected results."""
        self._check_versions()
        self.sums: dict[int, Tensor] = {}
        above: list[Tensor | None] = [None] * len(self.final)
        for i, grad in zip(self.moved, grads, strict=False):
            above[i] = grad
        by_step = self._by_step(grads[len(self.moved) :])
        self.changed: list[Tensor] = []
        with preserved(self.devices), self.autocast.restored():
            for action, working in self._descent():
                above = self._reversed(action, working, above, by_step)
        # Not to be held as long as somebody holds the loss.
        self.kept.clear()
        if any(map(bool, self.changed)):
            raise RequirementError(_NOT_THE_SAME)
        for leaf, grad in zip(self.start, above, strict=True):
            if grad is not None and leaf.requires_grad:
                self._add(leaf, grad)
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
        at, current = -1, None
        for action in self.actions:
            if isinstance(action, Reverse):
                assert current is not None
                yield action, current
                current = None
            else:
                with torch.no_grad():
                    current, at = self._moved(current, at, action, None)  # type: ignore[arg-type]

    def _reversed(
        self,
        action: Reverse,
        working: _Kept,
        above: list[Tensor | None],
        by_step: Callable[[int], list[Tensor | None]],
    ) -> list[Tensor | None]:
        """B before the steps, out of B after them; adds to the sums of everything else (A)."""
        working.randomness.set()
        local = _Local()
        leaves, spec = _tree.flatten(working.state)
        wanted = [self._wanted(i, leaf, action.start) for i, leaf in enumerate(leaves)]
        below = [local.of(leaf) if w else leaf for leaf, w in zip(leaves, wanted, strict=True)]
        for i, leaf in enumerate(leaves):
            position = self.constant.get(id(leaf))
            if position is not None and isinstance(self.start[position], Tensor):
                below[i] = local.for_input(self.start[position])
        meta = _tree.unflatten([local.for_input(leaf) for leaf in self.meta], self.meta_spec)
        earlier = [t for t in self.outside if t.grad_fn is not None]
        leaves_outside = [t for t in self.outside if t.grad_fn is None]
        others = {id(t): local.for_input(t) for t in earlier}
        since = _captured.sequence_number()
        state, outs = _tree.unflatten(below, spec), []
        with torch.enable_grad(), _captured.exchanged(others) if others else _nothing():
            for j in range(action.start, action.stop):
                state, out = self.step(state, meta, self._local_batch(j, local))
                outs.append(out)
        outputs, cotangents = _paired(_tree.flatten(state)[0], above)
        for j, out in zip(range(action.start, action.stop), outs, strict=True):
            more = _paired([t for t in _tree.flatten(out)[0] if differentiable(t)], by_step(j))
            outputs, cotangents = outputs + more[0], cotangents + more[1]
        again = zip(_mark(state, outs[-1]), self.marks[action.stop - 1], strict=True)
        self.changed += [_differs(new, old) for new, old in again]
        known = [*local.tensors, *leaves_outside]
        self._refuse_strangers(outputs, known, since)
        sources = [b for b, w in zip(below, wanted, strict=True) if w]
        targets = [*sources, *local.inputs.values(), *leaves_outside]
        found: Sequence[Tensor | None] = [None] * len(targets)
        if outputs and targets:
            found = torch.autograd.grad(outputs, targets, cotangents, allow_unused=True)
        rest = iter(found)
        new_above = [next(rest) if w else None for w in wanted]
        for key in local.inputs:
            self._add_by_id(key, next(rest))
        for leaf in leaves_outside:
            self._add(leaf, next(rest))
        return new_above

    def _wanted(self, i: int, leaf: Any, at: int) -> bool:
        """Whether the gradient of a state leaf before step ``at`` is needed."""
        if not self._varies(leaf):
            return False
        return at > 0 or self.start[i].requires_grad

    def _local_batch(self, j: int, local: _Local) -> Any:
        batch = self.batches[j]
        if not self.given:
            return batch
        leaves, spec = _tree.flatten(batch)
        return _tree.unflatten([local.for_input(leaf) for leaf in leaves], spec)

    def _by_step(self, grads: Sequence[Tensor | None]) -> Callable[[int], list[Tensor | None]]:
        return lambda j: [None if g is None else g[j] for g in grads]

    def _add_by_id(self, key: int, grad: Tensor | None) -> None:
        if grad is not None:
            self.sums[key] = self.sums[key] + grad if key in self.sums else grad

    def _add(self, leaf: Tensor, grad: Tensor | None) -> None:
        self._add_by_id(id(leaf), grad)

    # Checks. ------------------------------------------------------------------------------------

    def _check_versions(self) -> None:
        for tensor, version in self.versions:
            if tensor._version != version:
                raise InnerLoopError(
                    four_part(
                        f"A tensor of shape {tuple(tensor.shape)} (a weight, a setting or part of "
                        "a batch) was written to in place between the forward and the backward.",
                        "the values the inner loop ran with.",
                        "the backward computes its steps a second time from them.",
                        "backward() before optimizer.step() or before reusing a buffer, or a "
                        ".clone() of what is overwritten.",
                    )
                )

    def _refuse_strangers(self, outputs: list[Tensor], known: list[Tensor], since: int) -> None:
        roots = getattr(self.step, "roots", (self.step,))
        _captured.refuse(outputs, known, since, roots)


def _mark(state: Any, out: Any) -> list[Tensor]:
    """The norms of all tensors in a state and an output, which another step would change."""
    by_kind: dict[Any, list[Tensor]] = {}
    for leaf in _tree.flatten((state, out))[0]:
        if differentiable(leaf) and leaf.numel():
            by_kind.setdefault((leaf.dtype, leaf.device), []).append(leaf.detach())
    norms = torch._foreach_norm  # type: ignore[attr-defined]
    return [torch.stack(norms(group)) for group in by_kind.values()]


def _differs(new: Tensor, old: Tensor) -> Tensor:
    tolerance = {8: 1e-9, 4: 1e-5}.get(new.dtype.itemsize, 1e-2)
    return ~torch.isclose(new, old, rtol=tolerance, equal_nan=True).all()


_NOT_THE_SAME = four_part(
    "A step gave another output when it was computed a second time.",
    "a loss that depends only on the model, the batch and torch's own random numbers.",
    "this strategy computes steps again, and the gradient would belong to other steps than those "
    "taken.",
    "torch's random functions (which are replayed) instead of random or numpy, batches that are "
    "the same whenever they are indexed, or backward=Tape().",
)


class _Local:
    """Stand-ins for tensors in the graph of one reversal: same values, no history."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.inputs: dict[int, Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        new = tensor.detach().requires_grad_()
        self.tensors.append(new)
        return new

    def for_input(self, leaf: Any) -> Any:
        """The stand-in of an input, one for each; other leaves as they are."""
        if not (isinstance(leaf, Tensor) and leaf.requires_grad):
            return leaf
        if id(leaf) not in self.inputs:
            self.inputs[id(leaf)] = self.of(leaf)
        return self.inputs[id(leaf)]


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _paired(
    tensors: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [
        (tensor, grad)
        for tensor, grad in zip(tensors, grads, strict=True)
        if grad is not None and tensor.requires_grad
    ]
    return [tensor for tensor, _ in pairs], [grad for _, grad in pairs]


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
        return None, None, *ctx.walk.pulled(grads)


def refuse_higher(what: str) -> None:
    """Raise inside a backward that is itself to be differentiated."""
    if torch.is_grad_enabled():
        raise RequirementError(
            four_part(
                f"{what} was run with create_graph=True, as when an inner loop is differentiated "
                "inside another one.",
                "a strategy whose backward has a graph.",
                "a walk over recomputed steps has none, and the outer gradient would be wrong.",
                "backward=innerloop.Tape() for the inner one of two nested loops.",
            )
        )


def walk(
    step: Step,
    state: Any,
    meta: Any,
    batches: Sequence[Any],
    schedule: Callable[[], Iterator[Action]],
) -> tuple[Any, Any]:
    """Fold ``step`` over the batches; the backward follows ``schedule``."""
    return Walk(step, state, meta, batches, schedule).result()
