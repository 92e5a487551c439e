"""The texts of a report: problems, and the code to write instead."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from innerloop.backward import Implicit, Truncated
from innerloop.diagnose.report import Finding
from innerloop.errors import InnerLoopError, four_part

if TYPE_CHECKING:
    from innerloop.diagnose.runs import Failure
    from innerloop.diagnose.tracer import Cut
    from innerloop.inner_loop import InnerLoop

# Cuts. ------------------------------------------------------------------------------------------

CUTS = {
    "outside": (
        "The function uses {names} of a model from outside, and not of the one that it is given.",
        "def loss(model, batch): ... model(x) ..., with that argument.",
    ),
    "in place": (
        "{op} writes in place, unseen by autograd, to values{of}: the gradient is that of the "
        "values before, and at the first step the model's own weights change.",
        "a new tensor: weight = model.weight.clamp(-1, 1) and not model.weight.data.clamp_(-1, 1); "
        "grad_transform= for changes of gradients.",
    ),
    "detach": (
        "{op} takes a value{of} out of the graph.",
        "the same without {op}; keep it for values that are only logged, or for a straight-through "
        "estimate, whose gradient is meant to differ.",
    ),
    "no_grad": (
        "{op} runs with gradients off, in a torch.no_grad() or inference_mode() block, on tensors "
        "that carry the gradient{of}.",
        "the same outside of the block; .requires_grad_(False) for weights that should stay as "
        "they are.",
    ),
    "copy": (
        "{op}(...) copies values{of} and leaves the graph behind.",
        "the tensor itself; torch.stack([...]) to join several.",
    ),
    "leaf": (
        "A new parameter is made of values{of} and starts a graph of its own.",
        "the tensor itself, without nn.Parameter(...) or requires_grad_().",
    ),
    "grad": (
        "torch.autograd.grad returns a gradient{of} that is itself a constant.",
        "torch.autograd.grad(..., create_graph=True).",
    ),
    "rounding": (
        "{op} is constant between jumps, so its derivative{by} is zero everywhere.",
        "x without {op}, or x + (x.{op}() - x).detach() to pass the gradient on: an estimate, from "
        "which finite differences then differ.",
    ),
    "discrete": (
        "{op} returns integers or booleans, which have no derivative{by}.",
        "a differentiable proxy: torch.nn.functional.cross_entropy(logits, labels) in place of an "
        "accuracy, a softmax in place of an argmax or a choice, torch.sigmoid((x - threshold) / "
        "temperature) in place of a comparison.",
    ),
    "other": (
        "{op} returns a result without a gradient{of}.",
        "the same composed of differentiable operations.",
    ),
    "number": (
        "{op} makes a plain number of a tensor that carries the gradient{of}.",
        "the tensor itself, without {op}.",
    ),
}
"""By kind of cut the problem and what to write, the surest explanation first."""

_SHOWN = {
    **{"data": ".data", "detach": ".detach()", "detach_": ".detach_()"},
    **{"__float__": "float(...)", "__int__": "int(...)", "item": ".item()"},
    **{"tolist": ".tolist()", "numpy": ".numpy()", "round_": "round", "floor_": "floor"},
    **{"gt": "The comparison >", "lt": "The comparison <", "ge": "The comparison >="},
    **{"le": "The comparison <=", "eq": "The comparison ==", "ne": "The comparison !="},
}


def describe_cut(cut: Cut) -> tuple[str, str]:
    """The problem and what to write, for one cut."""
    names = _join(cut.sources)
    fields = {
        "op": _SHOWN.get(cut.op, cut.op),
        "names": names,
        "of": f" of {names}" if names else "",
        "by": f" by {names}" if names else "",
    }
    problem, write = CUTS[cut.kind]
    return problem.format(**fields), write.format(**fields)


def _join(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


NO_GRADIENT = "No gradient arrives."
PART_MISSING = "A part of the gradient is missing, as finite differences show."

# Errors of the loop. ----------------------------------------------------------------------------


def error(failure: Failure) -> Finding:
    """An exception: the advice that it gives itself, or that its message allows."""
    wrong, _, rest = failure.message.partition(" Needed: ")
    if rest:
        problem, write = wrong, rest.partition(" Write: ")[2]
    elif "inplace operation" in failure.message:
        problem = "An operation in place overwrote values that the gradient needs."
        write = "the same out of place: x = x + y and not x += y, x.relu() and not x.relu_()."
    else:
        problem = f"The run ended with {failure.kind}."
        write = "code that avoids the error below."
    message = f"{failure.kind}: {failure.message}"
    return Finding("broken", problem, write=write, message=message)


def not_an_inner_loop(given: object) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"You gave a {type(given).__name__} to diagnose.",
            "an innerloop.InnerLoop.",
            "a diagnosis runs its model, optimizer and loss.",
            "diagnose(InnerLoop(model, optimizer, loss), train, val).",
        )
    )


# Gradients that are missing, wrong or not finite. -----------------------------------------------

HALF_PRECISION = Finding(
    "note",
    "Part of the loss is computed in half precision, with 2 or 3 digits; float16 has nothing below "
    "6e-8 or above 65504.",
    write="the loss in float32: loss(model(x).float(), y.float()); with autocast, "
    "dtype=torch.bfloat16, which has the range of float32.",
)
FIRST_ORDER_ONLY = Finding(
    "broken",
    "first_order=True takes inner gradients as constants, and this parameter acts through nothing "
    "else.",
    write="first_order=False.",
    requirement="IIIb",
)
NOTHING_MEASURED = Finding(
    "no influence",
    "The gradient of L_val by the trained weights is zero (B_J = 0).",
    write="a val_loss that still changes with the weights here: not saturated, not clamped, and "
    "computed with the model that it is given.",
    requirement="I",
)
NOTHING_MOVES = Finding(
    "no influence",
    "No step has an inner gradient other than zero, so training moves nothing.",
    write="a loss whose gradient is not zero at the start: look for dead ReLUs, saturated or "
    "clamped outputs, and weights that are at an optimum already.",
)


def not_finite(steps: Sequence[int]) -> Finding:
    since = f", from step {max(steps)} backwards" if steps else ""
    return Finding(
        "broken",
        f"The gradient is not finite{since}.",
        write="grad_transform=il.clip_norm(1.0) or a smaller learning rate if the training loss "
        "explodes; otherwise a loss without sqrt, norm or log at zero.",
    )


def unused_parameter(part: str) -> Finding:
    user = {"init": "The model", "loss": "The loss", "optimizer": "The optimizer"}[part]
    return Finding(
        "broken",
        f"{user} never uses this parameter.",
        write="it in the forward, or remove it from the module (or .requires_grad_(False)).",
    )


def no_influence(name: str, part: str, checked: bool) -> Finding:
    confirmed = " Finite differences agree." if checked else ""
    if part == "loss":
        return Finding(
            "no influence",
            "The inner gradient does not change with this parameter: the second derivative ∂²ℓ/∂θ∂φ"
            " is zero, as for a constant added to the loss, or for a piecewise linear loss (ReLU, "
            f"absolute value, hinge).{confirmed}",
            write="a loss in which the parameter multiplies something that depends on the weights "
            "smoothly, such as a weight of a term, or softplus in place of relu.",
        )
    problem = f"At this point L_val does not change with this parameter.{confirmed}"
    write = "other data or another start, or leave it out of learn."
    if name == "settings.dampening":
        problem += " It acts on momentum alone, from the second step on."
        write = "momentum above 0 and two steps or more, or leave it out of learn."
    return Finding("no influence", problem, write=write)


def unexplained_gradient(functions: Sequence[str]) -> Finding:
    return Finding(
        "broken",
        "L_val changes with this parameter, but no gradient arrives, and no traced operation "
        "explains it.",
        write=f"tensors all the way: {_suspects(functions)}",
    )


def wrong_gradient(functions: Sequence[str]) -> Finding:
    return Finding(
        "broken",
        "Finite differences differ from the gradient.",
        write="other data if the loss has kinks (ReLU, max, clamp) near this point; otherwise "
        + _suspects(functions),
    )


def _suspects(functions: Sequence[str]) -> str:
    """Custom functions, whose backward may be wrong."""
    names = " and ".join(functions)
    own = f"a wrong backward of the autograd.Function {names}, and for " if names else ""
    return f"look for {own}values that leave torch, such as numpy arrays."


def approximation(inner: InnerLoop, steps: int) -> Finding | None:
    """The approximation that the user asked for, if any, and the exact alternative."""
    backward = inner.backward
    chosen = getattr(inner.val_loss, "by_choice", None)
    if chosen is not None:
        problem, write = chosen
    elif inner.first_order:
        problem = "first_order=True leaves out the second derivatives, so this is approximate."
        write = "first_order=False for the exact gradient."
    elif isinstance(backward, Truncated) and steps > backward.k:
        problem = f"{backward} differentiates only the last {backward.k} of {steps} steps."
        write = "backward=il.Remat() or il.Binomial(8) for the exact gradient."
    elif isinstance(backward, Implicit):
        problem = "Implicit is exact only where training has converged."
        write = "more steps, or backward=il.Remat() for the exact gradient."
    else:
        return None
    expected = "Finite differences differ from it, as expected."
    return Finding("by choice", f"{problem} {expected}", write=write)


# Finite differences that cannot judge. ----------------------------------------------------------

VALUE_NOT_FINITE = "L_val or its gradient is not finite"
NOT_COMPUTED = "L_val could not be computed"


def too_few_digits(eps: float) -> str:
    digits = max(0, round(-math.log10(eps)))
    more = "" if digits > 12 else "; inner.double() and batches in float64 have more"
    return f"L_val has about {digits} digits, too few for a difference as small as here{more}"


def no_repetition(first: float, second: float) -> str:
    return (
        f"L_val does not repeat ({first:.6g}, then {second:.6g}): it depends on random numbers "
        "that are not torch's, numpy's or Python's, or on something that it changes"
    )


# The set-up as a whole. -------------------------------------------------------------------------

NOTHING_LEARNED = Finding(
    "broken",
    "There is no meta-parameter: nothing of this inner loop is learned.",
    write="learn=('init',), or learn=('lr',).",
)
BATCH_WRITTEN = Finding(
    "broken",
    "The loss writes in place to its batch, so the next step with it sees other values.",
    write="x = x - mean and not x -= mean, or x = x.clone() first.",
)
WEIGHTS_WRITTEN = Finding(
    "broken",
    "The run changed the model's own weights in place (they were restored).",
    write="new tensors, and no operation on a weight that ends in an underscore.",
)
VAL_LOSS_WITHOUT_WEIGHTS = Finding(
    "broken",
    "L_val does not depend on the trained weights, only on parameters that it uses itself "
    "(Requirement I).",
    write="a val_loss that calls the model that it is given.",
)
LEARNED_MEASURE = Finding(
    "note",
    "L_val is the learned loss itself, so its parameters can make it small without any training "
    "getting better.",
    write="val_loss=, a fixed measure such as cross-entropy.",
)


def growth(ratio: float) -> Finding:
    verb, write = "vanishes", "fewer steps, less weight decay, or another inner learning rate."
    if ratio > 1:
        verb = "explodes"
        write = "a smaller inner learning rate, grad_transform=il.clip_norm(1.0), fewer steps."
    problem = f"The gradient {verb} on its way back: |B_0| is {ratio:.1e} times |B_J|."
    return Finding("note", problem, write=write)
