"""What all learned optimizers are."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from innerloop.errors import InnerLoopError, four_part
from innerloop.learned._checked import Checked
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


class LearnedOptimizer(Checked, abc.ABC):
    """A map from gradients to changes of weights that has parameters of its own.

    Hand it to :class:`innerloop.InnerLoop` in the place of a ``torch.optim`` instance, and its
    parameters are meta-parameters. Trained, :meth:`as_torch_optimizer` makes an ordinary optimizer
    of it. All weights of the model are coordinates of one vector, so that a step is a few
    operations on large tensors. It computes in the precision of its own parameters.

    A subclass says what it remembers and what it does, in :meth:`memory` and :meth:`change`.

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

    def hand_over(self, state: Memory, params: Mapping[str, Tensor], optimizer: Any) -> None:
        """Let an optimizer of :meth:`as_torch_optimizer` go on with the state of an inner loop.

        ``adapted.write_to(model, optimizer)`` calls it, after which the next step of the optimizer
        is the next step of the loop. ``params`` are the weights that the loop moved, by name.
        """
        parts = parted(state, [p.numel() for p in params.values()])
        own = isinstance(optimizer, TorchOptimizer) and type(optimizer.learned) is type(self)
        groups = optimizer.param_groups if own else []
        held = {id(p) for group in groups for p in group["params"]}
        pairs = list(zip(params.values(), parts, strict=True))
        if not all(
            id(p) in held and _shapes(optimizer.learned.begun(p)) == _shapes(part)
            for p, part in pairs
        ):
            raise InnerLoopError(_not_its_own(self, optimizer))
        for p, part in pairs:
            memory = {name: m.detach().to(p.device, copy=True) for name, m in part.items()}
            optimizer.state[p] = memory

    def get_extra_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.settings}

    def set_extra_state(self, state: Any) -> None:
        self._check_kind(state, self.settings)
        for name in self.settings:
            setattr(self, name, state[name])

    def _check_kind(self, state: Any, settings: Sequence[str]) -> None:
        if set(state) != set(settings):
            raise InnerLoopError(
                four_part(
                    f"You loaded a state with {sorted(state)} into {type(self).__name__}.",
                    f"one with {sorted(settings)}.",
                    "each kind of optimizer learns something else.",
                    "load_state_dict of an optimizer of the kind that was saved.",
                )
            )

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
        for name, m in memory.items():
            if m.shape[:1] != (param.numel(),) or name == STEP:
                raise InnerLoopError(
                    four_part(
                        f"The memory of {param.numel()} coordinates has {name!r} of shape "
                        f"{tuple(m.shape)}.",
                        f"[{param.numel()}, ...], under any name but {STEP!r}.",
                        "each coordinate has its own; steps are counted already.",
                        "def memory(self, count): return {'mean': torch.zeros(count)}.",
                    )
                )
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
        found: Any = self.change(at, memory)
        if type(found) is not tuple or len(found) != 2 or found[0].shape != at.weight.shape:
            raise InnerLoopError(_no_change(self, found, at))
        change, memory = found
        return shaped(change, params), {STEP: step + 1, **memory}

    def names_of(self, group: dict[str, Any], first: int) -> list[str]:
        """The names of a group's parameters, of which ``first`` came before in other groups."""
        known = group.get("param_names")
        return list(known or map(str, range(first, first + len(group["params"]))))

    @property
    def dtype(self) -> torch.dtype:
        """In which precision it computes and remembers."""
        first = next(self.parameters(), None)
        if first is None:
            raise InnerLoopError(
                four_part(
                    f"Your {type(self).__name__} has no parameters.",
                    "at least one.",
                    "it computes in their precision, and they are what is learned.",
                    "self.rate = torch.nn.Parameter(torch.tensor(0.1)).",
                )
            )
        return first.dtype


def _shapes(state: Memory) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items()}


def _not_its_own(learned: LearnedOptimizer, optimizer: Any) -> str:
    shown = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
    return four_part(
        f"You wrote the state of {type(learned).__name__} to {shown}.",
        "one made by as_torch_optimizer of it, over all weights that were trained of the model "
        "that is written to.",
        "each kind remembers other things, by weight.",
        "optimizer = learned.as_torch_optimizer(model.parameters()), and "
        "adapted.write_to(model, optimizer).",
    )


def _no_change(learned: LearnedOptimizer, found: Any, at: Coordinates) -> str:
    first = found[0] if isinstance(found, tuple) and found else found
    shape = f" of shape {tuple(first.shape)}" if isinstance(first, Tensor) else ""
    return four_part(
        f"{type(learned).__name__}.change returned a {type(found).__name__}, first a "
        f"{type(first).__name__}{shape}.",
        f"a change of shape {tuple(at.weight.shape)}, and the new memory.",
        "every coordinate is moved by a number of its own.",
        "return -self.rate * at.grad, memory.",
    )
