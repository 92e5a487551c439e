"""A module as a function of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from innerloop.modules import refusals
from innerloop.modules.replica import (
    Replicator,
    Template,
    copy_buffers,
    exact_class,
    match_weights,
)
from innerloop.modules.tree import named_tensors, survey, unwrap


class Functional:
    """A module as a pure function: ``f(params, *args, **kwargs)``.

    ``params`` is a mapping by name or a sequence in the order of ``module.parameters()``. All
    other arguments go to ``forward`` as they are. See :func:`functional`.
    """

    def __init__(self, module: nn.Module) -> None:
        survey(module)
        self.module = unwrap(module)

    @property
    def params(self) -> dict[str, Tensor]:
        """The module's own parameters by name, each tied one once."""
        return named_tensors(self.module, "_parameters")

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The module's own buffers by name."""
        return named_tensors(self.module, "_buffers")

    def bind(
        self,
        params: Mapping[str, Tensor] | Sequence[Tensor],
        buffers: Mapping[str, Tensor] | None = None,
    ) -> nn.Module:
        """A module with these weights: a new replica, independent of every other one.

        Buffers not given are copies of the module's own; those given are copied too, so what the
        forward does to them stays in the replica. Read them with ``replica.named_buffers()``.
        """
        own, own_buffers = self.params, self.buffers
        if torch.is_grad_enabled():
            check_buffers({**own_buffers, **(buffers or {})})
        tensors = dict(zip(map(id, own.values()), match_weights(params, own), strict=True))
        values = copy_buffers(buffers, own_buffers)
        tensors.update(zip(map(id, own_buffers.values()), values, strict=True))
        return Replicator(tensors).copy(survey(self.module), exact_class)

    def template(self) -> Template:
        """The module as it is now, to be bound to weights many times."""
        return Template(self.module)

    def __call__(
        self, params: Mapping[str, Tensor] | Sequence[Tensor], /, *args: Any, **kwargs: Any
    ) -> Any:
        return self.bind(params)(*args, **kwargs)

    def __repr__(self) -> str:
        return f"functional({type(self.module).__name__})"


def functional(module: nn.Module) -> Functional:
    """Any ``nn.Module`` as a function of its weights; the module itself is never touched.

    >>> net = nn.Linear(2, 1)
    >>> f = functional(net)
    >>> weights = {name: torch.ones_like(p) for name, p in f.params.items()}
    >>> f(weights, torch.tensor([[2.0, 3.0]]))
    tensor([[6.]])

    ``f.bind(weights)`` gives a module with these weights, for other methods than ``forward``.
    """
    return Functional(module)


def check_buffers(buffers: Mapping[str, Tensor]) -> None:
    """Refuses buffers that require grad."""
    for name, buffer in buffers.items():
        if buffer.requires_grad:
            raise refusals.buffer_with_gradient(name, buffer)
