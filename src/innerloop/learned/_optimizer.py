"""What all learned optimizers are."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from innerloop.learned._coordinates import (
    STEP,
    Coordinates,
    check_tensors,
    parted,
    shaped,
    together,
    vector,
)
from innerloop.learned._torch import TorchOptimizer

Memory = dict[str, Tensor]


class LearnedOptimizer(nn.Module, abc.ABC):
    """A map from gradients to changes of weights that has parameters of its own.

    Hand it to :class:`innerloop.InnerLoop` in the place of a ``torch.optim`` instance, and its
    parameters are meta-parameters. Trained, :meth:`as_torch_optimizer` makes an ordinary optimizer
    of it. All weights of the model are coordinates of one vector, so that a step is a few
    operations on large tensors. It computes in the precision of its own parameters.

    A subclass says what it remembers and what it does, in :meth:`memory` and :meth:`change`.

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
    """Attributes that are no parameters but belong to what was learned: they are saved with it."""

    @abc.abstractmethod
    def memory(self, count: int) -> Memory:
        """What is remembered of ``count`` coordinates before the first step. [count, ...] each"""

    @abc.abstractmethod
    def change(self, at: Coordinates, memory: Memory) -> tuple[Tensor, Memory]:
        """What is added to the weights, [coordinates], and the new memory. Write nothing in place.

        Coordinates of different tensors may stand side by side in any order: what a coordinate
        does may depend on its own tensor, not on others.
        """

    def as_torch_optimizer(self, params: Any, lr: float = 1.0) -> TorchOptimizer:
        """An ordinary optimizer with what has been learned so far, for any training loop.

        Args:
            params: as of any ``torch.optim`` class: parameters, named parameters, or groups.
            lr: a factor of every change, which schedulers may vary; 1 is what was learned.
        """
        return TorchOptimizer(self, params, lr)

    def get_extra_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.settings}

    def set_extra_state(self, state: Any) -> None:
        for name in self.settings:
            setattr(self, name, state[name])

    # What an inner loop asks for. ---------------------------------------------------------------

    def init(self, params: Mapping[str, Tensor]) -> Memory:
        """The state before the first step."""
        check_tensors(list(params.items()))
        return together([self.begun(p) for p in params.values()]) if params else {}

    def update(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor | None], state: Memory
    ) -> tuple[dict[str, Tensor], Memory]:
        """New weights and a new state. A weight whose gradient is ``None`` is left as it is."""
        given = {name: g for name, g in grads.items() if g is not None}
        if len(given) == len(params):
            return self._updated(params, grads, state)
        parts = dict(zip(params, parted(state, [p.numel() for p in params.values()]), strict=True))
        if given:
            moving = {name: params[name] for name in given}
            own = together([parts[name] for name in given])
            new, own = self._updated(moving, given, own)
            params = {**params, **new}
            sizes = [p.numel() for p in moving.values()]
            parts |= zip(given, parted(own, sizes), strict=True)
        return dict(params), together(list(parts.values()))

    def _updated(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Any], state: Memory
    ) -> tuple[dict[str, Tensor], Memory]:
        weights = list(params.values())
        changes, state = self.changes(list(params), weights, [grads[n] for n in params], state)
        moved = zip(params.items(), changes, strict=True)
        return {name: p + change for (name, p), change in moved}, state

    # What both kinds of loop stand on. ----------------------------------------------------------

    def begun(self, param: Tensor) -> Memory:
        """The state of one tensor before its first update."""
        memory = {name: m.to(param.device) for name, m in self.memory(param.numel()).items()}
        return {STEP: torch.zeros((), dtype=torch.int64, device=param.device), **memory}

    def changes(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: Memory,
    ) -> tuple[list[Tensor], Memory]:
        """What is added to each tensor, and the new state."""
        memory = dict(state)
        step = memory.pop(STEP)
        sizes = tuple(p.numel() for p in params)
        dtype = self.dtype
        at = Coordinates(tuple(names), sizes, vector(params, dtype), vector(grads, dtype), step)
        change, memory = self.change(at, memory)
        return shaped(change, params), {STEP: step + 1, **memory}

    def names_of(self, group: dict[str, Any], first: int) -> list[str]:
        """The names of a group's parameters, of which ``first`` came before in other groups."""
        known = group.get("param_names")
        return list(known or map(str, range(first, first + len(group["params"]))))

    @property
    def dtype(self) -> torch.dtype:
        """In which precision it computes and remembers."""
        return next(self.parameters()).dtype
