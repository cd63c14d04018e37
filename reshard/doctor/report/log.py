"""The report on a log: the moves that XLA warns of, as a table or JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from reshard.doctor.report.findings import format_origin, format_short_line, format_steps
from reshard.doctor.report.table import print_plain
from reshard.doctor.xla_log import MARK, Rematerialization, read_warnings
from reshard.plans.plan_data import checked_indent
from reshard.show import terminal
from reshard.synth import Network
from reshard.types.units import bytes_text, counted

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
        return print_plain(lambda out: show_log(out, self))


def show_log(out: Console, report: LogReport) -> None:
    """Prints the report in a terminal: a row for each move, then its origin and layouts, or why these are not known."""
    title = f"{counted(len(report.moves), 'array')} that XLA rebuilds whole on every device"
    terminal.print_paragraph(out, title, style=terminal.NAME)
    facts = [("received", f"{bytes_text(report.received_bytes)} a device")]
    facts += [("not needed", bytes_text(report.saved_bytes))] if report.saved_bytes else []
    terminal.print_facts(out, facts)
    out.print()
    columns = [name for name in _LOG_COLUMNS if out.width >= _WHOLE or name not in _DETAILS]
    table = terminal.make_table(*columns, right=["", "times", "array", "received", "receive", "saves"])
    table.columns[1].no_wrap = True
    for at, move in enumerate(report.moves, 1):
        figures = (move.whole_bytes, move.received_bytes, move.planned_bytes, move.saved_bytes)
        whole, received, planned, saved = map(bytes_text, figures) if move.plan else ("-",) * 4
        cells = {
            "": str(at),
            "where": format_short_line(move.where),
            "times": str(move.times),
            "array": whole,
            "received": Text(received, terminal.BAD),
            "reshard would": Text("-" if move.plan is None else format_steps(move.plan), terminal.STEP),
            "receive": planned,
            "saves": Text(saved, terminal.GOOD),
        }
        table.add_row(*(cells[name] for name in columns))
    terminal.print_table(out, table, indent=2)
    for at, move in enumerate(report.moves, 1):
        out.print()
        mark = f"  {at}  "
        terminal.print_paragraph(out, format_origin(move.where), mark)
        mark = " " * len(mark)
        if move.source is None or move.target is None:
            terminal.print_paragraph(out, f"not planned: {move.problem}", mark, terminal.FAINT)
            continue
        meshes = f" on {move.source.mesh}"
        if move.target.mesh != move.source.mesh:
            meshes += f" and {move.target.mesh}"
        terminal.print_paragraph(out, f"{move.source} -> {move.target}{meshes}", mark, terminal.NAME)
