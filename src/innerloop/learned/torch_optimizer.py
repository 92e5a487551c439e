"""A learned optimizer as an ordinary one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from innerloop._numerics import full_precision
from innerloop.errors import InnerLoopError, four_part, refusal
from innerloop.learned.coordinates import check_real, join_states, split_state
from innerloop.optim.convert import NoRule

_LEARNED = "learned"


class TorchOptimizer(NoRule):
    """A ``torch.optim.Optimizer`` that moves weights as a learned optimizer does in an inner loop.

    Made by :meth:`LearnedOptimizer.as_torch_optimizer`. It has a copy of what was learned, so
    meta-training may go on meanwhile; the copy is part of ``state_dict``, which is all that a
    later session needs to go on. Parameters without a gradient are left as they are.
    """

    refusal = four_part(
        "You gave an optimizer made by as_torch_optimizer to an inner loop.",
        "the learned optimizer that it was made of.",
        "what was learned is a copy here, and fixed; in an inner loop it is a meta-parameter.",
        "InnerLoop(model, learned, loss), whose memory is empty at first.",
    )

    def __init__(self, learned: Any, params: Any, lr: float = 1.0) -> None:
        self.learned = copy.deepcopy(learned).requires_grad_(False)
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except InnerLoopError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        if not 0 <= float(group["lr"]) < math.inf:
            raise _wrong_lr(group["lr"])
        first = sum(len(g["params"]) for g in self.param_groups[:-1])
        names = self.learned.names_of(group, first)
        check_real(dict(zip(names, group["params"], strict=True)))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = self._parameters_with_grad()
        if moving:
            names, params, rates = zip(*moving, strict=True)
            with full_precision(params[0].device):  # as in an inner loop
                self._move(names, params, rates)
        return loss

    def _parameters_with_grad(self) -> list[tuple[str, Tensor, Any]]:
        found, first = [], 0
        for group in self.param_groups:
            names = self.learned.names_of(group, first)
            first += len(names)
            named = zip(names, group["params"], strict=True)
            found += [(name, p, group["lr"]) for name, p in named if p.grad is not None]
        return found

    def _move(self, names: tuple[str, ...], params: tuple[Any, ...], rates: Any) -> None:
        learned = self.learned.to(params[0].device)
        grads = [p.grad for p in params]
        for name, grad in zip(names, grads, strict=True):
            if grad.is_sparse:
                raise _sparse_grad(name)
        for p in params:
            if p not in self.state:
                self.state[p] = learned.start_state(p)
        state = join_states([self.state[p] for p in params])
        changes, state = learned.changes(names, params, grads, state)
        parts = split_state(state, [p.numel() for p in params])
        for p, change, lr, own in zip(params, changes, rates, parts, strict=True):
            p.add_(change * lr)
            # Copied: a part is a view that would keep, and save, the whole.
            self.state[p] = {name: value.clone() for name, value in own.items()}

    # Saving. ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with the learned parameters under ``"learned"``."""
        return {**super().state_dict(), _LEARNED: self.learned.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        given = dict(state_dict)
        if _LEARNED not in given:
            raise _no_learned_state()
        learned = given.pop(_LEARNED)
        # First, into a copy: what does not fit must leave this optimizer as it is.
        copied = copy.deepcopy(self.learned)
        kinds = [v.dtype for v in learned.values() if isinstance(v, Tensor)]
        copied.to(kinds[0] if kinds else None).load_state_dict(learned)
        super().load_state_dict(given)
        self.learned = copied
        self._restore(given)

    def _restore(self, given: dict[str, Any]) -> None:
        """Restore the saved precision: torch rounds a state to that of the weight."""
        groups = zip(given["param_groups"], self.param_groups, strict=True)
        for saved, own in groups:
            for index, p in zip(saved["params"], own["params"], strict=True):
                if index in given["state"]:
                    state = given["state"][index]
                    self.state[p] = {n: v.to(p.device, copy=True) for n, v in state.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), _LEARNED: self.learned}


def _wrong_lr(lr: Any) -> InnerLoopError:
    return refusal(
        f"You gave lr={lr} to as_torch_optimizer.",
        "a number, 0 or more.",
        "it is a factor of every learned change.",
        "as_torch_optimizer(params, lr=1.0), the learned update itself.",
    )


def _no_learned_state() -> InnerLoopError:
    return refusal(
        "You loaded a state without 'learned'.",
        "the state_dict of an optimizer made by as_torch_optimizer.",
        "the learned parameters are a part of it.",
        "optimizer.load_state_dict(saved), where saved is optimizer.state_dict().",
    )


def _sparse_grad(name: str) -> InnerLoopError:
    return refusal(
        f"The gradient of {name!r} is sparse.",
        "dense gradients.",
        "every coordinate has a memory, which changes at each step.",
        "torch.nn.Embedding(..., sparse=False).",
    )
