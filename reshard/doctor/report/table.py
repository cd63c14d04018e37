"""The report in a terminal: totals, a table with one row per place, and remarks on the wasteful ones."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from reshard.doctor.places import Place
from reshard.doctor.report import phrases
from reshard.doctor.report.accounts import LineSum
from reshard.doctor.report.data import ReportData
from reshard.doctor.report.phrases import Row
from reshard.doctor.report.plain import plain_text
from reshard.show import terminal
from reshard.types.units import bytes_text

_ROWS, _LINES = 25, 12  # more than anyone reads


def text(report: ReportData) -> str:
    """The report as plain text, 100 columns wide."""
    return plain_text(lambda out: show(out, report))


def show(out: Console, report: ReportData, every: bool = False) -> None:
    """Prints the report; with `every`, also reductions, the user's own shard_maps and small places."""
    if not report.places:
        terminal.paragraph(out, f"{phrases.title(report)}: no data moves between devices", style=terminal.NAME)
        return
    terminal.paragraph(out, phrases.title(report), style=terminal.NAME)
    terminal.facts(out, phrases.facts(report))
    rows = phrases.rows(report.places if every else phrases.shown(report))
    rows, more = (rows, []) if every else (rows[:_ROWS], rows[_ROWS:])
    if rows:
        out.print()
        _table(out, rows)
    for at, row in enumerate(rows, 1):
        if row.place.wasted_bytes or row.place.rebuilds:
            out.print()
            _remark(out, at, row.place)
    if more:
        out.print()
        bytes_left = bytes_text(sum(row.places * row.place.total_bytes for row in more))
        terminal.paragraph(out, f"not shown: {len(more)} more rows, {bytes_left} received", style=terminal.FAINT)
    summed = report.accounts(every)
    if lines := sorted((*summed.reductions, *summed.others), key=lambda line: -line.received_bytes):
        out.print()
        _sums(out, lines)


def _sums(out: Console, lines: Sequence[LineSum]) -> None:
    """Prints the places that are not shown one by one, summed by line and kind, and the last of them in one row."""
    table = terminal.table("summed by line", "XLA does", "launches", "received", "why", right=["launches", "received"])
    for line in lines[:_LINES]:
        table.add_row(
            phrases.short_where(line.where),
            line.does,
            str(line.launches),
            bytes_text(line.received_bytes),
            Text(phrases.why_summed(line), terminal.FAINT),
        )
    if rest := lines[_LINES:]:
        launches, received = (sum(line[at] for line in map(_figures, rest)) for at in range(2))
        table.add_row(f"{len(rest)} more", "", str(launches), bytes_text(received), "")
    terminal.show(out, table, indent=2)


def _figures(line: LineSum) -> tuple[int, int]:
    return line.launches, line.received_bytes


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
    if not place.counted:
        terminal.paragraph(out, phrases.OTHER_BRANCH, mark, terminal.FAINT)
    if rebuilt := phrases.rebuilt(place):
        terminal.paragraph(out, rebuilt, mark, terminal.BAD if place.rebuilds_whole else "")
    if plan := phrases.plan_text(place):
        terminal.paragraph(out, f"reshard: {plan}", mark, terminal.GOOD)
