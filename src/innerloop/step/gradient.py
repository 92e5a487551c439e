"""What every inner gradient needs: a loss that has one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop._tracing import readable
from innerloop.errors import DivergedError, InnerLoopError, RequirementError, four_part


def check_loss(loss: Any) -> None:
    """Refuse what cannot be an inner loss."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        kind = "complex tensor" if isinstance(loss, Tensor) and loss.is_complex() else "tensor"
        found = f"a {kind} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise InnerLoopError(
            four_part(
                f"You gave {found} as the loss.",
                "a real tensor with one value.",
                "the inner gradient is that of a scalar.",
                "loss.mean() or loss.sum().",
            )
        )
    if not loss.requires_grad:
        raise RequirementError(
            four_part(
                "You gave a loss that does not require grad.",
                "a loss that depends on the model's weights through differentiable operations.",
                "a .detach(), .item(), argmax or torch.no_grad() block on the way cuts the graph.",
                "the loss as a tensor straight from the output of the model you are handed (in "
                "innerloop_ctx: fmodel), with gradients enabled.",
            )
        )
    if readable(loss) and bool(torch.isnan(loss)):
        raise DivergedError(
            four_part(
                "The loss is NaN.",
                "a finite loss.",
                "every weight would be NaN after this step.",
                "a smaller learning rate, clipped gradients (grad_callback= or grad_transform=), "
                "learned settings kept in their range (Learn(transform=...)), or check the input "
                "for NaN.",
            )
        )


def refuse_higher(
    what: str, instead: str = "backward=innerloop.Tape() for the inner one of two nested loops."
) -> None:
    """Raise inside a backward that is itself to be differentiated."""
    if torch.is_grad_enabled():
        raise RequirementError(
            four_part(
                f"{what} was run with create_graph=True, as when an inner loop is differentiated "
                "inside another one.",
                "a backward that has a graph of its own.",
                "this one works with values only, and the outer gradient would be wrong.",
                instead,
            )
        )
