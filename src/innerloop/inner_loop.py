"""``InnerLoop``: training as a module whose parameters are the meta-parameters."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from innerloop import _tree
from innerloop.adapted import AdaptedTasks
from innerloop.backward import Backward, Tape, Truncated
from innerloop.backward.strategy import cut
from innerloop.call import Call, TaskRun
from innerloop.compile import Compiler, opaque
from innerloop.errors import InnerLoopError
from innerloop.guard import losses, refusals
from innerloop.guard.arguments import (
    check_callable,
    check_parts,
    check_steady,
    check_whole,
    no_settings,
    warn_of_hooks,
)
from innerloop.guard.graph import reaches
from innerloop.modules.functional import functional
from innerloop.modules.replica import Template
from innerloop.modules.tree import unwrap
from innerloop.optim import Rule, from_torch
from innerloop.settings import (
    StepSettings,
    check_steps,
    learned_parameters,
    natural_values,
    parse_learn,
    write_learned,
)
from innerloop.step.schedules import Factors, check_schedule, start_values
from innerloop.step.state import Meta, State
from innerloop.step.step import InnerStep, inner_step
from innerloop.tasks import Way, axis
from innerloop.tasks.by_rule import by_rule
from innerloop.tasks.way import Ended, check_way
from innerloop.unroll import as_batches, check_strategy

_ALONE = -1  # the number of a run that is not one of several tasks


Wrap = Callable[[InnerStep], InnerStep]
_BASE, _CARRIED = "_base", "_carried"


class InnerLoop(nn.Module):
    """Train a model for some steps and measure it, differentiably in whatever shaped the training.

    It is made of the paper's three parts: a model (its weights are θ₀), an optimizer (φ_opt), and a
    loss (φ_loss). Its own parameters are the meta-parameters φ: the model's weights if ``"init"``
    is learned, the learned settings, and the weights of a loss or an optimizer that is a module.
    The model and the optimizer are read at every call, at their current state, and never changed.

    Args:
        model: any module.
        optimizer: a ``torch.optim`` instance over its parameters, or a learned optimizer: a module
            with ``init(params)`` and ``update(params, grads, state)``.
        loss: ``loss(model, batch)``, a scalar or a tuple that begins with one; may be a module.
        learn: what is meta-learned: ``"init"`` and names of settings; or a mapping from these to
            ``True`` or :class:`innerloop.Learn`.
        backward: how the gradient is computed, one of :mod:`innerloop.backward`.
        first_order: take inner gradients as constants.
        val_loss: ``val_loss(model, val)``; by default ``loss``.
        grad_transform: maps the inner gradients by name to others, as :func:`innerloop.clip_norm`.
        schedule: a function from the step to a factor of the learning rate, or a scheduler of
            ``torch.optim.lr_scheduler`` over the optimizer.
        tasks: True if calls have a task axis unless they say otherwise; or how tasks are run, one
            of :mod:`innerloop.tasks`, by default chosen from the model, the sizes and the device.

    >>> model = nn.Linear(1, 1)
    >>> inner = InnerLoop(model, torch.optim.SGD(model.parameters(), lr=0.1),
    ...                   lambda model, batch: (model(batch) - 1).square().mean(),
    ...                   learn=("init", "lr"))
    >>> batch = torch.ones(4, 1)
    >>> inner([batch] * 3, batch).backward()
    >>> [name for name, p in inner.named_parameters() if p.grad is not None]
    ['model.weight', 'model.bias', 'settings.lr']
    """

    val_loss: Callable[..., Any] | None

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | nn.Module,
        loss: Callable[..., Any],
        learn: Any = ("init",),
        backward: Backward | None = None,
        *,
        first_order: bool = False,
        val_loss: Callable[..., Any] | None = None,
        grad_transform: Callable[..., Any] | None = None,
        schedule: Any = None,
        tasks: bool | Way = False,
    ) -> None:
        super().__init__()
        check_parts(model, optimizer, loss)
        check_callable("val_loss", val_loss)
        check_callable("grad_transform", grad_transform)
        self.learn_init, self.learned = parse_learn(learn)
        self.backward = check_strategy(Tape() if backward is None else backward)
        self.first_order = first_order
        template = functional(model).template()
        if self.learn_init:
            self.model = model
        else:
            # Not registered: the weights are no meta-parameters.
            self.__dict__["model"] = model
        self.optimizer = optimizer
        self.loss = loss
        # Not registered either: its weights, if any, are no meta-parameters.
        self.__dict__["val_loss"] = val_loss
        self.grad_transform = grad_transform
        self.schedule = schedule
        check_way(tasks)
        self.tasks: bool | Way = tasks
        self._rule = by_rule()
        self._names: tuple[str, ...] = ()
        self._carried: Any = None
        self._base: Any = None
        self._first_base: Any = None
        self._compiler: Compiler | None = None
        self.settings = nn.ParameterDict()
        if isinstance(optimizer, torch.optim.Optimizer):
            rule = from_torch(optimizer, template.params)
            self._names = rule.names or ()
            if schedule is not None:
                check_schedule(schedule, optimizer)
            params = [template.params[name] for name in self._names]
            self._base = self._first_base = start_values(optimizer, schedule)
            self.settings = learned_parameters(rule, self.learned, params, self._base)
        elif self.learned or schedule is not None:
            raise InnerLoopError(no_settings(self.learned, schedule))

    # The interface. -----------------------------------------------------------------------------

    @opaque
    def forward(self, train: Any, val: Any, *, tasks: bool | Way | None = None) -> Tensor:
        """L_val after one step for each batch in ``train``.

        With ``tasks=True``, or a way of :mod:`innerloop.tasks` to run them, every tensor has a
        leading task axis, and so has the result. [tasks]
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                batches = [_usable(batch) for batch in as_batches(train)]
                return self(batches, _usable(val), tasks=tasks)
        way, carried = self._way(tasks), self._carried
        if self._compiler is None or not torch.is_grad_enabled():
            return self._losses(train, val, way)
        batches = list(as_batches(train))

        def losses(wrap: Wrap | None = None) -> Tensor:
            self._carried = carried
            return self._losses(batches, val, way, wrap)

        return self._compiler.run(self, batches, val, way, losses)

    def adapt(self, train: Any, *, tasks: bool | Way | None = None) -> Any:
        """The model after one step for each batch: an :class:`Adapted`, or one for each task.

        Under ``torch.no_grad()`` no graph is kept.
        """
        if torch.is_inference_mode_enabled():
            # No gradient can be taken in inference mode, and a step needs the inner one.
            with torch.inference_mode(False), torch.no_grad():
                return self.adapt([_usable(batch) for batch in as_batches(train)], tasks=tasks)
        way = self._way(tasks)
        call, ended = self._run(train, None, way, False)
        each = [call.adapted(state, outs) for state, outs in ended.each()]
        return each[0] if way is None else AdaptedTasks(each)

    def compile(  # type: ignore[override]
        self,
        unit: str = "auto",
        *,
        backend: Any = "inductor",
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Compute losses and meta-gradients by compiled programs from now on.

        Unlike ``nn.Module.compile``, it compiles gradients of gradients. With ``"whole"`` all steps
        and tasks are one program, the fastest for small models and few steps; compile time grows
        with both. With ``"step"`` one step is, with the strategy's memory. ``"auto"`` chooses by
        the number of steps and modules. ``backend``, ``mode`` and ``options`` are those of
        ``torch.compile``.

        A program is made at the first call with tensors of new shapes, or after something changed
        that it took for a constant; that call runs eagerly too, and its results are compared.
        What cannot be compiled runs eagerly, with one warning that says why.
        """
        self._compiler = Compiler(unit, backend=backend, mode=mode, options=options)

    @property
    def compiler(self) -> Compiler | None:
        """The programs that :meth:`compile` made, or why it made none."""
        return self._compiler

    def _way(self, tasks: bool | Way | None) -> Way | None:
        """The way to run tasks, or ``None`` if there are none."""
        given = self.tasks if tasks is None else tasks
        check_way(given)
        if given is True:
            given = self.tasks if isinstance(self.tasks, Way) else self._rule
        return given or None

    def _losses(self, train: Any, val: Any, way: Way | None, wrap: Wrap | None = None) -> Tensor:
        """L_val; ``wrap`` gives what is to be used in place of the step."""
        _, ended = self._run(train, val, way, True, wrap)
        assert ended.losses is not None
        return self._check_losses(ended.losses, ended.weights)

    def _run(
        self, train: Any, val: Any, way: Way | None, measured: bool, wrap: Wrap | None = None
    ) -> tuple[Call, Ended]:
        """Training of one task or of several, and L_val if they are ``measured``."""
        batches = as_batches(train)
        call = self.prepare(len(batches), way is None)
        if wrap is not None:
            call = dataclasses.replace(call, step=wrap(call.step))
        if way is None:
            state, outs = call.train(batches, self._carried_on(True).get(_ALONE))
            loss = call.measure(state, val) if measured else None
            ended = Ended(loss, list(state.params.values()), lambda: [(state, outs)])
        else:
            batches = list(batches)
            tasks = axis.count(batches, val)
            ended = way.run(TaskRun(call, batches, val, tasks, measured, self._states_of(tasks)))
        if isinstance(self.backward, Truncated) and self.backward.carry:
            states = [state for state, _ in ended.each()]
            now = dict(enumerate(states, _ALONE if way is None else 0))
            self._carried = {**(self._carried or {}), **_tree.map(cut, now)}
        return call, ended

    def _carried_on(self, alone: bool) -> dict[int, State]:
        """The states that a run starts from, by task, if it is under way."""
        carried = self._carried or {}
        return {task: state for task, state in carried.items() if (task == _ALONE) == alone}

    def _states_of(self, tasks: int) -> list[State] | None:
        """The states that these tasks start from, if they are under way."""
        states = [state for task, state in self._carried_on(False).items() if task < tasks]
        if states and len(states) != tasks:
            raise refusals.other_number_of_tasks(tasks, len(states), self.backward)
        return states or None

    @property
    def hyper(self) -> dict[str, Any]:
        """The learned settings in their own units, without a graph."""
        with torch.no_grad():
            return _tree.map(lambda t: t.detach(), natural_values(self.learned, self.settings))

    def write_to(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Put the learned settings into an ordinary optimizer, by default the loop's own."""
        target = self.optimizer if optimizer is None else optimizer
        if not isinstance(target, torch.optim.Optimizer) or self._base is None:
            raise refusals.not_two_optimizers(self.optimizer, target)
        own = cast(torch.optim.Optimizer, self.optimizer)
        self._base = write_learned(self.learned, self.hyper, own, target, self.schedule, self._base)

    def restart(self) -> None:
        """Forget the state carried over from the last call; see :class:`innerloop.Truncated`."""
        self._carried = None

    # What a call is made of. --------------------------------------------------------------------

    def prepare(self, steps: int, alone: bool = True) -> Call:
        """The three parts as they are now, as pure functions and plain tensors.

        ``alone`` tells a run without a task axis from one with: each carries its own state on.
        """
        check_steady(self.model)
        template = Template(unwrap(self.model))
        carried = self._carried_on(alone).values()
        self._check_reach(steps, bool(carried))
        check_steps(self.learned, max((state.time for state in carried), default=0) + steps)
        params = template.params
        if not self.learn_init:
            params = {name: _tree.detach(p) for name, p in params.items()}
        rule: Any = self.optimizer
        settings = None
        if isinstance(rule, torch.optim.Optimizer):
            rule = dataclasses.replace(from_torch(rule), names=self._names)
            factors = None if self.schedule is None else Factors(self.schedule, self._base)
            settings = StepSettings(rule, self.learned, factors)
        meta = self.meta(rule)
        modules = (m for part in (self, *self._unregistered()) for m in part.modules())
        check_whole(modules, (*params.values(), *_tree.tensors(meta)))
        if isinstance(self.optimizer, torch.optim.Optimizer):
            self._check_same(template, self.optimizer)
            warn_of_hooks({n: template.params[n] for n in self._names}, self.optimizer)
        step = inner_step(
            self.loss,
            rule,
            template,
            first_order=self.first_order,
            grad_transform=self.grad_transform,
            schedule=settings,
        )
        state = State(params, template.buffers, step.initial(params))
        return Call(step, template, state, meta, self.backward, self.val_loss)

    def _check_same(self, template: Template, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer whose parameters are no longer the model's."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if len(held) != len(self._names):
            raise refusals.replaced_parameters("the optimizer's groups")
        for name, param in zip(self._names, held, strict=True):
            own = template.params.get(name)
            # In a replica, as another loop trains this one, the weights are no Parameters.
            if own is not param and (own is None or isinstance(own, nn.Parameter)):
                raise refusals.replaced_parameters(f"{name!r} of the model")

    def meta(self, rule: Any) -> Meta:
        """φ as the steps see it: settings in their own units, the loss's weights by name."""
        loss = functional(self.loss).params if isinstance(self.loss, nn.Module) else {}
        if not isinstance(rule, Rule):
            return Meta(functional(cast(nn.Module, self.optimizer)).params, loss)
        given = {
            name: values
            for name, values in rule.hyper.items()
            if any([t.requires_grad for t in _tree.tensors(values)])
        }
        return Meta({**given, **natural_values(self.learned, self.settings)}, loss)

    def _check_losses(self, value: Tensor, weights: list[Tensor]) -> Tensor:
        """The loss; refuses one that no meta-parameter has an influence on."""
        asked = any(p.requires_grad for p in self.parameters())
        if not torch.is_grad_enabled() or not asked:
            return value
        if not any(p.requires_grad for p in weights):
            raise losses.no_influence(type(self).__name__)
        if not reaches(value, weights) and not reaches(value, self.parameters()):
            raise losses.val_loss_without_graph()
        return value

    def _check_reach(self, steps: int, is_under_way: bool) -> None:
        if not self.learn_init or not torch.is_grad_enabled():
            return
        if is_under_way:
            raise refusals.run_under_way(self.backward)
        if isinstance(self.backward, Truncated) and steps > self.backward.k:
            raise refusals.truncated_before_start(self.backward, steps)

    # Modules. -----------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InnerLoop:
        super()._apply(fn, recurse)
        for module in self._unregistered():
            module._apply(fn, recurse)

        def moved(value: Any) -> Any:
            return fn(value) if isinstance(value, Tensor) else value

        self._carried = _tree.map(moved, self._carried)
        if isinstance(self.optimizer, torch.optim.Optimizer):
            for slots in self.optimizer.state.values():
                # Counts of steps are float32 on the CPU, whatever the weights are.
                own = {name: slot for name, slot in slots.items() if name != "step"}
                slots.update(_tree.map(moved, own))
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(self.schedule, LRScheduler) and self._base != self._first_base:
            # What the learned settings are measured by since they were written to the optimizer.
            destination[prefix + _BASE] = [dict(group) for group in self._base]
        if self._carried is not None:
            destination[prefix + _CARRIED] = dict(self._carried)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:  # type: ignore[override]
        base = state_dict.pop(prefix + _BASE, None)
        carried = state_dict.pop(prefix + _CARRIED, None)
        device = next((p.device for p in self.model.parameters()), None)

        def here(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        # A loop that starts anew at each call has no use for a run under way.
        goes_on = isinstance(self.backward, Truncated) and self.backward.carry
        self._carried = _tree.map(here, carried) if goes_on else None
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._base = self._first_base if base is None else [dict(group) for group in base]

    def train(self, mode: bool = True) -> InnerLoop:
        super().train(mode)
        for module in self._unregistered():
            module.train(mode)
        return self

    def _unregistered(self) -> list[nn.Module]:
        """Modules that belong here and have no meta-parameters."""
        found = (self.__dict__.get("model"), self.__dict__.get("val_loss"))
        return [module for module in found if isinstance(module, nn.Module)]

    def extra_repr(self) -> str:
        learned = [*(["init"] if self.learn_init else []), *self.learned]
        kind = type(self.optimizer).__name__
        return f"optimizer={kind}, learn={tuple(learned)}, backward={self.backward}"


def _usable(data: Any) -> Any:
    """Data without tensors of inference mode, which cannot be part of a graph."""

    def usable(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(found, field.name, _usable(getattr(value, field.name)))
            return found
        return value.clone() if isinstance(value, Tensor) and value.is_inference() else value

    return _tree.map(usable, data)
