"""What a few-shot learner sees: a support set to learn from, a query set to be measured on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.errors import InnerLoopError, four_part


class Batch(NamedTuple):
    """Pictures and their labels."""

    x: Tensor
    """``[tasks, way*shot, channel, height, width]``, float32 in [0, 1]."""
    y: Tensor
    """``[tasks, way*shot]``, int64 from 0 to way - 1."""


class Episode(NamedTuple):
    """One meta-batch of few-shot tasks; every tensor has a leading task axis.

    Rows are ordered by class: the pictures of label 0 first, then those of label 1, and so on.
    Which class gets which label is drawn anew for every task.
    """

    support: Batch
    """What the inner loop trains on: ``way * shot`` pictures per task."""
    query: Batch
    """What the outer loss is measured on: ``way * query`` other pictures of the same classes."""

    def tasks(self, which: slice) -> Episode:
        """Some of the tasks, still with a task axis."""
        if not isinstance(which, slice):
            raise InnerLoopError(
                four_part(
                    f"You asked for the tasks {which!r}.",
                    "a slice.",
                    "every tensor of an episode has a task axis, which a number would take away.",
                    "episode.tasks(slice(0, 1)) for the first task alone.",
                )
            )
        return Episode(*(Batch(part.x[which], part.y[which]) for part in self))

    def to(self, target: torch.dtype | torch.device | str) -> Episode:
        """The same tasks on another device, or their pictures in another precision."""
        if isinstance(target, torch.dtype) and target.is_floating_point:
            return Episode(*(Batch(part.x.to(target), part.y) for part in self))
        try:
            device = torch.device(target)  # type: ignore[arg-type]
        except (TypeError, RuntimeError) as error:
            raise InnerLoopError(
                four_part(
                    f"You asked for an episode as {target!r}.",
                    "a device, or a dtype of floating-point numbers.",
                    "pictures are numbers between 0 and 1.",
                    "episode.to('cuda') or episode.to(torch.float64).",
                )
            ) from error
        return Episode(*(Batch(part.x.to(device), part.y.to(device)) for part in self))
