"""In-place writes: version counters of tensors that must keep their values."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from innerloop.errors import InnerLoopError, four_part


class Unwritten:
    """Tensors that must not be written to before a backward has used them."""

    def __init__(self) -> None:
        # Weakly: a batch that was made for one step is not to be kept for this.
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def add(self, leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not leaf.is_inference():
                known = self._versions.get(id(leaf))
                if known is None or known[0]() is not leaf:
                    self._versions[id(leaf)] = (weakref.ref(leaf), leaf._version)

    def check(self) -> None:
        """Raise an error if one was written to since it was added."""
        for reference, version in self._versions.values():
            tensor = reference()
            if tensor is not None and tensor._version != version:
                raise written_too_early(tensor)


def written_too_early(tensor: Tensor) -> InnerLoopError:
    """The error for a tensor that was written to between forward and backward."""
    return InnerLoopError(
        four_part(
            f"A tensor of shape {tuple(tensor.shape)} (a weight, a setting or part of a batch) "
            "was written to in place between the forward and the backward.",
            "the values the inner loop ran with.",
            "the backward computes its steps a second time from them.",
            "backward() before optimizer.step() or before reusing a buffer, or a .clone() of what "
            "is overwritten.",
        )
    )


def versions_of(named: Mapping[str, Any]) -> dict[str, int]:
    """The version of each tensor, by name."""
    return {name: p._version for name, p in named.items() if isinstance(p, Tensor)}


def check_unwritten(named: Mapping[str, Any], versions: Mapping[str, int]) -> None:
    """Refuse a loss that has written to the weights it was handed."""
    for name, version in versions.items():
        if named[name]._version != version:
            raise InnerLoopError(
                four_part(
                    f"The loss, or the model's forward, wrote in place to the weight {name!r}.",
                    "a forward that only reads the weights.",
                    "they are the model's own at the first step, and a step is a function of them.",
                    "the changed weight as a new tensor: torch.nn.utils.parametrize, or "
                    "weight.clamp(...) without the underscore where it is used.",
                )
            )
