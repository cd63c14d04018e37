"""A few lines in place of a picture that cannot be drawn."""

from __future__ import annotations

import textwrap

from reshard.draw.canvas import LARGE, SMALL, Area, Size

_WIDTH, _LINE = 4.5, 0.165


class Notice:
    """Why there is no picture of this name; `put` writes it on an area of `size`."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self.lines = textwrap.wrap(why, 72)
        self.size = Size(_WIDTH, 0.5 + _LINE * len(self.lines))

    def put(self, area: Area) -> None:
        """Writes the notice on an area of its size."""
        area.text(0.15, 0.0, f"no picture of the {self.name}", size=LARGE, weight="bold")
        area.text(0.15, 0.3, "\n".join(self.lines), size=SMALL)
