"""A family of optimizers: its settings, its state, and one update on packed tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Value = float | Tensor
Slots = dict[str, Any]
Group = dict[str, Any]
"""A parameter group: its settings and options by name."""


class Elsewhere:
    """The loss and its gradients at other weights; ``here``, the loss at the present ones."""

    def __init__(self, function: Callable[[Any], tuple[Tensor, Any]], here: Tensor | None) -> None:
        self.function, self.here = function, here

    def __call__(self, params: Any) -> tuple[Tensor, Any]:
        return self.function(params)


@dataclass(frozen=True)
class Packed:
    """One block of parameters seen as a single real tensor, and what an update needs besides it.

    A block of several parameters is concatenated to ``[elements]``; a block of one keeps its shape.
    Settings are numbers, 0-d tensors, one value per parameter ``[parameters]``, or one per element.
    """

    params: Tensor
    grads: Tensor
    slots: Slots
    hyper: Mapping[str, Any]
    options: Mapping[str, Any]
    spread: Callable[[Any], Any]
    """Takes one value per parameter to one per element; anything else it leaves as it is."""
    evaluate: Elsewhere | None = None
    """The loss and its gradient at other weights, packed alike, for LBFGS."""


def _identity(slots: Slots) -> Slots:
    return slots


def _drop_before_start(slots: Slots) -> Slots:
    """The state to write into torch, which keeps none before the first step."""
    return {} if "step" in slots and not bool((slots["step"] > 0).any()) else slots


@dataclass(frozen=True)
class Family:
    """A pure rule and the ``torch.optim`` class it reproduces."""

    torch_class: type[torch.optim.Optimizer]
    settings: Mapping[str, int]
    """Each continuous setting with its number of components (2 for ``betas``)."""
    update: Callable[[Packed], tuple[Tensor, Slots]]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Each discrete setting with its default."""
    buffers: tuple[str, ...] = ()
    """Slots with the shape of the parameter, zero before the first step."""
    counters: Mapping[str, float] = field(default_factory=lambda: {"step": 0.0})
    """Slots with one value for a parameter, and what they start from. Settings per element make
    them hold one per element."""
    only_with: Mapping[str, str] = field(default_factory=dict)
    """Slots that exist only where a setting or an option is on, with its name."""
    start: Callable[[Tensor, Group], Slots] | None = None
    """The state before the first step, where it is another one, of a real parameter and group."""
    read: Callable[[Slots], Slots] = _identity
    """The slots of a parameter out of its state in torch; ``write`` is the inverse."""
    write: Callable[[Slots], Slots] = _drop_before_start
    layout: str = "elementwise"
    """``"elementwise"`` packs parameters together, ``"tensor"`` takes them one by one because
    their shapes matter, ``"whole"`` needs all of them at once."""
    real_only: bool = False
    optional: frozenset[str] = frozenset()
    """Settings that may be ``None``."""
    update_each: (
        Callable[[Sequence[Tensor], Sequence[Tensor | None], Sequence[Group]], list[Tensor] | None]
        | None
    ) = None
    """An update without a state, cheaper tensor by tensor than packed, given the settings of each
    parameter; ``None`` where the settings ask for a state."""

    @property
    def name(self) -> str:
        return self.torch_class.__name__

    def fresh(self, param: Tensor, group: Mapping[str, Any]) -> Slots:
        """The state of one parameter, given as a real tensor, before its first step."""
        if self.start is not None:
            return self.start(param, dict(group))
        slots = {name: count(value) for name, value in self.counters.items()}
        slots |= {name: torch.zeros_like(param) for name in self.buffers}
        off_slots = [slot for slot, name in self.only_with.items() if off(group.get(name, 0))]
        return {name: slot for name, slot in slots.items() if name not in off_slots}


def count(start: float = 0.0) -> Tensor:
    """A counter of steps. It is a tensor in double precision, on the CPU as torch keeps its own.

    A tensor, so that a compiled step serves every value of it; double, because ``1 - beta ** t``
    loses all its digits in single precision when beta is near 1.
    """
    return torch.full((), start, dtype=torch.float64)


def off(value: Any) -> bool:
    """Tests whether a setting is the number 0, so that its term can be left out.

    A tensor is never off, whatever its value: a setting that starts at 0 must get its gradient.
    """
    return not isinstance(value, Tensor) and value == 0


def regularize(packed: Packed) -> tuple[Tensor, Tensor]:
    """Parameters and gradients after ``maximize`` and weight decay: ``p, g + weight_decay * p``.

    With ``decoupled_weight_decay``, ``(1 - lr * weight_decay) * p, g``.
    """
    grads = ascent(packed)
    if packed.options.get("decoupled_weight_decay"):
        return shrink(packed), grads
    decay = packed.hyper["weight_decay"]
    if not off(decay):
        grads = add_scaled(grads, packed.params, packed.spread(decay))
    return packed.params, grads


def ascent(packed: Packed) -> Tensor:
    """The gradient, with its sign turned under ``maximize``."""
    return -packed.grads if packed.options["maximize"] else packed.grads


def shrink(packed: Packed) -> Tensor:
    """``(1 - lr * weight_decay) * p``: the decay decoupled from the gradient."""
    decay = packed.hyper["weight_decay"]
    if off(decay):
        return packed.params
    return packed.params * packed.spread(1 - packed.hyper["lr"] * decay)


def start_from(packed: Packed, setting: Value, slot: str) -> Tensor:
    """The setting before a parameter's first step, its slot from then on.

    A setting that only acts at the start enters here and not in ``fresh``: the state is made
    without the settings of a step, and the gradient must reach them.
    """
    return torch.where(
        packed.spread(packed.slots["step"] == 0), packed.spread(setting), packed.slots[slot]
    )


def root_of(correction: Value) -> Value:
    """The root of a bias correction, which is 0 only where beta is 1."""
    return correction.sqrt() if isinstance(correction, Tensor) else correction**0.5


def larger(tensor: Tensor, bound: Value) -> Tensor:
    """The elementwise maximum, where the bound may be a number."""
    if isinstance(bound, Tensor):
        return torch.maximum(tensor, bound)
    return torch.clamp(tensor, min=bound)


def smaller(tensor: Tensor, bound: Value) -> Tensor:
    """The elementwise minimum, where the bound may be a number."""
    if isinstance(bound, Tensor):
        return torch.minimum(tensor, bound)
    return torch.clamp(tensor, max=bound)


def add_scaled(base: Tensor, other: Tensor, scale: Value) -> Tensor:
    """``base + scale * other`` in one kernel where ``scale`` is a number.

    Compiled, without ``alpha``: inductor fuses ``add(a, b @ c, alpha=...)`` and loses the factor.
    """
    if isinstance(scale, Tensor) or torch.compiler.is_compiling():
        return base + scale * other
    return torch.add(base, other, alpha=scale)


def average(old: Tensor, new: Tensor, keep: Value) -> Tensor:
    """``keep * old + (1 - keep) * new``."""
    return add_scaled(keep * old, new, 1 - keep)
