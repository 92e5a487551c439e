"""What training leaves behind: a model with the final weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from innerloop import _tree
from innerloop.errors import InnerLoopError, four_part
from innerloop.functional import Template, named_parameters
from innerloop.optim import Rule
from innerloop.step import State


class Adapted:
    """A trained model: callable like the model, with everything the model has.

    The weights are in the graph of the inner loop unless gradients were off. Other attributes and
    methods are those of the model with these weights.
    """

    def __init__(self, template: Template, rule: Any, state: State, outs: Any) -> None:
        self.state = state
        self.module: nn.Module = template.bind(state.params, state.buffers)
        """The model with the final weights, as a module."""
        self._rule = rule
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
        return dict(self.state.buffers)

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
        """What the loss returned besides its value, one of each per step; ``None`` if nothing."""
        if not isinstance(self._outs, tuple):
            return None
        rest = self._outs[1:]
        return rest[0] if len(rest) == 1 else rest

    def write_to(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Put the weights and buffers into a model, and the state into its optimizer."""
        targets = dict(named_parameters(model))
        _check_alike(targets, self.state.params)
        if optimizer is not None and not isinstance(self._rule, Rule):
            raise InnerLoopError(
                four_part(
                    "You wrote the state of a learned optimizer to one of torch.optim.",
                    "an inner loop with an optimizer of torch.optim.",
                    "the two keep different things.",
                    "adapted.write_to(model).",
                )
            )
        if optimizer is not None:
            self._rule.write_to(optimizer, self.state.opt)
        with torch.no_grad():
            for name, value in self.state.params.items():
                targets[name].copy_(value)
            own = dict(model.named_buffers())
            for name, value in self.state.buffers.items():
                own[name].copy_(value)

    def __repr__(self) -> str:
        return f"Adapted({type(self.module).__name__}, steps={self.state.time})"


class AdaptedTasks:
    """One trained model per task; inputs and everything held have a leading task axis."""

    def __init__(self, each: Sequence[Adapted]) -> None:
        self.each = list(each)
        """The trained model of each task."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outs = [
            one(*_tree.map(lambda v, t=t: _of_task(v, t), args), **_of_tasks(kwargs, t))
            for t, one in enumerate(self.each)
        ]
        return _stacked(outs)

    def __len__(self) -> int:
        return len(self.each)

    @property
    def params(self) -> dict[str, Tensor]:
        """The final weights by name. [tasks, ...]"""
        return _stacked([one.params for one in self.each])

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The final buffers by name. [tasks, ...]"""
        return _stacked([one.buffers for one in self.each])

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
        """What the loss returned besides its value. [tasks, steps, ...]"""
        return _stacked([one.aux for one in self.each])

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


def _of_task(value: Any, task: int) -> Any:
    return value[task] if isinstance(value, Tensor) else value


def _of_tasks(tree: Any, task: int) -> Any:
    return _tree.map(lambda v: _of_task(v, task), tree)


def _stacked(trees: Sequence[Any]) -> Any:
    flat = [_tree.flatten(tree) for tree in trees]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    leaves = [
        torch.stack(list(c)) if isinstance(c[0], Tensor) else (c[0] if c[0] is None else list(c))
        for c in columns
    ]
    return _tree.unflatten(leaves, flat[0][1])


def _check_alike(targets: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
    wrong = [n for n in params if n not in targets or targets[n].shape != params[n].shape]
    if wrong or len(targets) != len(params):
        raise InnerLoopError(
            four_part(
                f"You wrote to a model that does not have the same parameters ({wrong[:1]}).",
                "a model like the one that was adapted.",
                "weights are matched by name and shape.",
                "adapted.write_to(model), with the model of the inner loop or a copy of it.",
            )
        )
