"""Embeddings whose padding has no derivative, and the switch of attention's fast path."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def plain_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, *args: Any, **kwargs: Any
) -> Tensor:
    """``torch.embedding``, which has no padding below zero."""
    padding = padding_idx if padding_idx >= 0 else None
    found = torch.embedding(weight, indices, -1, *args, **kwargs)
    return found if padding is None else _without_padding(found, indices, padding)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """``F.embedding`` whose padding has no derivative, of any kind."""
    found = functional.embedding(input, weight, None, max_norm, *args, **kwargs)
    if padding_idx is None:
        return found
    return _without_padding(found, input, padding_idx % weight.shape[0])


def _without_padding(found: Tensor, indices: Tensor, padding: int) -> Tensor:
    return torch.where((indices == padding).unsqueeze(-1), found.detach(), found)


class _NoFastPath:
    """While any thread is inside, attention layers do not take torch's path for inference.

    It has no derivative, and under ``vmap`` weights do not look as if they required one. The switch
    is one for the whole process, so entries are counted and the last to leave restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._before = 0, True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._inside += 1

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.backends.mha.set_fastpath_enabled(self._before)


no_fast_path = _NoFastPath()
