"""What `peers.py` measured: the table, the details, the targets, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import peer_figure
import timing
from memory_report import Target, target_line
from peer_cases import AXES, GROWTH, LIMITS, PEERS, SYSTEMS, TINY, Case, Limit
from peer_run import TOLERANCE, Result

Results = Sequence[Result]


def agreement_line(result: Result) -> str:
    return f"{result.case:12} {result.system:12}{result.way:16}{_gradient(result) or result.note}"


def _gradient(result: Result) -> str:
    """How far the gradients are from those of the plain loop."""
    parts = [
        f"{kind} {d:.0e}" + ("" if d <= TOLERANCE else " WRONG")
        for kind, d in (result.differences or {}).items()
    ]
    return ", ".join(parts)


def best(results: Results, case: str, system: str) -> Result | None:
    """The fastest way; one with another gradient only if a peer has no better one."""
    mine = [r for r in results if r.case == case and r.system == system and r.times]
    exact = [r for r in mine if r.agrees]
    if system == "innerloop":
        mine = exact
    return min(exact or mine, key=_seconds, default=None)


def _seconds(result: Result) -> float:
    return timing.spread(result.times or [float("nan")]).median


# --- tables -----------------------------------------------------------------------------------


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _times(value: float) -> str:
    return f"{value:.0f} x" if value >= 100 else f"{value:.3g} x"


def _size(size: float | None) -> str:
    return "" if size is None else f"{size / 1e6:.3g} MB"


def _row(result: Result, ours: Result | None) -> list[str]:
    cells = [result.system, result.way]
    if result.times is None:
        return [*cells, "", "", "", "", _gradient(result), result.note]
    ratio = ""
    if ours is not None and ours.times is not None:
        median, low, high = timing.ratio(result.times, ours.times)
        ratio = f"{_times(median)} ({low:.3g}-{high:.3g})"
    first = "" if result.first is None else _time(result.first)
    numbers = [_time(_seconds(result)), first, _size(result.extra), ratio]
    return [*cells, *numbers, _gradient(result), result.note or result.remark]


def details(case: Case, results: Results) -> str:
    """Every way of every system."""
    ours = best(results, case.name, "innerloop")
    header = ["system", "way", "time", "first call", "memory", "time to ours", "gradient", "note"]
    rows = [_row(r, ours) for r in results if r.case == case.name]
    return f"### ({case.name}) {case.about}\n\n{_markdown([header, *rows])}"


def _cell(results: Results, case: str, system: str) -> str:
    """Time and memory, relative to innerloop's fastest way; or why there are none."""
    ours, theirs = best(results, case, "innerloop"), best(results, case, system)
    if theirs is None or theirs.times is None:
        notes = [r.note for r in results if r.case == case and r.system == system and r.note]
        return notes[0].partition(":")[0] if notes else ""
    absolute = f"{_time(_seconds(theirs))}, {_size(theirs.extra)}"
    if system == "innerloop" or ours is None or ours.times is None:
        return f"{absolute} ({theirs.way})"
    cell = _times(timing.ratio(theirs.times, ours.times).median)
    if theirs.extra is not None and ours.extra:
        cell += f", {_times(theirs.extra / ours.extra)}"
    wrong = [kind for kind, d in (theirs.differences or {}).items() if d > TOLERANCE]
    return f"{cell} (other gradient: {', '.join(wrong)})" if wrong else cell


def _present(results: Results) -> list[str]:
    return [system for system in SYSTEMS if any(r.system == system for r in results)]


def table(cases: Sequence[Case], results: Results) -> str:
    """A row for each case, a column for each system."""
    systems = _present(results)
    rows = [["", "one meta-step", *systems]]
    for case in cases:
        cells = [_cell(results, case.name, system) for system in systems]
        rows.append([case.name, case.about, *cells])
    return _markdown(rows)


def _growth(cases: Sequence[Case], results: Results, axis: str) -> str:
    systems = _present(results)
    rows = [[AXES[axis], *systems]]
    for case in cases:
        fastest = [best(results, case.name, system) for system in systems]
        cells = ["" if one is None else _time(_seconds(one)) for one in fastest]
        rows.append([str(getattr(case, axis)), *cells])
    return _markdown(rows)


# --- targets ----------------------------------------------------------------------------------


def _peer(results: Results, limit: Limit) -> Result | None:
    if limit.system != PEERS:
        return best(results, limit.case, limit.system)
    others = [best(results, limit.case, s) for s in SYSTEMS if s not in ("innerloop", "higher")]
    return min((o for o in others if o is not None and o.agrees), key=_seconds, default=None)


def _ours(results: Results, limit: Limit, theirs: Result) -> Result | None:
    if limit.memory is None:
        return best(results, limit.case, "innerloop")
    room = limit.memory * (theirs.extra or 0.0)
    every = [r for r in results if r.case == limit.case and r.system == "innerloop"]
    mine = [r for r in every if r.extra is not None and r.agrees]
    small = [r for r in mine if _extra(r) <= room]
    return best(small, limit.case, "innerloop") or min(mine, key=_extra, default=None)


def _extra(result: Result) -> float:
    return result.extra or 0.0


def _time_target(limit: Limit, ours: Result | None, theirs: Result | None) -> Target:
    pair = ("innerloop", limit.system) if limit.most else (limit.system, "innerloop")
    text = f"({limit.case}) time of {pair[0]} / {pair[1]}"
    bound, at_most = limit.most or limit.least or 0.0, limit.most is not None
    if ours is None or theirs is None or not ours.times or not theirs.times:
        return Target(text, None, bound, at_most)
    top, bottom = (ours.times, theirs.times) if at_most else (theirs.times, ours.times)
    ratio = timing.ratio(top, bottom)
    ways = f"{ours.way} against {theirs.system} {theirs.way}"
    detail = f"quartiles {ratio.low:.3f}-{ratio.high:.3f}; {ways}"
    return Target(text, ratio.median, bound, at_most, detail)


def _targets(results: Results, limit: Limit) -> list[Target]:
    theirs = _peer(results, limit)
    ours = None if theirs is None else _ours(results, limit, theirs)
    found = [_time_target(limit, ours, theirs)]
    if limit.memory is not None:
        text = f"({limit.case}) memory of innerloop / {limit.system}, the same way"
        ratio = _extra(ours) / theirs.extra if ours and theirs and theirs.extra else None
        found.append(Target(text, ratio, limit.memory))
    return found


def targets(results: Results) -> list[Target]:
    measured = {r.case for r in results}
    mine = [limit for limit in LIMITS if limit.case in measured]
    return [target for limit in mine for target in _targets(results, limit)]


# --- everything -------------------------------------------------------------------------------


def summary(cases: Sequence[Case], results: Results) -> str:
    """What one looks at first."""
    parts = []
    if rows := [case for case in cases if not case.name.startswith(GROWTH)]:
        parts += ["Time and memory, divided by those of innerloop's fastest way"]
        parts += [table(rows, results)]
    for axis in AXES:
        if mine := [case for case in cases if case.name.startswith(f"{GROWTH} {axis} ")]:
            parts += [f"(i) sine MAML: seconds over {AXES[axis]}", _growth(mine, results, axis)]
    if found := targets(results):
        about = "Targets"
        if any(case.about.startswith(TINY) for case in cases):
            about += " (tiny sizes: they say nothing here)"
        parts += [f"{about}:", "\n".join(["```", *map(target_line, found), "```"])]
    return "\n\n".join(parts)


def write(
    path: Path, about: dict[str, object], cases: Sequence[Case], results: Results
) -> list[Path]:
    """Markdown, JSON and the figure, with the same name. Returns the paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = {r.case for r in results}
    cases = [case for case in cases if case.name in measured]
    where = ", ".join(f"{key} {value}" for key, value in about.items())
    parts = [where, summary(cases, results), *(details(case, results) for case in cases)]
    text, data = path.with_suffix(".md"), path.with_suffix(".json")
    text.write_text("\n\n".join(parts) + "\n")
    content = about | {
        "results": [r._asdict() for r in results],
        "targets": [t._asdict() | {"verdict": t.verdict} for t in targets(results)],
    }
    data.write_text(json.dumps(content, indent=2) + "\n")
    points = {
        (case.name, system): _seconds(one)
        for case in cases
        for system in SYSTEMS
        if (one := best(results, case.name, system)) is not None
    }
    return [text, data, *peer_figure.draw(path, points)]
