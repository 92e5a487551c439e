"""The model that training leaves behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from innerloop.errors import InnerLoopError, four_part
from innerloop.modules.functional import functional
from innerloop.modules.replica import Template
from innerloop.optim import FAMILIES, Rule
from innerloop.optim.convert import family_of
from innerloop.step.state import State, buffers_of, differentiable
from innerloop.tasks.axis import count, slice_task, stack_tasks


class Adapted:
    """A trained model: callable like the model, with everything the model has.

    The weights are in the graph of the inner loop unless gradients were off. Other attributes and
    methods are those of the model with these weights.
    """

    def __init__(self, template: Template, rule: Any, state: State, outs: Any) -> None:
        self.state = state
        self.module: nn.Module = template.bind(state.params, buffers_of("", state.buffers))
        """The model with the final weights, as a module."""
        self._rule, self._trained = rule, template.trained
        self._outs = outs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "module" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.module, name)

    @property
    def params(self) -> dict[str, Tensor]:
        """The final weights by name."""
        return dict(self.state.params)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The final buffers by name."""
        return buffers_of("", self.state.buffers)

    @property
    def opt_state(self) -> Any:
        """The optimizer's state after the last step."""
        return self.state.opt

    @property
    def losses(self) -> Tensor:
        """The training loss before each step. [steps]"""
        if self._outs is None:
            return torch.empty(0)
        return self._outs[0] if isinstance(self._outs, tuple) else self._outs

    @property
    def aux(self) -> Any:
        """The further outputs of the loss, one of each per step; ``None`` if there are none."""
        if not isinstance(self._outs, tuple):
            return None
        rest = self._outs[1:]
        return rest if len(rest) > 1 else next(iter(rest), None)

    def write_to(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Put the weights and buffers into a model, and the state into its optimizer."""
        if not isinstance(model, nn.Module):
            raise InnerLoopError(_not_alike(f"a {type(model).__name__}"))
        targets, buffers = functional(model).params, functional(model).buffers
        _check_alike(targets, self.state.params)
        _check_alike(buffers, self.buffers)
        if optimizer is not None:
            self._write_state(optimizer, targets)
        with torch.no_grad():
            for name, value in self.state.params.items():
                targets[name].copy_(value)
            for name, value in self.buffers.items():
                buffers[name].copy_(value)

    def _write_state(self, optimizer: Any, targets: Mapping[str, Tensor]) -> None:
        hand_over = getattr(self._rule, "hand_over", None)  # that of a learned optimizer
        if hand_over is not None:
            moving = {
                name: targets[name]
                for name, p in self.state.params.items()
                if self._trained.get(name, True) and differentiable(p)
            }
            hand_over(self.state.opt, moving, optimizer)
        else:
            self._check_optimizer(optimizer, targets)
            self._rule.write_to(optimizer, self.state.opt)

    def _check_optimizer(self, optimizer: Any, targets: Mapping[str, Tensor]) -> None:
        own, kind = self._rule, type(optimizer)
        same = isinstance(own, Rule) and isinstance(optimizer, torch.optim.Optimizer)
        if same and family_of(kind, FAMILIES) is own.family:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            same = list(map(id, params)) == [id(targets[name]) for name in own.names or ()]
        else:
            same = False
        if not same:
            name = own.family.name if isinstance(own, Rule) else type(own).__name__
            shown = optimizer.__name__ if isinstance(optimizer, type) else kind.__name__
            raise InnerLoopError(
                four_part(
                    f"You wrote the state of {name} to {shown}.",
                    "an optimizer of the same torch.optim class, over the same parameters of the "
                    "model that is written to, in the same order.",
                    "each kind keeps other things, by parameter.",
                    "adapted.write_to(model, optimizer), with an optimizer built like that of the "
                    "inner loop, or adapted.write_to(model).",
                )
            )

    def __repr__(self) -> str:
        return f"Adapted({type(self.module).__name__}, steps={self.state.time})"


class AdaptedTasks:
    """One trained model per task; inputs and everything held have a leading task axis."""

    def __init__(self, each: Sequence[Adapted]) -> None:
        self.each = list(each)
        """The trained model of each task."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = count([args, kwargs])
        if found != len(self):
            raise InnerLoopError(
                four_part(
                    f"You called the adapted models of {len(self)} tasks with {found} tasks.",
                    f"tensors of shape [{len(self)}, ...].",
                    "each task's model gets its own slice.",
                    "inputs for the same tasks, or adapted.each[0](x) for one.",
                )
            )
        slices = [slice_task((args, kwargs), t) for t in range(found)]
        pairs = zip(self.each, slices, strict=True)
        return stack_tasks([one(*one_args, **one_kwargs) for one, (one_args, one_kwargs) in pairs])

    def __len__(self) -> int:
        return len(self.each)

    def __iter__(self) -> Iterator[Adapted]:
        return iter(self.each)

    @property
    def params(self) -> dict[str, Tensor]:
        """The final weights by name. [tasks, ...]"""
        return stack_tasks([one.params for one in self.each])

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The final buffers by name. [tasks, ...]"""
        return stack_tasks([one.buffers for one in self.each])

    @property
    def opt_state(self) -> Any:
        """The optimizer's state of each task."""
        return [one.opt_state for one in self.each]

    @property
    def losses(self) -> Tensor:
        """The training losses. [tasks, steps]"""
        return torch.stack([one.losses for one in self.each])

    @property
    def aux(self) -> Any:
        """The further outputs of the loss. [tasks, steps, ...]"""
        return stack_tasks([one.aux for one in self.each], is_leaf=lambda v: isinstance(v, list))

    def write_to(self, model: nn.Module, optimizer: Any = None) -> None:
        raise InnerLoopError(
            four_part(
                f"You wrote the adapted models of {len(self)} tasks to one model.",
                "one task.",
                "a model has one set of weights.",
                "adapted.each[0].write_to(model).",
            )
        )

    def __repr__(self) -> str:
        return f"AdaptedTasks({len(self)} x {self.each[0]!r})"


def _check_alike(targets: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
    wrong = [n for n in params if n not in targets or targets[n].shape != params[n].shape]
    wrong += [n for n in targets if n not in params]
    if wrong:
        raise InnerLoopError(
            _not_alike(f"a model without the same parameters and buffers: {wrong[0]!r}")
        )


def _not_alike(what: str) -> str:
    return four_part(
        f"You wrote to {what}.",
        "a model like the one that was adapted.",
        "weights and buffers are matched by name and shape.",
        "adapted.write_to(model), with the model of the inner loop or a copy of it.",
    )
