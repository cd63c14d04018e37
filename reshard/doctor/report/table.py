"""The report in a terminal: totals, a table with one row per place, and remarks on the wasteful ones."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from reshard.doctor.memory import ProgramMemory
from reshard.doctor.places import LineSum, Place, array_text
from reshard.doctor.report import phrases
from reshard.doctor.report.data import ReportData
from reshard.doctor.report.phrases import Row
from reshard.doctor.xla_log import MARK, Rematerialization, read_warnings
from reshard.plans.plan_data import checked_indent
from reshard.show import terminal
from reshard.synth import Network
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


# The report on a log: the moves that XLA warns of, as a table or JSON.


_LOG_COLUMNS = ("", "where", "times", "array", "received", "reshard would", "receive", "saves")
_DETAILS = ("times", "array", "reshard would", "receive")
_WHOLE = 76  # columns of a terminal that take the whole table


@dataclass(frozen=True)
class LogReport:
    """What XLA warns of in a log, those that cost most first; bytes are those of one device in one run of a move.

    >>> line = ("[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {devices=[4,1]<=[4]} "
    ...         "to {devices=[1,4]<=[4]} efficiently for HLO operation %add = f32[2,8]{1,0} add(%a, %b), "
    ...         'metadata={op_name="f/add" source_file="train.py" source_line=3}. As the last resort')
    >>> report = LogReport.of(line)
    >>> print(report)
    1 array that XLA rebuilds whole on every device
      received    192 B a device
      not needed  144 B
    <BLANKLINE>
          where        times   array   received   reshard would   receive   saves
      ───────────────────────────────────────────────────────────────────────────
      1   train.py:3       1   256 B      192 B   all_to_all         48 B   144 B
    <BLANKLINE>
      1  train.py:3, f/add
         f32[{d0}2, 8] -> f32[8, {d0}2] on <d0=4>
    >>> report.saved_bytes, report.to_dict()["moves"][0]["planned_bytes"]
    (144, 48)
    """

    moves: tuple[Rematerialization, ...]

    @classmethod
    def of(cls, log: str, network: Network | str | None = None) -> LogReport:
        """The report on the text of a log; `network` is that of `reshard.plan`."""
        return cls(read_warnings(log, network))

    @property
    def received_bytes(self) -> int:
        """The bytes that a device receives in XLA's way, each move once."""
        return sum(move.received_bytes for move in self.moves)

    @property
    def saved_bytes(self) -> int:
        """The bytes of these that the plans would save."""
        return sum(move.saved_bytes for move in self.moves)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "warning": MARK,
            "received_bytes": self.received_bytes,
            "saved_bytes": self.saved_bytes,
            "moves": [move.to_dict() for move in self.moves],
        }

    def to_json(self, indent: int | None = None) -> str:
        """The report as one JSON object."""
        return json.dumps(self.to_dict(), indent=checked_indent(indent))

    def __str__(self) -> str:
        return plain_text(lambda out: show_log(out, self))


def show_log(out: Console, report: LogReport) -> None:
    """Prints the report in a terminal."""
    title = f"{counted(len(report.moves), 'array')} that XLA rebuilds whole on every device"
    terminal.paragraph(out, title, style=terminal.NAME)
    facts = [("received", f"{bytes_text(report.received_bytes)} a device")]
    facts += [("not needed", bytes_text(report.saved_bytes))] if report.saved_bytes else []
    terminal.facts(out, facts)
    out.print()
    _log_table(out, report.moves)
    for at, move in enumerate(report.moves, 1):
        out.print()
        _log_remark(out, at, move)


def _log_table(out: Console, moves: Sequence[Rematerialization]) -> None:
    columns = [name for name in _LOG_COLUMNS if out.width >= _WHOLE or name not in _DETAILS]
    table = terminal.table(*columns, right=["", "times", "array", "received", "receive", "saves"])
    table.columns[1].no_wrap = True
    for at, move in enumerate(moves, 1):
        steps = "-" if move.plan is None else phrases.steps(move.plan)
        figures = (move.whole_bytes, move.received_bytes, move.planned_bytes, move.saved_bytes)
        whole, received, planned, saved = map(bytes_text, figures) if move.plan else ("-",) * 4
        cells = {
            "": str(at),
            "where": phrases.short_where(move.where),
            "times": str(move.times),
            "array": whole,
            "received": Text(received, terminal.BAD),
            "reshard would": Text(steps, terminal.STEP),
            "receive": planned,
            "saves": Text(saved, terminal.GOOD),
        }
        table.add_row(*(cells[name] for name in columns))
    terminal.show(out, table, indent=2)


def _log_remark(out: Console, at: int, move: Rematerialization) -> None:
    """Prints the origin of a move and its layouts, or why they cannot be read."""
    mark = f"  {at}  "
    terminal.paragraph(out, phrases.origin(move.where), mark)
    mark = " " * len(mark)
    if move.source is None or move.target is None:
        terminal.paragraph(out, f"not planned: {move.problem}", mark, terminal.FAINT)
        return
    meshes = f" on {move.source.mesh}"
    if move.target.mesh != move.source.mesh:
        meshes += f" and {move.target.mesh}"
    terminal.paragraph(out, f"{move.source} -> {move.target}{meshes}", mark, terminal.NAME)


# What a report prints in a terminal, as plain text.


_WIDTH = 100


def plain_text(show: Callable[[Console], None]) -> str:
    """What `show` prints, as plain text 100 columns wide.

    >>> plain_text(lambda out: out.print("received  ", style="bold"))
    'received'
    """
    plain: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False, "color_system": None}
    out = Console(file=io.StringIO(), width=_WIDTH, force_jupyter=False, **plain)  # otherwise prints in notebooks
    show(out)
    written = out.file.getvalue() if isinstance(out.file, io.StringIO) else ""
    return "\n".join(line.rstrip() for line in written.rstrip("\n").split("\n"))
