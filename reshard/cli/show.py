"""`reshard show`: a layout in words, and a picture of which device holds what."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from reshard.cli.options import NOTATIONS, ArrayOptions, Command
from reshard.errors import ReshardError, quoted

_MOST_ROWS = 1 << 20

_EXAMPLES = """\
examples:
  reshard show --mesh x=4 'f32[2{x}64]'
  reshard show --mesh x=4,y=2 'f32[{x}4, {y}8]'
  reshard show --mesh x=4,y=2 'f32[{y}8, 16, {x}4]'
  reshard show --mesh x=4,y=2 'f32[{y}8, 16] + sum{x}'
  reshard show --mesh x=4,y=2 "P(('x', 'y'))" --shape \\
      100,8 --dtype bf16
  reshard show \\
      '{devices=[2,2,2]<=[8] last_tile_dim_replicate}' \\
      --shape 8,8 --dtype f32
"""


@dataclass(frozen=True, kw_only=True)
class ShowOptions(ArrayOptions):
    """The options of `reshard show`."""

    layout: str
    limit: int

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the layout, those of its array, and the size of the picture."""
        parser.add_argument("layout", metavar="LAYOUT", help="a layout in any of the notations below")
        super().add_to(parser)
        what = "lines of the picture, about (default 32)"
        parser.add_argument("--limit", type=int, default=32, metavar="N", help=what)


def run_show(options: ShowOptions) -> int:
    """Prints the layout, its sizes, and its picture."""
    from reshard.cli.requests import read_layout
    from reshard.show.layout_picture import show_layout

    if not 1 <= options.limit <= _MOST_ROWS:
        raise ReshardError(f"--limit {quoted(options.limit)}: show at least 1 row, and at most {_MOST_ROWS}")
    show_layout(read_layout(options.layout, options), options.limit)
    return 0


COMMAND = Command("show", "a picture of which device holds what", f"{NOTATIONS}\n{_EXAMPLES}", ShowOptions, run_show)
