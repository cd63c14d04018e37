"""The report in a terminal: totals, a table with one row per place, and remarks on the wasteful ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from reshard.doctor.live_bytes import ProgramMemory
from reshard.doctor.places import format_array
from reshard.doctor.report.findings import (
    OTHER_BRANCH,
    Finding,
    Findings,
    LineSum,
    format_origin,
    format_short_line,
    shorten_path,
)
from reshard.show import terminal
from reshard.types.units import bytes_text, counted

_ROWS, _LINES, _BUFFERS = 25, 12, 6  # more than anyone reads
_FULL, _MIDDLE = 92, 76  # columns of a terminal that take the whole table, and most of it
_NUMBERS = ("", "places", "received", "needed", "temp", "saves", "launches", "live at peak", "times", "receive")


def show_report(out: Console, report: Findings, every: bool = False, frames: bool = False, hint: bool = True) -> None:
    """Prints the report; with `every`, also reductions, the user's own shard_maps and small places.

    With `frames`, every place has a remark with its whole stack, lines of frameworks included. The `hint` is one at
    advice, which may follow.
    """
    if not report.places:
        terminal.print_paragraph(out, f"{report.title}: no data moves between devices", style=terminal.NAME)
        return
    terminal.print_paragraph(out, report.title, style=terminal.NAME)
    terminal.print_facts(out, report.facts)
    every_one = report.shown(every)
    found = every_one if every else every_one[:_ROWS]
    # In a narrow terminal only the columns that matter most; the remarks have most of what the others say.
    hidden = () if out.width >= _FULL else ("needed", "temp")
    hidden += () if out.width >= _MIDDLE else ("places", "XLA does", "reshard would", "array", "why")
    if found:
        out.print()
        rows: list[dict[str, str | Text]] = []
        for at, one in enumerate(found, 1):
            alike: dict[str, str | Text] = {"places": str(one.alike)} if any(each.alike > 1 for each in found) else {}
            rows.append({
                "": str(at),
                "where": one.where,
                **alike,
                "XLA does": Text(one.does, terminal.BAD if one.place.rebuilds_whole else ""),
                "received": one.received,
                "needed": one.needed,
                "temp": bytes_text(one.place.temp_bytes),
                "reshard would": Text(one.instead, terminal.STEP if one.saved else terminal.FAINT),
                "saves": Text(one.saved, terminal.GOOD),
            })  # fmt: skip
        print_rows(out, rows, hidden, whole="where")
    for at, one in enumerate(found, 1):
        if one.is_wasteful or frames:
            out.print()
            _show_remark(out, at, one, frames)
    if more := every_one[len(found) :]:
        out.print()
        bytes_left = bytes_text(sum(one.alike * one.place.total_bytes for one in more))
        terminal.print_paragraph(out, f"not shown: {len(more)} more rows, {bytes_left} received", style=terminal.FAINT)
    summed = report.accounts(every)
    if lines := sorted((*summed.reductions, *summed.others), key=lambda line: -line.received_bytes):
        out.print()
        _show_sums(out, lines, hidden)
    if report.memory.moved_bytes:
        out.print()
        _show_buffers(out, report.memory, hidden)
    if hint and report.hint:
        out.print()
        terminal.print_paragraph(out, report.hint, style=terminal.FAINT)


def print_rows(
    out: Console,
    rows: Sequence[Mapping[str, str | Text]],
    hidden: Sequence[str] = (),
    whole: str = "",
    right: Sequence[str] = (),
) -> None:
    """Prints a table of rows, given by the names of their columns; the column `whole` is not wrapped.

    Columns that a narrow terminal has no room for are `hidden`; those of numbers, and others named `right`, end alike.
    """
    columns = [name for name in rows[0] if name not in hidden]
    table = terminal.make_table(*columns, right=(*_NUMBERS, *right))
    if whole:
        table.columns[columns.index(whole)].no_wrap = True
    for row in rows:
        table.add_row(*(row.get(name, "") for name in columns))
    terminal.print_table(out, table, indent=2)


def _show_remark(out: Console, at: int, one: Finding, frames: bool) -> None:
    """Prints what a place moves, and what would be better."""
    place, mark = one.place, f"  {at}  "
    terminal.print_paragraph(out, format_origin(place.where), mark)
    mark = " " * len(mark)
    for frame in place.where.frames if frames else ():
        line = ", ".join(filter(None, (f"{shorten_path(frame.file)}:{frame.line}", frame.function)))
        terminal.print_paragraph(out, line, mark, "" if frame.users else terminal.FAINT)
    for (before, after), move in zip(one.moves, place.moves, strict=True):
        mesh = "" if move.source is None else f" on {move.source.mesh}"
        terminal.print_paragraph(out, f"{before} -> {after}{mesh}", mark, terminal.NAME)
    if not place.counted:
        terminal.print_paragraph(out, OTHER_BRANCH, mark, terminal.FAINT)
    if one.rebuilt:
        terminal.print_paragraph(out, one.rebuilt, mark, terminal.BAD if place.rebuilds_whole else "")
    if one.plan:
        terminal.print_paragraph(out, f"reshard: {one.plan}", mark, terminal.GOOD)
    if one.causes:
        terminal.print_paragraph(out, one.causes, mark, terminal.FAINT)
    if one.left:
        terminal.print_paragraph(out, one.left, mark, terminal.FAINT)


def _show_sums(out: Console, lines: Sequence[LineSum], hidden: Sequence[str]) -> None:
    """Prints the places that are not shown one by one, summed by line and kind, and the last of them in one row."""
    rows = [
        (format_short_line(line.where), line.does, str(line.launches), bytes_text(line.received_bytes), line.why)
        for line in lines[:_LINES]
    ]
    if rest := lines[_LINES:]:
        launches, received = sum(line.launches for line in rest), sum(line.received_bytes for line in rest)
        rows.append((f"{len(rest)} more", "", str(launches), bytes_text(received), ""))
    names = ("summed by line", "XLA does", "launches", "received", "why")
    print_rows(out, [dict(zip(names, row, strict=True)) for row in rows], hidden)


def _show_buffers(out: Console, memory: ProgramMemory, hidden: Sequence[str]) -> None:
    """Prints the large buffers live at the peak, and what makes them; all others share a row."""
    large = [one for one in memory.buffers if 100 * one.array.nbytes >= memory.peak_bytes][:_BUFFERS]
    rows: list[dict[str, str | Text]] = [
        {
            "live at peak": bytes_text(buffer.array.nbytes),
            "array": format_array(buffer.array),
            "made by": Text(buffer.does, terminal.BAD if buffer.moved else ""),
            "where": format_short_line(buffer.where),
        }
        for buffer in large
    ]
    if rest := memory.buffers[len(large) :]:
        second = "made by" if "array" in hidden else "array"
        received = bytes_text(sum(one.array.nbytes for one in rest))
        rows.append({"live at peak": received, second: counted(len(rest), "more array")})
    print_rows(out, rows, hidden)
