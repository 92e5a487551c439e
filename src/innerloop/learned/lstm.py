"""The LSTM optimizer of "Learning to learn by gradient descent by gradient descent"."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from innerloop.errors import refusal
from innerloop.learned.coordinates import Coordinates
from innerloop.learned.optimizer import LearnedOptimizer, Memory


def preprocess_grad(grad: Tensor, scale: float) -> Tensor:
    """Map a gradient of any size to two numbers near [-1, 1]. [...] -> [..., 2]

    ``(log|g| / p, sign g)`` where ``|g| >= exp(-p)``, else ``(-1, exp(p) g)``.

    >>> preprocess_grad(torch.tensor([1.0, -torch.e, 0.0]), 10.0)
    tensor([[ 0.0000,  1.0000],
            [ 0.1000, -1.0000],
            [-1.0000,  0.0000]])
    """
    size = grad.abs()
    large = size >= math.exp(-scale)
    # Masked before the logarithm: 0 * inf would already be NaN in the derivative.
    logarithm = torch.where(large, size, 1.0).log() / scale
    first = torch.where(large, logarithm, -1.0)
    second = torch.where(large, grad.sign(), grad * math.exp(scale))
    return torch.stack([first, second], dim=-1)


class LSTMOptimizer(LearnedOptimizer):
    """An LSTM that maps the gradient of one coordinate to its change.

    All coordinates share its weights, and each has a memory of its own:
    ``h, c = LSTM(preprocess_grad(g), h, c);  θ += scale · (w · h)``.

    Args:
        hidden: width of each layer.
        layers: of the LSTM.
        preprocess: the scale ``p`` of the logarithm that gradients are read by.
        scale: of the changes.

    M. Andrychowicz et al. Learning to learn by gradient descent by gradient descent. NeurIPS 2016.

    >>> optimizer = LSTMOptimizer(hidden=8)
    >>> {name: list(m.shape) for name, m in optimizer.memory(5).items()}
    {'hidden': [5, 2, 8], 'cell': [5, 2, 8]}
    """

    settings = ("preprocess", "scale")

    def __init__(
        self, hidden: int = 20, layers: int = 2, preprocess: float = 10.0, scale: float = 0.1
    ) -> None:
        super().__init__()
        if hidden < 1 or layers < 1 or not 0 < preprocess < 80:
            raise refusal(
                f"You wrote LSTMOptimizer({hidden}, {layers}, {preprocess}).",
                "at least one layer, one hidden unit, and a scale between 0 and 80.",
                "they are the sizes of a network, a divisor, and an exponent.",
                "LSTMOptimizer(hidden=20, layers=2, preprocess=10.0).",
            )
        self.hidden, self.layers, self.preprocess, self.scale = hidden, layers, preprocess, scale
        widths = [2, *[hidden] * (layers - 1)]
        self.gates = nn.ModuleList(nn.Linear(width + hidden, 4 * hidden) for width in widths)
        self.out = nn.Linear(hidden, 1)
        with torch.no_grad():
            for gate in self.gates:
                # Of the forget gate: what was seen is remembered until training says otherwise.
                gate.bias[hidden : 2 * hidden] += 1.0  # type: ignore[index]

    def memory(self, count: int) -> Memory:
        zeros = self.out.weight.new_zeros(count, self.layers, self.hidden)
        return {"hidden": zeros, "cell": zeros}

    def change(self, at: Coordinates, memory: Memory) -> tuple[Tensor, Memory]:
        below = preprocess_grad(at.grad, self.preprocess)
        hiddens, cells = [], []
        before = zip(memory["hidden"].unbind(1), memory["cell"].unbind(1), strict=True)
        for gate, (hidden, cell) in zip(self.gates, before, strict=True):
            enter, keep, new, leave = gate(torch.cat([below, hidden], -1)).chunk(4, -1)
            cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
            below = leave.sigmoid() * cell.tanh()
            hiddens.append(below)
            cells.append(cell)
        change = self.scale * self.out(below).squeeze(-1)
        return change, {"hidden": torch.stack(hiddens, 1), "cell": torch.stack(cells, 1)}

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, layers={self.layers}, scale={self.scale}"
