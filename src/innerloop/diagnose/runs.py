"""Runs of an inner loop, each from the same point, that leave no trace behind."""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from innerloop import _tree
from innerloop.backward.auto import Forecast, forecast
from innerloop.backward.segment import Segment, StandIns
from innerloop.diagnose.tracer import Place, Tracer, failing_place, paths_in_modules
from innerloop.guard.graph import nodes
from innerloop.guard.randomness import Devices, Draws, Randomness, devices_of
from innerloop.modules.functional import functional
from innerloop.step.state import Meta, State

if TYPE_CHECKING:
    from innerloop.inner_loop import InnerLoop

T = TypeVar("T")
_PARTS = {"model": "init", "settings": "setting", "loss": "loss", "optimizer": "optimizer"}


class MetaParameter(NamedTuple):
    """One tensor of φ; ``name`` is that of ``inner.named_parameters()``, wrappers left out."""

    name: str
    tensor: Tensor
    part: str


class Failure(NamedTuple):
    """An exception that a run ended with."""

    kind: str
    message: str
    place: Place | None


class StepNorms(NamedTuple):
    """Losses and norms of Algorithm 1 by step; see the fields of ``Report`` and ``Row``."""

    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    b_norms: tuple[float, ...] = ()
    """Empty if the run failed, as all others are then."""
    per_step: Mapping[str, tuple[float, ...]] = {}
    direct: Mapping[str, float] = {}


class Runs:
    """An inner loop with its data, to be run repeatedly.

    The loop is a shallow copy that starts anew at each call, so that nothing is carried over from
    or to the runs of the original; its model, optimizer and loss are the original ones.
    """

    def __init__(self, inner: InnerLoop, train: Any, val: Any, tasks: bool) -> None:
        self.snapshot = Snapshot(inner, (train if isinstance(train, list | tuple) else (), val))
        self.inner = _copy_with(inner)
        self.model = functional(inner.model)
        self.phi = meta_parameters(inner)
        self.changed: set[str] = set()
        """Tensors that some run wrote to: ``"weights"`` or ``"batches"``."""
        self.batches: Any = train
        self.val = val
        self.steps = 0
        # A call of the loop refuses anything else, and says why.
        if isinstance(train, Iterable) and not isinstance(train, Tensor | str | bytes | dict):
            batches: Any = train if hasattr(train, "__getitem__") else list(train)
            self.batches, self.steps = batches, len(batches)
            if tasks:
                first = [batches[j] for j in range(self.steps)]
                self.batches, self.val = _tree.map(_first_task, (first, val))

    def attempt(self, run: Callable[[], T]) -> tuple[T | None, Failure | None]:
        """The result of a run from the starting point, or the exception that it raises."""
        self.restore()
        try:
            return run(), None
        except Exception as error:
            place = failing_place(traceback.walk_tb(error.__traceback__))
            return None, Failure(type(error).__name__, str(error), place)
        finally:
            self.changed |= self.restore()

    def restore(self, moved: Sequence[Tensor] = ()) -> set[str]:
        """Restores the starting point; see :meth:`Snapshot.restore`."""
        self.inner.restart()
        return self.snapshot.restore(moved)

    # Values and gradients. ----------------------------------------------------------------------

    def gradients(self) -> dict[str, Tensor | None]:
        """The meta-gradient by name, with the strategy of the loop."""
        with torch.enable_grad():
            value = self.inner(self.batches, self.val, tasks=False)
            tensors = [p.tensor for p in self.phi]
            grads = torch.autograd.grad(value, tensors, allow_unused=True) if tensors else ()
        return {p.name: g for p, g in zip(self.phi, grads, strict=True)}

    def measure(self, tracer: Tracer | None = None) -> tuple[Any, dict[str, Tensor]]:
        """L_val, and the trained weights as leaves of its graph."""
        with torch.no_grad():
            adapted = self.inner.adapt(self.batches, tasks=False)
        weights = self._leaves(adapted.params)
        module = self.model.bind(weights, adapted.buffers)
        leaves = {name: p for name, p in weights.items() if p.requires_grad}
        if tracer is not None:
            tracer.add_leaves({f"model.{name}": p for name, p in leaves.items()})
        measure: Any = self.inner.loss if self.inner.val_loss is None else self.inner.val_loss
        # Gradients are on, because a validation loss may take gradients itself.
        with torch.enable_grad(), tracer or nullcontext():
            out = measure(module, self.val)
        return _first(out), leaves

    def value(self) -> Tensor:
        """L_val as a tensor without a graph."""
        return torch.as_tensor(self.measure()[0]).detach()

    def forecast(self) -> Forecast:
        """The memory that every strategy would need."""
        step, state, meta = _parts(self.inner, self.steps)
        return forecast(step, state, meta, self.batches[0], self.steps)

    def _leaves(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights without a graph; those that are not frozen require grad."""
        own = self.model.params
        return {n: p.detach().requires_grad_(own[n].requires_grad) for n, p in params.items()}

    # Step by step. ------------------------------------------------------------------------------

    @torch.enable_grad()
    def step_norms(self) -> StepNorms:
        """Runs Algorithm 1 and records B_j, and what each step adds to A."""
        value, leaves = self.measure()
        phi = [p.tensor for p in self.phi]
        last = _gradients([value.reshape(())], [*leaves.values(), *phi])
        direct = {p.name: _norm([g]) for p, g in zip(self.phi, last[len(leaves) :], strict=True)}
        self.restore()
        losses: list[float] = []
        grad_norms: list[float] = []
        step, meta, kept, final = self._climb(losses, grad_norms)

        names = {id(p): name for name, p in self.model.params.items()}
        b: dict[str, Tensor | None] = dict(zip(leaves, last, strict=False))
        b_norms = [_norm(b.values())]
        per_step: dict[str, list[float]] = {p.name: [] for p in self.phi}
        above = [b.get(name) for name in final.params]
        above += [None] * (len(_tree.leaves(final)) - len(above))
        for j in reversed(range(self.steps)):
            state, randomness = kept.pop()
            randomness.set()
            segment = Segment(step, state, [self.batches[j]], StandIns({}, meta))
            added: dict[int, Tensor] = {}
            above = segment.pull(above, None, _collect_into(added))
            b = {name: g for name, g in zip(state.params, above, strict=False) if name in leaves}
            b_norms.append(_norm(b.values()))
            settings = [t for t in _requiring_grad(meta) if id(t) in added]
            contributions = _gradients(settings, phi, [added[id(t)] for t in settings])
            for p, g in zip(self.phi, contributions, strict=True):
                part = b.get(names[id(p.tensor)]) if p.part == "init" else g
                per_step[p.name].append(_norm([part]))
        return StepNorms(
            tuple(losses),
            tuple(grad_norms[: self.steps]),
            tuple(reversed(b_norms)),
            {name: tuple(reversed(norms)) for name, norms in per_step.items()},
            direct,
        )

    def _climb(
        self, losses: list[float], grad_norms: list[float]
    ) -> tuple[Any, Meta, list[Any], State]:
        """Trains without a graph; keeps every state with its random numbers, ℓ_j and |G_j|."""
        transform = self.inner.grad_transform

        def record(grads: dict[str, Any]) -> Mapping[str, Any]:
            grad_norms.append(_norm(grads.values()))
            return grads if transform is None else transform(grads)

        step, state, meta = _parts(_copy_with(self.inner, grad_transform=record), self.steps)
        state, plain = _tree.map(_tree.detach, (state, meta))
        kept = []
        with torch.no_grad():
            for j in range(self.steps):
                kept.append((state, _RandomState(self.snapshot.devices)))
                state, out = step(state, plain, self.batches[j])
                losses.append(float(_first(out)))
        return step, meta, kept, state

    # Under the tracer. --------------------------------------------------------------------------

    def tracer(self, stage: str) -> Tracer:
        """A tracer that knows φ and the weights of the original model."""
        names = {p.name: p.tensor for p in self.phi if p.part != "init"}
        known = {id(t) for t in names.values()}
        own = self.model.params.items()
        outside = {f"model.{n}": p for n, p in own if p.requires_grad and id(p) not in known}
        return Tracer(stage, names, outside)

    def trace_step(self, tracer: Tracer) -> list[Tensor]:
        """The first step and all that is computed for it; its loss and new weights."""
        inner = _copy_with(self.inner, loss=_TracedLoss(self.inner.loss))
        token = _TRACER.set(tracer)
        try:
            with self._paths(), tracer, torch.enable_grad():
                step, state, meta = _parts(inner, self.steps)
                params = self._leaves(state.params)
                tracer.add_leaves({f"model.{n}": p for n, p in params.items() if p.requires_grad})
                new, out = step(state._replace(params=params), meta, self.batches[0])
        finally:
            _TRACER.reset(token)
        results = _tree.tensors((out, new.params))
        tracer.finish("update", results)
        return results

    def trace_val(self, tracer: Tracer) -> None:
        """The validation loss at the trained weights."""
        with self._paths():
            value, _ = self.measure(tracer)
        tracer.finish("val_loss", [value])

    def _paths(self) -> Any:
        inner = self.inner
        roots = {"model": self.model.module, "loss": inner.loss, "optimizer": inner.optimizer}
        return paths_in_modules({**roots, "val_loss": inner.val_loss})


def _parts(inner: InnerLoop, steps: int) -> tuple[Any, State, Meta]:
    """The loop as a pure function: its step, the initial state, and φ as the step takes it."""
    call = inner.prepare(steps)
    return call.step, call.state, call.meta


def _copy_with(inner: InnerLoop, **parts: Any) -> InnerLoop:
    """A shallow copy of a loop with some of its parts replaced."""
    found = copy.copy(inner)
    found._modules = {name: m for name, m in inner._modules.items() if name not in parts}
    found.__dict__.update(parts)
    return found


_TRACER: ContextVar[Tracer] = ContextVar("tracer")


class _TracedLoss(nn.Module):
    """A loss that tells the tracer where it begins and ends.

    It does not hold the tracer, whose tensors a replica of the loss would look at.
    """

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, *args: Any) -> Any:
        tracer = _TRACER.get()
        tracer.stage = "loss"
        out = self.loss(*args)
        tracer.finish("loss", [_first(out)])
        tracer.stage = "update"
        return out


def custom_functions(results: Sequence[Tensor]) -> list[str]:
    """The names of the user's own autograd.Functions in the graph of a step."""
    kinds = {type(node) for node in nodes([t.grad_fn for t in results])[0]}
    found = [kind._forward_cls for kind in kinds if hasattr(kind, "_forward_cls")]
    return sorted(c.__name__ for c in found if not c.__module__.startswith("innerloop"))


def meta_parameters(inner: InnerLoop) -> list[MetaParameter]:
    """φ: the parameters of the loop, and tensors that the optimizer was built with."""
    weights = {id(p): f"model.{name}" for name, p in functional(inner.model).params.items()}
    found = [
        MetaParameter(weights.get(id(p), name), p, _PARTS.get(name.split(".")[0], "other"))
        for name, p in inner.named_parameters()
        if p.requires_grad
    ]
    if isinstance(inner.optimizer, torch.optim.Optimizer):
        for i, group in enumerate(inner.optimizer.param_groups):
            for name, value in group.items():
                suffix = f"[{i}]" if i else ""
                tensors = [] if name == "params" else _requiring_grad(value)
                found += [MetaParameter(f"optimizer.{name}{suffix}", t, "setting") for t in tensors]
    return list({id(p.tensor): p for p in reversed(found)}.values())[::-1]


# The starting point. ----------------------------------------------------------------------------


class _RandomState:
    """The random numbers of torch, Python and NumPy at one moment."""

    def __init__(self, devices: Devices) -> None:
        self.of_torch, self.of_others = Randomness(devices), Draws()

    def set(self) -> None:
        self.of_torch.set()
        self.of_others.undo()


class Snapshot:
    """The weights, gradients, batches and random numbers of a moment, to be restored."""

    def __init__(self, inner: InnerLoop, data: Any) -> None:
        weights = [t for m in (inner, inner.model) for t in (*m.parameters(), *m.buffers())]
        if isinstance(inner.optimizer, torch.optim.Optimizer):
            weights += _tree.tensors(list(inner.optimizer.state.values()))
            weights += _tree.tensors(inner.optimizer.param_groups)
        batches = _tree.tensors(data)
        self.grads = [(t, t.grad) for t in weights if t.is_leaf]
        self.saved = [
            *(("weights", *saved) for saved in _save(weights)),
            *(("batches", *saved) for saved in _save(batches)),
            *(("gradients", *saved) for saved in _save(g for _, g in self.grads if g is not None)),
        ]
        self.devices = devices_of((*weights, *batches))
        self.random = _RandomState(self.devices)

    def restore(self, moved: Sequence[Tensor] = ()) -> set[str]:
        """Restores everything but ``moved``; returns the kinds of tensors that had changed."""
        skipped = {id(t) for t in moved}
        changed = set()
        for kind, tensor, data, content in self.saved:
            if id(tensor) in skipped:
                continue
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
                changed.add(kind)
            if not torch.allclose(data, content, rtol=0, atol=0, equal_nan=True):
                data.copy_(content)
                changed.add(kind)
        for tensor, grad in self.grads:
            tensor.grad = grad
        self.random.set()
        return changed


def _save(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each tensor once, with its memory and a copy of its content."""
    found = {id(t): t for t in tensors if t.layout is torch.strided and not t.is_meta}
    return [(t, t.data, t.data.clone()) for t in found.values()]


# Trees and gradients. ---------------------------------------------------------------------------


def _requiring_grad(tree: Any) -> list[Tensor]:
    return [t for t in _tree.tensors(tree) if t.requires_grad]


def _first(out: Any) -> Any:
    """The value of a loss, without auxiliary outputs."""
    return out[0] if isinstance(out, tuple) and out else out


def _first_task(value: Any) -> Any:
    return value[0] if isinstance(value, Tensor) else value


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor] | None = None
) -> Sequence[Tensor | None]:
    if not outputs or not inputs:
        return [None] * len(inputs)
    return torch.autograd.grad(outputs, inputs, weights, retain_graph=True, allow_unused=True)


def _collect_into(added: dict[int, Tensor]) -> Callable[[Tensor, Tensor], None]:
    return lambda tensor, grad: added.update({id(tensor): grad})


def _norm(tensors: Iterable[Tensor | None]) -> float:
    parts = [float(torch.linalg.vector_norm(t.detach())) for t in tensors if t is not None]
    return math.sqrt(sum(part * part for part in parts))
