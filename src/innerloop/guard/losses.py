"""Checks of losses: of training, and of validation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from innerloop.errors import InnerLoopError, RequirementError, four_part

# The training loss. -----------------------------------------------------------------------------


def check_loss(loss: Any) -> Tensor:
    """The loss as a 0-d tensor; refuses what is not a real scalar."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss.reshape(()) if loss.dim() else loss
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


def no_graph() -> RequirementError:
    """The error for a loss that does not require grad."""
    return RequirementError(
        four_part(
            "You gave a loss that does not require grad.",
            "a loss that depends on the model's weights through differentiable operations.",
            "a .detach(), .item(), argmax or torch.no_grad() block on the way cuts the graph.",
            "the loss as a tensor straight from the output of the model you are handed (in "
            "innerloop_ctx: fmodel), with gradients enabled.",
        )
    )


# The validation loss. ---------------------------------------------------------------------------


def not_a_val_loss(value: Any) -> InnerLoopError:
    found = type(value).__name__
    if isinstance(value, Tensor):
        kind = "a complex tensor" if value.is_complex() else "a tensor"
        found = f"{kind} of shape {tuple(value.shape)}"
    return InnerLoopError(
        four_part(
            f"Your validation loss returned {found}.",
            "a real tensor with one value, or a tuple that begins with one.",
            "the meta-gradient is that of a scalar.",
            "val_loss=lambda model, val: per_example(model, val).mean().",
        )
    )


def no_influence(kind: str) -> RequirementError:
    return RequirementError(
        four_part(
            f"No meta-parameter of {kind} has an influence on the adapted weights.",
            "at least one that has (Requirement IIIa or IIIb).",
            "a .detach() in a transform, a schedule or a loss cuts the graph, or the loop "
            "takes no step.",
            "innerloop.diagnose(inner, train, val), which says where; or call under "
            "torch.no_grad() if no gradient is wanted.",
        )
    )


def val_loss_without_graph() -> RequirementError:
    return RequirementError(
        four_part(
            "The validation loss does not depend on the adapted weights by differentiable "
            "operations.",
            "a differentiable L_val (Requirement I).",
            "an argmax, a comparison, .item(), .detach() or a no_grad block cuts the "
            "graph, so no meta-gradient exists.",
            "a differentiable proxy such as cross-entropy as val_loss, "
            "innerloop.estimate.reinforce in it, or innerloop.estimate.evolution around "
            "the loop; or call under torch.no_grad() if no gradient is wanted.",
        )
    )
