"""Choosing kernels that can be differentiated twice."""

from __future__ import annotations

import threading
from types import TracebackType

import torch
from torch.backends import cuda


class _MathAttention:
    """While any thread is inside, attention runs on the kernels that have a second derivative.

    The fused kernels of ``scaled_dot_product_attention`` have none, on the CPU either. The switch
    is one for the whole process, so entries are counted and the last to leave restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = (True, True, True)

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = (
                    cuda.flash_sdp_enabled(),
                    cuda.mem_efficient_sdp_enabled(),
                    cuda.cudnn_sdp_enabled(),
                )
                _switch(False, False, False)
            self._inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                _switch(*self._before)


def _switch(flash: bool, efficient: bool, cudnn: bool) -> None:
    cuda.enable_flash_sdp(flash)
    cuda.enable_mem_efficient_sdp(efficient)
    cuda.enable_cudnn_sdp(cudnn)


twice_differentiable = _MathAttention()


def recurrent_forward(module: torch.nn.RNNBase, *args: object, **kwargs: object) -> object:
    """The module's forward without cuDNN, whose recurrent kernels have no second derivative."""
    with torch.backends.cudnn.flags(enabled=False):
        return type(module).forward(module, *args, **kwargs)
