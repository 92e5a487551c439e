"""What 20 steps of gradient descent reach on the sines of `innerloop learned-loss`, by other means
than a learned loss: the best rate for all tasks or for each, a step that follows from the loss
(Polyak), and a loss whose curvature the kernel of the nets is divided out of. And what the best
rate reaches in 100 steps, which is what a learned loss is measured by.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, jacrev, stack_module_state, vmap

from innerloop.experiments.sine.problem import HIGH, LOW, build_net, draw_sines

_RATES = (0.003, 0.005, 0.008, 0.012, 0.018, 0.025, 0.035, 0.05, 0.07, 0.1, 0.14, 0.2)
_GRID = torch.linspace(LOW, HIGH, 101).unsqueeze(1)
_NET = build_net(0)

Weights = dict[str, Tensor]
Rule = Callable[[Tensor, Tensor], Tensor]
"""The rate of each task, out of losses and squared norms of gradients. [tasks] each."""


def constant(rate: float) -> Rule:
    return lambda losses, norms: torch.full_like(losses, rate)


def polyak(share: float) -> Rule:
    return lambda losses, norms: share * losses / norms


def started(first: int, count: int) -> Weights:
    weights, _ = stack_module_state([build_net(first + k) for k in range(count)])
    return {name: weight.detach() for name, weight in weights.items()}


def said(weights: Weights, x: Tensor) -> Tensor:
    return functional_call(_NET, weights, (x,))


def kernel(weights: Weights) -> Tensor:
    """JJ' on the grid, divided by its size: the mean over nets. [grid, grid]"""

    def of_one(one: Weights) -> Tensor:
        rows = jacrev(lambda w: said(w, _GRID).squeeze(-1))(one)
        whole = torch.cat([row.flatten(1) for row in rows.values()], 1)
        return whole @ whole.T / len(_GRID)

    return vmap(of_one, chunk_size=8)(weights).mean(0)


def squared(weights: Weights, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    return (said(weights, x) - y).square().mean()


def preconditioned(weights: Weights, x: Tensor, y: Tensor, root: Tensor) -> Tensor:
    """e'Pe with P = RR', between the points of the grid along straight lines."""
    place = ((x.squeeze(-1) - LOW) / (HIGH - LOW) * (len(root) - 1)).clamp(0, len(root) - 1.001)
    low = place.floor().long()
    part = (place - low).unsqueeze(-1)
    features = root[low] * (1 - part) + root[low + 1] * part
    return (features * (said(weights, x) - y)).mean(0).square().sum()


class Problem:
    """Nets, each with random weights of its own and a sine of its own, as held-out tasks have."""

    def __init__(self, tasks: int, seed: int) -> None:
        self.start = started(1_000_003 * (seed + 1), tasks)
        generator = torch.Generator().manual_seed(seed)
        self.sines = draw_sines(generator, tasks, shots=100, query=_GRID)

    def errors(self, rule: Rule, steps: int, loss: Callable[..., Tensor], root: Tensor) -> Tensor:
        """Squared error on the grid after so many steps; infinite where it diverged. [tasks]"""
        step = vmap(grad_and_value(loss), in_dims=(0, 0, 0, None))
        weights = self.start
        for _ in range(steps):
            grads, losses = step(weights, *self.sines.support, root)
            norms = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0)
            rates = rule(losses, norms)
            weights = {
                name: weight - rates.view(-1, *[1] * (weight.dim() - 1)) * grads[name]
                for name, weight in weights.items()
            }
        x, y = self.sines.query
        found = (vmap(said)(weights, x) - y).square().mean((1, 2))
        return found.nan_to_num(torch.inf, torch.inf)

    def by_rate(
        self, steps: int, rates: Iterable[float], loss: Callable[..., Tensor], root: Tensor
    ) -> Tensor:
        """[rates, tasks]"""
        return torch.stack([self.errors(constant(r), steps, loss, root) for r in rates])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=200, help="nets and sines (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    problem, none = Problem(args.tasks, args.seed), torch.zeros(1)
    rows = {}
    plain = problem.by_rate(20, _RATES, squared, none)
    rows["20 steps, the best rate for all"] = plain.mean(1).min()
    rows["20 steps, the best rate for each task, chosen by its result"] = plain.min(0).values.mean()
    shares = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
    by_loss = [problem.errors(polyak(c), 20, squared, none).mean() for c in shares]
    rows["20 steps, Polyak's rate times the best of six factors"] = torch.stack(by_loss).min()
    mean = kernel(started(0, 64)).double()
    best = torch.tensor(torch.inf)
    for damping in (13.0, 4.0, 1.5, 0.5, 0.15):
        inverse = damping * torch.linalg.inv(mean + damping * torch.eye(len(mean)).double())
        values, vectors = torch.linalg.eigh(inverse * len(mean))
        root = (vectors * values.clamp(min=0).sqrt()).float()
        best = min(best, problem.by_rate(20, _RATES, preconditioned, root).mean(1).min())
    rows["20 steps, the mean kernel's inverse as e'Pe, best rate and damping"] = best
    rows["100 steps, the best rate for all"] = (
        problem.by_rate(100, _RATES, squared, none).mean(1).min()
    )
    print(f"squared error in the mean over {args.tasks} tasks:")
    for text, value in rows.items():
        print(f"  {text:68} {value.item():.3f}")


if __name__ == "__main__":
    main()
