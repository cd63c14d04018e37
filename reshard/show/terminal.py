"""Where and how the command prints: as wide as the terminal, plain when piped."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Container, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

PROSE = 100  # Columns that are still easy to read.
NARROWEST = 72  # Columns that a table of steps needs.
PIPED = 4096  # Wider than any table: what reads a pipe does not want our line breaks.

NAME, GOOD, BAD, FAINT, STEP = "bold", "green", "bold red", "dim", "cyan"
_QUANTITY = re.compile(r"([0-9]) ((?:[KMGTPE]i)?B|[num]?s)\b")


class _Console(Console):
    """A console that leaves a reader that has gone away to the command."""

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the `BrokenPipeError`, which it would turn into exit code 1."""
        raise


def console() -> Console:
    """A console on stdout. Layouts are full of brackets, so markup is off.

    COLUMNS rules, then the terminal's width; a pipe has none, and nothing is wrapped.
    """
    return _Console(width=_width(), markup=False, highlight=False, emoji=False)


def _width() -> int | None:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return max(40, int(columns))
    return None if sys.stdout.isatty() else PIPED


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """A table with light lines; the columns in `right` are numbers, and never wrapped."""
    found = Table(box=box.SIMPLE_HEAD, header_style=NAME, pad_edge=False, show_edge=False)
    numbers = set(right)
    for name in columns:
        found.add_column(name, justify="right" if name in numbers else "left", no_wrap=name in numbers)
    return found


def show(out: Console, found: Table, indent: int = 0) -> None:
    """Prints a table without the spaces that rich pads its lines with."""
    width = out.width
    # On a narrower terminal a row that it breaks is better than one without its numbers.
    out.width = max(width, NARROWEST)
    with out.capture() as captured:
        out.print(Padding(found, (0, 0, 0, indent), expand=False))
    out.width = width
    lines = captured.get().splitlines()
    out.file.write("".join(f"{line.rstrip()}\n" for line in lines))


def facts(out: Console, rows: Sequence[tuple[str, str]], good: Container[str] = ()) -> None:
    """Names and values, one below the other; those in `good` are good news."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        paragraph(out, value, f"  {name.ljust(width)}  ", GOOD if name in good else "")


def paragraph(out: Console, text: str, mark: str = "", style: str = "") -> None:
    """A paragraph behind a mark, wrapped where it is easy to read and indented as far as the mark."""
    width = max(20, min(out.width, PROSE) - len(mark))
    kept = _QUANTITY.sub("\\1\u00a0\\2", text)  # A number stays on one line with its unit.
    lines = textwrap.wrap(kept, width, break_long_words=False, break_on_hyphens=False) or [""]
    for at, line in enumerate(lines):
        out.print(
            Text.assemble((mark if at == 0 else " " * len(mark), FAINT), (line.replace("\u00a0", " "), style)),
            soft_wrap=True,
        )
