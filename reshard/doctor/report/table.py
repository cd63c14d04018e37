"""The report in a terminal: totals, a table with one row per place, and remarks on the wasteful ones."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from reshard.doctor.memory import ProgramMemory
from reshard.doctor.places import Place, array_text
from reshard.doctor.report import phrases
from reshard.doctor.report.accounts import LineSum
from reshard.doctor.report.data import ReportData
from reshard.doctor.report.phrases import Row
from reshard.doctor.report.plain import plain_text
from reshard.show import terminal
from reshard.types.units import bytes_text, counted

_ROWS, _LINES, _BUFFERS = 25, 12, 6  # more than anyone reads
_FULL, _MIDDLE = 92, 76  # columns of a terminal that take the whole table, and most of it
_COLUMNS = ("XLA does", "received", "needed", "temp", "reshard would", "saves")
_NUMBERS = ("received", "needed", "temp", "saves")


def text(report: ReportData) -> str:
    """The report as plain text, 100 columns wide."""
    return plain_text(lambda out: show(out, report))


def show(out: Console, report: ReportData, every: bool = False, frames: bool = False) -> None:
    """Prints the report; with `every`, also reductions, the user's own shard_maps and small places.

    With `frames`, every place has a remark with its whole stack, lines of frameworks included.
    """
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
        if row.place.wasted_bytes or row.place.rebuilds or frames:
            out.print()
            _remark(out, at, row.place, frames)
    if more:
        out.print()
        bytes_left = bytes_text(sum(row.places * row.place.total_bytes for row in more))
        terminal.paragraph(out, f"not shown: {len(more)} more rows, {bytes_left} received", style=terminal.FAINT)
    summed = report.accounts(every)
    if lines := sorted((*summed.reductions, *summed.others), key=lambda line: -line.received_bytes):
        out.print()
        _sums(out, lines)
    if report.memory.moved_bytes:
        out.print()
        _memory(out, report.memory)


def _memory(out: Console, memory: ProgramMemory) -> None:
    """Prints the large buffers live at the peak, and what makes them; all others share a row."""
    large = [one for one in memory.buffers if 100 * one.array.nbytes >= memory.peak_bytes][:_BUFFERS]
    columns = [name for name in ("live at peak", "array", "made by", "where") if name not in _left_out(out.width)]
    table = terminal.table(*columns, right=["live at peak"])
    for buffer in large:
        cells = {
            "live at peak": bytes_text(buffer.array.nbytes),
            "array": array_text(buffer.array),
            "made by": Text(buffer.does, terminal.BAD if buffer.moved else ""),
            "where": phrases.short_where(buffer.where),
        }
        table.add_row(*(cells[name] for name in columns))
    if rest := memory.buffers[len(large) :]:
        table.add_row(bytes_text(sum(one.array.nbytes for one in rest)), counted(len(rest), "more array"))
    terminal.show(out, table, indent=2)


def _sums(out: Console, lines: Sequence[LineSum]) -> None:
    """Prints the places that are not shown one by one, summed by line and kind, and the last of them in one row."""
    names = ("summed by line", "XLA does", "launches", "received", "why")
    columns = names if out.width >= _MIDDLE else (names[0], *names[2:4])
    table = terminal.table(*columns, right=["launches", "received"])
    rows = [
        (phrases.short_where(line.where), line.does, *_figures(line), phrases.why_summed(line))
        for line in lines[:_LINES]
    ]
    if rest := lines[_LINES:]:
        launches, received = sum(line.launches for line in rest), sum(line.received_bytes for line in rest)
        rows.append((f"{len(rest)} more", "", str(launches), bytes_text(received), ""))
    for row in rows:
        cells = dict(zip(names, row, strict=True))
        table.add_row(*(cells[name] for name in columns))
    terminal.show(out, table, indent=2)


def _figures(line: LineSum) -> tuple[str, str]:
    return str(line.launches), bytes_text(line.received_bytes)


def _table(out: Console, rows: Sequence[Row]) -> None:
    """Prints a row for each place; in a narrow terminal, only the columns that matter most."""
    alike = ["places"] if any(row.places > 1 for row in rows) else []
    columns = [name for name in ("", "where", *alike, *_COLUMNS) if name not in _left_out(out.width)]
    table = terminal.table(*columns, right=["", *alike, *_NUMBERS])
    table.columns[1].no_wrap = True
    for at, row in enumerate(rows, 1):
        cells = _cells(at, row)
        table.add_row(*(cells[name] for name in columns))
    terminal.show(out, table, indent=2)


def _left_out(width: int) -> tuple[str, ...]:
    """The columns for which a terminal is too narrow; the remarks have most of what they say."""
    if width >= _FULL:
        return ()
    return (
        ("needed", "temp") if width >= _MIDDLE else ("needed", "temp", "places", "XLA does", "reshard would", "array")
    )


def _cells(at: int, row: Row) -> dict[str, str | Text]:
    """A row's cells by the names of their columns."""
    place, saves = row.place, phrases.saves(row.place)
    return {
        "": str(at),
        "where": row.where,
        "places": str(row.places),
        "XLA does": Text(phrases.does(place), terminal.BAD if place.rebuilds_whole else ""),
        "received": phrases.received(place),
        "needed": phrases.needed(place),
        "temp": bytes_text(place.temp_bytes),
        "reshard would": Text(phrases.instead(place), terminal.STEP if saves else terminal.FAINT),
        "saves": Text(bytes_text(place.saved_bytes) if saves else "", terminal.GOOD),
    }


def _remark(out: Console, at: int, place: Place, frames: bool) -> None:
    """Prints what a place moves, and what would be better."""
    mark = f"  {at}  "
    terminal.paragraph(out, phrases.origin(place.where), mark)
    mark = " " * len(mark)
    for frame in place.where.frames if frames else ():
        terminal.paragraph(out, phrases.frame_text(frame), mark, "" if frame.users else terminal.FAINT)
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
    if left := phrases.left_text(place):
        terminal.paragraph(out, left, mark, terminal.FAINT)
