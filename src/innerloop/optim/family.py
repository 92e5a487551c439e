"""A family of optimizers: its settings, its state, and one update on packed tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from innerloop.errors import InnerLoopError, four_part

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
    """The loss and its gradient at other weights, for rules that ask for them (LBFGS)."""


Update = Callable[[Packed], tuple[Tensor, Slots]]
UpdateEach = Callable[
    [list[Tensor], list[Tensor], Mapping[str, Any], Mapping[str, Any]], list[Tensor] | None
]


def _no_slots(params: Tensor, group: Mapping[str, Any]) -> Slots:
    return {}


def _same(slots: Slots) -> Slots:
    return slots


@dataclass(frozen=True)
class Family:
    """A pure rule and the ``torch.optim`` class it reproduces.

    ``settings`` maps each continuous setting to its number of components (2 for ``betas``);
    ``options`` maps each discrete one to its default. ``fresh`` makes the state of one parameter
    before its first step, given the parameter as a real tensor and its group. ``read`` and
    ``write`` translate the state of one parameter from and to torch's dictionary.
    """

    torch_class: type[torch.optim.Optimizer]
    settings: Mapping[str, int]
    update: Update
    options: Mapping[str, Any] = field(default_factory=dict)
    fresh: Callable[[Tensor, Mapping[str, Any]], Slots] = _no_slots
    read: Callable[[Slots], Slots] = _same
    write: Callable[[Slots], Slots] = _same
    layout: str = "elementwise"
    """``"elementwise"`` packs parameters together, ``"tensor"`` takes them one by one because
    their shapes matter, ``"whole"`` needs all of them at once."""
    scalars: frozenset[str] = frozenset({"step"})
    """Slots that hold one value for a whole parameter; all others have its shape. Settings per
    element make them hold one per element."""
    real_only: bool = False
    optional: frozenset[str] = frozenset()
    """Settings that may be ``None``."""
    update_each: UpdateEach | None = None
    """An update that keeps no state and has so few operations that it costs less tensor by tensor
    than packed; it gives ``None`` where the settings or the parameters do not allow it."""
    linear: bool = False
    """Whether, settings aside, an update is linear in weights, gradients and state."""

    @property
    def name(self) -> str:
        return self.torch_class.__name__


def count() -> Tensor:
    """A step counter at 0. It is a tensor in double precision, on the CPU as torch keeps its own.

    A tensor, so that a compiled step serves every value of it; double, because ``1 - beta ** t``
    loses all its digits in single precision when beta is near 1.
    """
    return torch.zeros((), dtype=torch.float64)


def off(value: Any) -> bool:
    """Whether a setting is the number 0, so that its term can be left out.

    A tensor is never off, whatever its value: a setting that starts at 0 must get its gradient.
    """
    return not isinstance(value, Tensor) and value == 0


def decayed(packed: Packed, grads: Tensor) -> Tensor:
    """``g + weight_decay * p``: the penalty as part of the gradient."""
    decay = packed.hyper["weight_decay"]
    if off(decay):
        return grads
    return add_scaled(grads, packed.params, packed.spread(decay))


def shrunk(packed: Packed) -> Tensor:
    """``(1 - lr * weight_decay) * p``: the decay decoupled from the gradient."""
    decay = packed.hyper["weight_decay"]
    if off(decay):
        return packed.params
    return packed.params * packed.spread(1 - packed.hyper["lr"] * decay)


def initially(packed: Packed, setting: Value, slot: str) -> Tensor:
    """The setting before a parameter's first step, its slot from then on.

    A setting that only acts at the start enters here and not in ``fresh``: the state is made
    without the settings of a step, and the gradient must reach them.
    """
    return torch.where(
        packed.spread(packed.slots["step"] == 0), packed.spread(setting), packed.slots[slot]
    )


def once_started(slots: Slots) -> Slots:
    """The state to write into torch: nothing before the first step."""
    return slots if bool((slots["step"] > 0).any()) else {}


def root_of(correction: Value) -> Value:
    """The root of a bias correction, which is 0 only where beta is 1."""
    return correction.sqrt() if isinstance(correction, Tensor) else correction**0.5


def whole(packed: Packed, name: str) -> Any:
    """A setting that acts on a parameter as a whole, refused where it is given per element."""
    value = packed.hyper[name]
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, Tensor) and part.dim() > 0:
            raise InnerLoopError(
                four_part(
                    f"You gave {name!r} a value for each element of a parameter.",
                    "one value for each parameter or group.",
                    f"{name!r} acts on a parameter as a whole.",
                    f"{{{name!r}: [torch.tensor(...)]}} with one value.",
                )
            )
    return value


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
    """``base + scale * other`` in one kernel where ``scale`` is a number."""
    if isinstance(scale, Tensor):
        return base + scale * other
    return torch.add(base, other, alpha=scale)


def ascent(packed: Packed) -> Tensor:
    """The gradient, with its sign turned under ``maximize``."""
    return -packed.grads if packed.options["maximize"] else packed.grads


def average(old: Tensor, new: Tensor, keep: Value) -> Tensor:
    """``keep * old + (1 - keep) * new``."""
    return add_scaled(keep * old, new, 1 - keep)
