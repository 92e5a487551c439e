"""Algorithm 1 whole: meta-parameters updated in the middle of an ordinary training run."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from innerloop.errors import DivergedError, InnerLoopError, RequirementError, four_part
from innerloop.guard.randomness import (
    Devices,
    Randomness,
    devices_of,
    restore_randomness,
    seed_generators,
)
from innerloop.inner_loop import InnerLoop
from innerloop.tasks import Way
from innerloop.unroll import as_batches


def meta_update(
    inner: InnerLoop,
    train: Any,
    val: Any,
    meta_optimizer: torch.optim.Optimizer,
    updates: int = 1,
    *,
    tasks: bool | Way | None = None,
) -> list[Tensor]:
    """Update the meta-parameters ``updates`` times by the exact meta-gradient (Algorithm 1).

    Each update trains from a copy of the model and of the optimizer's state as they are now (or
    from the carried state of ``Truncated(carry=True)``) over ``train``, and is measured on ``val``.
    The model, the optimizer and their gradients stay as they are, except for what ``inner`` learns.
    Returns the validation losses.

    Random numbers: those of the ordinary run, as of its dropout, are not touched, except by
    functions that draw data. An update has random numbers of its own, which follow from the random
    state of the run and from the meta-parameters, so a resumed run repeats them. An LBFGS evaluates
    an update several times: from the same state, on the same data, with the same random numbers.

    Args:
        inner: the inner loop.
        train: one batch for each step, or a function without arguments that returns new ones for
            every update.
        val: the data of L_val, or such a function.
        meta_optimizer: the optimizer of meta-parameters of ``inner``.
        updates: the number of updates.
        tasks: as for ``inner(train, val)``; the mean over tasks counts.

    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> loss = lambda model, x: (model(x) - 1).square().mean()
    >>> inner = InnerLoop(model, optimizer, loss, learn=("lr",))
    >>> meta = torch.optim.Adam(inner.parameters(), lr=1e-3)
    >>> x = torch.ones(4, 1)
    >>> losses = meta_update(inner, [x] * 5, x, meta, updates=3)
    >>> inner.write_to(optimizer)  # the learned rate, for the ordinary training that goes on
    >>> optimizer.param_groups[0]["lr"] > 0.01
    True
    """
    phi = _updated_parameters(inner, meta_optimizer, updates)
    devices = devices_of(inner.parameters())
    if not callable(train):
        with restore_randomness(devices):  # a DataLoader draws a seed even if it does not shuffle
            _seed_anew(devices, phi)
            train = as_batches(train)

    def evaluate(batches: Any, held_out: Any) -> Tensor:
        """Sets the meta-gradient and returns L_val."""
        # Lines 2 to 9 are the forward of the loop, lines 10 to 15 its backward.
        value = inner(batches, held_out, tasks=tasks).mean()
        grads = torch.autograd.grad(value, phi, allow_unused=True)
        if all(grad is None for grad in grads):
            raise _nothing_reached()
        _check_finite(inner, value, dict(zip(phi, grads, strict=True)))
        for param, grad in zip(phi, grads, strict=True):
            param.grad = grad
        return value.detach()

    losses: list[Tensor] = []
    kept = [p.grad for p in phi]
    try:
        for _ in range(updates):  # line 1
            batches, held_out = _draw(train), _draw(val)
            carried = inner._carried
            with restore_randomness(devices):
                _seed_anew(devices, phi)
                try:
                    losses.append(
                        _take_step(inner, meta_optimizer, partial(evaluate, batches, held_out))
                    )
                except BaseException:
                    inner._carried = carried  # an update that was not taken leaves no trace
                    raise
    finally:
        for param, grad in zip(phi, kept, strict=True):
            param.grad = grad
    return losses


def _draw(data: Any | Callable[[], Any]) -> Any:
    return data() if callable(data) else data


def _seed_anew(devices: Devices, phi: list[Tensor]) -> None:
    """Seed random numbers that differ from the run's and from those of other updates."""
    now = Randomness(devices)
    digest = hashlib.sha256(b"".join(bytes(s.cpu().numpy()) for s in now.states))
    for p in phi:
        real = torch.view_as_real(p.detach()) if p.is_complex() else p.detach()
        flat = real.flatten().to(torch.float64)
        # Weighted: what is learned may keep its sum.
        weights = torch.arange(1.0, len(flat) + 1, dtype=flat.dtype, device=p.device).cos()
        digest.update(struct.pack("d", (flat @ weights).item()))
    seed_generators(devices, int.from_bytes(digest.digest()[:7], "big"))


def _take_step(
    inner: InnerLoop, meta_optimizer: torch.optim.Optimizer, evaluate: Callable[[], Tensor]
) -> Tensor:
    """One step of the meta-optimizer; an LBFGS repeats the evaluation from the same state."""
    if not isinstance(meta_optimizer, torch.optim.LBFGS):
        with torch.enable_grad():
            value = evaluate()
        meta_optimizer.step()  # line 16
        return value
    carried, randomness = inner._carried, Randomness(devices_of(inner.parameters()))

    def evaluate_again() -> Tensor:
        inner._carried = carried
        randomness.set()
        return evaluate()

    return meta_optimizer.step(evaluate_again)  # type: ignore[arg-type, return-value]


def _updated_parameters(inner: Any, meta_optimizer: Any, updates: Any) -> list[Tensor]:
    """The meta-parameters that the meta-optimizer updates. Refuses wrong arguments."""
    if not isinstance(updates, int) or isinstance(updates, bool) or updates < 0:
        raise _wrong(f"updates={updates!r}", "a whole number")
    if not isinstance(inner, InnerLoop):
        raise _wrong(f"a {type(inner).__name__} as inner", "an InnerLoop")
    if not isinstance(meta_optimizer, torch.optim.Optimizer):
        found = meta_optimizer if isinstance(meta_optimizer, type) else type(meta_optimizer)
        needed = "an instance of a torch.optim class"
        raise _wrong(f"{found.__name__} as the meta-optimizer", needed)
    known = {id(p) for p in inner.parameters()}
    phi = [p for group in meta_optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not any(id(p) in known for p in phi):
        needed = "one over meta-parameters"
        raise _wrong("a meta-optimizer without any parameter of inner", needed)
    return phi


def _wrong(wrote: str, needed: str) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"You gave {wrote} to meta_update.",
            f"{needed}.",
            "it updates the parameters of an inner loop by a meta-optimizer, some number of times.",
            "meta_update(inner, train, val, torch.optim.Adam(inner.parameters()), updates=1).",
        )
    )


def _nothing_reached() -> RequirementError:
    return RequirementError(
        four_part(
            "No meta-parameter of the inner loop has an influence on the validation loss.",
            "at least one that has.",
            "a gradient that reaches nothing updates nothing.",
            "innerloop.diagnose(inner, train, val), which says where the path ends.",
        )
    )


def _check_finite(inner: InnerLoop, value: Tensor, grads: dict[Tensor, Tensor | None]) -> None:
    """Refuses a step along NaN, which would spoil φ and the meta-optimizer for good."""
    broken = [p for p, grad in grads.items() if grad is not None and not grad.isfinite().all()]
    if value.isfinite() and not broken:
        return
    names = {id(p): name for name, p in inner.named_parameters()}
    listed = ", ".join(names.get(id(p), "a parameter of another module") for p in broken)
    what = f"its gradient is not finite for {listed}" if listed else "its gradient is finite"
    raise DivergedError(
        four_part(
            f"The validation loss is {value.item():g} after training; {what}.",
            "finite numbers.",
            "one step along others makes the meta-parameters NaN; none was taken.",
            "smaller learning rates, grad_transform=innerloop.clip_norm(...), or look at the "
            "validation data; innerloop.diagnose(inner, train, val) says more.",
        )
    )
