"""Eq. 2: one training step as a pure function of a state, meta-parameters and a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from innerloop import _deferred, _tree
from innerloop._numerics import full_precision
from innerloop._tracing import active
from innerloop.errors import InnerLoopError, four_part
from innerloop.guard import closures
from innerloop.modules.functional import check_buffers, functional
from innerloop.modules.replica import Template
from innerloop.optim import Elsewhere, Rule
from innerloop.step.evaluation import Evaluation, tensors_of
from innerloop.step.linearized import Linearized
from innerloop.step.mapped import mapped
from innerloop.step.state import Meta, State, buffers_of, named_leaves, rebuilt
from innerloop.step.stationary import lasting, penalized
from innerloop.step.task_evaluation import TaskEvaluation

Loss = Callable[..., Any]
GradTransform = Callable[[dict[str, Any]], Mapping[str, Any]]
Settings = Callable[[Mapping[str, Any], int], Mapping[str, Any]]


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
    tasks: bool = False
    """Whether every tensor of a state and a batch has a leading task axis."""
    frozen: frozenset[str] = frozenset()
    """With tasks, the buffers that no step changes."""

    def __call__(self, state: State, meta: Meta, batch: Any) -> tuple[State, Any]:
        _check_arguments(state, meta)
        if not active():
            self.check_state(state)
        try:
            new = self._taken(state, meta, batch)
            watch = closures.current()
            if watch is not None:
                watch.settle()
            return new
        except Exception as error:
            add_note = getattr(error, "add_note", None)
            if add_note is not None:
                add_note(
                    f"This happened in inner step {state.time} (counted from 0), where the loss "
                    f"was called with {'params' if self.model is None else 'the model'} and "
                    f"the batch {_shown(batch)}."
                )
            raise

    # What strategies may ask of a step beyond calling it. ----------------------------------------

    def check_state(self, state: State) -> None:
        """Refuse buffers that require grad, wherever they are, if a gradient is wanted."""
        if not torch.is_grad_enabled():
            return
        given = state.buffers
        parts = {"": self.model, "loss:": self.loss_model, "optimizer:": self.rule_model}
        for prefix, template in parts.items():
            if template is not None and template.requiring:
                own = {prefix + name: b for name, b in template.requiring.items()}
                check_buffers({name: b for name, b in own.items() if name not in given})
        # All tensors of a state require grad where a strategy takes a step's derivative.
        asking = {n: b for n, b in given.items() if b.requires_grad and not closures.is_own(b)}
        check_buffers(asking)

    def constants(self, state: State) -> list[Tensor]:
        """What has no derivative in a state after a step."""
        return list(state.buffers.values())

    def replayed(self, state: State, meta: Meta, batch: Any) -> tuple[State, Any]:
        """The step once more, for its derivative: the values of the new weights may be NaN."""
        plain = not self.tasks and not self.first_order and self.grad_transform is None
        if not (plain and _is_linear(self.rule, meta.opt)):
            return self(state, meta, batch)
        with _deferred.valueless():
            return self(state, meta, batch)

    def with_proximal(self, strength: float) -> InnerStep:
        """The same step with ``strength / 2 · ‖θ - anchor‖²`` added to the loss (iMAML)."""
        return dataclasses.replace(self, proximal=strength)

    def stationarity(self, state: State, meta: Meta, batch: Any) -> list[tuple[Tensor, Tensor]]:
        """Each weight that moves with what is zero after convergence: its gradient and penalty."""
        named = named_leaves(state.params)
        tracked = torch.is_grad_enabled() and not self.first_order
        found = self.evaluation(state, meta, batch).gradients(tracked)
        found = mapped(self._transformed, found) if self.tasks else self._transformed(found)
        moving = {name: grad for name, grad in found.items() if grad is not None}
        # Those of the last step: a schedule may have no further ones.
        last = max(state.time - 1, 0)
        hyper = meta.opt if self.schedule is None else self.schedule(meta.opt, last)
        plain = penalized(self.rule, {} if self.rule_model is not None else hyper)
        if plain is not None:
            moved = named_leaves(self._penalized(plain, state.params, rebuilt(state.params, found)))
            moving = {name: named[name] - moved[name] for name in moving}
        return [(named[name], rest) for name, rest in moving.items()]

    def _transformed(self, grads: Mapping[str, Any]) -> dict[str, Any]:
        """The gradients as the rule gets them."""
        if self.grad_transform is None:
            return dict(grads)
        present = {name: g for name, g in grads.items() if g is not None}
        return {**grads, **self._checked(self.grad_transform(present), present)}

    def _penalized(self, plain: tuple[Rule, Any], params: Any, grads: Any) -> Any:
        rule, settings = plain

        def one(params: Any, grads: Any) -> Any:
            return rule.update(params, grads, rule.init(params), settings)[0]

        return mapped(one, params, grads) if self.tasks else one(params, grads)

    @property
    def lasting(self) -> frozenset[str]:
        """The settings that have an influence on where training converges."""
        return lasting(self.rule)

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
        functions = _hashable(self.loss), _hashable(self.grad_transform)
        return *functions, model, rule, self.first_order, self.proximal

    @property
    def roots(self) -> tuple[Any, ...]:
        """Where the names of tensors can be found that the step closes over."""
        model = None if self.model is None else self.model.source
        return self.loss, self.grad_transform, self.schedule, self.rule, model

    def evaluation(self, state: State, meta: Meta, batch: Any) -> Evaluation:
        """The loss at a state and a batch; its gradient, and the update, are asked of it."""
        kind = TaskEvaluation if self.tasks else Evaluation
        return kind(self, state, meta, batch)

    def _taken(self, state: State, meta: Meta, batch: Any) -> tuple[State, Any]:
        tracked = torch.is_grad_enabled()
        if state.opt is None:
            state = state._replace(opt=self.initial(state.params))
        run = self.evaluation(state, meta, batch)
        grads = run.gradients(tracked and not self.first_order)
        # With nothing that requires grad this makes no graph, but it shows what was closed over.
        watch = None if tracked else closures.current()
        since = closures.sequence_number()
        with torch.set_grad_enabled(tracked or watch is not None):
            new = run.updated(grads)
        if watch is not None:
            leaves = tensors_of(new)
            if any(leaf.requires_grad for leaf in leaves):
                watch.inspect(leaves, [], since, _repeated_update(run, grads), self.roots)
                new = _tree.map(_detached, new)
        params, opt = new
        out = run.out if run.followed else _tree.map(_detached, run.out)
        return State(params, run.buffers, opt, state.time + 1), out

    def updated(
        self, state: State, meta: Meta, grads: Mapping[str, Any], run: Evaluation
    ) -> tuple[Any, Any]:
        """The rule's part of a step: the new weights and the new optimizer state."""
        with full_precision(run.value.device):
            grads = self._transformed(grads)
            if self.rule_model is not None:
                return self._learned(state, meta, grads, run)
            hyper = meta.opt if self.schedule is None else self.schedule(meta.opt, state.time)
            grads = _deferred.settled(grads, lambda: _is_linear(self.rule, hyper))
            found = rebuilt(state.params, grads)
            if not self.evaluates:
                return self.rule.update(state.params, found, state.opt, hyper)
            elsewhere = Elsewhere(run.elsewhere, run.value)
            return self.rule.update(state.params, found, state.opt, hyper, evaluate=elsewhere)

    def initial(self, params: Any) -> Any:
        """The optimizer's state before the first step."""
        if self.tasks:
            return mapped(dataclasses.replace(self, tasks=False).initial, params)
        if self.rule_model is None:
            return self.rule.init(params)
        named = named_leaves(params)
        trained = Evaluation(self, State(params), Meta(), None).trained(named)
        return self.rule.init({name: named[name] for name in trained})

    def _learned(
        self, state: State, meta: Meta, grads: Mapping[str, Any], run: Evaluation
    ) -> tuple[Any, Any]:
        """The update of a learned optimizer, which sees the weights that move and no others."""
        assert self.rule_model is not None
        rule: Any = self.rule_model.bind(meta.opt, buffers_of("optimizer", state.buffers))
        named = named_leaves(state.params)
        moving = {name: named[name] for name in run.trained(named)}
        # It may write to the containers of its state, which are those of an earlier state.
        opt = _tree.copied(state.opt)
        found = rule.update(moving, {name: grads[name] for name in moving}, opt)
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
        return rebuilt(state.params, {**named, **new}), found[1]

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
    buffers of the state. Without one, ``loss(params, batch)`` gets the weights themselves. A loss
    that is a module runs with the weights ``meta.loss``; to any other one they are a third
    argument, if there are any. It returns a scalar, or a tuple that begins with one: ``out``.

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
        found = rule.__name__ if isinstance(rule, type) else type(rule).__name__
        raise InnerLoopError(
            four_part(
                f"You gave {found} as the rule of a step.",
                "a rule of innerloop.optim, or a learned optimizer.",
                "a step is a function, and a torch optimizer changes weights in place.",
                "innerloop.optim.from_torch(optimizer, innerloop.functional(model).params).",
            )
        )
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


def _is_linear(rule: Any, hyper: Any) -> bool:
    """Whether the derivative of an update does not depend on the values of the gradient."""
    if not isinstance(rule, Rule) or not rule.family.linear:
        return False
    return not any(t.requires_grad for t in tensors_of((hyper, rule.hyper)))


def _check_arguments(state: Any, meta: Any) -> None:
    if not isinstance(state, State) or not isinstance(meta, Meta):
        wrong = state if not isinstance(state, State) else meta
        raise InnerLoopError(
            four_part(
                f"You gave a step a {type(wrong).__name__}.",
                "innerloop.State and innerloop.Meta.",
                "a step takes weights, buffers and the optimizer's state out of the one, settings "
                "and the loss's parameters out of the other.",
                "step(State(params), Meta({'lr': lr}), batch).",
            )
        )


def _shown(value: Any) -> str:
    """A batch in few words."""
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)}"
    if isinstance(value, tuple | list):
        inside = ", ".join(map(_shown, value[:4])) + (", ..." if len(value) > 4 else "")
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    return type(value).__name__


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


def _described(found: Any) -> str:
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Mapping)):
        return f"a {type(found).__name__}"
    return f"weights { ({name: _shape(value) for name, value in found[0].items()}) }"


def _hashable(value: Any) -> Any:
    """The value, or what stands for it as long as it lives."""
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return value


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _repeated_update(run: Evaluation, grads: Mapping[str, Any]) -> Callable[[], list[Tensor]]:
    """The rule's part of a step once more, if it is called, to see what it closed over."""
    same = run.step.evaluation(run.state, run.meta, run.batch)
    same.value, same.buffers = run.value.detach(), run.buffers

    def again() -> list[Tensor]:
        with torch.enable_grad():
            return tensors_of(same.updated(grads))

    return again


def batched(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step for many tasks at once: every tensor of a state and a batch has a leading task axis.

    Meta-parameters are shared by the tasks. Each task has its own buffers and random numbers.

    >>> from innerloop import optim
    >>> step = inner_step(lambda params, batch: ((params["w"] - batch) ** 2).sum(), optim.sgd(0.1))
    >>> state = State({"w": torch.tensor([[1.0], [2.0]])})
    >>> batched(step)(state, Meta(), torch.tensor([[3.0], [2.0]]))[0].params["w"]
    tensor([[1.4000],
            [2.0000]])
    """
    if isinstance(step, InnerStep):
        return dataclasses.replace(step, tasks=True)

    def for_tasks(state: Any, meta: Any, batch: Any) -> Any:
        return mapped(lambda state, batch: step(state, meta, batch), state, batch)

    return for_tasks
