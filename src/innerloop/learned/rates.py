"""Gradient descent whose rates are learned: for each coordinate, or each tensor and step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from innerloop.errors import InnerLoopError, four_part, refusal
from innerloop.learned.coordinates import Coordinates
from innerloop.learned.optimizer import LearnedOptimizer, Memory
from innerloop.modules.functional import functional


class _RatesOfModel(LearnedOptimizer):
    """Base class: parameters for each weight of one model, found by the weight's name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        found = functional(model).params
        if not found:
            raise refusal(
                f"You gave a {type(model).__name__} to {type(self).__name__}.",
                "a model with weights.",
                "rates are learned for each of them.",
                f"{type(self).__name__}(model) for the model that is to be trained.",
            )
        self.known = tuple(found)
        self.shapes = {name: tuple(p.shape) for name, p in found.items()}

    def get_extra_state(self) -> dict[str, Any]:
        return {"shapes": {name: list(shape) for name, shape in self.shapes.items()}}

    def set_extra_state(self, state: Any) -> None:
        self._check_kind(state, ("shapes",))
        saved = {name: tuple(shape) for name, shape in state["shapes"].items()}
        self._check_known(saved)
        if tuple(saved) != self.known:
            raise _other_order(type(self).__name__, tuple(saved), self.known)

    def memory(self, count: int) -> Memory:
        return {}

    def init(self, params: Any) -> Memory:
        self._check_known({name: tuple(p.shape) for name, p in params.items()})
        return super().init(params)

    def names_of(self, group: dict[str, Any], first: int) -> list[str]:
        """Return the group's names; a group without names must be all weights in their order."""
        given = [tuple(p.shape) for p in group["params"]]
        if group.get("param_names"):
            names = list(group["param_names"])
        elif first == 0 and given == list(self.shapes.values()):
            names = list(self.known)
        else:
            raise refusal(
                f"You gave a group of {len(given)} parameters without names.",
                f"all {len(self.known)} parameters of the model in one group, or names.",
                f"{type(self).__name__} has learned something else for each of them.",
                "as_torch_optimizer(model.named_parameters()), or groups of such pairs.",
            )
        self._check_known(dict(zip(names, given, strict=True)))
        return names

    def _check_known(self, given: dict[str, tuple[int, ...]]) -> None:
        wrong = [n for n, shape in given.items() if self.shapes.get(n) != shape]
        if wrong:
            raise refusal(
                f"You gave the weight {wrong[0]!r} of shape {given[wrong[0]]}.",
                "weights with the names and shapes of the model it was made for.",
                f"{type(self).__name__} has learned something else for each of them.",
                f"{type(self).__name__}(model) for this model.",
            )


def _other_order(kind: str, saved: tuple[str, ...], known: tuple[str, ...]) -> InnerLoopError:
    message = four_part(
        f"You loaded rates for the weights {_format(saved)} into {kind} of a model with the "
        f"weights {_format(known)}.",
        "the same weights in the same order.",
        "rates are saved one after the other, and would become those of other weights.",
        f"{kind}(model) for a model that defines its layers in the order of the saved one.",
    )
    return InnerLoopError(message)


def _format(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names[:6])) + (", ..." if len(names) > 6 else "")


class MetaSGD(_RatesOfModel):
    """A learned rate for each coordinate, of any sign: ``θ -= α ∘ g``.

    The rates are one vector, so the update has a direction of its own, not only a size.

    Args:
        model: the model it is for; its weights are told apart by their names.
        lr: the initial value of all rates.

    Z. Li et al. Meta-SGD: Learning to learn quickly for few-shot learning. 2017.

    >>> MetaSGD(nn.Linear(3, 2), lr=0.1).rates.shape
    torch.Size([8])
    """

    def __init__(self, model: nn.Module, lr: float = 0.01) -> None:
        super().__init__(model)
        first = next(iter(functional(model).params.values()))
        count = sum(torch.Size(shape).numel() for shape in self.shapes.values())
        rates = torch.full((count,), lr, dtype=first.dtype, device=first.device)
        self.rates = nn.Parameter(rates)

    def change(self, at: Coordinates, memory: Memory) -> tuple[Tensor, Memory]:
        return -self._rates(at.names) * at.grad, memory

    def _rates(self, names: tuple[str, ...]) -> Tensor:
        if names == self.known:
            return self.rates
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        parts = dict(zip(self.known, self.rates.split(sizes), strict=True))
        return torch.cat([parts[name] for name in names])


class LSLR(_RatesOfModel):
    """A learned rate for each tensor and each step: ``θ -= α[step, tensor] · g``.

    Later steps use the rates of the last one.

    Args:
        model: the model it is for; its weights are told apart by their names.
        steps: the number of steps with rates of their own.
        lr: the initial value of all rates.

    A. Antoniou et al. How to train your MAML. ICLR 2019.

    >>> LSLR(nn.Linear(3, 2), steps=5).rates.shape
    torch.Size([5, 2])
    """

    def __init__(self, model: nn.Module, steps: int, lr: float = 0.01) -> None:
        super().__init__(model)
        if steps < 1:
            raise refusal(
                f"You wrote LSLR(model, steps={steps}).",
                "at least one step.",
                "each step has rates of its own.",
                "LSLR(model, steps=5).",
            )
        first = next(iter(functional(model).params.values()))
        shape = steps, len(self.known)
        self.rates = nn.Parameter(torch.full(shape, lr, dtype=first.dtype, device=first.device))

    def change(self, at: Coordinates, memory: Memory) -> tuple[Tensor, Memory]:
        step = at.step.clamp(max=len(self.rates) - 1)
        known = [self.known.index(name) for name in at.names]
        rates = self.rates[step, torch.tensor(known, device=step.device)]
        return -rates[at.owner] * at.grad, memory
