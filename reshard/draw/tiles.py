"""The tiles of a plan before, between and after its steps: a panel for each layout, with the steps between them.

source              all_to_all            target
┌───┬───┬───┬───┐    1792 B     ┌───────────────┐      Each cell is coloured and labelled by its devices; a pointer
│ 0 │ 2 │ 4 │ 6 │   ───────>    │       0       │      that rests on it shows which indices they hold.
└───┴───┴───┴───┘   received    └───────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from reshard.draw.cells import Cell, PlanTiles, choose_panels
from reshard.draw.colours import Point, box, cut_stripes, ink_on
from reshard.draw.scene import (
    LARGE,
    LINE,
    SMALL,
    Area,
    Lines,
    Mark,
    Scene,
    Words,
    arrow_lines,
    box_area,
    fit_words,
    hatch_box,
    measure_words,
    wrap_words,
)
from reshard.plans.plan import Plan, Step
from reshard.types.units import bytes_text, counted

_COLUMNS = 3  # Panels in a row.
_PANEL, _STRIP = 200.0, 640.0  # The width of a panel, and of one of an array of one dim.
_SHORTEST, _TALLEST, _STRIP_HEIGHT = 60.0, 280.0, 42.0
_LEFT, _GAP, _RIGHT, _DROP = 56.0, 148.0, 44.0, 56.0  # Around and between panels; between those that are stacked.
_FOOT, _SLICE, _FINEST = 34.0, 18.0, 5.0  # Below a panel; above a slice; smaller cells have no rims.
_RAMP, _NUMBERED = 288.0, 16  # The width of the key of colours; the most devices that are numbered in it.


def draw_tiles(plan: Plan, narrow: bool = False) -> Scene:
    """The panels of a plan, three in a row, or one below the other for a narrow screen.

    Raises `ReshardError` for more devices than a picture has room for, and for steps that change the array's dims.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> scene = draw_tiles(plan(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh)))
    >>> [mark.title for mark in scene.marks if isinstance(mark, Area)][3]
    'device 3: [12:16, 0:16]'
    """
    tiles = choose_panels(plan)
    strip = len(tiles.grid) < 2
    width = _PANEL if not strip else _PANEL + 40 if narrow else _STRIP
    columns = 1 if strip or narrow else min(_COLUMNS, len(tiles.panels))
    across = _LEFT + columns * (width + _GAP) - _GAP + _RIGHT
    marks: list[Mark] = []
    top = 4.0
    labelled = True
    for first in range(0, len(tiles.panels), columns):
        row = [_Panel(tiles, at, width) for at in range(first, min(first + columns, len(tiles.panels)))]
        head = 18 + LINE * max(len(panel.title) for panel in row) + 8
        if first:
            marks += _draw_arrow_down(top, width, plan.steps[first - 1])
            top += _DROP
        for column, panel in enumerate(row):
            left = _LEFT + column * (width + _GAP)
            if column:
                marks += _draw_arrow(left - _GAP, top + head + row[0].height / 2, plan.steps[panel.at - 1])
            marks += panel.draw(left, top, head)
            labelled = labelled and panel.labelled
        top += head + max(panel.height for panel in row) + _FOOT
    if not labelled and len(tiles.devices) > 1:
        marks += _draw_ramp(tiles, top, min(_RAMP, across - 150))
        top += 24
    steps = ", ".join(step.kind for step in plan.steps) or "no step"
    spoken = f"which device holds what, from {plan.source} to {plan.target}, by {steps}"
    return Scene(across, top, tuple(marks), caption=tiles.describe(), spoken=spoken)


@dataclass(frozen=True)
class _Panel:
    """One layout: its cells, and where they lie."""

    tiles: PlanTiles
    at: int
    width: float

    @cached_property
    def slices(self) -> list[tuple[str, list[Cell]]]:
        return self.tiles.list_slices(self.at)

    @cached_property
    def spans(self) -> tuple[int, int]:
        """The elements across and down."""
        grid = self.tiles.grid
        across = self.tiles.extent(self.at, grid[-1]) if grid else 1
        return max(1, across), max(1, self.tiles.extent(self.at, grid[0])) if len(grid) > 1 else 1

    @cached_property
    def slice_height(self) -> float:
        across, down = self.spans
        if len(self.tiles.grid) < 2:
            return _STRIP_HEIGHT
        tall = min(max(self.width * down / across, _SHORTEST), _TALLEST)
        return tall if len(self.slices) <= 1 else max(tall / len(self.slices), 46.0)

    @property
    def pitch(self) -> float:
        """From the top of one slice to that of the next."""
        return self.slice_height + (_SLICE if self.tiles.slices else 0)

    @property
    def height(self) -> float:
        return self.pitch * max(1, len(self.slices))

    @cached_property
    def title(self) -> Sequence[str]:
        return wrap_words(str(self.tiles.layouts[self.at]), self.width + 100, SMALL)

    @cached_property
    def labelled(self) -> bool:
        """Whether all cells have room for the numbers of their devices."""
        return all(self._label_size(cell) for _, cells in self.slices for cell in cells if not self._is_padding(cell))

    def draw(self, left: float, top: float, head: float) -> Iterator[Mark]:
        """The marks of the panel: its title, then all cells, then what stands on them."""
        middle, below = left + self.width / 2, top + head
        yield Words(middle, top + 7, self.tiles.names[self.at], LARGE, bold=True)
        for line, words in enumerate(self.title):
            yield Words(middle, top + 26 + LINE * line, words, mono=True)
        tops = [
            below + number * self.pitch + (_SLICE if self.tiles.slices else 0) for number in range(len(self.slices))
        ]
        placed = [(start, cell) for start, (_, cells) in zip(tops, self.slices, strict=True) for cell in cells]
        yield from (self._draw_cell(cell, left, start) for start, cell in placed if not self._is_padding(cell))
        for start, cell in placed:
            yield from self._draw_padding(cell, left, start)
        for start, cell in placed:
            yield from self._draw_label(cell, left, start)
        for start, (name, _) in zip(tops, self.slices, strict=True):
            if name:
                yield Words(left, start - 7, name, anchor="start", faint=True)
        if self.slices:
            yield from self._draw_ticks(left, tops)
        else:
            yield Words(middle, below + self.slice_height / 2, "no elements")

    def _find_box(self, cell: Cell, clear: bool = False) -> tuple[float, float, float, float]:
        """A cell's sides from the corner of its slice; if `clear`, those of the part that is not padding."""
        ends = self.tiles.shape if clear else [stop for _, stop in cell.spans]
        spans = [(cell.spans[dim][0], min(cell.spans[dim][1], ends[dim])) for dim in self.tiles.grid]
        (left, right) = spans[-1] if spans else (0, 1)
        (low, high) = spans[0] if len(spans) > 1 else (0, 1)
        wide, tall = self.width / self.spans[0], self.slice_height / self.spans[1]
        return left * wide, low * tall, right * wide, high * tall

    def _draw_cell(self, cell: Cell, x: float, y: float) -> Area:
        """The part of a cell that is not padding, and which devices hold which indices."""
        left, top, right, bottom = self._find_box(cell, clear=True)
        outline = box(x + left, y + top, x + right, y + bottom)
        fills = self.tiles.fills(self.at, cell)
        stripes = cut_stripes(outline, len(fills)) if len(fills) > 1 else [outline]
        sizes = self.tiles.shape
        each = (f"{start}:{min(stop, max(start, n))}" for (start, stop), n in zip(cell.spans, sizes, strict=True))
        devices = ", ".join(map(str, cell.devices[:32])) + (", ..." if len(cell.devices) > 32 else "")
        title = f"{'device' if len(cell.devices) == 1 else 'devices'} {devices}: [{', '.join(each)}]"
        return Area(tuple(stripes), fills, title, rim=min(right - left, bottom - top) >= _FINEST)

    def _is_padding(self, cell: Cell) -> bool:
        return any(start >= size for (start, _), size in zip(cell.spans, self.tiles.shape, strict=True))

    def _draw_padding(self, cell: Cell, x: float, y: float) -> Iterator[Mark]:
        """The part of a cell that lies past the end of the array."""
        left, top, right, bottom = self._find_box(cell)
        if self._is_padding(cell):
            yield from hatch_box(x + left, y + top, x + right, y + bottom)
            return
        _, _, end, floor = self._find_box(cell, clear=True)
        yield from hatch_box(x + end, y + top, x + right, y + bottom)
        yield from hatch_box(x + left, y + floor, x + end, y + bottom)

    def _label_size(self, cell: Cell) -> float:
        left, top, right, bottom = self._find_box(cell, clear=True)
        return fit_words(self.tiles.label(self.at, cell), right - left, bottom - top)

    def _draw_label(self, cell: Cell, x: float, y: float) -> Iterator[Words]:
        size = 0.0 if self._is_padding(cell) else self._label_size(cell)
        if size:
            left, top, right, bottom = self._find_box(cell, clear=True)
            fills = self.tiles.fills(self.at, cell)
            colour, halo = (ink_on(fills[0]), False) if len(fills) == 1 else ("#000000", True)
            place = x + (left + right) / 2, y + (top + bottom) / 2
            yield Words(*place, self.tiles.label(self.at, cell), size, colour=colour, halo=halo)

    def _list_borders(self, axis: int) -> list[int]:
        """The indices that get a tick along an axis: 0, the end, and up to three borders of runs between them."""
        dim, cells = self.tiles.grid[axis], self.tiles.panels[self.at]
        drawn, run = cells.drawn[dim], cells.runs[dim]
        end = min(self.tiles.shape[dim], drawn * run)
        # Borders close to the end would touch its number.
        return [*(at * run for at in range(0, drawn, -(-drawn // 4)) if at * run <= 0.86 * end), end]

    def _draw_ticks(self, left: float, tops: Sequence[float]) -> Iterator[Mark]:
        grid, shape = self.tiles.grid, self.tiles.shape
        if not grid:
            return
        # A panel that has less than its neighbours in a row is shorter than the room for it.
        bottom = tops[-1] + max(self._find_box(cell)[3] for cell in self.slices[-1][1])
        segments: list[tuple[Point, Point]] = []
        for border in self._list_borders(-1):
            x = left + self.width * border / self.spans[0]
            segments.append(((x, bottom), (x, bottom + 3)))
            yield Words(x, bottom + 9, str(border), SMALL - 1, faint=True)
        yield Words(left + self.width / 2, bottom + 22, f"dim {grid[-1]} ({shape[grid[-1]]})", faint=True)
        if len(grid) > 1:
            for top in tops:
                for border in self._list_borders(0):
                    y = top + self.slice_height * border / self.spans[1]
                    segments.append(((left - 3, y), (left, y)))
                    yield Words(left - 5, y, str(border), SMALL - 1, "end", faint=True)
            yield Words(left - 38, (tops[0] + bottom) / 2, f"dim {grid[0]} ({shape[grid[0]]})", faint=True, turned=True)
        yield Lines(tuple(segments), width=0.8, opacity=0.75)


def _list_received(step: Step) -> list[str]:
    launches = [f"in {counted(step.launches, 'launch')}"] if step.launches > 1 else []
    return [bytes_text(step.received_bytes), "received", *launches]


def _draw_arrow(left: float, middle: float, step: Step) -> Iterator[Mark]:
    """The arrow from one panel to the next, with the step's kind and the bytes that the worst device receives."""
    start, end = left + 10, left + _GAP - 54
    centre = (start + end) / 2
    yield Words(centre, middle - 11, step.kind, bold=True)
    yield arrow_lines((start, middle), (end, middle))
    for at, words in enumerate(_list_received(step)):
        yield Words(centre, middle + 12 + LINE * at, words)


def _draw_arrow_down(top: float, width: float, step: Step) -> Iterator[Mark]:
    x = _LEFT + width / 2 - 60
    yield arrow_lines((x, top), (x, top + _DROP - 16))
    yield Words(x + 14, top + 12, step.kind, anchor="start", bold=True)
    yield Words(x + 14, top + 12 + LINE, " ".join(_list_received(step)), anchor="start")


def _draw_ramp(tiles: PlanTiles, top: float, width: float) -> Iterator[Mark]:
    """The colours by device, for cells without room for numbers."""
    ids = tiles.devices[:: -(-len(tiles.devices) // 64)]
    first, last = f"device {tiles.devices[0]}", f"device {tiles.devices[-1]}"
    left, each = 16 + measure_words(first, SMALL), width / len(ids)
    yield Words(left - 6, top + 8, first, anchor="end")
    for at, device in enumerate(ids):
        fill = tiles.colour[device]
        yield box_area(left + at * each, top, left + (at + 1) * each, top + 16, fill, f"device {device}")
    if len(ids) <= _NUMBERED:
        for at, device in enumerate(ids):
            yield Words(left + (at + 0.5) * each, top + 8, str(device), colour=ink_on(tiles.colour[device]))
    yield Words(left + width + 6, top + 8, last, anchor="start")
