"""Text on a terminal: paragraphs and tables as wide as the terminal, and plain, unwrapped lines in a pipe."""

from __future__ import annotations

import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

PROSE = 100  # Columns: longer lines of prose are hard to read.
_BETWEEN = 3  # Columns of a terminal between those of a table.
_NAMES = 40  # The widest name that shares a line with its text; a longer one has a line of its own.
PIPED = 4096  # Wider than any table: a program that reads a pipe expects one row per line.

NAME, GOOD, BAD, FAINT, STEP = "bold", "green", "bold red", "dim", "cyan"
_QUANTITY = re.compile(r"([0-9]) ((?:[KMGTPE]i)?B|[num]?s)\b")


class _Console(Console):
    """A console that leaves a closed pipe to the command, which treats it as a normal end."""

    def on_broken_pipe(self) -> None:
        """Re-raises the `BrokenPipeError` that rich is handling; rich would exit with code 1."""
        raise


def open_console() -> Console:
    """A console on stdout, with rich's markup off because layouts are full of brackets.

    Its width is COLUMNS if that is set, else the terminal's; in a pipe, lines are not wrapped. With NO_COLOR it writes
    no escape codes at all; rich would leave those of bold type.
    """
    colors = None if os.environ.get("NO_COLOR") else "auto"
    columns, width = os.environ.get("COLUMNS", ""), None if sys.stdout.isatty() else PIPED
    if re.fullmatch("0*[1-9][0-9]{0,4}", columns):
        width = max(40, int(columns))
    return _Console(width=width, color_system=colors, markup=False, highlight=False, emoji=False)


def print_plain(show: Callable[[Console], None]) -> str:
    """What `show` prints, as plain text 100 columns (`PROSE`) wide.

    >>> print_plain(lambda out: out.print("received  ", style="bold"))
    'received'
    """
    plain: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False, "color_system": None}
    out = Console(file=io.StringIO(), width=PROSE, force_jupyter=False, **plain)  # otherwise prints in notebooks
    show(out)
    written = out.file.getvalue() if isinstance(out.file, io.StringIO) else ""
    return "\n".join(line.rstrip() for line in written.rstrip("\n").split("\n"))


def make_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """An empty table with light rules; the columns named in `right` hold numbers and are never wrapped."""
    ruled = Table(box=box.SIMPLE_HEAD, header_style=NAME, pad_edge=False, show_edge=False)
    numbers = set(right)
    for name in columns:
        ruled.add_column(name, justify="right" if name in numbers else "left", no_wrap=name in numbers)
    return ruled


def least_width(rows: Table, indent: int) -> int:
    """The columns of a terminal that a table needs: numbers stay whole, other cells are broken between words."""
    widths: list[int] = []
    for column in rows.columns:
        cells = [str(cell) for cell in (column.header, *column.cells)]
        pieces = cells if column.no_wrap else [word for cell in cells for word in cell.split()]
        widths.append(max((cell_len(piece) for piece in pieces), default=0))
    return indent + sum(widths) + _BETWEEN * (len(widths) - 1)


def print_table(out: Console, rows: Table, indent: int = 0) -> None:
    """Prints a table without the trailing spaces with which rich fills its lines."""
    width = out.width
    # A terminal that breaks long rows still shows every number; rich would drop the columns that do not fit.
    out.width = max(width, least_width(rows, indent))
    with out.capture() as captured:
        out.print(Padding(rows, (0, 0, 0, indent), expand=False))
    out.width = width
    lines = captured.get().splitlines()
    out.file.write("".join(f"{line.rstrip()}\n" for line in lines))


def print_facts(out: Console, rows: Sequence[tuple[str, str]], good: Container[str] = ()) -> None:
    """Prints names and values, one pair per line; values whose name is in `good` are green."""
    width = max((len(name) for name, _ in rows if len(name) <= _NAMES), default=0)
    for name, value in rows:
        print_paragraph(out, value, print_name(out, f"  {name.ljust(width)}  "), GOOD if name in good else "")


def print_name(out: Console, mark: str) -> str:
    """The text's margin: the name itself, or an indent below a name too long to share the line, printed here."""
    if len(mark) <= _NAMES + 4:
        return mark
    for line in textwrap.wrap(mark, min(out.width, PROSE), subsequent_indent=mark[: -len(mark.lstrip())]):
        out.print(Text(line, FAINT), soft_wrap=True)
    return "      "


def print_paragraph(out: Console, text: str, mark: str = "", style: str = "") -> None:
    """Prints a paragraph behind a mark, wrapped at a readable width and indented by the mark's length."""
    width = max(20, min(out.width, PROSE) - len(mark))
    glued = _QUANTITY.sub("\\1\u00a0\\2", text)  # Keeps a number and its unit on one line.
    lines = textwrap.wrap(glued, width, break_long_words=False, break_on_hyphens=False) or [""]
    for at, line in enumerate(lines):
        out.print(
            Text.assemble((mark if at == 0 else " " * len(mark), FAINT), (line.replace("\u00a0", " "), style)),
            soft_wrap=True,
        )
