"""All weights of a model as the coordinates of one vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.errors import refusal

STEP = "step"
"""In a state: the number of updates of each tensor. [tensors]; all else is [coordinates, ...]."""


class Coordinates(NamedTuple):
    """The input of a learned optimizer: the weights that have a gradient, at one step."""

    names: tuple[str, ...]
    """The names of the tensors, in their order."""
    sizes: tuple[int, ...]
    """The number of coordinates of each tensor. [tensors]"""
    weight: Tensor
    """[coordinates]"""
    grad: Tensor
    """[coordinates]"""
    step: Tensor
    """The number of updates of each tensor so far. [tensors]"""

    @property
    def owner(self) -> Tensor:
        """The index of the tensor that each coordinate belongs to. [coordinates]"""
        # Not repeat_interleave, whose result has a shape that compilers do not know.
        ends = torch.tensor(self.sizes, device=self.weight.device).cumsum(0)
        return torch.bucketize(torch.arange(sum(self.sizes), device=ends.device), ends, right=True)

    def mean(self, values: Tensor, owner: Tensor) -> Tensor:
        """Average over the coordinates of each tensor. [coordinates, ...] -> [tensors, ...]"""
        total = values.new_zeros(len(self.sizes), *values.shape[1:]).index_add(0, owner, values)
        counts = torch.tensor(self.sizes, device=values.device).clamp(min=1)
        return total / counts.view(-1, *[1] * (values.dim() - 1))


def to_vector(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate the numbers of all tensors. [coordinates]"""
    return torch.cat([t.reshape(-1).to(dtype) for t in tensors])


def from_vector(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into tensors of given shapes: the inverse of :func:`to_vector`."""
    parts = row.split([p.numel() for p in like])
    return [part.view(p.shape).to(p.dtype) for part, p in zip(parts, like, strict=True)]


def split_state(state: dict[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """Split a state into one for each tensor."""
    parts: list[dict[str, Tensor]] = [{} for _ in sizes]
    for name, value in state.items():
        pieces = value.unbind() if name == STEP else value.split(list(sizes))
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


def join_states(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the states of tensors: the inverse of :func:`split_state`."""
    joined = {}
    for name in states[0]:
        join = torch.stack if name == STEP else torch.cat
        joined[name] = join([state[name] for state in states])
    return joined


def check_real(params: Mapping[str, Tensor]) -> None:
    """Refuse complex weights, whose imaginary part would be lost."""
    for name, p in params.items():
        if p.is_complex():
            raise refusal(
                f"The weight {name!r} is complex.",
                "real weights.",
                "a learned optimizer maps real numbers to real numbers, for each coordinate.",
                "torch.view_as_real(weight) as the parameter.",
            )
