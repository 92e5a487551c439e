"""Figures of the report as SVG that can stand inside a page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from innerloop.experiments.report.runs import FoundRun
from innerloop.experiments.report.tables import with_optimizer

_PANELS = 6
_LINES = 60
_POINTS = 500
_LARGEST = 1e12  # beyond it, an axis is no use and matplotlib's own sums overflow

# Text stays text, in the page's own letters; names in it are not formulas.
_STYLE: Any = {"svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "innerloop"}


def curves(runs: Sequence[FoundRun], name: str) -> str | None:
    """Validation accuracy of runs on the same tasks, a colour for each model and optimizer."""
    drawn = [run for run in runs if run.records]
    if not drawn:
        return None
    labels = sorted({with_optimizer(*run.setup[3:]) for run in drawn})
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        axes = figure.subplots()
        for number, label in enumerate(labels):
            axes.plot([], [], color=f"C{number % 10}", label=label)
        for run in drawn:
            number = labels.index(with_optimizer(*run.setup[3:]))
            shown = _thin(run.records)
            x = [record["iteration"] for record in shown]
            y = [100 * record["val_accuracy"] for record in shown]
            axes.plot(x, y, color=f"C{number % 10}", marker=".", linewidth=1)
        axes.axhline(100 / runs[0].setup.way, color="grey", linestyle=":", label="chance")
        axes.set(xlabel="meta-updates", ylabel="validation, %")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        # Beside the curves: with many models it would hide some.
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        return _svg(figure, name)


def _thin(records: list[Any]) -> list[Any]:
    return records[:: -(-len(records) // _POINTS)] if records else []


def learned_figures(run: FoundRun, name: str) -> dict[str, str]:
    """Figures of each learned setting over time."""
    records = _thin(run.records)
    epochs = [record["epoch"] for record in records]
    found = {}
    for k, setting in enumerate(records[-1].get("learned", {}) if records else ()):
        values = numpy.array([record["learned"][setting] for record in records], dtype=float)
        # Runs that diverge have values that no axis can show.
        values[~(numpy.abs(values) < _LARGEST)] = numpy.nan
        found[setting] = _learned_figure(epochs, _panels(values, setting), setting, f"{name}-{k}")
    return found


def _panels(values: numpy.ndarray, name: str) -> numpy.ndarray:
    """[epochs, panels, lines]: a panel for each step, or for each of the betas."""
    if name == "betas" and values.ndim > 2 and values.shape[1] != 2 and values.shape[-1] == 2:
        values = numpy.moveaxis(values, -1, 1)
    several = values.ndim > 2 or (name == "betas" and values.ndim == 2 and values.shape[1] == 2)
    panels = values.shape[1] if several and values.shape[1] <= _PANELS else 1
    return values.reshape(len(values), panels, -1)


def _learned_figure(epochs: list[int], panels: numpy.ndarray, setting: str, name: str) -> str:
    count, lines = panels.shape[1:]
    shown = range(0, lines, -(-lines // _LINES))
    kind = "beta" if setting == "betas" else "step"
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(max(5, 2.6 * count), 2.8), layout="constrained")
        alike = setting != "betas"  # the second one moves in thousandths
        panes = figure.subplots(1, count, sharey=alike, squeeze=False)[0]
        panes[0].set_ylabel(setting)
        for k, axes in enumerate(panes):
            for line in shown:
                colour = colormaps["viridis"](line / max(lines - 1, 1))
                axes.plot(epochs, panels[:, k, line], color=colour, linewidth=1)
            axes.set(xlabel="epoch", title=f"{kind} {k + 1}" if count > 1 else "")
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
            axes.grid(alpha=0.3)
        return _svg(figure, name)


def _svg(figure: Figure, name: str) -> str:
    """The figure as an element, its ids begun with ``name`` so that a page can hold several."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=nothing)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    return svg.replace("<svg ", '<svg role="img" ', 1)
