"""What each way to lose a gradient is called, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from innerloop.diagnose.tracer import Cut

# The surest explanation first.
_ORDER = (
    *("outside", "in place", "detach", "no_grad", "copy", "leaf", "grad"),
    *("number", "rounding", "discrete", "other"),
)
_PROXIES = {
    "argmax": "a differentiable proxy: torch.nn.functional.cross_entropy(logits, labels) in place "
    "of an accuracy, or a softmax in place of the argmax.",
    "argmin": "a softmin, torch.softmax(-x / temperature, -1), in place of the argmin.",
    "topk": "a softmax in place of the choice.",
}
_SOFT = (
    "a differentiable proxy, such as torch.sigmoid((x - threshold) / temperature) for a "
    "comparison, or a weighted sum in place of a choice."
)


_SIGNS = {"gt": ">", "lt": "<", "ge": ">=", "le": "<=", "eq": "==", "ne": "!="}


class Cause(NamedTuple):
    """One way in which a gradient was lost."""

    problem: str
    where: tuple[str, ...]
    write: str
    requirement: str


def causes(cuts: Iterable[Cut]) -> list[Cause]:
    """The cuts in words, the surest kind first and no other if there is one."""
    ranked = sorted(cuts, key=lambda cut: _ORDER.index(cut.kind))
    first = [cut for cut in ranked if cut.kind == ranked[0].kind]
    return [_cause(cut) for cut in first[:3]]


def _cause(cut: Cut) -> Cause:
    problem, write = _explained(cut)
    place = str(cut.place)
    return Cause(problem, (place,) if place else (), write, requirement(cut))


def requirement(cut: Cut) -> str:
    """The requirement of the paper that a cut violates."""
    if cut.stage == "val_loss":
        return "I"
    if cut.stage == "loss":
        return "IIIb"
    settings = any(name.split(".")[0] in ("settings", "optimizer") for name in cut.sources)
    return "IIIa" if settings else "II"


def _explained(cut: Cut) -> tuple[str, str]:
    of = f" of {_named(cut.sources)}" if cut.sources else ""
    by = f" by {_named(cut.sources)}" if cut.sources else ""
    op = cut.op
    if cut.kind == "detach":
        name = ".data" if op == "data" else f".{op}()"
        return (
            f"{name} takes a value{of} out of the graph.",
            f"the same without {name}; keep it for what is only logged, or for a straight-through "
            "estimate, whose gradient is meant to differ.",
        )
    if cut.kind == "number":
        name = {"__float__": "float(...)", "__int__": "int(...)"}.get(op, f".{op}()")
        return (
            f"{name} makes a plain number of a tensor that carries the gradient{of}.",
            f"the tensor itself, without {name}.",
        )
    if cut.kind == "no_grad":
        return (
            f"{op} runs with gradients off, in a torch.no_grad() or inference_mode() block, on "
            f"tensors that carry the gradient{of}.",
            "the same outside of the block; .requires_grad_(False) for weights that should stay as "
            "they are.",
        )
    if cut.kind == "copy":
        return (
            f"{op}(...) copies values{of} and leaves the graph behind.",
            "the tensor itself; torch.stack([...]) to join several.",
        )
    if cut.kind == "leaf":
        return (
            f"A new parameter is made of values{of} and is the start of a graph of its own.",
            "the tensor itself, without nn.Parameter(...) or requires_grad_().",
        )
    if cut.kind == "grad":
        return (
            f"torch.autograd.grad gives a gradient{of} that is itself a constant.",
            "torch.autograd.grad(..., create_graph=True).",
        )
    if cut.kind == "in place":
        return (
            f"{op} writes in place, unseen by autograd, to values{of}: the gradient is that of the "
            "values before, and at the first step the model's own weights change.",
            "a new tensor: weight = model.weight.clamp(-1, 1) and not model.weight.data.clamp_("
            "-1, 1); grad_transform= for what is done to gradients.",
        )
    if cut.kind == "rounding":
        return (
            f"{op} is constant between jumps, so its derivative{by} is zero everywhere.",
            f"x without {op}, or x + (x.{op.strip('_')}() - x).detach() to pass the gradient on: "
            "an estimate, from which finite differences then differ.",
        )
    if cut.kind == "discrete":
        name = f"The comparison {_SIGNS[op]}" if op in _SIGNS else op
        return (
            f"{name} has results that are whole numbers or true and false; they have no derivative"
            f"{by}.",
            _PROXIES.get(op, _SOFT),
        )
    if cut.kind == "outside":
        return (
            f"The function uses {_named(cut.sources)} of a model from outside, and not of the one "
            "that it is handed.",
            "def loss(model, batch): ... model(x) ..., with that argument.",
        )
    return (
        f"{op} gives a result without a gradient{of}.",
        "the same composed of differentiable operations.",
    )


def _named(names: Iterable[str]) -> str:
    found: Sequence[str] = sorted(names)
    shown = ", ".join(found[:3])
    return f"{shown} and {len(found) - 3} more" if len(found) > 3 else shown
