"""An optimizer that is a small network over features of each weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from innerloop.errors import refusal
from innerloop.learned.coordinates import Coordinates
from innerloop.learned.optimizer import LearnedOptimizer, Memory

_TIMES = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class MLPOptimizer(LearnedOptimizer):
    """A network of two hidden layers, the same for every coordinate.

    It reads the gradient, its running means at several timescales, and the weight, each divided by
    its root mean square over the tensor; the logarithms of these roots; and the step, as
    ``tanh(t / T)`` for several T. Its outputs are a direction ``d`` and a size ``s``:
    ``θ += scale · d · exp(s)``.

    Args:
        hidden: width of the network.
        decays: of the running means.
        scale: of the changes.

    L. Metz et al. Understanding and correcting pathologies in the training of learned optimizers.
    ICML 2019. L. Metz et al. Practical tradeoffs between memory, compute, and performance in
    learned optimizers. CoLLAs 2022.

    >>> optimizer = MLPOptimizer(decays=(0.9, 0.99))
    >>> {name: list(m.shape) for name, m in optimizer.memory(5).items()}
    {'means': [5, 2]}
    """

    settings = ("decays", "scale")

    def __init__(
        self,
        hidden: int = 32,
        decays: Sequence[float] = (0.5, 0.9, 0.99, 0.999),
        scale: float = 0.01,
    ) -> None:
        super().__init__()
        if hidden < 1 or not all(0 <= decay < 1 for decay in decays):
            raise refusal(
                f"You wrote MLPOptimizer({hidden}, {tuple(decays)}).",
                "at least one hidden unit, and decays from 0 to 1, without 1.",
                "they are the width of a network, and how much of a running mean stays.",
                "MLPOptimizer(hidden=32, decays=(0.5, 0.9, 0.99, 0.999)).",
            )
        self.hidden, self.decays, self.scale = hidden, tuple(decays), scale
        read = len(decays) + 2
        self.net = nn.Sequential(
            nn.Linear(2 * read + len(_TIMES), hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 2),
        )

    def memory(self, count: int) -> Memory:
        return {"means": self.net[0].weight.new_zeros(count, len(self.decays))}  # type: ignore[operator]

    def change(self, at: Coordinates, memory: Memory) -> tuple[Tensor, Memory]:
        grad, decays = at.grad.unsqueeze(-1), at.grad.new_tensor(self.decays)
        means = decays * memory["means"] + (1 - decays) * grad
        owner = at.owner
        features = self._features(torch.cat([grad, means, at.weight.unsqueeze(-1)], -1), at, owner)
        direction, size = self.net(features).unbind(-1)
        return self.scale * direction * size.exp(), {"means": means}

    def _features(self, read: Tensor, at: Coordinates, owner: Tensor) -> Tensor:
        squares = at.mean(read.square(), owner) + 1e-16  # [tensors, read]
        sizes = squares.log()[owner] / 20
        times = at.step.unsqueeze(-1) / read.new_tensor(_TIMES)
        return torch.cat([read * squares.rsqrt()[owner], sizes, times.tanh()[owner]], -1)
