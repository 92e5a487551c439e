"""Checks of arguments: the parts of an inner loop."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from innerloop.errors import InnerLoopError, RequirementError, four_part


def check_parts(model: Any, optimizer: Any, loss: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InnerLoopError(
            four_part(
                f"You gave a {type(model).__name__} as the model.",
                "a torch.nn.Module.",
                "its weights are where training starts.",
                "InnerLoop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss).",
            )
        )
    learned = isinstance(optimizer, nn.Module) and all(
        callable(getattr(optimizer, name, None)) for name in ("init", "update")
    )
    if not isinstance(optimizer, torch.optim.Optimizer) and not learned:
        raise InnerLoopError(
            four_part(
                f"You gave {_name_of(optimizer)} as the optimizer.",
                "an instance of a torch.optim class, or a module with init and update.",
                "its settings and its state are where training starts.",
                "torch.optim.SGD(model.parameters(), lr=0.1).",
            )
        )
    if isinstance(loss, type | _Loss) or not callable(loss):
        raise InnerLoopError(
            four_part(
                f"You gave {_name_of(loss)} as the loss.",
                "a function loss(model, batch) or a module.",
                "it is evaluated again at every step.",
                "loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]).",
            )
        )


def _name_of(value: Any) -> str:
    """The name of a class, or of a value's class."""
    return value.__name__ if isinstance(value, type) else type(value).__name__


def check_whole(modules: Iterable[nn.Module], weights: Iterable[Tensor]) -> None:
    """Refuse weights of which every process holds a part; a forward may have gathered them."""
    # Without these imports there are none; and importing them takes longer than all of innerloop.
    tensor, fsdp = (sys.modules.get(f"torch.distributed.{name}") for name in ("tensor", "fsdp"))
    sharded = tensor is not None and any([type(w) is tensor.DTensor for w in weights])
    if sharded or (fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in modules)):
        raise RequirementError(
            four_part(
                "You sharded a part of the inner loop by fully_shard or as DTensors.",
                "whole weights on every process.",
                "sharded ones are gathered by hooks of ordinary training, which the steps of "
                "an inner loop do not run.",
                "DistributedDataParallel(inner), which shares tasks or data; and Remat() or "
                "Binomial(k) to save memory.",
            )
        )


def check_steady(model: nn.Module) -> None:
    """Refuse layers that write to their weights whenever they are called."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise InnerLoopError(
                four_part(
                    f"The layer {name!r} of the model is a {type(module).__name__} with "
                    f"max_norm={module.max_norm}.",
                    "a forward that only reads the weights.",
                    "with max_norm, each call writes to the rows it reads, and a step is a "
                    "function of the weights.",
                    "max_norm=None, and a parametrization (torch.nn.utils.parametrize) that scales "
                    "the rows.",
                )
            )


def warn_of_hooks(params: Mapping[str, Any], optimizer: Any) -> None:
    """Say so where hooks of ordinary training are not part of the inner loop."""
    hooked = [
        name for name, p in params.items() if p._backward_hooks or p._post_accumulate_grad_hooks
    ]
    around = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    what = f"The parameter {hooked[0]!r} has a hook" if hooked else "The optimizer has step hooks"
    if hooked or any(getattr(optimizer, name, None) for name in around):
        warnings.warn(
            four_part(
                f"{what}, which the inner loop does not run.",
                "what is done to inner gradients as a part of the loop.",
                "hooks run when a gradient is accumulated into .grad and when the optimizer steps, "
                "which an inner loop does not do.",
                "grad_transform=..., a function from gradients to gradients, and schedule=...",
            ),
            stacklevel=6,
        )


def check_callable(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, type) or not callable(value)):
        raise InnerLoopError(
            four_part(
                f"You gave {name}={value!r}.",
                "a function, a module, or None.",
                "it is called in every inner loop.",
                "val_loss=lambda model, val: ..., grad_transform=innerloop.clip_norm(1.0).",
            )
        )


def no_settings(learned: Mapping[str, Any], schedule: Any) -> str:
    what = f"learn={tuple(learned)}" if learned else f"schedule={schedule!r}"
    return four_part(
        f"You gave {what} with a learned optimizer.",
        "an optimizer of torch.optim for settings by name.",
        "a learned optimizer has no settings; its weights are meta-parameters already.",
        "learn=('init',) or learn=().",
    )
