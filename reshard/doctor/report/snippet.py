"""The lines of the user's program around the origin of a place, if its file is on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from reshard.hlo import Source

_AROUND = 2
_LARGEST = 1 << 20  # bytes of a file: no program is larger


class SnippetLine(NamedTuple):
    """A line of a file; `here` is whether it is the one that is meant."""

    number: int
    text: str
    here: bool


def snippet(where: Source) -> tuple[SnippetLine, ...]:
    """The line of an origin with two lines before and after; empty if the file cannot be read or has no such line.

    >>> snippet(Source("f", "no/such/file.py", 3))
    ()
    """
    if where.file is None or where.line is None:
        return ()
    try:
        path = Path(where.file)
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return ()
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return ()
    if not 0 < where.line <= len(lines):
        return ()
    first = max(1, where.line - _AROUND)
    shown = lines[first - 1 : where.line + _AROUND]
    return tuple(SnippetLine(number, text, number == where.line) for number, text in enumerate(shown, first))
