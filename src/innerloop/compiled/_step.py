"""One step and its derivative as two programs, used for every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop import _tree
from innerloop._tree import differentiable
from innerloop.compiled._program import Flat, Layout, Programs, Recorded, Values
from innerloop.compiled._whole import UNCOMPILED, refuse_strangers
from innerloop.guard import closures
from innerloop.step.gradient import refuse_higher
from innerloop.step.state import State, named_leaves, rebuilt


class _Pull(NamedTuple):
    program: Flat
    used: list[bool]
    """Which inputs have a gradient."""


class _Result:
    """The place of a tensor among the results of a step."""

    def __init__(self, tensor: Tensor, of_state: bool, followed: bool) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.of_state = of_state
        self.differentiable = followed and differentiable(tensor)

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class CompiledStep:
    """A step in the place of another one, computed by programs.

    Its derivative computes the step a second time, so what a tape keeps of it are the states.
    """

    def __init__(self, step: Any, programs: Programs, key: Any) -> None:
        self.step, self.programs, self.key = step, programs, key
        self.tracked = torch.is_grad_enabled()
        self.size = 0
        """How many operations the last program has, without its derivative."""
        self.identity, self.roots = step.identity, step.roots
        self.check_state, self.constants = step.check_state, step.constants

    def __call__(self, state: Any, meta: Any, batch: Any) -> tuple[Any, Any]:
        state, (out,) = self.many(state, meta, [batch])
        return state, out

    def many(self, state: Any, meta: Any, batches: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Several steps by one program: the state after the last, and the outputs of all."""
        step = self.step
        if state.opt is None:
            state = state._replace(opt=step.initial(state.params))
        times = range(state.time, state.time + len(batches))
        named = named_leaves(state.params)
        trained = step.evaluation(state, meta, None).trained(named)
        metas = [self._at(meta, time, named) for time in times]
        # A gradient may come to every weight that moves and every number of the optimizer, in all
        # steps but the first: one program for all.
        moving = ({name: named[name] for name in trained}, state.opt)
        layout = Layout((state.params, state.buffers, metas, list(batches)), moving)
        pair: _Pair = self.programs.get(
            ("step", self.key, layout.key, layout.wanted, step.tasks),
            lambda: _Pair(step, layout, self.programs, self.tracked),
        )
        self.size = pair.size
        rest = iter(pair(layout))
        leaves = [next(rest) if isinstance(leaf, _Result) else leaf for leaf in pair.leaves]
        new, outs = _tree.unflatten(leaves, pair.spec)
        if len(trained) < len(named):
            # What stays requires grad only if it did before.
            moved = named_leaves(new.params)
            own = {**named, **{name: moved[name] for name in trained}}
            new = new._replace(params=rebuilt(new.params, own))
        return new._replace(time=times.stop), outs

    def _at(self, meta: Any, time: int, named: Mapping[str, Any]) -> Any:
        """The settings of one step; numbers that a schedule gives are tensors, as they change."""
        schedule = self.step.schedule
        if schedule is None:
            return meta
        dtypes = [p.dtype for p in named.values() if differentiable(p)]
        dtype = torch.promote_types(dtypes[0].to_real(), torch.float32)

        def as_input(value: Any) -> Any:
            return torch.tensor(value, dtype=dtype) if type(value) is float else value

        scheduled = schedule(meta.opt, time)
        changed = {k: v for k, v in scheduled.items() if v is not meta.opt.get(k)}
        return meta._replace(opt={**scheduled, **_tree.map(as_input, changed)})


class _Pair:
    """The programs of one step, or of several, for one kind of input."""

    def __init__(
        self,
        step: Any,
        layout: Layout,
        programs: Programs,
        tracked: bool,
    ) -> None:
        self.step = dataclasses.replace(step, schedule=None)
        self.layout, self.wanted, self.programs = layout.detached(), layout.wanted, programs
        self.leaves: list[Any] = []
        self.spec: Any = None
        self.pulls: dict[Any, _Pull] = {}
        recorded = Recorded(self._forward, layout.tensors)
        self.size = recorded.size
        self.forward = programs.compiled(recorded)
        if tracked:
            # Now, so that what cannot be compiled is found before a backward is under way.
            self._pull(self.layout.tensors, [None] * self._results)

    @property
    def _results(self) -> int:
        return sum(isinstance(leaf, _Result) for leaf in self.leaves)

    def __call__(self, layout: Layout) -> Sequence[Tensor]:
        values = Values(layout.tensors)
        if torch.is_grad_enabled() and any(layout.requiring):
            return _Step.apply(self, values, *layout.tensors)  # type: ignore[return-value]
        return self.forward(*values.tensors)

    def _taken(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (_, opt), (params, buffers, metas, batches) = self.layout.rebuilt(tensors)
        state, outs = State(params, buffers, opt), []
        for meta, batch in zip(metas, batches, strict=True):
            state, out = self.step(state, meta, batch)
            outs.append(out)
        of_state = len(_tree.flatten(state)[0])
        buffers = {id(b) for b in state.buffers.values()}
        leaves, self.spec = _tree.flatten((state, outs))
        self.leaves = [
            _Result(v, i < of_state, id(v) not in buffers) if isinstance(v, Tensor) else v
            for i, v in enumerate(leaves)
        ]
        return [v for v in leaves if isinstance(v, Tensor)]

    def _forward(self, *tensors: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [t.detach() for t in self._taken(tensors)]

    def pulled(
        self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gradients of the inputs, given those of the results."""
        program, used, cotangents = self._pull(tensors, grads)
        found = iter(program(*tensors, *cotangents))
        return [next(found) if u else None for u in used]

    def _pull(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Any:
        """The program for these gradients. For states all are there, if only as zeros."""
        results = [leaf for leaf in self.leaves if isinstance(leaf, _Result)]
        given = tuple(
            leaf.differentiable and (leaf.of_state or g is not None)
            for leaf, g in zip(results, grads, strict=True)
        )
        cotangents = [
            leaf.zeros() if g is None else g.contiguous()
            for leaf, g, there in zip(results, grads, given, strict=True)
            if there
        ]
        if given not in self.pulls:
            self.pulls[given] = self._made(given, tensors, cotangents)
        return *self.pulls[given], cotangents

    def _made(
        self, given: Sequence[bool], tensors: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> _Pull:
        used: list[bool] = []

        def joint(*flat: Tensor) -> list[Tensor]:
            own = [
                t.detach().requires_grad_(wanted)
                for t, wanted in zip(flat[: len(tensors)], self.wanted, strict=True)
            ]
            since = closures.sequence_number()
            with torch.enable_grad():
                results = self._taken(own)
            there = [t for t, g in zip(results, given, strict=True) if g]
            pairs = [
                (t, g) for t, g in zip(there, flat[len(tensors) :], strict=True) if t.requires_grad
            ]
            sources = [t for t in own if t.requires_grad]
            refuse_strangers([t for t, _ in pairs], sources, since)
            found = torch.autograd.grad(
                [t for t, _ in pairs], sources, [g for _, g in pairs], allow_unused=True
            )
            rest = iter(found)
            grads = [next(rest) if t.requires_grad else None for t in own]
            used[:] = [g is not None for g in grads]
            return [g for g in grads if g is not None]

        # Any numbers but zeros, for the program to be compared with what was recorded.
        examples = [
            torch.arange(1, 1 + g.numel(), device=g.device).sin().view(g.shape).to(g.dtype)
            for g in cotangents
        ]
        program = self.programs.compiled(Recorded(joint, [*tensors, *examples]))
        return _Pull(program, used)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pair: _Pair, values: Values, *tensors: Tensor) -> Any:
        ctx.pair, ctx.values = pair, values
        ctx.set_materialize_grads(False)
        results = pair.forward(*values.tensors)
        marks = [leaf.differentiable for leaf in pair.leaves if isinstance(leaf, _Result)]
        ctx.mark_non_differentiable(*(t for t, yes in zip(results, marks, strict=True) if not yes))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_higher("The backward of a compiled step", UNCOMPILED)
        return None, None, *ctx.pair.pulled(ctx.values.tensors, grads)
