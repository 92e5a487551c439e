"""All weights of a model as the coordinates of one vector, whatever tensors they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.errors import InnerLoopError, four_part

STEP = "step"
"""In a state: how many updates each tensor has had. [tensors]; all else is [coordinates, ...]."""


class Coordinates(NamedTuple):
    """What a learned optimizer sees of the weights that have a gradient, at one step."""

    names: tuple[str, ...]
    """Of the tensors, in their order."""
    sizes: tuple[int, ...]
    """How many coordinates each of them has. [tensors]"""
    weight: Tensor
    """[coordinates]"""
    grad: Tensor
    """[coordinates]"""
    step: Tensor
    """How many updates each tensor has had. [tensors]"""

    @property
    def owner(self) -> Tensor:
        """Which tensor each coordinate belongs to. [coordinates]"""
        # Not repeat_interleave, whose result has a shape that compilers do not know.
        ends = torch.tensor(self.sizes, device=self.weight.device).cumsum(0)
        return torch.bucketize(torch.arange(sum(self.sizes), device=ends.device), ends, right=True)

    def mean(self, values: Tensor, owner: Tensor) -> Tensor:
        """The mean over the coordinates of each tensor. [coordinates, ...] -> [tensors, ...]"""
        total = values.new_zeros(len(self.sizes), *values.shape[1:]).index_add(0, owner, values)
        counts = torch.tensor(self.sizes, device=values.device).clamp(min=1)
        return total / counts.view(-1, *[1] * (values.dim() - 1))


def vector(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The numbers of all tensors in a row. [coordinates]"""
    return torch.cat([t.reshape(-1).to(dtype) for t in tensors])


def shaped(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of :func:`vector`."""
    parts = row.split([p.numel() for p in like])
    return [part.view(p.shape).to(p.dtype) for part, p in zip(parts, like, strict=True)]


def parted(state: dict[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """A state as one for each tensor."""
    columns: dict[str, Sequence[Tensor]] = {
        name: value.unbind() if name == STEP else value.split(list(sizes))
        for name, value in state.items()
    }
    return [{name: column[i] for name, column in columns.items()} for i in range(len(sizes))]


def together(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The inverse of :func:`parted`."""
    return {
        name: torch.stack([s[name] for s in states])
        if name == STEP
        else torch.cat([s[name] for s in states])
        for name in states[0]
    }


def check_tensors(params: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse weights that are no coordinates of one real vector."""
    for name, p in params:
        if p.is_complex():
            raise InnerLoopError(
                four_part(
                    f"The weight {name!r} is complex.",
                    "real weights.",
                    "a learned optimizer maps real numbers to real numbers, for each coordinate.",
                    "torch.view_as_real(weight) as the parameter.",
                )
            )
    devices = {p.device for _, p in params}
    if len(devices) > 1:
        raise InnerLoopError(
            four_part(
                f"The weights are on {', '.join(sorted(map(str, devices)))}.",
                "weights on one device.",
                "all of them are coordinates of one vector.",
                "model.to(device).",
            )
        )
