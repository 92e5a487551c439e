"""Verdicts: from measurements and traces to a row for each meta-parameter, and findings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from innerloop.diagnose import advice
from innerloop.diagnose.advice import Advice
from innerloop.diagnose.report import Difference, Finding, Row
from innerloop.diagnose.tracer import Call, Cut, Tracer

if TYPE_CHECKING:
    from innerloop.diagnose.runs import Failure, MetaParameter, StepNorms
    from innerloop.inner_loop import InnerLoop

_STAGES = ("loss", "update", "val_loss")
_RANKS = {kind: rank for rank, kind in enumerate(advice.CUTS)}
Verdict = tuple[Finding, str]
"""A finding, and the requirement of the paper that does not hold."""


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
    norms: StepNorms | None = None
    differences: Mapping[str, Difference] = field(default_factory=dict)
    functions: Sequence[str] = ()
    """The user's own autograd.Functions."""
    changed: set[str] = field(default_factory=set)
    """Tensors that a run wrote to: ``"weights"`` or ``"batches"``."""
    warnings: Sequence[str] = ()

    def harmful(self, stage: str) -> list[Cut]:
        return (self.val if stage == "val_loss" else self.step).harmful(stage)

    @property
    def half_places(self) -> tuple[str, ...]:
        """Lines that cast to half precision."""
        casts = [*self.step.half, *self.val.half]
        return tuple(dict.fromkeys(str(place) for _, place in casts))[:3]


def build_row(seen: Evidence, p: MetaParameter) -> tuple[Row, Finding | None]:
    """The row of a meta-parameter, and the finding about it, if something is wrong."""
    grad = None if seen.grads is None else seen.grads[p.name]
    norm = None if grad is None else float(torch.linalg.vector_norm(grad))
    norms = seen.norms
    row = Row(
        p.name,
        tuple(p.tensor.shape),
        p.part,
        norm is not None and 0 < norm < math.inf,
        _requirement(seen, p),
        norm,
        () if norms is None else norms.per_step[p.name],
        0.0 if norms is None else norms.direct[p.name],
        seen.differences.get(p.name, Difference("not judged", why=advice.NOT_COMPUTED)),
    )
    verdict = _verdict(seen, row)
    if verdict is None:
        return row, None
    finding, requirement = verdict
    row = row._replace(problem=finding.problem, write=finding.write, requirement=requirement)
    return row, finding._replace(rows=(p.name,))


def join(findings: Sequence[Finding]) -> tuple[Finding, ...]:
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
    if p.part == "setting" or p.part == "optimizer":
        return "IIIa"
    norms = seen.norms
    if norms is not None and norms.direct[p.name] and not any(norms.per_step[p.name]):
        return "I"
    if p.part == "init" and not seen.steps:
        return "I"
    first_order = p.part == "init" and seen.inner.first_order
    return "II" if first_order or p.part == "other" else "IIIb"


# Verdicts on one meta-parameter. ----------------------------------------------------------------


def _verdict(seen: Evidence, row: Row) -> Verdict | None:
    if seen.grads is None:
        return _failed(seen, row)
    if row.norm is not None and not math.isfinite(row.norm):
        return _not_finite(seen, row)
    if not row.reached:
        return _unreached(seen, row)
    if row.difference.verdict == "differs":
        return _differs(seen, row)
    return None


def _finding(kind: str, text: Advice, where: tuple[str, ...] = ()) -> Finding:
    return Finding(kind, text.problem, where, text.write)


def _half_finding(seen: Evidence, problem: str) -> Finding:
    text = advice.HALF_PRECISION
    return Finding("broken", f"{problem} {text.problem}", seen.half_places, text.write)


def error_finding(failure: Failure, calls: Sequence[Call]) -> Finding:
    """The finding about an error that the loop ended with."""
    where = _failing_calls(failure, calls)
    if not where and failure.place is not None:
        where = (str(failure.place),)
    message = f"{failure.kind}: {failure.message}"
    return _finding("broken", advice.error(failure), where)._replace(message=message)


def _failing_calls(failure: Failure, calls: Sequence[Call]) -> tuple[str, ...]:
    """The lines that call the operation which an error is about."""
    named = re.search(r"The inner loss uses (\w+)", failure.message)
    if "inplace operation" in failure.message:
        calls = [c for c in calls if c.op.endswith("_") and not c.op.endswith("__")]
    elif named is not None:
        op = named[1].strip("_").lower()
        # The apply of a custom Function is no call of torch; its name is in the line.
        of_name = [c for c in calls if op in c.op.lower() or c.op.strip("_") == op]
        calls = of_name or [c for c in calls if op in c.place.code.lower()]
    else:
        calls = []
    return tuple(dict.fromkeys(str(call.place) for call in calls))[:3]


def _failed(seen: Evidence, row: Row) -> Verdict:
    failure = seen.failure
    assert failure is not None
    finding = error_finding(failure, seen.step.calls)
    named = re.search(r"Requirement (I+[ab]?)\)", failure.message)
    requirement = "" if named is None else named[1]
    cuts = _failing_cuts(seen, failure, row)
    if not cuts:
        return finding, requirement
    found, requirement = _cut_finding("broken", finding.problem, cuts[:1])
    return found._replace(message=finding.message), requirement


def _failing_cuts(seen: Evidence, failure: Failure, row: Row) -> list[Cut]:
    """The cuts that explain why a run raised."""
    if "wrote in place" in failure.message:
        return [cut for cut in _rank(seen.step.cuts) if cut.kind == "in place"]
    without_graph = {
        *(stage for tracer in (seen.step, seen.val) for stage in _unconnected(tracer)),
        *(["loss"] if "Inference tensors" in failure.message else []),
    }
    stages = [stage for stage in _STAGES if stage in without_graph]
    cuts = [cut for stage in stages for cut in _row_cuts(seen, row, stage)]
    return _rank(cuts or [cut for s in stages for cut in _row_cuts(seen, row, s, later=True)])


def _unconnected(tracer: Tracer) -> list[str]:
    return [stage for stage, connected in tracer.connected.items() if not connected]


def _not_finite(seen: Evidence, row: Row) -> Verdict:
    steps = [j for j, norm in enumerate(row.per_step) if not math.isfinite(norm)]
    text = advice.not_finite(steps)
    if seen.half_places:
        return _half_finding(seen, text.problem), "IIIb"
    return _finding("broken", text), row.requirement


def _unreached(seen: Evidence, row: Row) -> Verdict:
    """The first explanation that fits, the surest first."""
    influence, norms = row.difference.influence, seen.norms
    if not influence and _is_unused(seen, row):
        return _finding("broken", advice.unused(row.part)), row.requirement
    if influence and seen.inner.first_order and row.part in ("loss", "init"):
        return _finding("broken", advice.FIRST_ORDER_ONLY), "IIIb"
    for stage in _STAGES:
        cuts = _row_cuts(seen, row, stage)
        unmeasured = stage == "val_loss" and norms is not None and not norms.b_norms[-1]
        if not (influence or row.difference.verdict == "not judged" or unmeasured):
            # Without an influence, only an operation on the parameter itself can be to blame.
            cuts = [cut for cut in cuts if row.name in cut.sources]
        if cuts:
            return _cut_finding("broken", advice.NO_GRADIENT, cuts)
    if row.norm is not None and seen.half_places:
        return _half_finding(seen, "The gradient is zero."), "IIIb"
    if norms is not None and not norms.b_norms[-1]:
        return _finding("no influence", advice.NOTHING_MEASURED), "I"
    if norms is not None and not any(norms.grad_norms) and not influence:
        return _finding("no influence", advice.NOTHING_MOVES), row.requirement
    if influence:
        return _finding("broken", advice.unexplained(seen.functions)), row.requirement
    return _without_influence(seen, row), row.requirement


def _is_unused(seen: Evidence, row: Row) -> bool:
    used = seen.step.used | seen.val.used
    owned = row.part in ("init", "loss", "optimizer")
    return owned and row.name not in used and bool(seen.step.calls)


def _without_influence(seen: Evidence, row: Row) -> Finding:
    text = advice.no_influence(row.name, row.part, row.difference.verdict == "agrees")
    finding = _finding("no influence", text)
    if row.part != "loss":
        return finding
    # The term that the parameter multiplies, or the choice that it makes, may have left the graph.
    cuts = _rank([c for c in seen.step.cuts if c.kind == "grad" or row.name in c.sources])
    if not cuts:
        return finding
    also = f"{text.write} If it acts through this line: {advice.cut(cuts[0]).write}"
    return finding._replace(where=_places(cuts[:1]), write=also)


def _differs(seen: Evidence, row: Row) -> Verdict:
    chosen = advice.approximation(seen.inner, seen.steps)
    if chosen is not None:
        return _finding("by choice", advice.differs_by_choice(chosen)), row.requirement
    # A part that is left out knowingly, as in torch's spectral_norm, is often this small.
    kind = "broken" if (row.difference.error or 0.0) > 1e-3 else "note"
    for later in (False, True):
        for stage in _STAGES:
            cuts = _row_cuts(seen, row, stage, later)
            if cuts:
                return _cut_finding(kind, advice.PART_MISSING, cuts)
    text = advice.differs(seen.functions)
    if seen.half_places:
        return _half_finding(seen, text.problem)._replace(kind=kind), row.requirement
    return _finding(kind, text), row.requirement


# Cuts. ------------------------------------------------------------------------------------------


def _row_cuts(seen: Evidence, row: Row, stage: str, later: bool = False) -> list[Cut]:
    """The cuts of a stage that the gradient of a row would have passed.

    The gradient of an initial weight passes the cuts of that weight, and in ``later`` steps those
    of any weight, as the gradient of a setting does.
    """
    cuts = seen.harmful(stage)
    found = [cut for cut in cuts if row.name in cut.sources]
    if found or (row.part == "init" and not later):
        return found
    return [cut for cut in cuts if any(name.startswith("model.") for name in cut.sources)]


def _rank(cuts: Sequence[Cut]) -> list[Cut]:
    """At most three cuts of the surest kind."""
    ranked = sorted(cuts, key=lambda cut: _RANKS[cut.kind])
    return [cut for cut in ranked if cut.kind == ranked[0].kind][:3]


def _cut_finding(kind: str, sentence: str, cuts: Sequence[Cut]) -> Verdict:
    cuts = _rank(cuts)
    texts = [advice.cut(cut) for cut in cuts]
    problem = " ".join(dict.fromkeys([sentence, *(text.problem for text in texts)]))
    finding = Finding(kind, problem, _places(cuts), texts[0].write)
    return finding, _violated(cuts[0])


def _places(cuts: Sequence[Cut]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(cut.place) for cut in cuts if str(cut.place)))


def _violated(cut: Cut) -> str:
    """The requirement of the paper that a cut violates."""
    if cut.stage == "val_loss":
        return "I"
    if cut.stage == "loss":
        return "IIIb"
    settings = any(name.split(".")[0] in ("settings", "optimizer") for name in cut.sources)
    return "IIIa" if settings else "II"


# Findings on the whole. -------------------------------------------------------------------------


def notes(seen: Evidence, rows: Sequence[Row], findings: Sequence[Finding]) -> Iterator[Finding]:
    """Findings that concern no single row, or nothing that is wrong."""
    if not rows and seen.failure is not None:
        yield error_finding(seen.failure, seen.step.calls)
    elif not rows:
        yield _finding("broken", advice.NOTHING_LEARNED)
    yield from _writes(seen, findings)
    yield from _val_loss(seen, rows)
    reported = {place for finding in findings for place in finding.where}
    if seen.half_places and reported.isdisjoint(seen.half_places):
        yield _finding("note", advice.HALF_PRECISION, seen.half_places)
    yield from _growth(seen)
    for text in seen.warnings:
        yield _finding("note", advice.warning(text))


def _writes(seen: Evidence, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Writes in place to weights and batches."""
    if "batches" in seen.changed:
        yield _finding("broken", advice.BATCH_WRITTEN)
    if "weights" not in seen.changed:
        return
    cuts = _rank([cut for t in (seen.step, seen.val) for cut in t.cuts if cut.kind == "in place"])
    reported = {place for finding in findings for place in finding.where}
    if not cuts:
        yield _finding("broken", advice.WEIGHTS_WRITTEN)
    elif not reported.issuperset(_places(cuts)):
        yield _finding("broken", advice.cut(cuts[0]), _places(cuts[:1]))


def _val_loss(seen: Evidence, rows: Sequence[Row]) -> Iterator[Finding]:
    norms, inner = seen.norms, seen.inner
    if norms is None or hasattr(inner.val_loss, "by_choice"):
        return
    if seen.steps and not norms.b_norms[-1] and any(norms.direct.values()):
        text = advice.VAL_LOSS_WITHOUT_WEIGHTS
        cuts = _rank(seen.harmful("val_loss"))
        finding = _finding("broken", text)
        if cuts:
            finding, _ = _cut_finding("broken", text.problem, cuts[:1])
        names = tuple(row.name for row in rows if row.part == "init" and row.direct > 0)
        yield finding._replace(rows=names)
    learned = tuple(row.name for row in rows if row.part == "loss" and row.direct > 0)
    if inner.val_loss is None and isinstance(inner.loss, nn.Module) and learned:
        yield _finding("note", advice.LEARNED_MEASURE)._replace(rows=learned)


def _growth(seen: Evidence) -> Iterator[Finding]:
    norms = (0.0,) if seen.norms is None else seen.norms.b_norms
    if not 0 < norms[-1] < math.inf or not math.isfinite(norms[0]):
        return
    ratio = norms[0] / norms[-1]
    if not 1e-3 < ratio < 1e3:
        yield _finding("note", advice.growth(ratio))
