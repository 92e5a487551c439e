"""Weights and data of a case, made once with torch and written down, the same for every system."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from torch import Tensor

import models
from peer_cases import Case

Batch = tuple[Tensor, Tensor]  # inputs and what should come out, [*lead, examples, ...]


def _uniform(low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(*shape, dtype=torch.float64)


def _sines(case: Case, lead: list[list[int]], sizes: list[int]) -> list[Batch]:
    """Every task has an amplitude and a phase of its own."""
    tasks = case.tasks or 1
    amplitude, phase = _uniform(0.1, 5, tasks, 1, 1), _uniform(0, torch.pi, tasks, 1, 1)
    inputs = [_uniform(-5, 5, *a, n, 1) for a, n in zip(lead, sizes, strict=True)]
    return [(x, amplitude * (x - phase).sin()) for x in inputs]


def _images(case: Case, lead: list[list[int]], sizes: list[int]) -> list[Batch]:
    colours, size = case.sizes.get("colours", 1), case.sizes.get("size", 28)
    return [
        (
            torch.randn(*a, n, colours, size, size, dtype=torch.float64),
            (torch.arange(n) % case.sizes["way"]).expand(*a, n),
        )
        for a, n in zip(lead, sizes, strict=True)
    ]


def _text(case: Case, lead: list[list[int]], sizes: list[int]) -> list[Batch]:
    length, vocabulary = case.sizes.get("length", 256), case.sizes.get("vocabulary", 256)
    drawn = [
        torch.randint(vocabulary, (*a, n, length + 1)) for a, n in zip(lead, sizes, strict=True)
    ]
    return [(tokens[..., :-1], tokens[..., 1:]) for tokens in drawn]


def _regression(case: Case, lead: list[list[int]], sizes: list[int]) -> list[Batch]:
    width = case.sizes["widths"][0]
    inputs = [
        torch.randn(*a, n, width, dtype=torch.float64) for a, n in zip(lead, sizes, strict=True)
    ]
    return [(x, x.sum(-1, keepdim=True).sin()) for x in inputs]


_KINDS: dict[str, Callable[[Case, list[list[int]], list[int]], list[Batch]]] = {
    "sines": _sines,
    "images": _images,
    "text": _text,
    "regression": _regression,
}


def _groups(names: list[str]) -> list[int]:
    """The embeddings, every block, and what follows them. One group if there are no blocks."""
    blocks = [int(n.split(".")[1]) + 1 if n.startswith("blocks.") else None for n in names]
    last = max((b for b in blocks if b is not None), default=-1) + 1
    first = ("token", "position")
    return [
        block if block is not None else (0 if name.startswith(first) else last)
        for name, block in zip(names, blocks, strict=True)
    ]


def write(case: Case, path: Path) -> None:
    """Everything in double precision; each system makes of it what it needs."""
    torch.manual_seed(0)
    model = getattr(models, case.network)(**case.sizes)
    tasks = [] if case.tasks is None else [case.tasks]
    lead = [[case.batches, *tasks], tasks]
    train, val = _KINDS[case.data](case, lead, [case.support, case.query])
    weights = {f"weights/{n}": p.detach().double().numpy() for n, p in model.named_parameters()}
    numpy.savez(
        path,
        groups=numpy.array(_groups([name for name, _ in model.named_parameters()])),
        train_x=train[0].numpy(),
        train_y=train[1].numpy(),
        val_x=val[0].numpy(),
        val_y=val[1].numpy(),
        **weights,
    )
