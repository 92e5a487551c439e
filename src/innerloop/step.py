"""Eq. 2: one training step as a pure function of a state, meta-parameters and a batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from innerloop import _ambient, _captured, _second_order, _tree
from innerloop._gradient import check_loss, full_precision
from innerloop._kernels import twice_differentiable
from innerloop._linear import Pushforward
from innerloop.errors import InnerLoopError, RequirementError, four_part
from innerloop.functional import Template, functional
from innerloop.optim import Rule

Loss = Callable[..., Any]
GradTransform = Callable[[dict[str, Any]], Mapping[str, Any]]
Settings = Callable[[Mapping[str, Any], int], Mapping[str, Any]]


class State(NamedTuple):
    """What a step changes: θ, the buffers, and the optimizer's state."""

    params: Any
    """Tensors by name, or any nesting of tensors."""
    buffers: Mapping[str, Tensor] = {}
    """The model's by name; those of a loss that is a module as ``"loss:name"``."""
    opt: Any = None
    """The optimizer's state, as ``rule.init(params)`` makes it; ``None`` before the first step."""
    time: int = 0
    """How many steps led here."""


class Meta(NamedTuple):
    """φ: what shapes a step and is not changed by it."""

    opt: Mapping[str, Any] = {}
    """φ_opt: settings of the optimizer by name, or the weights of a learned one."""
    loss: Mapping[str, Any] = {}
    """φ_loss: parameters of the loss by name."""
    anchor: Any = None
    """The weights that a proximal term pulls towards, if there is one."""


@dataclasses.dataclass(frozen=True)
class InnerStep:
    """``step(state, meta, batch) -> (state, out)``; made by :func:`inner_step`."""

    loss: Loss
    rule: Any
    model: Template | None = None
    loss_model: Template | None = None
    rule_model: Template | None = None
    first_order: bool = False
    grad_transform: GradTransform | None = None
    schedule: Settings | None = None
    proximal: float = 0.0

    def __call__(self, state: State, meta: Meta, batch: Any) -> tuple[State, Any]:
        try:
            return self._taken(state, meta, batch)
        except Exception as error:
            add_note = getattr(error, "add_note", None)
            if add_note is not None:
                add_note(f"This happened in inner step {state.time} (counted from 0).")
            raise

    # What strategies may ask of a step beyond calling it. ----------------------------------------

    def with_proximal(self, strength: float) -> InnerStep:
        """The same step with ``strength / 2 · ‖θ - anchor‖²`` added to the loss (iMAML)."""
        return dataclasses.replace(self, proximal=strength)

    def stationarity(self, state: State, meta: Meta, batch: Any) -> list[tuple[Tensor, Tensor]]:
        """Each weight that moves with its inner gradient, which is zero after convergence."""
        named = _named(state.params)
        found = _Run(self, state, meta, batch).gradients(torch.is_grad_enabled())
        return [(named[name], grad) for name, grad in found.items() if grad is not None]

    def linearized(self, state: State, meta: Meta, batch: Any) -> Linearized | None:
        """The step at a point whose tensors are leaves, with its derivative along directions.

        ``None`` if the rule takes more than one gradient in a step.
        """
        if state.opt is None:
            state = state._replace(opt=self.initial(state.params))
        return None if self.evaluates else Linearized(self, state, meta, batch)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What is the same in all steps that cost the same."""
        model = None if self.model is None else self.model.source
        rule = self.rule.family.name if isinstance(self.rule, Rule) else type(self.rule)
        return self.loss, model, rule, self.grad_transform, self.first_order, self.proximal

    @property
    def roots(self) -> tuple[Any, ...]:
        """Where the names of tensors can be found that the step closes over."""
        return self.loss, self.grad_transform, self.schedule, self.rule

    def _taken(self, state: State, meta: Meta, batch: Any) -> tuple[State, Any]:
        tracked = torch.is_grad_enabled()
        if state.opt is None:
            state = state._replace(opt=self.initial(state.params))
        run = _Run(self, state, meta, batch)
        grads = run.gradients(tracked and not self.first_order)
        # With nothing that requires grad this makes no graph, but it shows what was closed over.
        watch = None if tracked else _captured.current()
        since = _captured.sequence_number()
        with torch.set_grad_enabled(tracked or watch is not None):
            new = self.updated(state, meta, grads, run)
        if watch is not None:
            leaves = [t for t in _tree.flatten(new)[0] if isinstance(t, Tensor)]
            if any(leaf.requires_grad for leaf in leaves):
                _inspect_update(watch, self, state, meta, grads, run, leaves, since)
                new = _tree.map(_detached, new)
        params, opt = new
        out = run.out if run.followed else _tree.map(_detached, run.out)
        return State(params, run.buffers, opt, state.time + 1), out

    def updated(
        self, state: State, meta: Meta, grads: Mapping[str, Any], run: _Run
    ) -> tuple[Any, Any]:
        """The rule's part of a step: the new weights and the new optimizer state."""
        with full_precision(run.value.device):
            if self.grad_transform is not None:
                present = {name: g for name, g in grads.items() if g is not None}
                grads = {**grads, **self._checked(self.grad_transform(present), present)}
            found = _rebuilt(state.params, grads)
            if self.rule_model is not None:
                return self._learned(state, meta, grads, run)
            hyper = meta.opt if self.schedule is None else self.schedule(meta.opt, state.time)
            if not self.evaluates:
                return self.rule.update(state.params, found, state.opt, hyper)
            return self.rule.update(state.params, found, state.opt, hyper, evaluate=run.elsewhere)

    def initial(self, params: Any) -> Any:
        """The optimizer's state before the first step."""
        if self.rule_model is None:
            return self.rule.init(params)
        named = _named(params)
        trained = _Run(self, State(params), Meta(), None).trained(named)
        return self.rule.init({name: named[name] for name in trained})

    def _learned(
        self, state: State, meta: Meta, grads: Mapping[str, Any], run: _Run
    ) -> tuple[Any, Any]:
        """The update of a learned optimizer, which sees the weights that move and no others."""
        assert self.rule_model is not None
        rule: Any = self.rule_model.bind(meta.opt, buffers_of("optimizer", state.buffers))
        named = _named(state.params)
        moving = {name: named[name] for name in run.trained(named)}
        found = rule.update(moving, {name: grads[name] for name in moving}, state.opt)
        run.keep("optimizer", self.rule_model.buffers_of(rule))
        pair = isinstance(found, tuple) and len(found) == 2
        new: Any = found[0] if pair else None
        alike = isinstance(new, Mapping) and new.keys() == moving.keys()
        if not alike or any(_shape(new[n]) != p.shape for n, p in moving.items()):
            raise InnerLoopError(
                four_part(
                    f"update of your {type(self.rule).__name__} returned {_described(found)}.",
                    "a pair: the new weights by name, each in its shape, and the new state.",
                    "the next step goes on from them.",
                    "return {name: p - step(g) for ...}, state.",
                )
            )
        return _rebuilt(state.params, {**named, **new}), found[1]

    @property
    def evaluates(self) -> bool:
        """Whether the rule asks for the loss at other weights within a step (LBFGS)."""
        return isinstance(self.rule, Rule) and self.rule.family.layout == "whole"

    @staticmethod
    def _checked(given: Any, present: Mapping[str, Any]) -> Mapping[str, Any]:
        alike = isinstance(given, Mapping) and given.keys() == present.keys()
        if alike and all(g is None or isinstance(g, Tensor) for g in given.values()):
            return given
        raise InnerLoopError(
            four_part(
                f"Your grad_transform returned {type(given).__name__}.",
                "a mapping of tensors with the names of the gradients it was given.",
                "gradients are matched to weights by name.",
                "return {name: f(g) for name, g in grads.items()}.",
            )
        )


class _Run:
    """One evaluation of the loss: its value, and the gradient by the weights it was taken at."""

    def __init__(self, step: InnerStep, state: State, meta: Meta, batch: Any) -> None:
        self.step, self.state, self.meta, self.batch = step, state, meta, batch
        self.buffers = state.buffers
        self.out: Any = None
        self.value: Tensor = None  # type: ignore[assignment]
        self.followed = False
        """Whether anything that a gradient could reach has a part in the loss."""

    def gradients(self, create_graph: bool) -> dict[str, Any]:
        """G = ∇ℓ(θ, φ_loss), with a graph or without; ``None`` for weights the loss leaves out."""
        tracked, since = torch.is_grad_enabled(), _captured.sequence_number()
        named = _named(self.state.params)
        trained = self.trained(named)
        sources = {name: _source(named[name], tracked) for name in trained}
        versions = [source._version for source in sources.values()]
        exact = twice_differentiable if create_graph else contextlib.nullcontext()
        with exact, torch.enable_grad():
            self.value, self.out = self.evaluated({**named, **sources})
            check_loss(self.value)
            _check_unwritten(sources, versions)
            self.followed = tracked and self._matters(sources.values(), since)
            create_graph = create_graph and self.followed
            found = torch.autograd.grad(
                self.value,
                list(sources.values()),
                retain_graph=self.followed,
                create_graph=create_graph,
                allow_unused=True,
            )
        if all(g is None for g in found):
            raise RequirementError(
                four_part(
                    "The loss does not depend on any of the weights that the optimizer trains.",
                    "a loss computed with the model it is handed.",
                    "nothing would move.",
                    "def loss(model, batch): ... model(x) ..., with that argument and not with a "
                    "model from outside.",
                )
            )
        watch = None if tracked else _captured.current()
        if watch is not None:
            shown = [t for t in _tree.flatten(self.out)[0] if isinstance(t, Tensor)]
            watch.inspect(
                shown, sources.values(), since, lambda: self._again(named), self.step.roots
            )
        if create_graph:
            weights = list(sources.values())
            names = list(sources)
            _second_order.guard(self.value, found, weights, names.__getitem__)
        if self.step.proximal:
            found = [self.pulled(n, g, named[n]) for n, g in zip(sources, found, strict=True)]
        return dict.fromkeys(named) | dict(zip(sources, found, strict=True))

    def keep(self, part: str, found: Mapping[str, Tensor]) -> None:
        """Note what a forward left in the buffers of the model, the loss or the optimizer."""
        prefix = f"{part}:" if part else ""
        new = {
            prefix + name: _unless_same(buffer.detach(), self.buffers.get(prefix + name))
            for name, buffer in found.items()
        }
        self.buffers = {**self.buffers, **new}

    def elsewhere(self, params: Any) -> tuple[Tensor, Any]:
        """The loss and its gradient at other weights, for rules that ask for them."""
        other = _Run(self.step, State(params, self.buffers), self.meta, self.batch)
        grads = other.gradients(torch.is_grad_enabled() and not self.step.first_order)
        self.buffers = other.buffers
        return other.value, _rebuilt(params, grads)

    def trained(self, named: Mapping[str, Any]) -> list[str]:
        """The weights that move: those of the rule that are not frozen in the model."""
        step = self.step
        names = getattr(step.rule, "names", None)
        weights = {} if step.model is None else step.model.params
        # The weights of a replica are no Parameters; whether they require grad says nothing here.
        frozen = {
            name
            for name, p in weights.items()
            if isinstance(p, nn.Parameter) and not p.requires_grad
        }
        own = named if names is None else set(names)
        return [n for n, p in named.items() if n in own and n not in frozen and differentiable(p)]

    def _matters(self, sources: Iterable[Tensor], since: int) -> bool:
        given = _tree.flatten((self.state.params, self.meta, self.batch))[0]
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given):
            return True
        shown = [t for t in _tree.flatten(self.out)[0] if isinstance(t, Tensor)]
        return any(_captured.strangers(shown, sources, since))

    def pulled(self, name: str, grad: Tensor | None, param: Tensor) -> Tensor | None:
        pull = self.step.proximal * (param - _named(self.meta.anchor)[name])
        return pull if grad is None else grad + pull

    def evaluated(self, named: dict[str, Tensor]) -> tuple[Tensor, Any]:
        step, loss, given = self.step, self.step.loss, self.state.buffers
        if step.loss_model is not None:
            loss = step.loss_model.bind(self.meta.loss, buffers_of("loss", given))
        if step.model is None:
            extra = () if step.loss_model is not None or not self.meta.loss else (self.meta.loss,)
            out = loss(_rebuilt(self.state.params, named), self.batch, *extra)
        else:
            replica = step.model.bind(named, buffers_of("", given))
            out = loss(replica, self.batch)
            self.keep("", step.model.buffers_of(replica))
        if step.loss_model is not None:
            self.keep("loss", step.loss_model.buffers_of(cast(nn.Module, loss)))
        first, *rest = out if isinstance(out, tuple) and out else (out,)
        value: Any = (
            first.reshape(()) if isinstance(first, Tensor) and first.numel() == 1 else first
        )
        return value, (value, *rest) if isinstance(out, tuple) else value

    def _again(self, named: dict[str, Tensor]) -> None:
        again = _Run(self.step, self.state, self.meta, self.batch)
        devices = _ambient.devices_of(named.values())
        with _ambient.preserved(devices), torch.enable_grad():
            again.evaluated(named)


class Linearized:
    """One step and its pushforward, by second derivatives of the loss and no higher ones.

    The inner gradient's derivative along (dθ, dφ) is the gradient by θ of ⟨∇ℓ, (dθ, dφ)⟩, since the
    matrix of second derivatives is symmetric. The rule's part is pushed forward by itself.
    """

    def __init__(self, step: InnerStep, state: State, meta: Meta, batch: Any) -> None:
        run = _Run(step, state, meta, batch)
        since = _captured.sequence_number()
        named = _named(state.params)
        trained = run.trained(named)
        sources = {name: _source(named[name], True) for name in trained}
        with torch.enable_grad(), twice_differentiable:
            run.value, run.out = run.evaluated({**named, **sources})
            check_loss(run.value)
            others = [t for n, t in named.items() if n not in sources]
            others += _tree.flatten(meta.loss)[0]
            self._others = [t for t in others if isinstance(t, Tensor) and t.requires_grad]
            self._trained = [named[name] for name in trained]
            self._sources = list(sources.values())
            first = torch.autograd.grad(
                run.value,
                [*self._sources, *self._others],
                create_graph=True,
                allow_unused=True,
            )
            self._first = first
            count = len(self._sources)
            _second_order.guard(run.value, first[:count], self._sources, trained.__getitem__)
            self._grads = [
                None if g is None else g.detach().requires_grad_() for g in first[:count]
            ]
            grads = dict(zip(trained, self._grads, strict=True))
            if step.proximal:
                grads = {n: run.pulled(n, g, named[n]) for n, g in grads.items()}
            found = dict.fromkeys(named) | grads
            params, opt = step.updated(state, meta, found, run)
        self.first_order = step.first_order
        self.state = State(params, run.buffers, opt, state.time + 1)
        self.out = _tree.map(_detached, run.out)
        leaves = _tree.flatten((state.params, state.opt, meta))[0]
        self._given = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        self._outputs = _tree.flatten(self.state)[0]
        self._aux = _tree.flatten(run.out)[0]
        moved = [g for g in self._grads if g is not None]
        known = [*self._sources, *self._given, *self._others, *moved]
        shown = [*_only(self._outputs), *_only(self._aux)]
        _captured.refuse(shown, known, since, step.roots)
        self._rule = Pushforward(_only(self._outputs), [*self._given, *moved])
        self._loss = Pushforward(_only(self._aux), [*self._sources, *self._others])

    def push(
        self, tangents: Mapping[int, Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Tangents of the new state's leaves and of the outputs', given those of leaves by id."""
        loss = [tangents.get(id(t)) for t in (*self._trained, *self._others)]
        changes = zip(self._grads, self._gradients(loss), strict=True)
        moved = [change for grad, change in changes if grad is not None]
        given = [tangents.get(id(t)) for t in self._given]
        return (
            _spread(self._outputs, self._rule([*given, *moved])),
            _spread(self._aux, self._loss(loss)),
        )

    def _gradients(self, tangents: list[Tensor | None]) -> list[Tensor | None]:
        """How the inner gradient changes along a direction of the loss's inputs."""
        pairs = [
            (first, tangent)
            for first, tangent in zip(self._first, tangents, strict=True)
            if first is not None and tangent is not None and first.requires_grad
        ]
        if self.first_order or not pairs:
            return [None] * len(self._sources)
        found = torch.autograd.grad(
            [first for first, _ in pairs],
            self._sources,
            [tangent for _, tangent in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        return list(found)


def _only(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if differentiable(leaf)]


def _spread(leaves: Iterable[Any], tangents: Iterable[Any]) -> list[Any]:
    rest = iter(tangents)
    return [next(rest) if differentiable(leaf) else None for leaf in leaves]


def inner_step(
    loss: Loss,
    rule: Any,
    model: nn.Module | None = None,
    *,
    first_order: bool = False,
    grad_transform: GradTransform | None = None,
    schedule: Settings | None = None,
) -> InnerStep:
    """One step of training as a pure function ``step(state, meta, batch) -> (state, out)`` (Eq. 2).

    With a ``model``, ``loss(model, batch)`` is called with a replica that has the weights and
    buffers of the state. Without one, ``loss(params, batch)`` gets the weights themselves, and
    ``meta.loss`` as a third argument if there is any. A loss that is a module runs with the weights
    ``meta.loss``. It returns a scalar, or a tuple that begins with one; that is ``out``.

    ``rule`` is one of :mod:`innerloop.optim`, or a module with ``init(params)`` and
    ``update(params, grads, state)``, a learned optimizer, whose weights are ``meta.opt``.
    ``first_order`` takes the inner gradient as a constant. ``grad_transform`` maps gradients by
    name to others. ``schedule(settings, time)`` gives the settings of one step out of ``meta.opt``.

    >>> from innerloop import optim
    >>> step = inner_step(lambda params, batch: ((params["w"] - batch) ** 2).sum(), optim.sgd(0.1))
    >>> state, loss = step(State({"w": torch.tensor([1.0])}), Meta(), torch.tensor([3.0]))
    >>> state.params["w"], loss
    (tensor([1.4000]), tensor(4.))
    """
    return InnerStep(
        loss,
        rule,
        None if model is None else functional(model).template(),
        functional(loss).template() if isinstance(loss, nn.Module) else None,
        functional(rule).template() if isinstance(rule, nn.Module) else None,
        first_order,
        grad_transform,
        schedule,
    )


def _named(params: Any) -> dict[str, Any]:
    """The leaves of any nesting by name; a flat mapping keeps its own names."""
    if isinstance(params, Mapping) and all(isinstance(p, Tensor) for p in params.values()):
        return dict(params)
    return {str(i): leaf for i, leaf in enumerate(_tree.flatten(params)[0])}


def _rebuilt(params: Any, named: Mapping[str, Any]) -> Any:
    """The inverse of :func:`_named` for other leaves."""
    if isinstance(params, Mapping) and all(isinstance(p, Tensor) for p in params.values()):
        return {name: named[name] for name in params}
    leaves, spec = _tree.flatten(params)
    return _tree.unflatten([named[str(i)] for i in range(len(leaves))], spec)


def _source(param: Tensor, tracked: bool) -> Tensor:
    """A weight as its own point of the graph: the inner gradient is a *partial* derivative.

    Other weights, or parameters of the loss, may have been computed from this one.
    """
    if tracked and param.requires_grad:
        return param.view_as(param)
    return _captured.own(param.detach().requires_grad_())


def buffers_of(part: str, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers of the model (``""``), of a loss or of an optimizer that is a module."""
    found = {}
    for name, buffer in buffers.items():
        owner, colon, own = name.rpartition(":")
        if owner == part:
            found[own if colon else name] = buffer
    return found


def _check_unwritten(sources: Mapping[str, Tensor], versions: list[int]) -> None:
    """Refuse a loss that changes the weights it is handed."""
    for (name, source), version in zip(sources.items(), versions, strict=True):
        if source._version != version:
            raise InnerLoopError(
                four_part(
                    f"The loss, or the model's forward, wrote in place to the weight {name!r}.",
                    "a forward that only reads the weights.",
                    "they are the model's own at the first step, and a step is a function of them.",
                    "the changed weight as a new tensor: torch.nn.utils.parametrize, or "
                    "weight.clamp(...) without the underscore where it is used.",
                )
            )


def _unless_same(new: Tensor, old: Tensor | None) -> Tensor:
    """The old buffer if the new one has its values: a mask is then one tensor in all states.

    Compared, since batch norm writes to its statistics without telling the version counter.
    """
    same = old is not None and old.dtype == new.dtype and torch.equal(old, new)
    return old if old is not None and same else new


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


def _described(found: Any) -> str:
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Mapping)):
        return f"a {type(found).__name__}"
    return f"weights { ({name: _shape(value) for name, value in found[0].items()}) }"


def differentiable(value: Any) -> bool:
    """Whether a value can have a derivative: a tensor of real or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _inspect_update(
    watch: _captured.Watch,
    step: InnerStep,
    state: State,
    meta: Meta,
    grads: Mapping[str, Any],
    run: _Run,
    leaves: list[Tensor],
    since: int,
) -> None:
    """Note what the rule or the transform of the gradients closed over."""

    def again() -> None:
        with torch.enable_grad():
            step.updated(state, meta, grads, run)

    watch.inspect(leaves, [], since, again, step.roots)
