"""Eq. 2: one training step as a pure function of a state, meta-parameters and a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from innerloop import _tree
from innerloop._numerics import full_precision
from innerloop.errors import NotBatchableError
from innerloop.guard import closures, graph, losses, second_order
from innerloop.modules.exact import twice_differentiable
from innerloop.modules.functional import check_buffers, functional
from innerloop.modules.replica import Template
from innerloop.optim import Elsewhere, Rule
from innerloop.step import refusals
from innerloop.step.linearized import InnerLinearization
from innerloop.step.protocol import Look, Pairs, Step
from innerloop.step.state import Meta, State, buffers_of, named_leaves, rebuild
from innerloop.step.stationary import descent_with_penalty, lasting_settings

Loss = Callable[..., Any]
GradTransform = Callable[[dict[str, Any]], Mapping[str, Any]]
Settings = Callable[[Mapping[str, Any], int], Mapping[str, Any]]
Buffers = Mapping[str, Tensor]


class Evaluation(NamedTuple):
    """The loss at some weights."""

    total: Tensor
    """The scalar to differentiate: the loss, or the sum of the losses of all tasks."""
    out: Any
    buffers: Buffers


def call_once(function: Callable[..., Any], *trees: Any) -> Any:
    """Calls ``function`` for the one task there is."""
    return function(*trees)


@dataclasses.dataclass(frozen=True)
class InnerStep(Step):
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
    map_tasks: Callable[..., Any] = call_once
    """Calls a function of one task: once, or for all tasks by ``vmap``."""
    constant_buffers: frozenset[str] = frozenset()
    """Buffers that no step changes."""
    guard: second_order.Guard | None = None
    """Searches inner gradients made with a graph, until one has nothing to refuse."""
    look: Look | None = None
    """Called with the graphs of the loss and of the update where a step returns none."""
    probe: Callable[[Tensor], None] | None = None
    """Called with the value of the loss before the gradient is taken."""
    needs_view: Collection[int] | None = None
    """Ids of weights that meta, batch or loss may also depend on: each enters as a view.

    ``None`` for all weights.
    """
    checked: bool = False
    """True after the first step of a call, whose rule has checked its arguments."""

    symmetric = True

    def __call__(self, state: State, meta: Meta, batch: Any) -> tuple[State, Any]:
        if not isinstance(state, State) or not isinstance(meta, Meta):
            raise refusals.not_a_state(meta if isinstance(state, State) else state)
        if torch.compiler.is_compiling():
            return self._take(state, meta, batch)
        try:
            return self._take(state, meta, batch)
        except Exception as error:
            refusals.add_step(error, state.time, self.model is not None, batch)
            raise

    def _take(self, state: State, meta: Meta, batch: Any) -> tuple[State, Any]:
        grad_enabled = torch.is_grad_enabled()
        if grad_enabled and state.buffers:
            check_buffers(state.buffers)
        if state.opt is None:
            state = state._replace(opt=self.initial(state.params))
        named = self.by_name(state.params)
        sources = self.sources(named, grad_enabled)
        since = graph.now() if grad_enabled and not torch.compiler.is_compiling() else 0
        needs_second = grad_enabled and not self.first_order
        with torch.enable_grad(), twice_differentiable() if needs_second else nullcontext():
            params = self._nest(state.params, {**self.resting(named), **sources})
            found = self.evaluate(params, state, meta, batch, grad_enabled or self.look is not None)
            needs_graph = grad_enabled and self._needs_graph(
                state, meta, batch, found.out, sources, since
            )
            if self.probe is not None:
                self.probe(found.total.detach())
            grads = self.gradients(found.total, sources, needs_graph, since)
        if self.look is not None:
            self.look(_tree.tensors(found.out), sources.values())
        if self.proximal:
            grads = self.pull_to_anchor(grads, named, meta)
        if len(grads) < len(named):
            grads = dict.fromkeys(named) | grads
        state = State(state.params, found.buffers, state.opt, state.time)
        with torch.set_grad_enabled(grad_enabled or self.look is not None):
            new = self.update(state, meta, grads, found, batch)
        if self.look is not None:
            # The inputs require no grad here, so a result that does uses a closed-over tensor.
            connected = [t for t in _tree.tensors((new.params, new.opt)) if t.requires_grad]
            if connected:
                self.look(connected, ())
                new = _tree.map(_tree.detach, new)
        return new, found.out if needs_graph else _tree.map(_tree.detach, found.out)

    # The parts of a step. -----------------------------------------------------------------------

    def by_name(self, params: Any) -> Mapping[str, Any]:
        """The weights by name, as a model has them already."""
        return named_leaves(params) if self.model is None else params

    def _nest(self, like: Any, named: Mapping[str, Any]) -> Any:
        """Inverse of :meth:`by_name`."""
        return rebuild(like, named) if self.model is None else named

    def sources(self, named: Mapping[str, Any], grad_enabled: bool = True) -> dict[str, Tensor]:
        """The weights that the rule updates, as what the inner gradient is taken by.

        It is a *partial* derivative: other weights, or parameters of the loss, may have been
        computed from the same tensor, so a weight that could have a part elsewhere is viewed.
        """
        found, needs_view = {}, self.needs_view
        for name in self.moving(named):
            param = named[name]
            if not (grad_enabled and param.requires_grad):
                found[name] = as_leaf(param)
            elif needs_view is None or id(param) in needs_view:
                found[name] = param.view_as(param)
            else:
                found[name] = param
        return found

    def as_trained(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The weights, each requiring grad if the model's own does: a loss may read the flag."""
        trained = {} if self.model is None else self.model.trained
        return {
            name: as_leaf(p) if trained.get(name) and not p.requires_grad else p
            for name, p in named.items()
        }

    def resting(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        """The weights that the rule does not update, as the loss sees them."""
        if torch.compiler.is_compiling():
            return named  # as they were before: see innerloop.compile
        return self.as_trained(named) if self._trains_others else named

    @functools.cached_property
    def _trains_others(self) -> bool:
        """Whether the model has weights that require grad and that the rule does not move."""
        trained = {} if self.model is None else self.model.trained
        moving = () if self.model is None else self._moving_in_model
        return any([is_trained and name not in moving for name, is_trained in trained.items()])

    def moving(self, named: Mapping[str, Any]) -> Sequence[str]:
        """The names of the weights that move: those of the rule that the model has not frozen."""
        compiling = torch.compiler.is_compiling()  # Dynamo does not enter a cached_property
        if self.model is not None and not compiling and named.keys() == self.model.params.keys():
            return self._moving_in_model
        return self._moving_among(named)

    @functools.cached_property
    def _moving_in_model(self) -> tuple[str, ...]:
        assert self.model is not None
        return self._moving_among(self.model.params)

    def _moving_among(self, named: Mapping[str, Any]) -> tuple[str, ...]:
        names = self.rule.names if isinstance(self.rule, Rule) else None
        own = named if names is None else set(names)
        trained = {} if self.model is None else self.model.trained
        found = [name for name in named if name in own and trained.get(name, True)]
        found = [name for name in found if _tree.differentiable(named[name])]
        if not found:
            raise refusals.nothing_moves()
        return tuple(found)

    def evaluate(
        self, params: Any, state: State, meta: Meta, batch: Any, needs_gradient: bool = True
    ) -> Evaluation:
        """The loss of one task, or of all tasks, and the buffers afterwards.

        ``needs_gradient``: a meta-gradient is wanted, now or from a later recomputation.
        """

        def one(params: Any, buffers: Buffers, batch: Any) -> Any:
            return self._evaluate_one(params, buffers, meta, batch)

        value, out, buffers = self.map_tasks(one, params, state.buffers, batch)
        total = value if value.dim() == 0 else value.sum()
        if not total.requires_grad:
            raise losses.no_graph()
        if buffers:
            buffers = self._keep_buffers(state.buffers, buffers, needs_gradient)
        return Evaluation(total, out, buffers or state.buffers)

    def _evaluate_one(self, params: Any, buffers: Buffers, meta: Meta, batch: Any) -> Any:
        loss, extra = self.loss, (meta.loss,) if meta.loss else ()
        if self.loss_model is not None:
            loss, extra = self.loss_model.bind(meta.loss, buffers_of("loss", buffers)), ()
        model = params
        if self.model is not None:
            model = self.model.bind(params, buffers_of("", buffers) if buffers else None)
        before = self._buffers_in(model, loss)
        out = loss(model, batch, *extra)
        after = self._buffers_in(model, loss) if before else before
        value = out[0] if isinstance(out, tuple) and out else out
        if not isinstance(value, Tensor) or value.dim() or value.is_complex():
            value = losses.check_loss(value)
        found = (value, *out[1:]) if isinstance(out, tuple) else value
        return value, found, _changed(before, after) if before else {}

    def _buffers_in(self, model: Any, loss: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self.model is not None and self.model.buffers:
            found = self.model.buffers_of(model)
        if self.loss_model is not None and self.loss_model.buffers:
            own = self.loss_model.buffers_of(loss)
            found |= {f"loss:{name}": buffer for name, buffer in own.items()}
        return found

    def _keep_buffers(self, old: Buffers, new: Buffers, needs_gradient: bool) -> Buffers:
        """The buffers after a forward, without a graph."""
        kept = dict(old)
        for name, buffer in new.items():
            if buffer.requires_grad and needs_gradient:
                raise refusals.buffer_with_graph(name)
            if name not in self.constant_buffers:
                kept[name] = buffer.detach()
        return kept

    def gradients(
        self, total: Tensor, sources: Mapping[str, Tensor], needs_graph: bool, since: int = 0
    ) -> dict[str, Tensor | None]:
        """G = ∇ℓ(θ, φ_loss); ``None`` for weights that the loss leaves out.

        ``since`` is autograd's clock before the loss was computed.
        """
        needs_second = needs_graph and not self.first_order
        weights = list(sources.values())
        found = torch.autograd.grad(
            total,
            weights,
            retain_graph=needs_graph or self.look is not None,
            create_graph=needs_second,
            allow_unused=True,
        )
        if all([g is None for g in found]):
            raise refusals.no_gradient()
        if needs_second and self.guard is not None and not self.guard.is_done:
            self.guard.look(total, found, sources, since)
        return dict(zip(sources, found, strict=True))

    def _needs_graph(
        self, state: State, meta: Meta, batch: Any, out: Any, sources: Any, since: int
    ) -> bool:
        """True if the loss depends on a tensor that requires grad, besides ``sources``."""
        for part in (state.params, meta, batch):
            for leaf in _tree.leaves(part):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    return True
        if torch.compiler.is_compiling():
            return True  # gradients are derived where they are needed
        return any(closures.closed_over(_tree.tensors(out), sources.values(), since))

    def pull_to_anchor(
        self, grads: dict[str, Tensor | None], named: Mapping[str, Any], meta: Meta
    ) -> dict[str, Tensor | None]:
        """The gradients with that of the proximal term, if there is one."""
        if not self.proximal:
            return grads
        anchor = named_leaves(meta.anchor)
        pulls = {name: self.proximal * (named[name] - anchor[name]) for name in grads}
        return {name: pulls[name] if g is None else g + pulls[name] for name, g in grads.items()}

    def transform(self, grads: Mapping[str, Any]) -> Mapping[str, Any]:
        """The gradients as the rule gets them."""
        if self.grad_transform is None:
            return grads
        present = {name: g for name, g in grads.items() if g is not None}
        found = self.grad_transform(present)
        alike = isinstance(found, Mapping) and found.keys() == present.keys()
        if not alike or not all(g is None or isinstance(g, Tensor) for g in found.values()):
            raise refusals.transform_returned(found)
        return {**grads, **found}

    def update(
        self, state: State, meta: Meta, grads: Mapping[str, Any], found: Evaluation, batch: Any
    ) -> State:
        """The rule's part of a step."""
        if self.needs_reevaluation:
            params, opt, buffers = self._search(state, meta, grads, found, batch)
        else:

            def one(params: Any, grads: Any, opt: Any, buffers: Buffers) -> Any:
                return self._update_one(params, grads, opt, buffers, meta, state.time)

            with full_precision(found.total.device):
                params, opt, buffers = self.map_tasks(
                    one, state.params, grads, state.opt, state.buffers
                )
        if buffers:
            buffers = self._keep_buffers(state.buffers, buffers, torch.is_grad_enabled())
        return State(params, buffers or state.buffers, opt, state.time + 1)

    def _update_one(
        self,
        params: Any,
        grads: Mapping[str, Any],
        opt: Any,
        buffers: Buffers,
        meta: Meta,
        time: int,
    ) -> Any:
        if self.grad_transform is not None:
            grads = self.transform(grads)
        if self.rule_model is not None:
            return self._update_learned(self.rule_model, params, grads, opt, buffers, meta)
        hyper = self.settings_at(meta, time)
        check = {"checked": True} if self.checked and self.grad_transform is None else {}
        return *self.rule.update(params, self._nest(params, grads), opt, hyper, **check), {}

    def settings_at(self, meta: Meta, time: int) -> Mapping[str, Any]:
        """The optimizer's settings for one step."""
        return meta.opt if self.schedule is None else self.schedule(meta.opt, time)

    def _update_learned(
        self, template: Template, params: Any, grads: Any, opt: Any, buffers: Buffers, meta: Meta
    ) -> Any:
        """The update of a learned optimizer, which sees the weights that move and no others."""
        rule: Any = template.bind(meta.opt, buffers_of("optimizer", buffers))
        before = template.buffers_of(rule)
        named = named_leaves(params)
        moving = {name: named[name] for name in self.moving(named)}
        # It may write to the containers of its state, which are those of an earlier state.
        found = rule.update(moving, {name: grads[name] for name in moving}, _tree.copied(opt))
        refusals.check_update(type(self.rule).__name__, found, moving)
        left = _changed(before, template.buffers_of(rule))
        named_left = {f"optimizer:{name}": buffer for name, buffer in left.items()}
        return rebuild(params, {**named, **found[0]}), found[1], named_left

    @property
    def needs_reevaluation(self) -> bool:
        """Whether the rule asks for the loss at other weights within a step (LBFGS)."""
        return isinstance(self.rule, Rule) and self.rule.family.layout == "whole"

    def _search(
        self, state: State, meta: Meta, grads: Mapping[str, Any], found: Evaluation, batch: Any
    ) -> Any:
        """An update that evaluates the loss at several weights."""
        if self.map_tasks is not call_once:
            raise NotBatchableError(
                f"the optimizer {self.rule.family.name}: each task searches for its own steps"
            )
        buffers, grad_enabled = state.buffers, torch.is_grad_enabled()

        def elsewhere(params: Any) -> tuple[Tensor, Any]:
            nonlocal buffers
            named = named_leaves(params)
            sources = self.sources(named, grad_enabled)
            given = state._replace(buffers=buffers)
            with torch.enable_grad():
                there = self.evaluate(
                    rebuild(params, {**self.resting(named), **sources}), given, meta, batch
                )
                found = self.gradients(there.total, sources, grad_enabled)
            buffers = there.buffers
            by_name = dict.fromkeys(named) | self.pull_to_anchor(found, named, meta)
            return there.total if grad_enabled else there.total.detach(), rebuild(params, by_name)

        with full_precision(found.total.device):
            hyper, given = self.settings_at(meta, state.time), self.transform(grads)
            evaluate = Elsewhere(elsewhere, found.total)
            params, opt = self.rule.update(
                state.params, rebuild(state.params, given), state.opt, hyper, evaluate=evaluate
            )
        return params, opt, {n: b for n, b in buffers.items() if b is not state.buffers.get(n)}

    def initial(self, params: Any) -> Any:
        """The optimizer's state before the first step."""
        return self.map_tasks(self._initial_one, params)

    def _initial_one(self, params: Any) -> Any:
        if self.rule_model is None:
            return self.rule.init(params)
        named = named_leaves(params)
        return self.rule.init({name: named[name] for name in self.moving(named)})

    # What strategies may ask. -------------------------------------------------------------------

    @property
    def roots(self) -> tuple[Any, ...]:
        model = None if self.model is None else self.model.source
        return self.loss, self.grad_transform, self.schedule, self.rule, model

    @property
    def identity(self) -> Any:
        model = None if self.model is None else self.model.source
        rule = self.rule.family.name if isinstance(self.rule, Rule) else type(self.rule)
        return id(self.loss), id(self.grad_transform), model, rule, self.first_order, self.proximal

    def check_state(self, state: Any) -> None:
        """Refuse buffers that require grad, wherever they are, if a gradient is wanted."""
        if not torch.is_grad_enabled() or not isinstance(state, State):
            return
        check_buffers(state.buffers)
        parts = {"": self.model, "loss:": self.loss_model, "optimizer:": self.rule_model}
        for prefix, template in parts.items():
            if template is not None and template.requiring:
                own = {prefix + name: b for name, b in template.requiring.items()}
                check_buffers({name: b for name, b in own.items() if name not in state.buffers})

    def with_guard(self) -> InnerStep:
        return self._with(guard=second_order.Guard())

    def with_observer(self, look: Look) -> InnerStep:
        return self._with(look=look)

    def with_probe(self, probe: Callable[[Tensor], None]) -> InnerStep:
        return self._with(probe=probe)

    def with_start(self, start: Any) -> InnerStep:
        if torch.compiler.is_compiling() or not isinstance(self.rule, Rule):
            return self  # a learned optimizer may compute one weight from another
        return self._with(needs_view=frozenset(map(id, _tree.tensors(start))), checked=True)

    def _with(self, **changes: Any) -> InnerStep:
        """``dataclasses.replace`` without its checks: this runs at every call."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, **changes)
        return new

    def with_proximal(self, strength: float) -> InnerStep:
        return dataclasses.replace(self, proximal=strength)

    def linearize(self, state: State, meta: Meta, batch: Any) -> Any:
        if self.needs_reevaluation:
            return super().linearize(state, meta, batch)
        if state.opt is None:
            state = state._replace(opt=self.initial(state.params))
        return InnerLinearization(self, state, meta, batch)

    @property
    def lasting(self) -> frozenset[str]:  # type: ignore[override]
        return lasting_settings(self.rule)

    def residual(self, state: State, meta: Meta, batch: Any) -> Pairs:
        """Each weight that moves with its gradient and penalty, which are zero at convergence."""
        grad_enabled = torch.is_grad_enabled()
        named = named_leaves(state.params)
        sources = self.sources(named, grad_enabled)
        with torch.enable_grad():
            found = self.evaluate(
                rebuild(state.params, {**self.resting(named), **sources}), state, meta, batch
            )
            grads = self.gradients(found.total, sources, grad_enabled)
        by_name = dict.fromkeys(named) | self.pull_to_anchor(grads, named, meta)
        present = {name: g for name, g in by_name.items() if g is not None}
        moving = self.map_tasks(lambda present: self.transform(present), present)
        # The settings of the last step: a schedule may have no further ones.
        hyper = self.settings_at(meta, max(state.time - 1, 0))
        plain = descent_with_penalty(self.rule, {} if self.rule_model is not None else hyper)
        if plain is None:
            return [(named[name], g) for name, g in moving.items() if g is not None]
        rule, settings = plain
        absent = dict.fromkeys(named)

        def one(params: Any, present: Any) -> Any:
            grads = rebuild(params, {**absent, **present})
            return rule.update(params, grads, rule.init(params), settings)[0]

        moved = named_leaves(self.map_tasks(one, state.params, moving))
        return [
            (named[name], named[name] - moved[name]) for name, g in moving.items() if g is not None
        ]


def inner_step(
    loss: Loss,
    rule: Any,
    model: nn.Module | Template | None = None,
    *,
    first_order: bool = False,
    grad_transform: GradTransform | None = None,
    schedule: Settings | None = None,
) -> InnerStep:
    """One step of training as a pure function ``step(state, meta, batch) -> (state, out)`` (Eq. 2).

    With a ``model``, ``loss(model, batch)`` is called with a replica that has the weights and
    buffers of the state. Without one, ``loss(params, batch)`` gets the weights themselves. A loss
    that is a module runs with the weights ``meta.loss``; for any other loss, ``meta.loss`` is a
    third argument if it is not empty. The loss returns a scalar, or a tuple that begins with one,
    which is ``out``.

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
    if isinstance(rule, torch.optim.Optimizer | type) or not hasattr(rule, "update"):
        raise refusals.not_a_rule(rule)
    return InnerStep(
        loss,
        rule,
        functional(model).template() if isinstance(model, nn.Module) else model,
        functional(loss).template() if isinstance(loss, nn.Module) else None,
        functional(rule).template() if isinstance(rule, nn.Module) else None,
        first_order,
        grad_transform,
        schedule,
    )


def as_leaf(param: Tensor) -> Tensor:
    """A weight as a leaf of the graph, marked as made by a step."""
    leaf = param.detach().requires_grad_()
    if not torch.compiler.is_compiling():
        leaf._innerloop_made = True  # type: ignore[attr-defined]
    return leaf


def _changed(before: Buffers, after: Buffers) -> dict[str, Tensor]:
    """The buffers that a forward may have written to.

    Batch norm writes to its statistics without counting a version, so a floating-point buffer is
    always taken as changed. A mask stays one tensor in all states.
    """
    return {
        name: buffer
        for name, buffer in after.items()
        if buffer is not before.get(name) or buffer.is_floating_point() or _is_written(buffer)
    }


def _is_written(buffer: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return True  # its version would become a value to look at
    return buffer._version > 0 or is_functorch_wrapped_tensor(buffer)  # which count no versions
