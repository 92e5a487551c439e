"""Baselines of the score-function estimator, which lower its variance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop.errors import InnerLoopError, refusal


class RunningMean:
    """A running mean of the metric, updated explicitly.

    It changes only in :meth:`update`, after the gradient was taken. A baseline that has seen the
    samples it is subtracted from would bias the estimate; and a validation loss may be computed
    more than once, for instance to find the fastest way to run tasks.

    >>> baseline = RunningMean(decay=0.5)
    >>> baseline.value
    0.0
    >>> baseline.update(torch.tensor(4.0))
    >>> baseline.update(torch.tensor(2.0))
    >>> baseline.value
    3.0
    """

    def __init__(self, decay: float = 0.9) -> None:
        if not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise refusal(
                f"You gave decay={decay!r} to RunningMean.",
                "a number from 0 to 1, without 1.",
                "it is the weight of the old mean.",
                "RunningMean(decay=0.9).",
            )
        self.decay = float(decay)
        self.value = 0.0
        self._started = False

    def update(self, value: Tensor | float) -> None:
        """Add a metric to the mean; of several values, their mean."""
        new = torch.as_tensor(value).detach().double().mean().item()
        self.value = self.decay * self.value + (1 - self.decay) * new if self._started else new
        self._started = True

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "begun": self._started}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._started = state["value"], state["begun"]

    def __repr__(self) -> str:
        return f"RunningMean(decay={self.decay}, value={self.value:.4g})"


def baseline_values(given: Any, values: Tensor) -> Tensor:
    """Return the baseline of each value; the first axis of values is the samples."""
    if isinstance(given, str) and given == "leave-one-out":
        if len(values) < 2:
            raise _wrong_baseline("'leave-one-out' with samples=1", "2 samples or more")
        return (values.sum(0) - values) / (len(values) - 1)
    if given is None:
        return torch.zeros_like(values)
    number = given.value if isinstance(given, RunningMean) else given
    if isinstance(number, bool) or not isinstance(number, int | float | Tensor):
        raise _wrong_baseline(
            repr(given), "'leave-one-out', a RunningMean, a number, a tensor, or None"
        )
    found = torch.as_tensor(number).detach().to(values)
    shape = tuple(values.shape[1:])
    sizes = zip(reversed(found.shape), reversed(shape), strict=False)
    if found.dim() > len(shape) or any(own not in (1, size) for own, size in sizes):
        raise _wrong_baseline(f"a tensor of shape {tuple(found.shape)}", f"one like {shape}")
    return found.expand_as(values)


def _wrong_baseline(wrote: str, needed: str) -> InnerLoopError:
    return refusal(
        f"You gave baseline={wrote} to reinforce.",
        f"{needed}.",
        "it is subtracted from the metric of each sample and must not depend on that sample.",
        "reinforce(logits, metric, samples=8, baseline='leave-one-out').",
    )
