"""Base class of the learned optimizers."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from innerloop.errors import InnerLoopError, refusal
from innerloop.learned.coordinates import (
    STEP,
    Coordinates,
    check_real,
    from_vector,
    join_states,
    split_state,
    to_vector,
)
from innerloop.learned.state_check import StateCheckedModule
from innerloop.learned.torch_optimizer import TorchOptimizer

Memory = dict[str, Tensor]


class LearnedOptimizer(StateCheckedModule, abc.ABC):
    """A map from gradients to changes of weights that has parameters of its own.

    Hand it to :class:`innerloop.InnerLoop` in the place of a ``torch.optim`` instance, and its
    parameters are meta-parameters. Trained, :meth:`as_torch_optimizer` makes an ordinary optimizer
    of it. All weights of the model are coordinates of one vector, so that a step is a few
    operations on large tensors. It computes in the precision of its own parameters.

    A subclass defines its state in :meth:`memory` and its update in :meth:`change`.

    >>> from torch import nn
    >>> class Descent(LearnedOptimizer):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.rate = nn.Parameter(torch.tensor(0.5))
    ...     def memory(self, count):
    ...         return {}
    ...     def change(self, at, memory):
    ...         return -self.rate * at.grad, memory
    >>> weight = nn.Parameter(torch.ones(2))
    >>> opt = Descent().as_torch_optimizer([weight])
    >>> weight.square().sum().backward()
    >>> opt.step()
    >>> weight.tolist()
    [0.0, 0.0]
    """

    settings: ClassVar[tuple[str, ...]] = ()
    """Attributes that are saved with the parameters."""

    @abc.abstractmethod
    def memory(self, count: int) -> Memory:
        """Return the initial state of ``count`` coordinates. [count, ...] each"""

    @abc.abstractmethod
    def change(self, at: Coordinates, memory: Memory) -> tuple[Tensor, Memory]:
        """Return the change of the weights, [coordinates], and the new memory. Not in place.

        Coordinates of different tensors may stand side by side in any order: what a coordinate
        does may depend on its own tensor, not on others.
        """

    def as_torch_optimizer(self, params: Any, lr: float = 1.0) -> TorchOptimizer:
        """Build an ordinary optimizer with a copy of the parameters, for any training loop.

        Args:
            params: as of any ``torch.optim`` class: parameters, named parameters, or groups.
            lr: a factor of every change, which schedulers may vary; 1 is the learned update.
        """
        return TorchOptimizer(self, params, lr)

    def hand_over(self, state: Memory, params: Mapping[str, Tensor], optimizer: Any) -> None:
        """Copy the state of an inner loop to an optimizer of :meth:`as_torch_optimizer`.

        ``adapted.write_to(model, optimizer)`` calls it, after which the next step of the optimizer
        is the next step of the loop. ``params`` are the weights that the loop moved, by name.
        """
        parts = split_state(state, [p.numel() for p in params.values()])
        pairs = list(zip(params.values(), parts, strict=True))
        if not self._accepts(optimizer, pairs):
            raise _other_optimizer(self, optimizer)
        for p, part in pairs:
            memory = {name: m.detach().to(p.device, copy=True) for name, m in part.items()}
            optimizer.state[p] = memory

    def _accepts(self, optimizer: Any, pairs: list[tuple[Tensor, Memory]]) -> bool:
        """Check that an optimizer was made of this kind, over these weights."""
        if not isinstance(optimizer, TorchOptimizer) or type(optimizer.learned) is not type(self):
            return False
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for p, part in pairs:
            if id(p) not in held or _shapes(optimizer.learned.start_state(p)) != _shapes(part):
                return False
        return True

    def get_extra_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.settings}

    def set_extra_state(self, state: Any) -> None:
        self._check_kind(state, self.settings)
        for name in self.settings:
            setattr(self, name, state[name])

    def _check_kind(self, state: Any, settings: Sequence[str]) -> None:
        if set(state) != set(settings):
            raise _other_kind(self, state, settings)

    # The interface for inner loops. -------------------------------------------------------------

    def init(self, params: Mapping[str, Tensor]) -> Memory:
        """Return the state before the first step."""
        check_real(params)
        return join_states([self.start_state(p) for p in params.values()]) if params else {}

    def update(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor | None], state: Memory
    ) -> tuple[dict[str, Tensor], Memory]:
        """Return new weights and a new state. A weight without a gradient is unchanged."""
        given = {name: g for name, g in grads.items() if g is not None}
        if len(given) == len(params):
            return self._update_all(params, grads, state)
        parts = dict(
            zip(params, split_state(state, [p.numel() for p in params.values()]), strict=True)
        )
        if given:
            moving = {name: params[name] for name in given}
            own = join_states([parts[name] for name in given])
            new, own = self._update_all(moving, given, own)
            params = {**params, **new}
            sizes = [p.numel() for p in moving.values()]
            parts |= zip(given, split_state(own, sizes), strict=True)
        return dict(params), join_states(list(parts.values()))

    def _update_all(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Any], state: Memory
    ) -> tuple[dict[str, Tensor], Memory]:
        weights = list(params.values())
        changes, state = self.changes(list(params), weights, [grads[n] for n in params], state)
        moved = zip(params.items(), changes, strict=True)
        return {name: p + change for (name, p), change in moved}, state

    # Shared with TorchOptimizer. ----------------------------------------------------------------

    def start_state(self, param: Tensor) -> Memory:
        """Return the state of one tensor before its first update."""
        memory = {name: m.to(param.device) for name, m in self.memory(param.numel()).items()}
        for name, m in memory.items():
            if m.shape[:1] != (param.numel(),) or name == STEP:
                raise _wrong_memory(param.numel(), name, m)
        return {STEP: torch.zeros((), dtype=torch.int64, device=param.device), **memory}

    def changes(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: Memory,
    ) -> tuple[list[Tensor], Memory]:
        """Return the change of each tensor, and the new state."""
        memory = dict(state)
        step = memory.pop(STEP)
        sizes = tuple(p.numel() for p in params)
        dtype = self.dtype
        at = Coordinates(
            tuple(names), sizes, to_vector(params, dtype), to_vector(grads, dtype), step
        )
        found: Any = self.change(at, memory)
        if type(found) is not tuple or len(found) != 2 or found[0].shape != at.weight.shape:
            raise _wrong_change(self, found, at)
        change, memory = found
        return from_vector(change, params), {STEP: step + 1, **memory}

    def names_of(self, group: dict[str, Any], first: int) -> list[str]:
        """Return the names of a group's parameters, or their numbers from ``first`` on."""
        known = group.get("param_names")
        return list(known or map(str, range(first, first + len(group["params"]))))

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the computation and of the memory: that of the parameters."""
        first = next(self.parameters(), None)
        if first is None:
            raise _no_parameters(self)
        return first.dtype


def _shapes(state: Memory) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items()}


def _other_kind(learned: LearnedOptimizer, state: Any, settings: Sequence[str]) -> InnerLoopError:
    return refusal(
        f"You loaded a state with {sorted(state)} into {type(learned).__name__}.",
        f"one with {sorted(settings)}.",
        "each kind of optimizer learns something else.",
        "load_state_dict of an optimizer of the kind that was saved.",
    )


def _wrong_memory(count: int, name: str, memory: Tensor) -> InnerLoopError:
    return refusal(
        f"The memory of {count} coordinates has {name!r} of shape {tuple(memory.shape)}.",
        f"[{count}, ...], under any name but {STEP!r}.",
        "each coordinate has its own; steps are counted already.",
        "def memory(self, count): return {'mean': torch.zeros(count)}.",
    )


def _no_parameters(learned: LearnedOptimizer) -> InnerLoopError:
    return refusal(
        f"Your {type(learned).__name__} has no parameters.",
        "at least one.",
        "it computes in their precision, and they are what is learned.",
        "self.rate = torch.nn.Parameter(torch.tensor(0.1)).",
    )


def _other_optimizer(learned: LearnedOptimizer, optimizer: Any) -> InnerLoopError:
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    return refusal(
        f"You wrote the state of {type(learned).__name__} to {kind.__name__}.",
        "an optimizer made by its as_torch_optimizer, over all trained weights of the model "
        "that is written to.",
        "the state is kept by weight, and differs between kinds of optimizers.",
        "optimizer = learned.as_torch_optimizer(model.parameters()), and "
        "adapted.write_to(model, optimizer).",
    )


def _wrong_change(learned: LearnedOptimizer, found: Any, at: Coordinates) -> InnerLoopError:
    first = found[0] if isinstance(found, tuple) and found else found
    shape = f" of shape {tuple(first.shape)}" if isinstance(first, Tensor) else ""
    return refusal(
        f"{type(learned).__name__}.change returned a {type(found).__name__}, first a "
        f"{type(first).__name__}{shape}.",
        f"a change of shape {tuple(at.weight.shape)}, and the new memory.",
        "every coordinate is moved by a number of its own.",
        "return -self.rate * at.grad, memory.",
    )
