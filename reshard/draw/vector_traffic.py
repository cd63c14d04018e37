"""Who sends how much to whom as SVG, without matplotlib: a row for each sender, a column for each receiver.

receiver  0   1   2   3
sender 0      ■   ■   ■      A square has the colour that its sender has in the picture of the tiles; the larger it
       1  ■       ■   ■      is, the more bytes it stands for. A pointer that rests on it shows them.
       2  ■   ■       ■
       3  ■   ■   ■
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from reshard.draw.shapes import colours, on
from reshard.errors import ReshardError
from reshard.lower import lower_plan
from reshard.lower.traffic import TrafficMatrix, traffic
from reshard.plans.plan import Plan
from reshard.show.plan_table import meshes_text
from reshard.types.units import bytes_text

_MOST_ROWS = 64  # Smaller squares cannot be told apart.
_SIDE, _LEFT, _TOP, _EDGE = 300.0, 62.0, 58.0, 8.0  # Of the matrix; before and above it; at the right and below.
_STRIP, _APART = 8.0, 4.0  # The colours along the edges, and their distance from the matrix.
_LETTER, _TEXT, _SMALLEST = 0.61, 10.5, 7.0
_LABELLED, _RULED = 16, 32  # The most rows that all have their numbers, and lines between them.
_LEAST = 0.3  # The side of the smallest square over that of its cell.


def traffic_svg(plan: Plan) -> tuple[str, str]:
    """The bytes that each device sends to each other one, as one `svg` element, and a caption for it.

    Raises `ReshardError` for more devices or transfers than can be counted one by one.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> svg, notes = traffic_svg(plan(Layout.parse("f32[{x}4, 4]", mesh), Layout.parse("f32[16, {x}1]", mesh)))
    >>> "<title>0 to 3: 16 B</title>" in svg, svg.count("<title>")
    (True, 12)
    >>> notes[-71:]
    'Worst device: 0 receives 48 B, as planned; all devices together: 192 B.'
    """
    meshes = [plan.source.mesh, *(step.result.mesh for step in plan.steps)]
    matrix = _Matrix(TrafficCells(plan, _MOST_ROWS), colours(meshes))
    return matrix.svg, matrix.caption


@dataclass(frozen=True)
class _Matrix:
    """The cells of a plan's traffic, and the colour of each device; lengths are pixels."""

    cells: TrafficCells
    colour: dict[int, str]

    @property
    def svg(self) -> str:
        width, height = _LEFT + _SIDE + _EDGE, _TOP + _SIDE + _EDGE
        spoken = escape("; ".join(["bytes that each device sends to each other one", *self.cells.notes]))
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"'
        style = f"font-family:system-ui,sans-serif;font-size:{_TEXT}px"
        parts = "".join((*self._names(), *self._strips(), *self._ground(), *self._squares()))
        return f'{head} width="{width:g}" height="{height:g}" style="{style}" aria-label="{spoken}">{parts}</svg>'

    @property
    def caption(self) -> str:
        """How to read the squares, and the sums."""
        sums = "; ".join(self.cells.notes)
        if not self._most:
            return f"{sums.capitalize()}."
        sizes = "" if self._size else " The larger a square, the more bytes."
        return f"Rows send, columns receive; the colours are those of the tiles.{sizes} {sums[0].upper()}{sums[1:]}."

    @cached_property
    def _count(self) -> int:
        return len(self.cells.groups)

    @cached_property
    def _each(self) -> float:
        """The side of a cell."""
        return _SIDE / self._count

    @cached_property
    def _most(self) -> int:
        return max((count for row in self.cells.rows for count in row), default=0)

    @cached_property
    def _size(self) -> float:
        """The size of numbers that fit into all cells; 0 if they would be too small to read."""
        longest = max((len(bytes_text(count)) for row in self.cells.rows for count in row if count), default=0)
        size = min(_TEXT, 0.9 * self._each / (_LETTER * max(1, longest)))
        return size if size >= _SMALLEST else 0

    def _names(self) -> Iterator[str]:
        yield _text(_LEFT + _SIDE / 2, 12, "receiver")
        at = f'transform="translate(12 {_TOP + _SIDE / 2:g}) rotate(-90)"'
        yield f'<text {at} text-anchor="middle" style="fill:currentColor">sender</text>'
        every = 1 if self._count <= _LABELLED else -(-self._count // 8)
        for row in range(0, self._count, every):
            name, middle = span(self.cells.groups[row]), (row + 0.5) * self._each
            yield _text(_LEFT + middle, _TOP - _APART - _STRIP - 6, name if every == 1 else name.partition("-")[0])
            yield _text(_LEFT - _APART - _STRIP - 5, _TOP + middle + _TEXT * 0.35, name.partition("-")[0], "end")

    def _strips(self) -> Iterator[str]:
        """The colours of senders at the left and of receivers above."""
        for row, group in enumerate(self.cells.groups):
            fill, at, each = self.colour[group[0]], row * self._each, self._each
            yield _rect(_LEFT - _APART - _STRIP, _TOP + at, _STRIP, each, f'fill="{fill}"')
            yield _rect(_LEFT + at, _TOP - _APART - _STRIP, each, _STRIP, f'fill="{fill}"')

    def _ground(self) -> Iterator[str]:
        """The matrix without its squares: lines between cells, or between blocks of eight where cells are many."""
        yield _rect(_LEFT, _TOP, _SIDE, _SIDE, 'fill="currentColor" fill-opacity=".05"')
        every = 1 if self._count <= _RULED else -(-self._count // 8)
        lines = (row * self._each for row in range(every, self._count, every))
        path = "".join(f"M{_LEFT + at:.5g} {_TOP:g}v{_SIDE:g}M{_LEFT:g} {_TOP + at:.5g}h{_SIDE:g}" for at in lines)
        yield f'<path d="{path}" stroke="currentColor" stroke-opacity=".14"/>'

    def _squares(self) -> Iterator[str]:
        for at, (group, row) in enumerate(zip(self.cells.groups, self.cells.rows, strict=True)):
            fill, sender = self.colour[group[0]], span(group)
            squares = (self._square(at, column, count, sender, fill) for column, count in enumerate(row) if count)
            yield f'<g fill="{fill}">{"".join(squares)}</g>'

    def _square(self, row: int, column: int, count: int, sender: str, fill: str) -> str:
        """A square with what it stands for; it fills its cell if that has the number in it."""
        share = 1.0 if self._size else max(_LEAST, math.sqrt(count / self._most))
        gap = min(1.0, self._each / 12)
        side = share * (self._each - gap)
        left, top = (start + (at + 0.5) * self._each for start, at in ((_LEFT, column), (_TOP, row)))
        words = bytes_text(count)
        title = f"{sender} to {span(self.cells.groups[column])}: {words}"
        path = f'<path d="M{left - side / 2:.5g} {top - side / 2:.5g}h{side:.3g}v{side:.3g}h-{side:.3g}z">'
        shown = f"{path}<title>{title}</title></path>"
        if not self._size:
            return shown
        style = f"font-size:{self._size:.3g}px;pointer-events:none;fill:{on(fill)}"
        return shown + _text(left, top + self._size * 0.35, words, "middle", style)


def _text(x: float, y: float, words: str, anchor: str = "middle", style: str = "fill:currentColor") -> str:
    return f'<text x="{x:.5g}" y="{y:.5g}" text-anchor="{anchor}" style="{style}">{escape(words)}</text>'


def _rect(left: float, top: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{left:.5g}" y="{top:.5g}" width="{width:.4g}" height="{height:.4g}" {style}/>'


# Who sends how many bytes to whom in all steps of a plan, as the rows and columns that every picture of it has.
#
# f32[{x}4, 4] -> f32[16, {x}1] on <x=4>      receiver   0   1   2   3
#                                    sender 0                16  16  16      bytes; 16 B each, 48 B to every device
#                                           1            16      16  16
#                                           ...


MOST_DEVICES = 512
MOST_TRANSFERS = 1 << 18


@dataclass(frozen=True)
class TrafficCells:
    """Bytes by sender (down) and receiver (across), in at most `most` rows, which neighbouring devices share.

    Raises `ReshardError` for more devices or transfers than can be counted one by one.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=2)
    >>> cells = TrafficCells(plan(Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)), 64)
    >>> cells.rows, cells.notes
    ([[0, 16], [16, 0]], ['worst device: 0 receives 16 B, as planned', 'all devices together: 32 B'])
    """

    plan: Plan
    most: int

    @cached_property
    def traffic(self) -> TrafficMatrix:
        """The traffic of all steps together."""
        return traffic_of(self.plan)

    @cached_property
    def devices(self) -> list[int]:
        """All device ids, ascending."""
        return sorted(self.traffic.devices)

    @cached_property
    def together(self) -> int:
        """The devices that share a row."""
        return together(len(self.devices), self.most)

    @cached_property
    def groups(self) -> list[list[int]]:
        """The devices of each row, which are also those of the column of the same number."""
        return [self.devices[at : at + self.together] for at in range(0, len(self.devices), self.together)]

    @cached_property
    def rows(self) -> list[list[int]]:
        """The bytes, row by row."""
        place = {device: row for row, group in enumerate(self.groups) for device in group}
        cells = [[0] * len(self.groups) for _ in self.groups]
        for (sender, receiver), count in self.traffic.elements.items():
            cells[place[sender]][place[receiver]] += count
        return [[self.traffic.nbytes(count) for count in row] for row in cells]

    @property
    def notes(self) -> list[str]:
        """The sums, beside what the plan predicts."""
        return list(self._notes())

    def _notes(self) -> Iterator[str]:
        received = self.traffic.received
        if not self.traffic.elements:
            yield "nothing moves"
            return
        worst = self.traffic.busiest_receiver
        yield f"worst device: {worst} receives {bytes_text(received[worst])}{self._predicted(received[worst])}"
        yield f"all devices together: {bytes_text(self.traffic.nbytes(sum(self.traffic.elements.values())))}"
        if self.together > 1:
            yield f"each cell: {self.together} x {self.together} devices, their sum"

    def _predicted(self, worst: int) -> str:
        planned = self.plan.received_bytes
        return ", as planned" if worst == planned else f" of the {bytes_text(planned)} planned"


def traffic_of(plan: Plan) -> TrafficMatrix:
    """The traffic of all steps of a plan together.

    Raises `ReshardError` for more devices or transfers than can be counted one by one.
    """
    size = plan.source.mesh.size + (plan.target.mesh.size if plan.crosses else 0)
    if size > MOST_DEVICES:
        raise ReshardError(
            f"{size} devices on mesh {meshes_text(plan.source, plan.target)} are too many for a matrix of who sends to "
            f"whom (at most {MOST_DEVICES}); draw the same plan on smaller axes, or use draw('memory')"
        )
    if size * plan.launches > MOST_TRANSFERS:
        raise ReshardError(
            f"{plan.launches} launches on {size} devices are too many to count one by one (at most "
            f"{MOST_TRANSFERS // size} on that many devices); plan with a larger budget, or use draw('memory')"
        )
    return traffic(lower_plan(plan))


def together(devices: int, most: int) -> int:
    """The smallest number of devices that have to share a row, so that there are at most `most` rows.

    >>> together(256, 256), together(512, 256), together(2 * 257, 256)
    (1, 2, 257)
    """
    return next(size for size in range(1, devices + 1) if devices % size == 0 and devices // size <= most)


def span(devices: Sequence[int]) -> str:
    """The devices of a row in words.

    >>> span([3]), span([4, 5, 6, 7])
    ('3', '4-7')
    """
    return str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"
