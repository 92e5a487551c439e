"""Resilient propagation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop.optim.family import Family, Packed, Slots, ascent, larger, smaller, start_from
from innerloop.optim.rule import Rule


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    slots, e, h = packed.slots, packed.spread, packed.hyper
    shrink, grow = (e(eta) for eta in h["etas"])
    least, most = (e(size) for size in h["step_sizes"])
    # Gradients enter by their signs alone, which have derivative 0.
    grads = ascent(packed).detach()
    agreement = grads * slots["prev"]
    turned = agreement < 0
    factor = torch.where(agreement > 0, grow, torch.ones_like(grads))
    factor = torch.where(turned, shrink, factor)
    sizes = start_from(packed, h["lr"], "step_size") * factor
    sizes = smaller(larger(sizes, least), most)
    grads = torch.where(turned, 0.0, grads)
    new = {"step": slots["step"] + 1, "prev": grads, "step_size": sizes}
    return packed.params - grads.sign() * sizes, new


RPROP = Family(
    torch_class=torch.optim.Rprop,
    settings={"lr": 1, "etas": 2, "step_sizes": 2},
    options={"maximize": False},
    buffers=("prev", "step_size"),
    update=_update,
)


def rprop(
    lr: Any = 1e-2,
    etas: Any = (0.5, 1.2),
    step_sizes: Any = (1e-6, 50),
    *,
    maximize: bool = False,
) -> Rule:
    r"""Rprop (Riedmiller and Braun, 1993), the variant without weight-backtracking.

    With gradient :math:`g` and the one before it :math:`g'`, ``lr`` = α, ``etas`` = (η₋, η₊) and
    ``step_sizes`` = (Δ₋, Δ₊)::

        Δ ← η₊ Δ  where g g' > 0,   η₋ Δ  where g g' < 0        (Δ = α before the first step)
        Δ ← min(max(Δ, Δ₋), Δ₊)
        g ← 0     where g g' < 0
        θ ← θ - Δ sign(g)

    The step depends on the gradient by its sign alone, so θ has derivative 1 in itself and the rest
    of the derivative comes through α, η and Δ.

    >>> rule = rprop(lr=0.1)
    >>> params = [torch.tensor([1.0, 1.0])]
    >>> params, state = rule.update(params, [torch.tensor([3.0, 0.0])], rule.init(params))
    >>> params
    [tensor([0.9000, 1.0000])]
    """
    return Rule(RPROP, (locals(),))
