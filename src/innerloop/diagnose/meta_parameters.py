"""The meta-parameters of an inner loop, by name."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from innerloop import _tree
from innerloop.inner_loop import InnerLoop
from innerloop.modules.functional import functional
from innerloop.optim import from_torch

_PARTS = {
    "model": "init",
    "settings": "setting",
    "loss": "loss",
    "optimizer": "optimizer",
    "val_loss": "val_loss",
}


class MetaParameter(NamedTuple):
    """One of them; ``name`` is that of ``inner.named_parameters()``, wrappers left out."""

    name: str
    tensor: Tensor
    part: str


def meta_parameters(inner: InnerLoop) -> list[MetaParameter]:
    """φ: the parameters of the loop, and tensors that the optimizer was built with."""
    weights = {id(p): f"model.{name}" for name, p in functional(inner.model).params.items()}
    found = [
        MetaParameter(weights.get(id(p), name), p, _PARTS.get(name.split(".")[0], "other"))
        for name, p in inner.named_parameters()
        if p.requires_grad
    ]
    known = {id(entry.tensor) for entry in found}
    for name, tensor in _inside_the_optimizer(inner):
        if id(tensor) not in known:
            found.append(MetaParameter(name, tensor, "setting"))
    return found


def frozen(inner: InnerLoop) -> list[str]:
    """Parameters of the loop that do not require grad."""
    return [name for name, p in inner.named_parameters() if not p.requires_grad]


def _inside_the_optimizer(inner: InnerLoop) -> list[tuple[str, Tensor]]:
    if not isinstance(inner.optimizer, torch.optim.Optimizer):
        return []
    hyper = from_torch(inner.optimizer).hyper
    return [
        (f"optimizer.{name}" if i == 0 else f"optimizer.{name}[{i}]", value)
        for name, values in hyper.items()
        for i, value in enumerate(_tree.flatten(values)[0])
        if isinstance(value, Tensor) and value.requires_grad
    ]
