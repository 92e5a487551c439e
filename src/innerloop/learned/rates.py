"""Gradient descent whose rates are learned: for each coordinate, or each tensor and step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from innerloop.errors import InnerLoopError, refusal
from innerloop.learned.coordinates import Coordinates
from innerloop.learned.optimizer import LearnedOptimizer, Memory
from innerloop.modules.functional import functional


class _RatesOfModel(LearnedOptimizer):
    """Base class: parameters for each weight of one model, found by the weight's name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        found = functional(model).params
        self.known = tuple(found)
        self.shapes = {name: p.shape for name, p in found.items()}
        self.sizes = [p.numel() for p in found.values()]

    def get_extra_state(self) -> dict[str, Any]:
        return {"shapes": {name: list(shape) for name, shape in self.shapes.items()}}

    def set_extra_state(self, state: Any) -> None:
        self._check_kind(state, ("shapes",))
        saved = {name: torch.Size(shape) for name, shape in state["shapes"].items()}
        # Rates are saved one after the other: their order counts.
        if [*saved.items()] != [*self.shapes.items()]:
            raise _other_weights(self, saved)

    def memory(self, count: int) -> Memory:
        return {}

    def init(self, params: Any) -> Memory:
        self._check_known({name: p.shape for name, p in params.items()})
        return super().init(params)

    def names_of(self, group: dict[str, Any], first: int) -> list[str]:
        """Return the group's names; a group without names must be all weights in their order."""
        shapes = [p.shape for p in group["params"]]
        names = group.get("param_names")
        if not names and (first or shapes != [*self.shapes.values()]):
            raise _group_without_names(self, len(shapes))
        names = list(names or self.known)
        self._check_known(dict(zip(names, shapes, strict=True)))
        return names

    def _check_known(self, given: dict[str, torch.Size]) -> None:
        if not given.items() <= self.shapes.items():
            raise _other_weights(self, given)


def _equal_rates(model: nn.Module, lr: float, *shape: int) -> nn.Parameter:
    """Rates in the precision and on the device of the model."""
    first = next(model.parameters(), torch.zeros(()))
    return nn.Parameter(torch.full(shape, lr, dtype=first.dtype, device=first.device))


def _group_without_names(learned: _RatesOfModel, count: int) -> InnerLoopError:
    return refusal(
        f"You gave a group of {count} parameters without names.",
        f"all {len(learned.known)} parameters of the model in one group, or names.",
        f"{type(learned).__name__} has learned something else for each of them.",
        "as_torch_optimizer(model.named_parameters()), or groups of such pairs.",
    )


def _other_weights(learned: _RatesOfModel, given: dict[str, torch.Size]) -> InnerLoopError:
    kind = type(learned).__name__
    return refusal(
        f"You gave the weights {_format(given)} to {kind} of a model with "
        f"{_format(learned.shapes)}.",
        "weights with the names and shapes of that model; in a saved state, in the same order.",
        f"{kind} has learned something else for each of them.",
        f"{kind}(model) for this model.",
    )


def _format(shapes: dict[str, torch.Size]) -> str:
    shown = [f"{name!r}, {list(shape)}" for name, shape in shapes.items()]
    return "; ".join(shown[:6]) + ("; ..." if len(shown) > 6 else "")


class MetaSGD(_RatesOfModel):
    """A learned rate for each coordinate, of any sign: ``θ -= α ∘ g``.

    The rates are one vector, so the update has a direction of its own, not only a size.

    Args:
        model: the model it is for; its weights are identified by name.
        lr: the initial value of all rates.

    Z. Li et al. Meta-SGD: Learning to learn quickly for few-shot learning. 2017.

    >>> MetaSGD(nn.Linear(3, 2), lr=0.1).rates.shape
    torch.Size([8])
    """

    def __init__(self, model: nn.Module, lr: float = 0.01) -> None:
        super().__init__(model)
        self.rates = _equal_rates(model, lr, sum(self.sizes))

    def change(self, at: Coordinates, memory: Memory) -> tuple[Tensor, Memory]:
        return -self._rates(at.names) * at.grad, memory

    def _rates(self, names: tuple[str, ...]) -> Tensor:
        if names == self.known:
            return self.rates
        parts = dict(zip(self.known, self.rates.split(self.sizes), strict=True))
        return torch.cat([parts[name] for name in names])


class LSLR(_RatesOfModel):
    """A learned rate for each tensor and each step: ``θ -= α[step, tensor] · g``.

    Later steps use the rates of the last one.

    Args:
        model: the model it is for; its weights are identified by name.
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
        self.rates = _equal_rates(model, lr, steps, len(self.known))

    def change(self, at: Coordinates, memory: Memory) -> tuple[Tensor, Memory]:
        step = at.step.clamp(max=len(self.rates) - 1)
        known = [self.known.index(name) for name in at.names]
        rates = self.rates[step, torch.tensor(known, device=step.device)]
        return -rates[at.owner] * at.grad, memory
