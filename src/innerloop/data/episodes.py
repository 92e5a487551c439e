"""Few-shot tasks: a support set to train on, a query set to evaluate on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.data.refusals import refusal
from innerloop.errors import InnerLoopError


class Batch(NamedTuple):
    """Images and their labels."""

    x: Tensor
    """``[tasks, way*shot, channel, height, width]``, float32 in [0, 1]."""
    y: Tensor
    """``[tasks, way*shot]``, int64 from 0 to way - 1."""


class Episode(NamedTuple):
    """One meta-batch of few-shot tasks; every tensor has a leading task axis.

    Rows are ordered by class: the images of label 0 first, then those of label 1, and so on.
    Which class gets which label is drawn anew for every task.
    """

    support: Batch
    """The inner loop's training data: ``way * shot`` images per task."""
    query: Batch
    """The outer loss's data: ``way * query`` other images of the same classes."""

    def tasks(self, which: slice) -> Episode:
        """Return some of the tasks, still with a task axis."""
        if not isinstance(which, slice):
            raise _not_a_slice(which)
        return Episode(*(Batch(part.x[which], part.y[which]) for part in self))

    def to(self, target: torch.dtype | torch.device | str) -> Episode:
        """Return the same tasks on another device, or their images in another precision."""
        if isinstance(target, torch.dtype) and target.is_floating_point:
            return Episode(*(Batch(part.x.to(target), part.y) for part in self))
        try:
            device = torch.device(target)  # type: ignore[arg-type]
        except (TypeError, RuntimeError) as error:
            raise _no_device_or_dtype(target) from error
        return Episode(*(Batch(part.x.to(device), part.y.to(device)) for part in self))


def _not_a_slice(which: object) -> InnerLoopError:
    return refusal(
        f"You asked for the tasks {which!r}.",
        "a slice.",
        "every tensor of an episode has a task axis, which a number would remove.",
        "episode.tasks(slice(0, 1)) for the first task alone.",
    )


def _no_device_or_dtype(target: object) -> InnerLoopError:
    return refusal(
        f"You asked for an episode as {target!r}.",
        "a device, or a dtype of floating-point numbers.",
        "images are numbers between 0 and 1.",
        "episode.to('cuda') or episode.to(torch.float64).",
    )
