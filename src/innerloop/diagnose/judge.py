"""Judgement: what is wrong with each meta-parameter, from everything that was measured."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from innerloop.diagnose import advice
from innerloop.diagnose.report import Difference, Finding, Row
from innerloop.diagnose.runs import Failure, MetaParameter, StepNorms
from innerloop.diagnose.tracer import Cut, Tracer

if TYPE_CHECKING:
    from innerloop.inner_loop import InnerLoop

_STAGES = ("loss", "update", "val_loss")
_RANKS = {kind: rank for rank, kind in enumerate(advice.CUTS)}


@dataclass
class Evidence:
    """Everything that was measured."""

    inner: InnerLoop
    steps: int
    step: Tracer
    """The trace of the first step."""
    val: Tracer
    """The trace of the validation loss."""
    grads: Mapping[str, Tensor | None] | None = None
    """By the strategy of the inner loop; ``None`` if it raised."""
    failure: Failure | None = None
    norms: StepNorms = field(default_factory=StepNorms)
    differences: Mapping[str, Difference] = field(default_factory=dict)
    functions: Sequence[str] = ()
    """The user's own autograd.Functions."""
    changed: set[str] = field(default_factory=set)
    """Tensors that a run wrote to: ``"weights"`` or ``"batches"``."""

    @property
    def cuts(self) -> list[Cut]:
        return [*self.step.cuts, *self.val.cuts]

    @property
    def half_places(self) -> tuple[str, ...]:
        """Lines that cast to half precision."""
        casts = [*self.step.half, *self.val.half]
        return tuple(dict.fromkeys(str(place) for _, place in casts))[:3]

    @property
    def is_measured(self) -> bool:
        """True unless the gradient of L_val by the trained weights is known to be zero."""
        return not self.norms.b_norms or bool(self.norms.b_norms[-1])


def build_row(seen: Evidence, p: MetaParameter) -> tuple[Row, Finding | None]:
    """The row of a meta-parameter, and the finding about it, if something is wrong."""
    grad = None if seen.grads is None else seen.grads[p.name]
    norm = None if grad is None else float(torch.linalg.vector_norm(grad))
    row = Row(
        p.name,
        tuple(p.tensor.shape),
        p.part,
        norm is not None and 0 < norm < math.inf,
        "" if seen.grads is None else _requirement(seen, p),
        norm,
        seen.norms.per_step.get(p.name, ()),
        seen.norms.direct.get(p.name, 0.0),
        seen.differences.get(p.name, Difference("not judged", why=advice.NOT_COMPUTED)),
    )
    finding = _explain(seen, row)
    if finding is None:
        return row, None
    requirement = finding.requirement or row.requirement
    row = row._replace(problem=finding.problem, write=finding.write, requirement=requirement)
    return row, finding._replace(rows=(p.name,))


def merge(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """One finding for all meta-parameters of which the same is said; notes come last."""
    found: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        key = (finding.kind, finding.problem)
        old = found.get(key, Finding(*key))
        where = tuple(dict.fromkeys((*old.where, *finding.where)))
        found[key] = finding._replace(rows=old.rows + finding.rows, where=where)
    return tuple(sorted(found.values(), key=lambda finding: finding.kind == "note"))


def _requirement(seen: Evidence, p: MetaParameter) -> str:
    """The requirement by which a gradient comes."""
    if p.part in ("setting", "optimizer"):
        return "IIIa"
    if seen.norms.direct.get(p.name) and not any(seen.norms.per_step[p.name]):
        return "I"
    if p.part == "init" and not seen.steps:
        return "I"
    first_order = p.part == "init" and seen.inner.first_order
    return "II" if first_order or p.part == "other" else "IIIb"


# Findings on one meta-parameter. ----------------------------------------------------------------


def _explain(seen: Evidence, row: Row) -> Finding | None:
    if seen.failure is not None:
        return _explain_error(seen, seen.failure, row)
    if row.norm is not None and not math.isfinite(row.norm):
        steps = [j for j, norm in enumerate(row.per_step) if not math.isfinite(norm)]
        return _blame_half(seen, advice.not_finite(steps))
    if not row.reached:
        return _explain_missing(seen, row)
    return _explain_difference(seen, row) if row.difference.verdict == "differs" else None


def _blame_half(seen: Evidence, finding: Finding) -> Finding:
    """The finding, explained by half precision if the loss has any."""
    if not seen.half_places:
        return finding
    half = advice.HALF_PRECISION
    problem = f"{finding.problem} {half.problem}"
    return Finding(finding.kind, problem, seen.half_places, half.write, requirement="IIIb")


def error_finding(seen: Evidence, failure: Failure) -> Finding:
    """The finding about an error that the loop ended with."""
    where = _failing_calls(seen, failure)
    if not where and failure.place is not None:
        where = (str(failure.place),)
    return advice.error(failure)._replace(where=where)


def _failing_calls(seen: Evidence, failure: Failure) -> tuple[str, ...]:
    """The lines that call the operation which an error is about."""
    calls = seen.step.calls
    named = re.search(r"The inner loss uses (\w+)", failure.message)
    if "inplace operation" in failure.message:
        calls = [(op, at) for op, at in calls if op.endswith("_") and not op.endswith("__")]
    elif named is not None:
        name = named[1].strip("_").lower()
        # The apply of a custom Function is no call of torch; its name is in the line.
        of_name = [(op, at) for op, at in calls if name in op.lower()]
        calls = of_name or [(op, at) for op, at in calls if name in at.code.lower()]
    else:
        calls = []
    return tuple(dict.fromkeys(str(at) for _, at in calls))[:3]


def _explain_error(seen: Evidence, failure: Failure, row: Row) -> Finding:
    finding = error_finding(seen, failure)
    if "wrote in place" in failure.message:
        cuts = _rank([cut for cut in seen.step.cuts if cut.kind == "in place"])
    else:
        cuts = _rank(_cuts_without_graph(seen, failure, row))
    if cuts:
        found = _cut_finding("broken", finding.problem, cuts[:1])
        return found._replace(message=finding.message)
    named = re.search(r"Requirement (I+[ab]?)\)", failure.message)
    return finding if named is None else finding._replace(requirement=named[1])


def _cuts_without_graph(seen: Evidence, failure: Failure, row: Row) -> list[Cut]:
    """The cuts of the stages whose result depends on no leaf."""
    connected = {**seen.step.connected, **seen.val.connected}
    if "Inference tensors" in failure.message:
        connected["loss"] = False
    stages = [stage for stage in _STAGES if not connected.get(stage, True)]
    cuts = [cut for stage in stages for cut in _row_cuts(seen, row, stage)]
    return cuts or [cut for stage in stages for cut in _row_cuts(seen, row, stage, later=True)]


def _explain_missing(seen: Evidence, row: Row) -> Finding:
    """The first explanation that fits, the surest first."""
    influence = row.difference.influence
    if not influence and _is_unused(seen, row):
        return advice.unused_parameter(row.part)
    if influence and seen.inner.first_order and row.part in ("loss", "init"):
        return advice.FIRST_ORDER_ONLY
    for stage in _STAGES:
        cuts = _row_cuts(seen, row, stage)
        unmeasured = stage == "val_loss" and not seen.is_measured
        if not (influence or row.difference.verdict == "not judged" or unmeasured):
            # Without an influence, only an operation on the parameter itself can be to blame.
            cuts = [cut for cut in cuts if row.name in cut.sources]
        if cuts:
            return _cut_finding("broken", advice.NO_GRADIENT, cuts)
    if row.norm is not None and seen.half_places:
        return _blame_half(seen, Finding("broken", "The gradient is zero."))
    if not seen.is_measured:
        return advice.NOTHING_MEASURED
    if influence:
        return advice.unexplained_gradient(seen.functions)
    if seen.norms.b_norms and not any(seen.norms.grad_norms):
        return advice.NOTHING_MOVES
    return _explain_no_influence(seen, row)


def _is_unused(seen: Evidence, row: Row) -> bool:
    used = seen.step.used | seen.val.used
    owned = row.part in ("init", "loss", "optimizer")
    return owned and row.name not in used and bool(seen.step.calls)


def _explain_no_influence(seen: Evidence, row: Row) -> Finding:
    finding = advice.no_influence(row.name, row.part, row.difference.verdict == "agrees")
    if row.part != "loss":
        return finding
    # The term that the parameter multiplies, or the choice that it makes, may have left the graph.
    cuts = _rank([c for c in seen.step.cuts if c.kind == "grad" or row.name in c.sources])
    if not cuts:
        return finding
    _, instead = advice.describe_cut(cuts[0])
    also = f"{finding.write} If it acts through this line: {instead}"
    return finding._replace(where=_places(cuts[:1]), write=also)


def _explain_difference(seen: Evidence, row: Row) -> Finding:
    chosen = advice.approximation(seen.inner, seen.steps)
    if chosen is not None:
        return chosen
    # A part that is left out knowingly, as in torch's spectral_norm, is often this small.
    kind = "broken" if (row.difference.error or 0.0) > 1e-3 else "note"
    for later in (False, True):
        for stage in _STAGES:
            if cuts := _row_cuts(seen, row, stage, later):
                return _cut_finding(kind, advice.PART_MISSING, cuts)
    return _blame_half(seen, advice.wrong_gradient(seen.functions))._replace(kind=kind)


# Cuts. ------------------------------------------------------------------------------------------


def _row_cuts(seen: Evidence, row: Row, stage: str, later: bool = False) -> list[Cut]:
    """The cuts of a stage that the gradient of a row would have passed.

    The gradient of an initial weight passes the cuts of that weight, and in ``later`` steps those
    of any weight, as the gradient of a setting does.
    """
    cuts = (seen.val if stage == "val_loss" else seen.step).harmful_cuts(stage)
    found = [cut for cut in cuts if row.name in cut.sources]
    if found or (row.part == "init" and not later):
        return found
    return [cut for cut in cuts if any(name.startswith("model.") for name in cut.sources)]


def _rank(cuts: Sequence[Cut]) -> list[Cut]:
    """At most three cuts of the surest kind."""
    ranked = sorted(cuts, key=lambda cut: _RANKS[cut.kind])
    return [cut for cut in ranked if cut.kind == ranked[0].kind][:3]


def _cut_finding(kind: str, sentence: str, cuts: Sequence[Cut]) -> Finding:
    cuts = _rank(cuts)
    texts = [advice.describe_cut(cut) for cut in cuts]
    problem = " ".join(dict.fromkeys([sentence, *(problem for problem, _ in texts)]))
    write = texts[0][1]
    return Finding(kind, problem, _places(cuts), write, requirement=_violated_requirement(cuts[0]))


def _places(cuts: Sequence[Cut]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(cut.place) for cut in cuts if str(cut.place)))


def _violated_requirement(cut: Cut) -> str:
    """The requirement of the paper that a cut violates."""
    if cut.stage != "update":
        return "I" if cut.stage == "val_loss" else "IIIb"
    settings = any(name.split(".")[0] in ("settings", "optimizer") for name in cut.sources)
    return "IIIa" if settings else "II"


# Findings on the whole. -------------------------------------------------------------------------


def notes(seen: Evidence, rows: Sequence[Row], findings: Sequence[Finding]) -> Iterator[Finding]:
    """Findings that concern no single row, or nothing that is wrong."""
    reported = {place for finding in findings for place in finding.where}
    if not rows:
        failure = seen.failure
        yield advice.NOTHING_LEARNED if failure is None else error_finding(seen, failure)
    if "batches" in seen.changed:
        yield advice.BATCH_WRITTEN
    if "weights" in seen.changed:
        cuts = _rank([cut for cut in seen.cuts if cut.kind == "in place"])
        if not cuts:
            yield advice.WEIGHTS_WRITTEN
        elif not reported.issuperset(_places(cuts)):
            problem, write = advice.describe_cut(cuts[0])
            yield Finding("broken", problem, _places(cuts[:1]), write)
    if not hasattr(seen.inner.val_loss, "by_choice"):
        yield from _val_loss(seen, rows)
    if seen.half_places and reported.isdisjoint(seen.half_places):
        yield advice.HALF_PRECISION._replace(where=seen.half_places)
    norms = seen.norms.b_norms or (0.0,)
    first, last = norms[0], norms[-1]
    if 0 < last < math.inf and math.isfinite(first) and not 1e-3 < first / last < 1e3:
        yield advice.growth(first / last)


def _val_loss(seen: Evidence, rows: Sequence[Row]) -> Iterator[Finding]:
    if seen.steps and not seen.is_measured and any(seen.norms.direct.values()):
        finding = advice.VAL_LOSS_WITHOUT_WEIGHTS
        if cuts := _rank(seen.val.harmful_cuts("val_loss")):
            finding = _cut_finding("broken", finding.problem, cuts[:1])
        names = tuple(row.name for row in rows if row.part == "init" and row.direct > 0)
        yield finding._replace(rows=names)
    learned = tuple(row.name for row in rows if row.part == "loss" and row.direct > 0)
    if seen.inner.val_loss is None and isinstance(seen.inner.loss, nn.Module) and learned:
        yield advice.LEARNED_MEASURE._replace(rows=learned)
