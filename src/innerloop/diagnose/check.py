"""``diagnose``: run an inner loop in every way that tells something about its gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop.backward.auto import Forecast, forecast
from innerloop.diagnose.agreement import Agreement
from innerloop.diagnose.difference import Noise
from innerloop.diagnose.failures import Failure
from innerloop.diagnose.judge import Evidence, Judge, approximation
from innerloop.diagnose.layers import replaced_layers
from innerloop.diagnose.measure import as_leaves, measured, replica
from innerloop.diagnose.meta_parameters import MetaParameter, meta_parameters
from innerloop.diagnose.notes import notes
from innerloop.diagnose.report import Difference, Finding, Report, Row
from innerloop.diagnose.steps import look_at_steps
from innerloop.diagnose.traced import Traced
from innerloop.diagnose.untouched import Untouched
from innerloop.errors import InnerLoopError, four_part
from innerloop.inner_loop import InnerLoop
from innerloop.modules.functional import functional
from innerloop.tasks.axis import sliced
from innerloop.tasks import Way, axis
from innerloop.unroll import as_batches


def diagnose(
    inner: InnerLoop, train: Any, val: Any, *, tasks: bool | Way | None = None, checks: int = 32
) -> Report:
    """Say which meta-parameters a gradient reaches, whether it is right, and what is in its way.

    The loop is run as it is, and again with every step looked at, once under a tracer that notes
    where values leave the graph, and some times more for finite differences, with the same random
    numbers each time. The model, the optimizer, their gradients, the batches and the random state
    are left as they were. Errors in the loop do not raise; they are findings of the report.

    Args:
        inner: the inner loop.
        train: one batch for each step, as for ``inner(train, val)``.
        val: what L_val is measured on.
        tasks: whether every tensor has a leading task axis, by default as the loop was made; the
            first task is looked at then.
        checks: up to how many meta-parameters are checked one by one by finite differences. Of
            more, those of the same part are moved together.

    >>> model = torch.nn.Linear(1, 1)
    >>> def loss(model, x):
    ...     return (model(x).detach() - 1).square().mean()
    >>> inner = InnerLoop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    >>> x = torch.ones(4, 1)
    >>> report = diagnose(inner, [x] * 3, x)
    >>> report.healthy, report["model.weight"].reached
    (False, False)
    >>> print(report.findings[0].write.partition(";")[0])
    the same without .detach()
    """
    if not isinstance(inner, InnerLoop):
        raise InnerLoopError(
            four_part(
                f"You gave a {type(inner).__name__} to diagnose.",
                "an innerloop.InnerLoop.",
                "it has the three parts that are looked at.",
                "diagnose(InnerLoop(model, optimizer, loss), train, val).",
            )
        )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        diagnosis = _Diagnosis(inner, train, val, bool(inner.tasks if tasks is None else tasks))
        try:
            return diagnosis.report(checks, warned)
        finally:
            diagnosis.untouched.restore()


class _Level(NamedTuple):
    """The loop without gradients."""

    value: float | None = None
    losses: tuple[float, ...] = ()
    noise: Noise | None = None
    why: str = "not computed"
    """Why it is not known how exactly L_val is computed."""


class _Diagnosis:
    """One inner loop with its data, run again and again from the same point."""

    def __init__(self, inner: InnerLoop, train: Any, val: Any, tasks: bool) -> None:
        self.inner = inner
        self.untouched = Untouched(inner, (train if isinstance(train, list | tuple) else (), val))
        self.phi: list[MetaParameter] = []
        self.batches: Sequence[Any] = ()
        self.val = val
        _, self.failure = self.untouched.attempt(lambda: self._given(train, val, tasks))

    def _given(self, train: Any, val: Any, tasks: bool) -> None:
        self.phi = meta_parameters(self.inner)
        batches = as_batches(train)
        if tasks:
            axis.count(batches, val)
            batches, self.val = axis.of_task(batches, 0), sliced(val, 0)
        self.batches = batches

    def report(self, checks: int, warned: list[Any]) -> Report:
        traced = Traced(self.inner, self.phi)
        evidence = Evidence(self.inner, len(self.batches), traced, failure=self.failure)
        level, unseen = _Level(), None
        if self.failure is None:
            unseen = self._gather(evidence)
            level = self._level(evidence)
            evidence.differences = self._differences(evidence, level, checks)
        judge = Judge(evidence)
        rows = tuple(judge.row(p) for p in self.phi)
        for finding in self._more(judge, rows, checks, warned, unseen):
            judge.add(finding)
        looked = evidence.looked
        return Report(
            rows,
            tuple(sorted(judge.findings, key=lambda f: f.kind == "note")),
            str(self.inner.backward),
            len(self.batches),
            level.value,
            level.losses if looked is None else looked.losses,
            () if looked is None else looked.grad_norms,
            () if looked is None else looked.b_norms,
            replaced_layers(self.inner.model, traced.step.calls),
            self._memory(),
        )

    def _gather(self, evidence: Evidence) -> Failure | None:
        """Run everything that needs gradients; what kept the steps from being looked at, if so."""
        attempt, traced = self.untouched.attempt, evidence.traced
        evidence.grads, evidence.failure = attempt(self._gradients)
        evidence.looked, unseen = attempt(self._look)
        if len(self.batches):
            attempt(lambda: traced.run_step(self.batches))
        attempt(lambda: self._trace_val(traced))
        return unseen

    def _more(
        self,
        judge: Judge,
        rows: tuple[Row, ...],
        checks: int,
        warned: list[Any],
        unseen: Failure | None,
    ) -> list[Finding]:
        """What is to be said besides the verdict on each row."""
        evidence, changed = judge.seen, self.untouched.changed
        found: list[Finding] = []
        if evidence.failure is not None and not rows:
            found.append(judge.failed(evidence.failure))
        attempt = self.untouched.attempt
        said, _ = attempt(lambda: list(notes(evidence, rows, judge.findings, changed, warned)))
        found += said or []
        if len(rows) > checks:
            text = "For finite differences, parameters of the same part were moved together; "
            found.append(Finding("note", f"{text}checks={len(rows)} moves each by itself."))
        if unseen is not None and evidence.grads is not None:
            found.append(Finding("note", f"Norms by step are missing: {unseen.message}"))
        return found

    # The runs. ----------------------------------------------------------------------------------

    def _gradients(self) -> dict[str, Tensor | None]:
        with torch.enable_grad():
            value = self.inner(self.batches, self.val, tasks=False)
            if not self.phi:
                return {}
            grads = torch.autograd.grad(value, [p.tensor for p in self.phi], allow_unused=True)
        return {p.name: g for p, g in zip(self.phi, grads, strict=True)}

    def _look(self) -> Any:
        with torch.enable_grad():
            return look_at_steps(self.inner, self.phi, self.batches, self.val)

    def _trace_val(self, traced: Traced) -> None:
        with torch.no_grad():
            adapted = self.inner.adapt(self.batches, tasks=False)
        traced.run_val(adapted.state, self.val)

    def _evaluated(self) -> tuple[float, float]:
        """L_val, and the rounding of its dtype."""
        with torch.no_grad():
            state = self.inner.adapt(self.batches, tasks=False).state
        template = functional(self.inner.model).template()
        # Leaves, and gradients on: a validation loss may take gradients itself.
        module = replica(template, state, as_leaves(template, state.params))
        with torch.enable_grad():
            value = torch.as_tensor(measured(self.inner, module, self.val)).detach()
        return float(value), torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0

    def _level(self, evidence: Evidence) -> _Level:
        """L_val, and how well it repeats."""
        attempt = self.untouched.attempt
        losses = () if evidence.looked is not None else attempt(self._losses)[0] or ()
        first, failure = attempt(self._evaluated)
        second, _ = attempt(self._evaluated)
        if first is None or second is None:
            why = "L_val could not be computed" if failure is None else f"{failure.kind} was raised"
            return _Level(None, losses, None, why)
        value, eps = first
        if not math.isfinite(value):
            return _Level(value, losses, None, "L_val is not finite")
        eps = max(eps, *(torch.finfo(dtype).eps for dtype in self._dtypes(evidence.traced)))
        spread = abs(second[0] - value)
        if spread > 1e4 * eps * abs(value):
            why = (
                f"L_val does not repeat ({value:.6g}, then {second[0]:.6g}): it depends on random "
                "numbers that are not torch's, numpy's or Python's, or on something it changes"
            )
            return _Level(value, losses, None, why)
        return _Level(value, losses, Noise(value, eps, spread))

    def _dtypes(self, traced: Traced) -> list[torch.dtype]:
        """In what L_val is computed: the weights, and casts that were seen."""
        weights = [p.dtype for p in self.inner.model.parameters() if p.is_floating_point()]
        casts = [dtype for dtype, _ in (*traced.step.lowered, *traced.val.lowered)]
        return [torch.float64, *weights, *casts]

    def _losses(self) -> tuple[float, ...]:
        with torch.no_grad():
            return tuple(
                self.inner.adapt(self.batches, tasks=False).losses.double().reshape(-1).tolist()
            )

    def _differences(self, evidence: Evidence, level: _Level, checks: int) -> dict[str, Difference]:
        if level.noise is None:
            return {p.name: Difference("not judged", why=level.why) for p in self.phi}
        grads = evidence.grads or {}
        agreement = Agreement(lambda: self._evaluated()[0], level.noise, self.untouched, grads)
        return agreement.of(self.phi, checks, exact=approximation(evidence) is None)

    def _memory(self) -> Forecast | None:
        if self.failure is not None or not len(self.batches):
            return None

        def run() -> Any:
            made = self.inner.prepared(len(self.batches))
            return forecast(made.step, made.state, made.meta, self.batches[0], len(self.batches))

        return self.untouched.attempt(run)[0]
