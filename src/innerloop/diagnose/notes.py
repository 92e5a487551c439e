"""What is worth knowing about a set-up besides the verdict on each meta-parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from innerloop import _tree
from innerloop.backward import Truncated
from innerloop.diagnose.causes import causes
from innerloop.diagnose.judge import Evidence, last, meant
from innerloop.diagnose.meta_parameters import frozen
from innerloop.diagnose.report import Finding, Row


def notes(
    seen: Evidence,
    rows: Sequence[Row],
    findings: Sequence[Finding],
    changed: set[str],
    warned: Sequence[Any],
) -> Iterator[Finding]:
    """Findings that concern the whole, or nothing that is wrong."""
    if not rows and seen.failure is None:
        problem = "There is no meta-parameter: nothing of this inner loop is learned."
        yield Finding("broken", problem, (), "learn=('init',), or learn=('lr',).")
    yield from _writing(seen, findings, changed)
    yield from _val_loss(seen, rows)
    yield from _approximation(seen, rows, findings)
    yield from _settings(seen)
    yield from _precision(seen, findings)
    yield from _growth(seen)
    for stranger in seen.traced.strangers:
        yield Finding(
            "note",
            f"The step uses a tensor, {stranger}, that requires grad and is no parameter of the "
            "inner loop: it gets a gradient, but inner.parameters() does not have it.",
            write="the loss as an nn.Module with it as a parameter.",
        )
    left_out = frozen(seen.inner)
    if left_out:
        shown = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        yield Finding("note", f"Not learned, since requires_grad is False: {shown}.")
    for text in dict.fromkeys(str(w.message) for w in warned if _is_users(w)):
        yield Finding("note", f"A warning was given: {text}")


def _is_users(warning: Any) -> bool:
    return not issubclass(warning.category, DeprecationWarning | PendingDeprecationWarning)


def _writing(seen: Evidence, findings: Sequence[Finding], changed: set[str]) -> Iterator[Finding]:
    """What the user's functions write to although it is not theirs."""
    if "batches" in changed:
        yield Finding(
            "broken",
            "The loss writes in place to its batch, so the next step with it sees other values.",
            write="x = x - mean and not x -= mean, or x = x.clone() first.",
        )
    if "weights" not in changed:
        return
    tracers = (seen.traced.step, seen.traced.val)
    cuts = [cut for tracer in tracers for cut in tracer.cuts if cut.kind == "in place"]
    said = {place for finding in findings for place in finding.where}
    if not cuts:
        yield Finding(
            "broken",
            "The run changed the model's own weights in place (they were put back).",
            write="new tensors, and nothing that ends in an underscore on a weight.",
        )
    elif not {place for cause in causes(cuts) for place in cause.where} <= said:
        cause = causes(cuts)[0]
        yield Finding("broken", cause.problem, cause.where, cause.write)


def _val_loss(seen: Evidence, rows: Sequence[Row]) -> Iterator[Finding]:
    looked, inner = seen.looked, seen.inner
    if meant(inner):
        return
    if looked is not None and seen.steps and not looked.b_norms[-1] and any(looked.direct.values()):
        cuts = seen.traced.val.harmful("val_loss")
        found = causes(cuts) if cuts else []
        yield Finding(
            "broken",
            "L_val does not depend on the trained weights, only on parameters it uses itself "
            "(Requirement I)." + "".join(f" {cause.problem}" for cause in found[:1]),
            found[0].where if found else (),
            found[0].write if found else "a val_loss that calls the model it is handed.",
            tuple(row.name for row in rows if row.part == "init" and row.direct > 0),
        )
    learned = [row.name for row in rows if row.part == "loss" and row.direct > 0]
    if inner.val_loss is None and isinstance(inner.loss, nn.Module) and learned:
        yield Finding(
            "note",
            "L_val is the learned loss itself, so its parameters can make it small without any "
            "training getting better.",
            write="val_loss=, a fixed measure such as cross-entropy.",
            rows=tuple(learned),
        )


def _approximation(
    seen: Evidence, rows: Sequence[Row], findings: Sequence[Finding]
) -> Iterator[Finding]:
    inner = seen.inner
    if inner.first_order and not any("first_order" in f.problem for f in findings):
        yield Finding("note", "first_order=True: second derivatives are off.")
    if not isinstance(inner.backward, Truncated):
        return
    k = inner.backward.k
    for row in rows:
        total = math.fsum(row.per_step)
        if row.part != "init" and seen.steps > k and 0 < total < math.inf:
            share = math.fsum(row.per_step[:-k]) / total
            text = f"Of the norms that the steps add to {row.name}, {share:.0%} come before "
            yield Finding("note", f"{text}{last(k)} and are left out.", rows=(row.name,))


def _settings(seen: Evidence) -> Iterator[Finding]:
    for name, value in seen.inner.hyper.items():
        leaves = [t for t in _tree.flatten(value)[0] if isinstance(t, Tensor)]
        if name in ("momentum", "weight_decay") and not any(bool(t.any()) for t in leaves):
            yield Finding(
                "note",
                f"{name} starts at 0. It gets a gradient here all the same, which may make it "
                "negative: without need, leave it out of learn.",
                rows=(f"settings.{name}",),
            )


def _precision(seen: Evidence, findings: Sequence[Finding]) -> Iterator[Finding]:
    casts = [*seen.traced.step.lowered, *seen.traced.val.lowered]
    places = tuple(dict.fromkeys(str(place) for _, place in casts))[:3]
    if not casts or any(set(places) & set(finding.where) for finding in findings):
        return
    names = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype, _ in casts}))
    yield Finding(
        "note",
        f"Part of the loss is computed in {names}, with 2 or 3 digits; second derivatives lose "
        "more of them, and float16 has nothing below 6e-8 or above 65504.",
        places,
        "the loss itself in float32: loss(model(x).float(), y).",
    )


def _growth(seen: Evidence) -> Iterator[Finding]:
    norms = () if seen.looked is None else seen.looked.b_norms
    if len(norms) < 2 or not 0 < norms[-1] < math.inf or not math.isfinite(norms[0]):
        return
    ratio = norms[0] / norms[-1]
    if ratio > 1e3:
        yield Finding(
            "note",
            f"The gradient explodes on its way back: |B_0| is {ratio:.1e} times |B_J|.",
            write="a smaller inner learning rate, grad_transform=il.clip_norm(1.0), fewer steps.",
        )
    elif ratio < 1e-3:
        yield Finding(
            "note",
            f"The gradient vanishes on its way back: |B_0| is {ratio:.1e} times |B_J|.",
            write="fewer steps, less weight decay, or a learning rate further from 1/curvature.",
        )
