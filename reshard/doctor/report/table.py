"""The report in a terminal: totals, a table with one row per place, and remarks on the wasteful ones."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from reshard.doctor.places import Place
from reshard.doctor.report import phrases
from reshard.doctor.report.data import ReportData
from reshard.doctor.report.phrases import Row
from reshard.show import terminal
from reshard.types.units import bytes_text

_WIDTH = 100
_ROWS = 25  # more than anyone reads


def text(report: ReportData) -> str:
    """The report as plain text, 100 columns wide."""
    plain: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False, "color_system": None}
    out = Console(file=io.StringIO(), width=_WIDTH, force_jupyter=False, **plain)  # otherwise prints in notebooks
    show(out, report)
    written = out.file.getvalue() if isinstance(out.file, io.StringIO) else ""
    return "\n".join(line.rstrip() for line in written.rstrip("\n").split("\n"))


def show(out: Console, report: ReportData, every: bool = False) -> None:
    """Prints the report; with `every`, also reductions, the user's own shard_maps and small places."""
    if not report.places:
        terminal.paragraph(out, f"{phrases.title(report)}: no data moves between devices", style=terminal.NAME)
        return
    terminal.paragraph(out, phrases.title(report), style=terminal.NAME)
    terminal.facts(out, phrases.facts(report))
    rows = phrases.rows(report.places if every else phrases.shown(report))
    rows, more = (rows, 0) if every else (rows[:_ROWS], len(rows[_ROWS:]))
    if rows:
        out.print()
        _table(out, rows)
    for at, row in enumerate(rows, 1):
        if row.place.wasted_bytes or row.place.rebuilds:
            out.print()
            _remark(out, at, row.place)
    if not every:
        _not_shown(out, report, more)


def _not_shown(out: Console, report: ReportData, more: int) -> None:
    """Prints what the table leaves out, if anything: `more` rows, and places that are not shown by default."""
    left_out = [f"{more} more rows" if more else "", phrases.hidden(report, phrases.shown(report))]
    if text := ", ".join(filter(None, left_out)):
        out.print()
        terminal.paragraph(out, f"not shown: {text}", style=terminal.FAINT)


def _table(out: Console, rows: Sequence[Row]) -> None:
    numbers = ["received", "needed", "temp", "saves"]
    alike = ["places"] if any(row.places > 1 for row in rows) else []
    columns = ["", "where", *alike, "XLA does", *numbers[:3], "reshard would", "saves"]
    table = terminal.table(*columns, right=["", *alike, *numbers])
    table.columns[1].no_wrap = True
    for at, row in enumerate(rows, 1):
        place = row.place
        table.add_row(
            str(at),
            row.where,
            *([str(row.places)] if alike else []),
            Text(phrases.does(place), terminal.BAD if place.rebuilds_whole else ""),
            phrases.received(place),
            phrases.needed(place),
            bytes_text(place.temp_bytes),
            Text(phrases.instead(place), terminal.STEP if phrases.saves(place) else terminal.FAINT),
            Text(bytes_text(place.saved_bytes) if phrases.saves(place) else "", terminal.GOOD),
        )
    terminal.show(out, table, indent=2)


def _remark(out: Console, at: int, place: Place) -> None:
    """Prints what a place moves, and what would be better."""
    mark = f"  {at}  "
    terminal.paragraph(out, phrases.origin(place.where), mark)
    mark = " " * len(mark)
    for move in place.moves:
        before, after = phrases.move_text(move)
        mesh = "" if move.source is None else f" on {move.source.mesh}"
        terminal.paragraph(out, f"{before} -> {after}{mesh}", mark, terminal.NAME)
    if rebuilt := phrases.rebuilt(place):
        terminal.paragraph(out, rebuilt, mark, terminal.BAD if place.rebuilds_whole else "")
    if plan := phrases.plan_text(place):
        terminal.paragraph(out, f"reshard: {plan}", mark, terminal.GOOD)
