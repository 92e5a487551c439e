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

    Every time, training starts from a copy of the model and of the optimizer's state as they are
    now (or from the carried state of ``Truncated(carry=True)``), runs over ``train``, and is
    measured on ``val``; the model, the optimizer and their gradients are left as they are, except
    for what ``inner`` learns. ``train`` and ``val`` may be functions without arguments that give
    new data for every update. ``tasks`` is that of ``inner(train, val)``; the mean over tasks
    counts. Random numbers of the ordinary run, as of its dropout, go on where they were, but for
    those that such functions draw; an update has others, which follow from the random state of the
    run and from the meta-parameters, so that a resumed run has the same ones. An LBFGS evaluates an
    update several times: from the same state, on the same data, with the same random numbers.
    Returns the validation losses.

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
    phi = _learned(inner, meta_optimizer, updates)
    devices = devices_of(inner.parameters())
    if not callable(train):
        with restore_randomness(devices):  # a DataLoader draws a seed even if it does not shuffle
            _seed_anew(devices, phi)
            train = as_batches(train)
    losses: list[Tensor] = []

    def evaluated(batches: Any, judged: Any) -> Tensor:
        # Lines 2 to 9 are the forward of the loop, lines 10 to 15 its backward.
        value = inner(batches, judged, tasks=tasks).mean()
        grads = torch.autograd.grad(value, phi, allow_unused=True)
        if all(grad is None for grad in grads):
            raise RequirementError(_NOTHING)
        _check_finite(inner, value, dict(zip(phi, grads, strict=True)))
        for param, grad in zip(phi, grads, strict=True):
            param.grad = grad
        return value.detach()

    kept = [p.grad for p in phi]
    try:
        for _ in range(updates):  # line 1
            once = partial(evaluated, _given(train), _given(val))
            carried = inner._carried
            with restore_randomness(devices):
                _seed_anew(devices, phi)
                try:
                    losses.append(_taken(inner, meta_optimizer, once))
                except BaseException:
                    inner._carried = carried  # an update that was not taken leaves no trace
                    raise
    finally:
        for param, grad in zip(phi, kept, strict=True):
            param.grad = grad
    return losses


def _seed_anew(devices: Devices, phi: list[Tensor]) -> None:
    """Random numbers that differ from the run's and from those of other updates."""
    now = Randomness(devices)
    digest = hashlib.sha256(b"".join(bytes(s.cpu().numpy()) for s in now.states))
    for p in phi:
        real = torch.view_as_real(p.detach()) if p.is_complex() else p.detach()
        flat = real.flatten().to(torch.float64)
        # Weighted: what is learned may keep its sum.
        said = flat @ torch.arange(1.0, len(flat) + 1, dtype=flat.dtype, device=p.device).cos()
        digest.update(struct.pack("d", said.item()))
    seed_generators(devices, int.from_bytes(digest.digest()[:7], "big"))


def _taken(
    inner: InnerLoop, meta_optimizer: torch.optim.Optimizer, once: Callable[[], Tensor]
) -> Tensor:
    if isinstance(meta_optimizer, torch.optim.LBFGS):
        return meta_optimizer.step(_repeatable(inner, once))  # type: ignore[arg-type, return-value]
    with torch.enable_grad():
        found = once()
    meta_optimizer.step()  # line 16
    return found


def _repeatable(inner: InnerLoop, once: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The same from the same state and with the same random numbers, whenever it is called."""
    carried, randomness = inner._carried, Randomness(devices_of(inner.parameters()))

    def again() -> Tensor:
        inner._carried = carried
        randomness.set()
        return once()

    return again


def _check_finite(inner: InnerLoop, value: Tensor, grads: dict[Tensor, Tensor | None]) -> None:
    """A step along NaN would spoil the meta-parameters and the meta-optimizer for good."""
    broken = [p for p, grad in grads.items() if grad is not None and not grad.isfinite().all()]
    if value.isfinite() and not broken:
        return
    names = {id(p): name for name, p in inner.named_parameters()}
    said = ", ".join(names.get(id(p), "a parameter of another module") for p in broken)
    what = f"its gradient is not finite for {said}" if said else "its gradient is finite"
    raise DivergedError(
        four_part(
            f"The validation loss is {value.item():g} after training; {what}.",
            "finite numbers.",
            "one step along others makes the meta-parameters NaN; none was taken.",
            "smaller learning rates, grad_transform=innerloop.clip_norm(...), or look at the "
            "validation data; innerloop.diagnose(inner, train, val) says more.",
        )
    )


_NOTHING = four_part(
    "No meta-parameter of the inner loop has an influence on the validation loss.",
    "at least one that has.",
    "a gradient that reaches nothing updates nothing.",
    "innerloop.diagnose(inner, train, val), which says where the path ends.",
)


def _learned(inner: Any, meta_optimizer: Any, updates: Any) -> list[Tensor]:
    """The meta-parameters that the meta-optimizer updates, or an error."""
    if not isinstance(updates, int) or isinstance(updates, bool) or updates < 0:
        raise InnerLoopError(_wrong(f"updates={updates!r}", "a whole number"))
    if not isinstance(inner, InnerLoop):
        raise InnerLoopError(_wrong(f"a {type(inner).__name__} as inner", "an InnerLoop"))
    if not isinstance(meta_optimizer, torch.optim.Optimizer):
        found = meta_optimizer if isinstance(meta_optimizer, type) else type(meta_optimizer)
        raise InnerLoopError(
            _wrong(f"{found.__name__} as the meta-optimizer", "an instance of a torch.optim class")
        )
    known = {id(p) for p in inner.parameters()}
    phi = [p for group in meta_optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not any(id(p) in known for p in phi):
        raise InnerLoopError(
            _wrong("a meta-optimizer without any parameter of inner", "one over meta-parameters")
        )
    return phi


def _wrong(wrote: str, needed: str) -> str:
    return four_part(
        f"You gave {wrote} to meta_update.",
        f"{needed}.",
        "it updates the parameters of an inner loop by a meta-optimizer, some number of times.",
        "meta_update(inner, train, val, torch.optim.Adam(inner.parameters()), updates=1).",
    )


def _given(data: Any | Callable[[], Any]) -> Any:
    return data() if callable(data) else data
