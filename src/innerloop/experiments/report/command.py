"""Results of runs of ``innerloop maml``, beside the numbers of the paper.

``innerloop report RUNS`` reads the folders of runs, and folders of such folders, prints Table 1 and
the table of the appendix, and writes a page with tables, curves and the settings of each run.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.command_line import WRONG, Parser, path
from innerloop.experiments.report.page import page
from innerloop.experiments.report.runs import FoundRun, read_runs
from innerloop.experiments.report.tables import NOTE, Table, appendix, average, table_1

_WIDTH = 170


def report(folders: Sequence[Path], out: Path | None) -> str:
    """The tables as text; the page goes to ``out`` if that is given.

    Runs that cannot be read are left out, each with a remark at the end of the text.

    >>> print(report([Path("no-such-folder")], None).splitlines()[-1])
    Remark: no-such-folder does not exist
    """
    return _report(folders, out)[0]


def _report(folders: Sequence[Path], out: Path | None) -> tuple[str, list[FoundRun]]:
    runs, remarks = read_runs(folders)
    ours = average(runs, remarks)
    tables = (table_1(ours), appendix(ours))
    finished = sum(run.result is not None for run in runs)
    summary = f"{len(runs)} run{'s' * (len(runs) != 1)}, {finished} finished."
    if out is not None:
        _write(out, page(summary, tables, runs, remarks))
    lines = [*map(_print_table, tables), NOTE, summary]
    lines += [f"Remark: {remark.folder} {remark.text}" for remark in remarks]
    return "\n".join(lines), runs


def _print_table(table: Table) -> str:
    shown = RichTable(title=Text(table.title), title_justify="left")
    for word in table.head:
        # Narrow enough for a terminal; long names go on in the next line.
        shown.add_column(Text("\n".join(word.split())), overflow="fold")
    for row in table.rows:
        shown.add_row(*[Text(word) for word in row])
    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None).print(shown)
    return file.getvalue()


def _write(out: Path, html: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(html, encoding="utf-8")
    except OSError as error:
        raise InnerLoopError(
            f"The page cannot be written to {out} ({error.strerror}). Name another file with --out."
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run it from the command line. The exit code is 1 if there was no run to report."""
    parser = Parser("innerloop report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=path, metavar="RUNS", help="folders of runs")
    parser.add_argument(
        "--out", type=path, default=Path("out/report.html"), help="the page (out/report.html)"
    )
    args = parser.parse_args(argv)
    try:
        text, runs = _report(args.runs, args.out)
    except InnerLoopError as error:
        print(error, file=sys.stderr)
        return WRONG
    print(text)
    print(f"Page: {args.out}")
    return 0 if runs else 1
