"""L-BFGS with a fixed rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop.optim import refusals
from innerloop.optim.family import Family, Group, Packed, Slots
from innerloop.optim.rule import Rule


def _start(params: Tensor, group: Group) -> Slots:
    """One state for all parameters, in torch's own names; torch keeps it with the first one."""
    return {"func_evals": 0, "n_iter": 0, "old_dirs": [], "old_stps": [], "ro": [], "H_diag": 1.0}


def _read(state: Slots) -> Slots:
    return {name: value for name, value in state.items() if name != "al"}


def _append_last_pair(slots: Slots, grads: Tensor, size: int) -> Slots:
    """The history with the pair of the last iteration, where the curvature along it is positive."""
    change = grads - slots["prev_flat_grad"]
    moved = slots["d"] * slots["t"]
    curvature = change @ moved
    if not bool(curvature > 1e-10):
        return slots
    recent = slice(1 if len(slots["old_dirs"]) == size else 0, None)
    return {
        **slots,
        "old_dirs": [*slots["old_dirs"][recent], change],
        "old_stps": [*slots["old_stps"][recent], moved],
        "ro": [*slots["ro"][recent], 1 / curvature],
        "H_diag": curvature / (change @ change),
    }


def _direction(slots: Slots, grads: Tensor) -> Tensor:
    """Minus the approximate inverse Hessian times the gradient, by the two-loop recursion."""
    pairs = list(zip(slots["old_dirs"], slots["old_stps"], slots["ro"], strict=True))
    result = -grads
    weights = []
    for change, moved, ro in reversed(pairs):
        weights.append(moved @ result * ro)
        result = result - weights[-1] * change
    result = result * slots["H_diag"]
    for (change, moved, ro), weight in zip(pairs, reversed(weights), strict=True):
        result = result + (weight - change @ result * ro) * moved
    return result


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max())


def _update(packed: Packed) -> tuple[Tensor, Slots]:
    evaluate, options, lr = _evaluation(packed), packed.options, packed.spread(packed.hyper["lr"])
    most_evals = options["max_eval"]
    if most_evals is None:
        most_evals = options["max_iter"] * 5 // 4
    sign = -1 if options["maximize"] else 1
    params, grads = packed.params.reshape(-1), sign * packed.grads.reshape(-1)
    if isinstance(lr, Tensor) and lr.dim() > 0:
        lr = lr.reshape(-1)
    here = evaluate(params)[0] if evaluate.here is None else evaluate.here
    loss = sign * float(here.detach())
    evals = 1
    slots = {**packed.slots, "func_evals": packed.slots["func_evals"] + 1}
    if _largest(grads) <= options["tolerance_grad"]:
        return packed.params, slots
    for iteration in range(1, options["max_iter"] + 1):
        first = slots["n_iter"] == 0
        if not first:
            slots = _append_last_pair(slots, grads, options["history_size"])
        direction = _direction(slots, grads)
        rate = torch.clamp(1 / grads.abs().sum(), max=1.0) * lr if first else lr
        before = loss
        slots = {
            **slots,
            "n_iter": slots["n_iter"] + 1,
            "d": direction,
            "t": rate,
            "prev_flat_grad": grads,
            "prev_loss": before,
        }
        if bool(grads @ direction > -options["tolerance_change"]):
            break
        params = params + direction * rate
        if iteration == options["max_iter"]:
            break
        value, grads = evaluate(params)
        loss, grads, evals = sign * float(value.detach()), sign * grads.reshape(-1), evals + 1
        slots["func_evals"] += 1
        if (
            evals >= most_evals
            or _largest(grads) <= options["tolerance_grad"]
            or _largest(direction * rate) <= options["tolerance_change"]
            or abs(loss - before) < options["tolerance_change"]
        ):
            break
    return params.reshape(packed.params.shape), slots


def _evaluation(packed: Packed) -> Any:
    if packed.options["line_search_fn"] is not None:
        raise refusals.line_search(packed.options["line_search_fn"])
    if packed.evaluate is None:
        raise refusals.gradients_alone()
    return packed.evaluate


LBFGS = Family(
    torch_class=torch.optim.LBFGS,
    settings={"lr": 1},
    options={
        "max_iter": 20,
        "max_eval": None,
        "tolerance_grad": 1e-7,
        "tolerance_change": 1e-9,
        "history_size": 100,
        "line_search_fn": None,
        "maximize": False,
    },
    counters={},
    start=_start,
    read=_read,
    update=_update,
    layout="whole",
)


def lbfgs(
    lr: Any = 1,
    max_iter: int = 20,
    max_eval: int | None = None,
    tolerance_grad: float = 1e-7,
    tolerance_change: float = 1e-9,
    history_size: int = 100,
    *,
    maximize: bool = False,
) -> Rule:
    r"""L-BFGS (Liu and Nocedal, 1989) with a fixed rate.

    One update makes up to ``max_iter`` iterations over all parameters at once. With gradient
    :math:`g`, ``lr`` = α and the last ``history_size`` pairs s = θ - θ', y = g - g' with y·s > 0::

        d ← -H g        (H from the pairs by the two-loop recursion, H₀ = (y·s / y·y) I)
        θ ← θ + α d     (the very first time: α min(1, 1 / |g|₁))

    The derivative is that along the path taken: how many iterations are made and which pairs are
    kept is decided by comparisons. ``evaluate(params)`` must give the loss and its gradients,
    made with ``create_graph=True`` or ``torch.func.grad_and_value`` where derivatives are wanted.

    >>> def evaluate(params):
    ...     return (params[0] ** 2).sum(), [2 * params[0]]
    >>> rule = lbfgs()
    >>> params = [torch.tensor([3.0, -4.0])]
    >>> state = rule.init(params)
    >>> params, state = rule.update(params, evaluate(params)[1], state, evaluate=evaluate)
    >>> params[0].abs().max() < 1e-6
    tensor(True)
    """
    return Rule(LBFGS, (locals(),))
