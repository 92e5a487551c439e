"""Derivatives along a direction, out of reverse-mode derivatives alone.

torch's forward mode lacks formulas (LSTM, mse_loss) and has wrong ones (batch norm), so it is not
used. A pullback is linear in what is pulled back; differentiating it by that gives the pushforward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Pushforward:
    """The derivative of ``outputs`` along any direction of ``inputs``, in whose graph they are."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self.live = [i for i, t in enumerate(outputs) if t.requires_grad]
        self.count = len(outputs)
        reached = [outputs[i] for i in self.live]
        self.dummies = [torch.zeros_like(t).requires_grad_() for t in reached]
        self.pulled: Sequence[Tensor | None] = [None] * len(inputs)
        if reached and inputs:
            self.pulled = torch.autograd.grad(
                reached, inputs, self.dummies, create_graph=True, allow_unused=True
            )

    def __call__(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """One tangent for each output, given one for each input; ``None`` stands for zero."""
        pairs = [
            (pulled, tangent)
            for pulled, tangent in zip(self.pulled, tangents, strict=True)
            if pulled is not None and tangent is not None and pulled.requires_grad
        ]
        found: list[Tensor | None] = [None] * self.count
        if not pairs:
            return found
        pushed = torch.autograd.grad(
            [p for p, _ in pairs],
            self.dummies,
            [t for _, t in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        for i, tangent in zip(self.live, pushed, strict=True):
            found[i] = tangent
        return found
