"""What a report prints in a terminal, as plain text."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from rich.console import Console

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
