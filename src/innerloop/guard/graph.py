"""The one walker of autograd graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

now: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Autograd's clock in this thread: nodes made from now on have this number or a later one."""


def nodes(
    starts: Iterable[Any], ends: Iterable[Any] = (), since: int = 0
) -> tuple[list[Any], list[Any]]:
    """The nodes below ``starts``, nearest first, and those older than ``since``, where it stops.

    ``ends`` are nodes to leave out. A node with an attribute ``variable`` stands for a leaf.
    """
    seen = set(ends)
    found: list[Any] = []
    older: list[Any] = []
    queue = [node for node in starts if node is not None]
    for node in queue:  # which grows meanwhile
        if node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() < since:
            older.append(node)
            continue
        found.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                queue.append(following)
    return found, older


def reaches(output: Tensor, tensors: Iterable[Tensor]) -> bool:
    """True if a graph leads from ``output`` to one of ``tensors``."""
    wanted = [t for t in tensors if t.requires_grad]
    leaves = {id(t) for t in wanted if t.grad_fn is None}
    ends = {t.grad_fn for t in wanted if t.grad_fn is not None}
    if id(output) in leaves or output.grad_fn in ends:
        return True
    stack, seen = [output.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node in ends or id(getattr(node, "variable", None)) in leaves:
            return True
        seen.add(node)
        stack.extend([following for following, _ in node.next_functions])
    return False
