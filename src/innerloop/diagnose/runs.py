"""Runs of an inner loop, each from the same point, that leave no trace behind."""

from __future__ import annotations

import copy
import math
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from innerloop import _tree
from innerloop.backward import Remat, Tape
from innerloop.backward.auto import Forecast, forecast
from innerloop.diagnose.tracer import Place, Tracer, failing_place, paths_in_modules
from innerloop.guard.graph import nodes
from innerloop.modules.functional import functional
from innerloop.step.state import Meta, State
from innerloop.unroll import unroll

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
    """Norms of Algorithm 1 by step; see the fields of ``Report`` and ``Row``."""

    grad_norms: tuple[float, ...]
    b_norms: tuple[float, ...]
    per_step: Mapping[str, tuple[float, ...]]
    direct: Mapping[str, float]


class Probe(NamedTuple):
    """The input of one step: its batch, its own copy of φ, and zeros to add to the weights.

    The gradient by the zeros is B_j; that by the copy is what the step adds to A.
    """

    batch: Any
    meta: Meta
    zeros: Mapping[str, Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.zeros.values(), *_requiring_grad(self.meta)]


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

    def losses(self) -> tuple[float, ...]:
        """The training loss before each step."""
        with torch.no_grad():
            found = self.inner.adapt(self.batches, tasks=False).losses
        return tuple(found.double().reshape(-1).tolist())

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

    def step_norms(self) -> StepNorms:
        """Runs the loop once and differentiates it by the inputs of each step."""
        with torch.enable_grad():
            last, direct = self._last_gradients()
            self.restore()
            norms: dict[int, float] = {}
            step, state, meta = self._probing_step(norms)
            probes = [self._probe(state, meta, self.batches[j]) for j in range(self.steps)]
            strategy = Tape() if isinstance(self.inner.backward, Tape) else Remat()
            final, _ = unroll(step, state, None, probes, strategy)
            pulled = _pull_back(final.params, last, probes)
            b_norms = [_norm(g[: len(p.zeros)]) for p, g in zip(probes, pulled, strict=True)]
            return StepNorms(
                tuple(norms.get(j, 0.0) for j in range(self.steps)),
                (*b_norms, _norm(last.values())),
                self._by_parameter(meta, probes, pulled),
                {p.name: _norm([g]) for p, g in zip(self.phi, direct, strict=True)},
            )

    def _last_gradients(self) -> tuple[dict[str, Tensor], Sequence[Tensor | None]]:
        """B_J by name, and the gradient of L_val by φ without any step."""
        value, leaves = self.measure()
        sources = [*leaves.values(), *(p.tensor for p in self.phi)]
        grads = torch.autograd.grad(value.reshape(()), sources, allow_unused=True)
        last = {n: g for n, g in zip(leaves, grads, strict=False) if g is not None}
        return last, grads[len(leaves) :]

    def _probing_step(self, norms: dict[int, float]) -> tuple[Any, State, Meta]:
        """The step with zeros added to its weights, which records |G_j|."""
        time = 0
        transform = self.inner.grad_transform

        def record(grads: dict[str, Any]) -> Mapping[str, Any]:
            norms.setdefault(time, _norm(grads.values()))
            return grads if transform is None else transform(grads)

        step, state, meta = _parts(_copy_with(self.inner, grad_transform=record), self.steps)

        def probing(state: State, _: Any, probe: Probe) -> tuple[State, Any]:
            nonlocal time
            time = state.time
            moved = {name: state.params[name] + zero for name, zero in probe.zeros.items()}
            return step(state._replace(params={**state.params, **moved}), probe.meta, probe.batch)

        return probing, _tree.map(_detach, state), meta

    def _probe(self, state: State, meta: Meta, batch: Any) -> Probe:
        zeros = {
            name: torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape).requires_grad_()
            for name, p in state.params.items()
            if _tree.differentiable(p) and self.model.params[name].requires_grad
        }
        return Probe(batch, _tree.map(_copy_leaf, meta), zeros)

    def _by_parameter(
        self, meta: Meta, probes: Sequence[Probe], pulled: Sequence[Sequence[Tensor | None]]
    ) -> dict[str, tuple[float, ...]]:
        weights = {id(p): name for name, p in self.model.params.items()}
        rows: dict[str, list[float]] = {p.name: [] for p in self.phi}
        others = [p for p in self.phi if p.part != "init"]
        for probe, grads in zip(probes, pulled, strict=True):
            b = dict(zip(probe.zeros, grads, strict=False))
            for p in self.phi:
                if p.part == "init":
                    rows[p.name].append(_norm([b.get(weights[id(p.tensor)])]))
            added = _pull_through(
                _requiring_grad(meta), grads[len(probe.zeros) :], [p.tensor for p in others]
            )
            for p, grad in zip(others, added, strict=True):
                rows[p.name].append(_norm([grad]))
        return {name: tuple(norms) for name, norms in rows.items()}

    # Under the tracer. --------------------------------------------------------------------------

    def tracer(self, stage: str) -> Tracer:
        """A tracer that knows φ and the weights of the original model."""
        names = {p.name: p.tensor for p in self.phi if p.part != "init"}
        known = {id(t) for t in names.values()}
        own = self.model.params.items()
        outside = {f"model.{n}": p for n, p in own if p.requires_grad and id(p) not in known}
        tracer = Tracer(names, outside)
        tracer.stage = stage
        return tracer

    def trace_step(self, tracer: Tracer) -> list[Tensor]:
        """The first step and all that is computed for it; its loss and new weights."""
        loss = self.inner.loss
        inner, hooks = self.inner, []
        if isinstance(loss, nn.Module):
            hooks = [loss.register_forward_pre_hook(_begin_loss)]
            hooks += [loss.register_forward_hook(_end_loss)]
        else:

            def traced_loss(*args: Any) -> Any:
                _begin_loss()
                out = loss(*args)
                _end_loss(out)
                return out

            inner = _copy_with(inner, loss=traced_loss)
        token = _TRACER.set(tracer)
        try:
            with self._paths(), tracer, torch.enable_grad():
                step, state, meta = _parts(inner, self.steps)
                params = self._leaves(state.params)
                leaves = {f"model.{n}": p for n, p in params.items() if p.requires_grad}
                tracer.add_leaves(leaves)
                new, out = step(state._replace(params=params), meta, self.batches[0])
        finally:
            _TRACER.reset(token)
            for hook in hooks:
                hook.remove()
        results = [t for t in _tree.flatten((out, new.params))[0] if isinstance(t, Tensor)]
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


# Hooks of a loss. They close over nothing, because a replica copies the closures of its hooks.
_TRACER: ContextVar[Tracer] = ContextVar("tracer")


def _begin_loss(*_: Any) -> None:
    _TRACER.get().stage = "loss"


def _end_loss(*given: Any) -> None:
    _TRACER.get().finish("loss", [_first(given[-1])])
    _TRACER.get().stage = "update"


# The graph of a step. ---------------------------------------------------------------------------


def custom_functions(results: Sequence[Tensor]) -> list[str]:
    """The names of the user's own autograd.Functions."""
    kinds = {type(node) for node in nodes([t.grad_fn for t in results])[0]}
    found = [kind._forward_cls for kind in kinds if hasattr(kind, "_forward_cls")]
    return sorted(c.__name__ for c in found if not c.__module__.startswith("innerloop"))


# Meta-parameters. -------------------------------------------------------------------------------


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


class Snapshot:
    """The weights, gradients, batches and random numbers of a moment, to be restored."""

    def __init__(self, inner: InnerLoop, data: Any) -> None:
        modules = (inner, inner.model)
        weights = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        if isinstance(inner.optimizer, torch.optim.Optimizer):
            weights += _tree.flatten(list(inner.optimizer.state.values()))[0]
            weights += _tree.flatten(inner.optimizer.param_groups)[0]
        self.weights = _saved_tensors(weights)
        self.batches = _saved_tensors(_tree.flatten(data)[0])
        devices = {saved.tensor.device for saved in (*self.weights, *self.batches)}
        self.random: list[tuple[Callable[[Any], None], Any]] = [
            (torch.set_rng_state, torch.get_rng_state()),
            (random.setstate, random.getstate()),
        ]
        for device in devices - {torch.device("cpu")}:
            module = torch.get_device_module(device)
            state = module.get_rng_state(device)
            self.random.append((lambda s, m=module, d=device: m.set_rng_state(s, d), state))
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"].random
            self.random.append((numpy.set_state, numpy.get_state()))

    def restore(self, moved: Sequence[Tensor] = ()) -> set[str]:
        """Restores everything but ``moved``; returns the kinds of tensors that had changed."""
        changed = set()
        skipped = {id(t) for t in moved}
        for kind, every in (("weights", self.weights), ("batches", self.batches)):
            saved = [s for s in every if id(s.tensor) not in skipped]
            if any([s.restore() for s in saved]):
                changed.add(kind)
        for set_state, state in self.random:
            set_state(state)
        return changed


class _SavedTensor:
    """One tensor: its memory, its content, and its gradient."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.data = tensor.data
        self.content = self.data.clone()
        self.grad = tensor.grad if tensor.is_leaf else None
        self.grad_content = None if self.grad is None else self.grad.detach().clone()

    def restore(self) -> bool:
        """Restores it; returns whether its content had changed."""
        replaced = self.tensor.data_ptr() != self.data.data_ptr()
        if replaced:
            self.tensor.data = self.data
        written = not torch.allclose(self.data, self.content, rtol=0, atol=0, equal_nan=True)
        if written:
            self.data.copy_(self.content)
        if self.tensor.is_leaf and self.tensor.grad is not self.grad:
            self.tensor.grad = self.grad
        if self.grad is not None and self.grad_content is not None:
            self.grad.data.copy_(self.grad_content)
        return replaced or written


def _saved_tensors(leaves: Iterable[Any]) -> list[_SavedTensor]:
    dense = (t for t in leaves if isinstance(t, Tensor) and t.layout is torch.strided)
    return [_SavedTensor(t) for t in {id(t): t for t in dense if not t.is_meta}.values()]


# Trees and gradients. ---------------------------------------------------------------------------


def _requiring_grad(tree: Any) -> list[Tensor]:
    return [t for t in _tree.flatten(tree)[0] if isinstance(t, Tensor) and t.requires_grad]


def _first(out: Any) -> Any:
    """The value of a loss, without auxiliary outputs."""
    return out[0] if isinstance(out, tuple) and out else out


def _first_task(value: Any) -> Any:
    return value[0] if isinstance(value, Tensor) else value


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _copy_leaf(value: Any) -> Any:
    followed = isinstance(value, Tensor) and value.requires_grad
    return value.detach().requires_grad_() if followed else value


def _pull_back(
    params: Mapping[str, Tensor], last: Mapping[str, Tensor], probes: Sequence[Probe]
) -> list[list[Tensor | None]]:
    """For each step, the gradient by its zeros and by its copy of φ."""
    leaves = [t for probe in probes for t in probe.leaves]
    ends = [name for name in last if params[name].requires_grad]
    if not ends or not leaves:
        return [[None] * len(probe.leaves) for probe in probes]
    outputs, weights = [params[name] for name in ends], [last[name] for name in ends]
    grads = iter(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))
    return [[next(grads) for _ in probe.leaves] for probe in probes]


def _pull_through(
    settings: Sequence[Tensor], grads: Sequence[Tensor | None], phi: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Gradients by φ, given those by the settings that were computed from it."""
    pairs = [(s, g) for s, g in zip(settings, grads, strict=True) if g is not None]
    if not pairs or not phi:
        return [None] * len(phi)
    outputs, weights = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, list(phi), weights, retain_graph=True, allow_unused=True)


def _norm(tensors: Iterable[Tensor | None]) -> float:
    parts = [float(torch.linalg.vector_norm(t.detach())) for t in tensors if t is not None]
    return math.sqrt(sum(part * part for part in parts))
