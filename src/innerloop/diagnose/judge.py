"""From what was measured and seen to a verdict on each meta-parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from innerloop.backward import Implicit, Truncated
from innerloop.diagnose.causes import Cause, causes
from innerloop.diagnose.failures import (
    Failure,
    explained,
    is_about_the_graph,
    places_of,
    violated,
)
from innerloop.diagnose.meta_parameters import MetaParameter
from innerloop.diagnose.report import Difference, Finding, Row
from innerloop.diagnose.steps import Steps
from innerloop.diagnose.traced import Traced
from innerloop.diagnose.tracer import Cut
from innerloop.inner_loop import InnerLoop


@dataclass
class Evidence:
    """All that is known when the verdicts are made."""

    inner: InnerLoop
    steps: int
    traced: Traced
    grads: Mapping[str, Tensor | None] | None = None
    """By the strategy of the inner loop; ``None`` if it raised."""
    failure: Failure | None = None
    looked: Steps | None = None
    differences: Mapping[str, Difference] = field(default_factory=dict)


def approximation(seen: Evidence) -> tuple[str, str] | None:
    """The approximation that was asked for, if one was, and what to write for none."""
    inner, backward = seen.inner, seen.inner.backward
    if meant(inner):
        return meant(inner)
    if inner.first_order:
        text = "first_order=True leaves out the second derivatives, so this is approximate."
        return text, "first_order=False for the exact gradient."
    if isinstance(backward, Truncated) and seen.steps > backward.k:
        text = f"{backward} leaves out what comes before {last(backward.k)}."
        return text, "backward=il.Remat() or il.Binomial(8) for the exact gradient."
    if isinstance(backward, Implicit):
        text = "Implicit is exact only where training has converged."
        return text, "more steps, or backward=il.Remat() for the exact gradient."
    return None


def meant(inner: InnerLoop) -> tuple[str, str] | None:
    """What a val_loss says of itself: that its gradient is another by choice."""
    return getattr(inner.val_loss, "by_choice", None)


def last(k: int) -> str:
    return "the last step" if k == 1 else f"the last {k} steps"


class Judge:
    """Makes one row for each meta-parameter, and collects what is found on the way."""

    def __init__(self, evidence: Evidence) -> None:
        self.seen = evidence
        self._found: dict[tuple[str, str], Finding] = {}

    @property
    def findings(self) -> list[Finding]:
        return list(self._found.values())

    def row(self, p: MetaParameter) -> Row:
        seen = self.seen
        grad = None if seen.grads is None else seen.grads[p.name]
        difference = seen.differences.get(p.name, Difference("not judged", why="not computed"))
        norm = None if grad is None else float(torch.linalg.vector_norm(grad))
        looked = seen.looked
        row = Row(
            p.name,
            tuple(p.tensor.shape),
            p.part,
            norm is not None and 0 < norm < math.inf,
            self._requirement(p),
            norm,
            () if looked is None else looked.per_step[p.name],
            0.0 if looked is None else looked.direct[p.name],
            difference,
        )
        finding, requirement = self._verdict(row)
        if finding is None:
            return row
        self.add(finding)
        return row._replace(problem=finding.problem, write=finding.write, requirement=requirement)

    def add(self, finding: Finding) -> None:
        """Join it with one that says the same of other meta-parameters."""
        key = (finding.kind, finding.problem)
        old = self._found.get(key)
        if old is not None:
            finding = old._replace(
                rows=old.rows + finding.rows,
                where=tuple(dict.fromkeys((*old.where, *finding.where))),
            )
        self._found[key] = finding

    # Which requirement. -------------------------------------------------------------------------

    def _requirement(self, p: MetaParameter) -> str:
        looked = self.seen.looked
        if p.part in ("setting", "optimizer"):
            return "IIIa"
        by_steps = looked is None or any(norm > 0 for norm in looked.per_step[p.name])
        if p.part == "val_loss" or (looked is not None and not by_steps and looked.direct[p.name]):
            return "I"
        if p.part == "init":
            if not self.seen.steps:
                return "I"
            return "II" if self.seen.inner.first_order else "IIIb"
        return "II" if p.part == "other" else "IIIb"

    # What is wrong. -----------------------------------------------------------------------------

    def _verdict(self, row: Row) -> tuple[Finding | None, str]:
        if self.seen.grads is None:
            return self._failed(row)
        if row.norm is not None and not math.isfinite(row.norm):
            return self._not_finite(row)
        if not row.reached:
            return self._unreached(row)
        if row.difference.verdict == "differs":
            return self._differs(row)
        return None, ""

    def _failed(self, row: Row) -> tuple[Finding, str]:
        failure = self.seen.failure
        assert failure is not None
        finding = self.failed(failure)._replace(rows=(row.name,))
        lowered = self.lowered()
        if "NaN" in failure.message and lowered:
            problem = f"{finding.problem} {_OVERFLOW}"
            finding = finding._replace(problem=problem, where=lowered, write=_FULL_PRECISION)
            return finding, "IIIb"
        cuts = [cut for stage in _STAGES for cut in self._cuts(row, stage)]
        cuts = cuts or [cut for stage in _STAGES for cut in self._cuts(row, stage, own=False)]
        if not cuts or not is_about_the_graph(failure):
            return finding, violated(failure)
        cause = causes(cuts)[0]
        problem = f"{finding.problem} {cause.problem}"
        finding = finding._replace(problem=problem, where=cause.where, write=cause.write)
        return finding, cause.requirement

    def failed(self, failure: Failure) -> Finding:
        """An error that the loop ended with, as a finding."""
        problem, write = explained(failure)
        where = places_of(failure, self.seen.traced.step.calls)
        if not where and failure.place is not None:
            where = (str(failure.place),)
        at = "" if failure.step is None else f" (in inner step {failure.step})"
        message = f"{failure.kind}{at}: {failure.message}"
        return Finding("broken", problem, where, write, (), message)

    def _not_finite(self, row: Row) -> tuple[Finding, str]:
        steps = [j for j, norm in enumerate(row.per_step) if not math.isfinite(norm)]
        since = f", from step {max(steps)} backwards" if steps else ""
        lowered = self.lowered()
        if lowered:
            problem = f"The gradient is not finite{since}. {_OVERFLOW}"
            return Finding("broken", problem, lowered, _FULL_PRECISION, (row.name,)), "IIIb"
        problem = f"The gradient is not finite{since}."
        write = (
            "grad_transform=il.clip_norm(1.0) or a smaller learning rate if the training loss "
            "explodes; otherwise look for sqrt, norm or log at zero in the loss."
        )
        return Finding("broken", problem, (), write, (row.name,)), row.requirement

    def _unreached(self, row: Row) -> tuple[Finding, str]:
        for judge in (
            self._unused,
            self._first_order,
            self._cut,
            self._underflow,
            self._nothing_measured,
            self._nothing_moves,
        ):
            found = judge(row)
            if found is not None:
                return found
        if row.difference.influence:
            return self._unknown(row), row.requirement
        return self._no_influence(row), row.requirement

    def _unused(self, row: Row) -> tuple[Finding, str] | None:
        traced = self.seen.traced
        if row.part not in ("init", "loss", "optimizer") or row.difference.influence:
            return None
        if row.name in traced.step.used | traced.val.used or not traced.step.calls:
            return None
        what = {"init": "The model", "loss": "The loss", "optimizer": "The optimizer"}[row.part]
        problem = f"{what} never uses this parameter."
        write = "it in the forward, or remove it from the module (or .requires_grad_(False))."
        return Finding("broken", problem, (), write, (row.name,)), row.requirement

    def _first_order(self, row: Row) -> tuple[Finding, str] | None:
        if not self.seen.inner.first_order or row.part not in ("loss", "init"):
            return None
        if not row.difference.influence:
            return None
        problem = (
            "first_order=True takes inner gradients as constants, and this parameter acts through "
            "nothing else."
        )
        write = "first_order=False."
        return Finding("broken", problem, (), write, (row.name,)), "IIIb"

    def _cut(self, row: Row) -> tuple[Finding, str] | None:
        looked, difference = self.seen.looked, row.difference
        sure = difference.influence or difference.verdict == "not judged"
        for stage in _STAGES:
            cuts = self._cuts(row, stage)
            if not (sure or (stage == "val_loss" and looked and not looked.b_norms[-1])):
                # Without an influence, only what has no derivative can be to blame.
                cuts = [cut for cut in cuts if row.name in cut.sources]
            if cuts:
                return self._by_causes("broken", "No gradient arrives.", causes(cuts), row)
        return None

    def _underflow(self, row: Row) -> tuple[Finding, str] | None:
        lowered = self.lowered()
        if row.norm is None or not lowered:
            return None
        problem = "The gradient is zero: float16 has nothing between 0 and 6e-8."
        return Finding("broken", problem, lowered, _FULL_PRECISION, (row.name,)), "IIIb"

    def _nothing_measured(self, row: Row) -> tuple[Finding, str] | None:
        looked = self.seen.looked
        if looked is None or looked.b_norms[-1] > 0:
            return None
        problem = "The gradient of L_val by the trained weights is zero (B_J = 0)."
        write = (
            "a val_loss that still changes with the weights here: not saturated, not clamped, and "
            "computed with the model it is handed."
        )
        return Finding("no influence", problem, (), write, (row.name,)), "I"

    def _nothing_moves(self, row: Row) -> tuple[Finding, str] | None:
        looked = self.seen.looked
        if looked is None or any(looked.grad_norms) or row.difference.influence:
            return None
        if not self.seen.steps:
            problem = "There is no step in which this parameter could have an influence."
            return Finding("no influence", problem, (), "[batch] * 5.", (row.name,)), ""
        problem = "The inner gradient is zero at every step, so training moves nothing."
        write = (
            "a loss whose gradient is not zero at the start: look for dead ReLUs, saturated or "
            "clamped outputs, and weights that are at an optimum already."
        )
        return Finding("no influence", problem, (), write, (row.name,)), row.requirement

    def _no_influence(self, row: Row) -> Finding:
        checked = row.difference.verdict == "agrees"
        honest = " Finite differences say the same." if checked else ""
        where: tuple[str, ...] = ()
        if row.part == "loss":
            problem = (
                "The inner gradient does not change with this parameter: the second derivative "
                "∂²ℓ/∂θ∂φ is zero, as for a constant added to the loss, or for a loss that is "
                f"linear piece by piece (ReLU, absolute value, hinge).{honest}"
            )
            write = (
                "a loss in which the parameter multiplies something that depends on the weights "
                "smoothly, such as a weight of a term, or softplus in place of relu."
            )
            # What it was multiplied with, or what was decided by it, may have left the graph; or
            # it was only looked at.
            cuts = self.seen.traced.step.cuts
            found = causes([c for c in cuts if c.kind == "grad" or row.name in c.sources])
            if found:
                where = found[0].where
                write = f"{write} If it acts through this line: {found[0].write}"
        else:
            problem = f"At this point L_val does not change with this parameter.{honest}"
            write = "other data or another start, or leave it out of learn."
            if row.name == "settings.dampening":
                problem = f"{problem} It acts on momentum alone, from the second step on."
                write = "momentum above 0 and two steps or more, or leave it out of learn."
        return Finding("no influence", problem, where, write, (row.name,))

    def _unknown(self, row: Row) -> Finding:
        problem = (
            "L_val changes with this parameter, but no gradient arrives, and no operation was seen "
            "that would explain it."
        )
        write = (
            f"tensors all the way: look for {self._suspects()}values that leave torch, such as "
            "numpy arrays."
        )
        return Finding("broken", problem, (), write, (row.name,))

    def _differs(self, row: Row) -> tuple[Finding, str]:
        chosen = approximation(self.seen)
        # What is left out knowingly, as in torch's spectral_norm, is often this small.
        kind = "broken" if (row.difference.error or 0.0) > 1e-3 else "note"
        if chosen:
            problem, write = chosen
            problem = f"{problem} Finite differences differ from it, as they should."
            return Finding("by choice", problem, (), write, (row.name,)), row.requirement
        for own in (True, False):
            for stage in _STAGES:
                cuts = self._cuts(row, stage, own)
                if cuts:
                    wrong = "A part of the gradient is missing, as finite differences show."
                    return self._by_causes(kind, wrong, causes(cuts), row)
        problem = "Finite differences differ from the gradient."
        lowered = self.lowered()
        write = (
            "if the loss has kinks (ReLU, max, clamp) near this point, other data; otherwise look "
            f"for {self._suspects()}values that leave torch, such as numpy arrays."
        )
        if lowered:
            write = _FULL_PRECISION
        return Finding(kind, problem, lowered, write, (row.name,)), row.requirement

    # What is known. -----------------------------------------------------------------------------

    def _cuts(self, row: Row, stage: str, own: bool = True) -> list[Cut]:
        """The cuts of a stage that the gradient of a row would have passed.

        The gradient of an initial weight passes those of that weight, and in later steps
        (``own=False``) those of any; so does that of a setting.
        """
        traced = self.seen.traced
        cuts = traced.val.harmful(stage) if stage == "val_loss" else traced.step.harmful(stage)
        found = [cut for cut in cuts if row.name in cut.sources]
        if found or (own and row.part == "init"):
            return found
        return [cut for cut in cuts if any(name.startswith("model.") for name in cut.sources)]

    def _by_causes(
        self, kind: str, wrong: str, found: list[Cause], row: Row
    ) -> tuple[Finding, str]:
        problem = " ".join(dict.fromkeys([wrong, *(cause.problem for cause in found)]))
        where = tuple(dict.fromkeys(place for cause in found for place in cause.where))
        return Finding(kind, problem, where, found[0].write, (row.name,)), found[0].requirement

    def _suspects(self) -> str:
        """Custom functions, of whose backward nothing is known."""
        names = " and ".join(self.seen.traced.functions)
        return f"a wrong backward of the autograd.Function {names}, and for " if names else ""

    def lowered(self) -> tuple[str, ...]:
        traced = self.seen.traced
        casts = [*traced.step.lowered, *traced.val.lowered]
        return tuple(dict.fromkeys(str(place) for _, place in casts))[:3]


_STAGES = ("loss", "update", "val_loss")
_OVERFLOW = "Half precision overflowed: float16 ends at 65504."
_FULL_PRECISION = (
    "the loss in float32: loss(model(x).float(), y.float()); with autocast, dtype=torch.bfloat16, "
    "which has the range of float32."
)
