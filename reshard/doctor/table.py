"""The report in a terminal: totals, a table with a row for each place, and what there is to say of those that waste."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from reshard.cli import output
from reshard.cli.units import bytes_text
from reshard.doctor import words
from reshard.doctor.model import Place, Report
from reshard.doctor.words import Row

_WIDTH = 100
_ROWS = 25  # As many as one looks through.


def text(report: Report) -> str:
    """The report as plain text, 100 columns wide."""
    plain: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False, "color_system": None}
    out = Console(file=io.StringIO(), width=_WIDTH, force_jupyter=False, **plain)  # Jupyter's would print it.
    show(out, report)
    written = out.file.getvalue() if isinstance(out.file, io.StringIO) else ""
    return "\n".join(line.rstrip() for line in written.rstrip("\n").split("\n"))


def show(out: Console, report: Report, every: bool = False) -> None:
    """Prints the report; with `every`, also reductions, what the user's shard_maps move, and what is small."""
    if not report.places:
        output.paragraph(out, f"{words.title(report)}: no data moves between devices", style=output.NAME)
        return
    output.paragraph(out, words.title(report), style=output.NAME)
    output.facts(out, words.facts(report))
    rows = words.rows(report.places if every else words.shown(report))
    rows, more = (rows, 0) if every else (rows[:_ROWS], len(rows[_ROWS:]))
    if rows:
        out.print()
        _table(out, rows)
    for at, row in enumerate(rows, 1):
        if row.place.wasted_bytes or row.place.rebuilds:
            out.print()
            _remark(out, at, row.place)
    left = "" if every else words.hidden(report, words.shown(report))
    if left := ", ".join(filter(None, [f"{more} more rows" if more else "", left])):
        out.print()
        output.paragraph(out, f"not shown: {left}", style=output.FAINT)


def _table(out: Console, rows: Sequence[Row]) -> None:
    numbers = ["received", "needed", "temp", "saves"]
    alike = ["places"] if any(row.places > 1 for row in rows) else []
    columns = ["", "where", *alike, "XLA does", *numbers[:3], "reshard would", "saves"]
    table = output.table(*columns, right=["", *alike, *numbers])
    table.columns[1].no_wrap = True
    for at, row in enumerate(rows, 1):
        place = row.place
        table.add_row(
            str(at),
            row.where,
            *([str(row.places)] if alike else []),
            Text(words.does(place), output.BAD if place.rebuilds_whole else ""),
            words.received(place),
            words.needed(place),
            bytes_text(place.temp_bytes),
            Text(words.instead(place), output.STEP if words.saves(place) else output.FAINT),
            Text(bytes_text(place.saved_bytes) if words.saves(place) else "", output.GOOD),
        )
    output.show(out, table, indent=2)


def _remark(out: Console, at: int, place: Place) -> None:
    """What a place moves, and what would be better."""
    mark = f"  {at}  "
    output.paragraph(out, words.origin(place.where), mark)
    mark = " " * len(mark)
    for move in place.moves:
        before, after = words.move_text(move)
        mesh = "" if move.source is None else f" on {move.source.mesh}"
        output.paragraph(out, f"{before} -> {after}{mesh}", mark, output.NAME)
    if rebuilt := words.rebuilt(place):
        output.paragraph(out, rebuilt, mark, output.BAD if place.rebuilds_whole else "")
    if plan := words.plan_text(place):
        output.paragraph(out, f"reshard: {plan}", mark, output.GOOD)
