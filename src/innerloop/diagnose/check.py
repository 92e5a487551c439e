"""``diagnose``: runs an inner loop in every way that tells something about its gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop.diagnose import advice
from innerloop.diagnose.difference import Noise, compare_all
from innerloop.diagnose.judge import Evidence, build_row, merge, notes
from innerloop.diagnose.report import Difference, Finding, Report
from innerloop.diagnose.runs import Runs, StepNorms, custom_functions
from innerloop.inner_loop import InnerLoop
from innerloop.tasks import Way


def diagnose(
    inner: InnerLoop, train: Any, val: Any, *, tasks: bool | Way | None = None, checks: int = 32
) -> Report:
    """Reports which meta-parameters a gradient reaches, whether it is right, and what stops it.

    The loop is run as it is, once with every step differentiated by its inputs, once under a tracer
    that records where values leave the graph, and several times for finite differences, with the
    same random numbers each time. The model, the optimizer, their gradients, the batches and the
    random state are left as they were. An error in the loop is not raised; it is a finding of the
    report.

    Args:
        inner: the inner loop.
        train: one batch for each step, as for ``inner(train, val)``.
        val: the data of L_val.
        tasks: whether every tensor has a leading task axis, by default as the loop was made; the
            first task is diagnosed then.
        checks: the number of meta-parameters up to which each is checked by a finite difference of
            its own. Of more, those of the same part are moved together.

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
        raise advice.not_an_inner_loop(inner)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = Runs(inner, train, val, bool(inner.tasks if tasks is None else tasks))
        return _diagnose(runs, checks, caught)


def _diagnose(runs: Runs, checks: int, caught: Sequence[Any]) -> Report:
    seen = Evidence(runs.inner, runs.steps, runs.tracer("update"), runs.tracer("val_loss"))
    seen.grads, seen.failure = runs.attempt(runs.gradients)
    seen.norms = runs.attempt(runs.step_norms)[0] or StepNorms()
    if runs.steps:
        results, _ = runs.attempt(lambda: runs.trace_step(seen.step))
        seen.functions = custom_functions(results or [])
    runs.attempt(lambda: runs.trace_val(seen.val))
    value, noise = _noise(runs, seen)
    seen.differences = _differences(runs, seen, noise, checks)
    memory = runs.attempt(runs.forecast)[0] if runs.steps else None
    seen.changed = runs.changed

    pairs = [build_row(seen, p) for p in runs.phi]
    rows = tuple(row for row, _ in pairs)
    findings = [finding for _, finding in pairs if finding is not None]
    findings += notes(seen, rows, findings)
    findings += [Finding("note", f"A warning was given: {text}") for text in _texts(caught)]
    if len(rows) > checks:
        together = "For finite differences, parameters of the same part were moved together; "
        findings.append(Finding("note", f"{together}checks={len(rows)} moves each by itself."))
    return Report(
        rows,
        merge(findings),
        str(runs.inner.backward),
        runs.steps,
        value,
        seen.norms.losses,
        seen.norms.grad_norms,
        seen.norms.b_norms,
        memory,
    )


def _noise(runs: Runs, seen: Evidence) -> tuple[float | None, Noise | str]:
    """L_val and its precision, or the reason why differences of it cannot judge."""
    first, failure = runs.attempt(runs.value)
    second, _ = runs.attempt(runs.value)
    if first is None or second is None:
        return None, advice.NOT_COMPUTED if failure is None else f"{failure.kind} was raised"
    value, spread = float(first), abs(float(second) - float(first))
    if not math.isfinite(value):
        return value, advice.VALUE_NOT_FINITE
    weights = [p.dtype for p in runs.model.params.values()]
    casts = [dtype for dtype, _ in (*seen.step.half, *seen.val.half)]
    dtypes = [torch.float64, first.dtype, *weights, *casts]
    eps = max(torch.finfo(d).eps for d in dtypes if d.is_floating_point or d.is_complex)
    if spread > 1e4 * eps * abs(value):
        return value, advice.no_repetition(value, float(second))
    return value, Noise(value, eps, spread)


def _differences(
    runs: Runs, seen: Evidence, noise: Noise | str, checks: int
) -> dict[str, Difference]:
    if isinstance(noise, str):
        return {p.name: Difference("not judged", why=noise) for p in runs.phi}
    exact = advice.approximation(runs.inner, runs.steps) is None

    def evaluate(moved: Sequence[Tensor]) -> float:
        runs.restore(moved)
        return float(runs.value())

    found, _ = runs.attempt(
        lambda: compare_all(evaluate, noise, runs.phi, seen.grads or {}, checks, exact)
    )
    return found or {}


def _texts(caught: Sequence[Any]) -> list[str]:
    """Warnings that are not about deprecation, each once."""
    ignored = (DeprecationWarning, PendingDeprecationWarning)
    return list(
        dict.fromkeys(str(w.message) for w in caught if not issubclass(w.category, ignored))
    )
