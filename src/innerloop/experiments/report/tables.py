"""Means over seeds, beside the paper's numbers. All accuracies in percent."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from innerloop.experiments.report.paper import (
    ANTONIOU,
    APPENDIX,
    BASE,
    BEST,
    BEST_SETUP,
    CELLS,
    Reported,
    Setup,
)
from innerloop.experiments.report.runs import FoundRun, Remark

_OPTIMIZERS = {"sgd": "SGD", "adam": "Adam"}
NONE = "-"
NOTE = (
    "Base: vgg+SGD. Best: of all models and optimizers the one with the highest test accuracy, "
    "chosen on the test tasks as in the paper, which flatters it a little. Differences are in "
    "percentage points. The spread is the standard deviation over seeds; one seed has none. "
    "A star: runs of it left out updates or guessed at test tasks, as the remarks say."
)


class Mean(NamedTuple):
    """Over seeds; one seed has no spread."""

    setup: Setup
    mean: float
    std: float | None
    seeds: int
    flawed: bool
    """A run left out updates, or guessed at test tasks."""

    @property
    def star(self) -> str:
        return "*" if self.flawed else ""


class Table(NamedTuple):
    """A table of text."""

    title: str
    head: list[str]
    rows: list[list[str]]


def average(runs: Sequence[FoundRun], remarks: list[Remark]) -> dict[Setup, Mean]:
    """The mean over the seeds of each setup, among runs with the same settings otherwise.

    Where a setup was run with several settings, those with most seeds count, then those that came
    first; never those with the best accuracy.
    """
    found: dict[Setup, dict[str, dict[int, FoundRun]]] = {}
    for run in runs:
        if run.result is not None:
            seeds = found.setdefault(run.setup, {}).setdefault(run.settings, {})
            if run.seed in seeds:
                first = seeds[run.seed].folder
                text = f"not in the mean: the same settings and seed as {first}"
                remarks.append(Remark(run.folder, text))
            else:
                seeds[run.seed] = run
    return {setup: _mean(setup, by_settings, remarks) for setup, by_settings in found.items()}


def _mean(setup: Setup, by_settings: dict[str, dict[int, FoundRun]], remarks: list[Remark]) -> Mean:
    chosen = max(by_settings.values(), key=len)  # the first of equals
    for seeds in by_settings.values():
        if seeds is not chosen:
            other = next(iter(chosen.values())).folder
            text = f"not in the mean: other settings than {other}"
            remarks.extend(Remark(run.folder, text) for run in seeds.values())
    results = [run.result for run in chosen.values() if run.result is not None]
    values = [100 * result.accuracy for result in results]
    std = statistics.stdev(values) if len(values) > 1 else None
    flawed = any(result.flaws for result in results)
    return Mean(setup, statistics.fmean(values), std, len(values), flawed)


def table_1(ours: dict[Setup, Mean]) -> Table:
    """Table 1 of the paper with our rows below theirs."""
    base = [ours.get(Setup(*cell, "vgg", "sgd")) for cell in CELLS]
    best = [_best(ours, cell) for cell in CELLS]
    rows = [
        ["MAML++ (Antoniou et al.)", *[plus_minus(*ANTONIOU[c]) for c in CELLS]],
        ["MAML++ (paper's base)", *[plus_minus(*BASE[c]) for c in CELLS]],
        ["MAML++ (paper's best)", *[plus_minus(*BEST[c]) for c in CELLS]],
        ["", *[with_optimizer(*BEST_SETUP[c]) for c in CELLS]],
        ["innerloop (base)", *map(_text, base)],
        ["  seeds", *map(_seeds, base)],
        ["  difference", *[_difference(m, BASE[c]) for m, c in zip(base, CELLS, strict=True)]],
        ["innerloop (best)", *map(_text, best)],
        ["  seeds", *map(_seeds, best)],
        ["  difference", *[_difference(m, BEST[c]) for m, c in zip(best, CELLS, strict=True)]],
        ["", *[NONE if m is None else with_optimizer(*m.setup[3:]) for m in best]],
    ]
    head = ["approach", *[f"{c.dataset} {c.way}-way {c.shot}-shot" for c in CELLS]]
    return Table("Table 1: test accuracy in %, mean ± std over seeds", head, rows)


def _best(ours: dict[Setup, Mean], cell: tuple) -> Mean | None:
    fitting = [mean for setup, mean in ours.items() if setup.cell == cell]
    return max(fitting, key=lambda mean: mean.mean, default=None)


def appendix(ours: dict[Setup, Mean]) -> Table:
    """The appendix's table: every row of the paper's and of ours, repeated words left out."""
    rows: list[list[str]] = []
    before: Sequence[object] = ()
    known = ("mini-imagenet", "omniglot")  # others come last
    for setup in sorted(APPENDIX.keys() | ours.keys(), key=lambda s: (s.dataset not in known, s)):
        theirs, mean = APPENDIX.get(setup), ours.get(setup)
        names = [*map(str, setup[:4]), optimizer(setup.inner_optim)]
        equal = (a == b for a, b in zip(before, setup[:4], strict=False))
        same = len(list(itertools.takewhile(bool, equal)))
        rows.append(
            [
                *[("" if k < same else name) for k, name in enumerate(names)],
                *(_two(theirs.mean, theirs.std) if theirs else [NONE, NONE]),
                *(_two(mean.mean, mean.std, mean.star) if mean else [NONE, NONE]),
                _seeds(mean),
                _difference(mean, theirs),
            ]
        )
        before = setup
    head = ["dataset", "nway", "kshot", "model", "inner_optim", "paper: mean acc", "std"]
    head += ["ours: mean acc", "std", "seeds", "difference"]
    return Table("Full MAML++ model and inner optimizer sweep", head, rows)


def _two(mean: float, std: float | None, star: str = "") -> list[str]:
    return [f"{mean:.2f}{star}", NONE if std is None else f"{std:.2f}"]


def plus_minus(mean: float, std: float | None) -> str:
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def _text(mean: Mean | None) -> str:
    return NONE if mean is None else plus_minus(mean.mean, mean.std) + mean.star


def _seeds(mean: Mean | None) -> str:
    return NONE if mean is None else str(mean.seeds)


def _difference(ours: Mean | None, theirs: Reported | None) -> str:
    return NONE if ours is None or theirs is None else f"{ours.mean - theirs.mean:+.2f}"


def optimizer(name: str) -> str:
    """As the paper writes it."""
    return _OPTIMIZERS.get(name, name)


def with_optimizer(model: str, inner_optim: str) -> str:
    return f"{model}+{optimizer(inner_optim)}"
