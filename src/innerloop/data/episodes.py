"""What a few-shot learner sees: a support set to learn from, a query set to be measured on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
        """Some of the tasks."""
        return Episode(*(Batch(part.x[which], part.y[which]) for part in self))

    def to(self, dtype: torch.dtype) -> Episode:
        """The same pictures in another precision."""
        return Episode(*(Batch(part.x.to(dtype), part.y) for part in self))
