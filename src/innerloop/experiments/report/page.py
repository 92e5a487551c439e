"""The report as one page that needs nothing else: no scripts, no other files, no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from innerloop.experiments.report import figures
from innerloop.experiments.report.runs import FoundRun, Remark
from innerloop.experiments.report.tables import NOTE, Table, with_optimizer

_TEMPLATE = Path(__file__).with_name("page.html.jinja")


class _Section(NamedTuple):
    title: str
    outcome: str
    settings: Table
    learned: dict[str, Markup]


def page(
    summary: str,
    tables: tuple[Table, Table],
    runs: Sequence[FoundRun],
    remarks: Sequence[Remark],
) -> str:
    """The page's HTML. Everything that came from a run's folder is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        summary=summary,
        note=NOTE,
        table_1=tables[0],
        appendix=tables[1],
        curves=_curves(runs),
        runs=[_section(run, number) for number, run in enumerate(runs)],
        remarks=remarks,
    )


def _curves(runs: Sequence[FoundRun]) -> list[tuple[str, Markup]]:
    cells = sorted({run.setup.cell for run in runs})
    found = []
    for k, cell in enumerate(cells):
        svg = figures.curves([r for r in runs if r.setup.cell == cell], f"curve{k}")
        if svg is not None:
            title = f"{cell.dataset}, {cell.way}-way {cell.shot}-shot; a line for each run"
            found.append((title, Markup(svg)))
    return found


def _section(run: FoundRun, number: int) -> _Section:
    setup = run.setup
    title = f"{setup.dataset}, {setup.way}-way {setup.shot}-shot, {with_optimizer(*setup[3:])}"
    settings = [[name, json.dumps(value)] for name, value in run.config.items()]
    return _Section(
        f"{title}, seed {run.seed}",
        outcome(run),
        Table(str(run.folder), ["setting", "value"], settings),
        {name: Markup(svg) for name, svg in figures.learned_figures(run, f"run{number}").items()},
    )


def outcome(run: FoundRun) -> str:
    """The result in words."""
    if run.result is None:
        if not run.records:
            return "not finished"
        last = run.records[-1]
        return (
            f"not finished; validation accuracy {100 * last['val_accuracy']:.2f} % "
            f"after epoch {last['epoch']}"
        )
    result = run.result
    text = f"{result} (95 % interval over test tasks)"
    if len(result.epochs) > 1:
        text += f", mean prediction of epochs {', '.join(map(str, result.epochs))}"
    else:
        text += f", from epoch {result.epochs[0]}"
    text += f"; {result.seconds / 60:.1f} minutes"
    return f"{text}; it {result.flaws}" if result.flaws else text
