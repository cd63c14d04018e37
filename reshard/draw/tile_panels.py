"""The tiles of a plan before, between and after its steps: a panel for each layout, with the steps between them.

source              all_to_all            target
┌───┬───┬───┬───┐    1792 B     ┌───────────────┐      Each cell is coloured and labelled by its devices; a pointer
│ 0 │ 2 │ 4 │ 6 │   ───────>    │       0       │      that rests on it shows which indices they hold.
└───┴───┴───┴───┘   received    └───────────────┘

All elements of a run, the minor local digit of a dim, lie on the same devices, so a cell is a box of runs, and an array
of 2^40 elements is drawn like a small one:

    f32[2{x}64] on <x=4>     8 runs, by device: | 0 | 1 | 2 | 3 | 0 | 1 | 2 | 3 |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from reshard.draw.scene import (
    LARGE,
    LINE,
    PALE,
    SMALL,
    Area,
    Lines,
    Mark,
    Point,
    Scene,
    Words,
    arrow_lines,
    box,
    box_area,
    colour_devices,
    cut_stripes,
    fit_words,
    hatch_box,
    ink_on,
    measure_words,
    wrap_words,
)
from reshard.errors import ReshardError
from reshard.plans.plan import Plan, Step
from reshard.show.layout_pieces import (
    fix_coordinates,
    list_owners,
    list_pieces,
    list_summands,
    number_run,
    set_text,
    split_digits,
)
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.units import bytes_text, counted, listed

MOST_CELLS = 4096
MOST_RUNS = 1024  # Along one dim: more than a panel has columns of pixels.
MOST_DEVICES = 4096
MOST_SLICES = 8
MOST_STRIPES = 8  # Colours in one cell.
_MOST_DEALT, _DEALT = 32, 16  # Of a block-cyclic dim with more than 32 runs, 16 (or one round) show the pattern.

Span = tuple[int, int]
"""(start, stop) along one dim, in elements of the whole array."""


class Cell(NamedTuple):
    """A box of the array, padding included, and the devices that hold it, one set for each summand."""

    spans: tuple[Span, ...]
    holders: tuple[tuple[int, ...], ...]

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices that hold the box or a summand of it."""
        return tuple(sorted(itertools.chain(*self.holders)))


@dataclass(frozen=True)
class LayoutCells:
    """The cells of a layout, cut to the first `drawn` runs of each dim."""

    layout: Layout
    drawn: tuple[int, ...]

    @cached_property
    def runs(self) -> tuple[int, ...]:
        """The elements of one run, for each dim."""
        return tuple(split_digits(dim)[1] for dim in self.layout.dims)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """A cell for each box of runs that is drawn, row-major; none for an empty array.

        >>> from reshard.types import Mesh
        >>> for cell in LayoutCells(Layout.parse("f32[{x}2/3, 2]", Mesh(x=2, y=2)), (2, 1)).cells:
        ...     print(cell)
        Cell(spans=((0, 2), (0, 2)), holders=((0, 1),))
        Cell(spans=((2, 4), (0, 2)), holders=((2, 3),))
        """
        layout = self.layout
        if 0 in layout.shape:
            return ()
        check_devices(layout.mesh)
        # What a run's held digits fix says who holds it. Those of a block-cyclic dim come again and again.
        # Pieces of any size are drawn index by index.
        numbers = [
            [number_run(dim, at) for at in range(drawn)]
            if dim.pieces is None
            else [piece.number for piece in list_pieces(dim) for _ in range(piece.start, piece.stop)][:drawn]
            for dim, drawn in zip(layout.dims, self.drawn, strict=True)
        ]
        known: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        cells: list[Cell] = []
        for place in itertools.product(*map(range, self.drawn)):
            spans = tuple((at * run, (at + 1) * run) for at, run in zip(place, self.runs, strict=True))
            key = tuple(own[at] for own, at in zip(numbers, place, strict=True))
            if key not in known:
                pairs = zip(layout.dims, key, strict=True)
                fixed = [one for dim, number in pairs for one in fix_coordinates(dim, layout.mesh, number)]
                summands = ([*fixed, *summand] for summand in list_summands(layout))
                sets = (list_owners(layout.mesh, each, MOST_DEVICES)[0] for each in summands)
                known[key] = tuple(sorted(map(tuple, sets)))
            cells.append(Cell(spans, known[key]))
        return tuple(cells)


def count_runs(layout: Layout) -> tuple[int, ...]:
    """The runs of each dim, those of padding included; 0 for an empty dim.

    >>> from reshard.types import Mesh
    >>> count_runs(Layout.parse("f32[2{x}8, 16, {y}5/9]", Mesh(x=4, y=2)))
    (8, 1, 2)
    """
    counts = (dim.padded if dim.pieces is None else dim.size for dim in layout.dims)
    return tuple(count // split_digits(dim)[1] if count else 0 for count, dim in zip(counts, layout.dims, strict=True))


def limit_runs(sizes: Sequence[int], most: int = MOST_CELLS) -> tuple[int, ...]:
    """How many runs of each dim to draw for at most `most` cells; small dims are drawn whole.

    >>> limit_runs([2, 8]), limit_runs([128, 128]), limit_runs([2, 4000])
    ((2, 8), (64, 64), (2, 1024))
    """
    drawn = [0] * len(sizes)
    # What a small dim does not use of its equal share is left to the larger ones.
    smallest_first = sorted(range(len(sizes)), key=lambda at: sizes[at])
    for left, at in zip(range(len(sizes), 0, -1), smallest_first, strict=True):
        share = math.floor(most ** (1 / left) + 1e-9)
        drawn[at] = max(min(sizes[at], share, MOST_RUNS), min(1, sizes[at]))
        most //= max(1, drawn[at])
    return tuple(drawn)


def check_devices(mesh: Mesh) -> None:
    """Raises `ReshardError` if a mesh has too many devices for a picture of their tiles."""
    if mesh.size > MOST_DEVICES:
        raise ReshardError(
            f"{mesh.size} devices on mesh {mesh} are too many to draw tiles of (at most {MOST_DEVICES}); draw the same "
            f"layouts on smaller axes, or use draw('memory')"
        )


# Which dims a picture of a plan's tiles shows, how many runs of each, and the caption.
#
# f32[{y}8, 16, {x}4] -> f32[16, {x}{y}2, 16] on <x=4, y=2>, one all_to_all
#
# dim      0   1   2      all three are split by one of the layouts, so all three are drawn:
# source   2   1   4      (runs of each dim)
# target   1   8   1      dims 1 and 2, the ones with most runs, along the axes of a panel,
# most     2   8   4      and one slice of the panel for each run of dim 0


@dataclass(frozen=True)
class PlanTiles:
    """The layouts of a plan as panels of cells.

    The dims of `grid` lie along the axes of a panel, and each run of the dims of `slices` has a slice of its own.
    """

    names: tuple[str, ...]
    panels: tuple[LayoutCells, ...]
    grid: tuple[int, ...]
    slices: tuple[int, ...]

    @property
    def layouts(self) -> list[Layout]:
        """The source, and the result of each step."""
        return [panel.layout for panel in self.panels]

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape of the array."""
        return self.panels[0].layout.shape

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """All device ids, ascending."""
        return tuple(sorted({device for layout in self.layouts for device in layout.mesh.devices}))

    @cached_property
    def colour(self) -> dict[int, str]:
        """The colour of each device, by its coordinates on the largest mesh that has them all."""
        return colour_devices([layout.mesh for layout in self.layouts])

    def label(self, at: int, cell: Cell) -> str:
        """The devices of a cell of panel number `at`; see `label_cell`."""
        return label_cell(cell, self.layouts[at].mesh)

    def fills(self, at: int, cell: Cell) -> tuple[str, ...]:
        """The colours of a cell: one for each device, `PALE` if they are many, that of the first if cells are many."""
        devices = cell.devices
        if len(devices) > MOST_STRIPES:
            return (PALE,)
        return tuple([self.colour[device] for device in (devices if self._are_striped[at] else devices[:1])])

    def extent(self, at: int, dim: int) -> int:
        """The elements of a dim that a panel spans: the same in all panels if none of them leaves any out."""
        drawn = [panel.drawn[dim] * panel.runs[dim] for panel in self.panels]
        return drawn[at] if any(self.cropped(other, dim) for other in range(len(self.panels))) else max(drawn)

    def cropped(self, at: int, dim: int) -> bool:
        """Whether a panel leaves out runs of a dim."""
        return self.panels[at].drawn[dim] < count_runs(self.layouts[at])[dim]

    def list_slices(self, at: int) -> list[tuple[str, list[Cell]]]:
        """A panel's cells, slice by slice, each with its name; a single one without a name if no dim is sliced."""
        by_spans: dict[tuple[Span, ...], list[Cell]] = {}
        for cell in self.panels[at].cells:
            by_spans.setdefault(tuple(cell.spans[dim] for dim in self.slices), []).append(cell)
        named: list[tuple[str, list[Cell]]] = []
        for spans, cells in by_spans.items():
            words: list[str] = []
            for dim, (start, stop) in zip(self.slices, spans, strict=True):
                size = self.shape[dim]
                words.append(f"dim {dim}: {start}:{min(stop, size) if start < size else f'{stop} (padding)'}")
            named.append((", ".join(words), cells))
        return named

    @cached_property
    def _are_striped(self) -> tuple[bool, ...]:
        """Whether panels have room for all colours of each cell; if not, a cell has that of its first device."""
        each = [(len(p.cells), max((len(cell.devices) for cell in p.cells), default=0)) for p in self.panels]
        return tuple(cells * most <= MOST_CELLS for cells, most in each)

    def describe(self) -> str:
        """The caption: how to read the cells, and what is not drawn."""
        notes = [f"Numbers and colours are the {counted(len(self.devices), 'device')}."]
        cells = [(panel.layout.mesh, cell) for panel in self.panels for cell in panel.cells]
        if any(len(replicas) > 1 for _, cell in cells for replicas in cell.holders):
            notes.append("0,1 or 0-1: each of these devices holds it.")
            labels = (label_cell(cell, mesh) for mesh, cell in cells)
            if name := next((words for words in labels if "=" in words), None):
                notes.append(f"{name.split(' + ')[0]}: the devices at this place of the mesh.")
        if any(len(cell.holders) > 1 for _, cell in cells):
            reduction = next(layout.reduction for layout in self.layouts if layout.partial)
            notes.append(f"0 + 1: each holds a summand, and the array is their {reduction}.")
        if not all(self._are_striped):
            notes.append("Where several devices hold a tile, its colour is that of the first one.")
        if any(not layout.even and not layout.ragged for layout in self.layouts):
            notes.append("Hatched: padding.")
        whole = [dim for dim in range(len(self.shape)) if dim not in (*self.grid, *self.slices)]
        if whole:
            notes.append(f"Not drawn: {listed([f'dim {dim} ({self.shape[dim]})' for dim in whole])}, never split.")
        for at, panel in enumerate(self.panels):
            dims = [dim for dim in (*self.grid, *self.slices) if self.cropped(at, dim)]
            if dims:
                first = listed(
                    [f"{panel.drawn[dim]} of {count_runs(panel.layout)[dim]} runs of dim {dim}" for dim in dims]
                )
                notes.append(f"{self.names[at].capitalize()}: the first {first}.")
        return " ".join(notes)


def choose_panels(plan: Plan) -> PlanTiles:
    """The panels of a plan: all dims of an array of at most two, else those that one of the layouts splits.

    Raises `ReshardError` for more devices than a picture has room for, and for steps that change the array's dims.

    >>> from reshard.synth import plan
    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> source, target = (Layout.parse(text, mesh) for text in ("f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]"))
    >>> drawn = choose_panels(plan(source, target))
    >>> drawn.names, drawn.grid, drawn.slices
    (('source', 'target'), (1, 2), (0,))
    """
    check_devices(plan.source.mesh)
    check_devices(plan.target.mesh)
    layouts = [plan.source, *(step.result for step in plan.steps)]
    if any(layout.shape != plan.source.shape for layout in layouts):
        raise ReshardError(
            f"{plan.source} -> {plan.target}: the steps change the array's dims, so its tiles have no common picture; "
            f'draw "memory" or "traffic"'
        )
    between = (f"after step {number}" for number in range(1, len(plan.steps)))
    names = ("source", *between, "target") if plan.steps else ("source and target",)
    # The two dims with most runs lie along the axes of a panel; the other drawn dims are sliced.
    most = [max(of_dim) for of_dim in zip(*map(count_runs, layouts), strict=True)]
    shown = [dim for dim, runs in enumerate(most) if runs > 1 or len(most) <= 2]
    grid = sorted(sorted(shown, key=lambda dim: (most[dim], dim))[-2:])
    slices = [dim for dim in shown if dim not in grid]
    panels = tuple(LayoutCells(layout, _choose_runs(layout, grid, slices)) for layout in layouts)
    return PlanTiles(names, panels, tuple(grid), tuple(slices))


def _choose_runs(layout: Layout, grid: Sequence[int], slices: Sequence[int]) -> tuple[int, ...]:
    """How many runs of each dim are drawn: at most `MOST_SLICES` slices, and `MOST_CELLS` cells in all of them."""
    drawn: list[int] = []
    for dim, count in zip(layout.dims, count_runs(layout), strict=True):
        # A block-cyclic dim starts over after each round, so the first runs show its pattern.
        dealt = len(dim.digits) >= 2 and dim.digits[0].axis is None
        period = count // next(iter(dim.digits)).radix if dealt else count
        drawn.append(count if count <= _MOST_DEALT else min(count, max(_DEALT, period)))
    for dim, some in zip(slices, limit_runs([drawn[dim] for dim in slices], MOST_SLICES), strict=True):
        drawn[dim] = some
    number = max(1, math.prod(drawn[dim] for dim in slices))
    for dim, some in zip(grid, limit_runs([drawn[dim] for dim in grid], MOST_CELLS // number), strict=True):
        drawn[dim] = some
    return tuple(drawn)


def label_cell(cell: Cell, mesh: Mesh) -> str:
    """The devices of a cell: replicas by comma, or by their coordinate if they are many; summands by plus.

    >>> mesh = Mesh(x=4, y=2)
    >>> [label_cell(Cell((), holders), mesh) for holders in (((0, 1), (4, 5)), ((3,),), ((0, 2, 4, 6),))]
    ['0,1 + 4,5', '3', 'y=0']
    """
    axes = [(name, mesh.sub_axis(name)) for name, size in mesh.axes.items() if size > 1]
    sets: list[str] = []
    for devices in cell.holders:
        words = ",".join(map(str, devices)) if len(devices) <= 2 else set_text(devices, len(devices))
        if ".." in words:
            # The coordinates that they have in common say more, if no other device has these.
            first, *others = (mesh.position(device) for device in devices)
            same = {
                name: axis
                for name, axis in axes
                if all(mesh.coordinate(other, axis) == mesh.coordinate(first, axis) for other in others)
            }
            if mesh.size == len(devices) * math.prod(axis.size for axis in same.values()):
                words = ",".join(f"{name}={mesh.coordinate(first, axis)}" for name, axis in same.items()) or words
        sets.append(words)
    return " + ".join(sets if len(sets) <= 4 else [*sets[:2], f".. ({len(sets)})"])


# The picture.

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
            marks += _draw_arrow(_LEFT + width / 2 - 60, top, plan.steps[first - 1], down=True)
            top += _DROP
        for column, panel in enumerate(row):
            left = _LEFT + column * (width + _GAP)
            if column:
                middle = top + head + row[0].height / 2
                marks += _draw_arrow(left - _GAP, middle, plan.steps[panel.at - 1], down=False)
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
        areas, padding, labels = list[Mark](), list[Mark](), list[Mark]()
        for start, cell in (
            (start, cell) for start, (_, cells) in zip(tops, self.slices, strict=True) for cell in cells
        ):
            edge, high, far, low = self._find_box(cell, left, start)
            if self._is_padding(cell):
                padding += hatch_box(edge, high, far, low)
                continue
            _, _, right, bottom = self._find_box(cell, left, start, clear=True)
            fills, devices = self.tiles.fills(self.at, cell), cell.devices
            outline = box(edge, high, right, bottom)
            stripes = cut_stripes(outline, len(fills)) if len(fills) > 1 else [outline]
            ends = zip(cell.spans, self.tiles.shape, strict=True)
            indices = ", ".join(f"{start}:{min(stop, max(start, size))}" for (start, stop), size in ends)
            named = ", ".join(map(str, devices[:32])) + (", ..." if len(devices) > 32 else "")
            title = f"{'device' if len(devices) == 1 else 'devices'} {named}: [{indices}]"
            areas.append(Area(tuple(stripes), fills, title, rim=min(right - edge, bottom - high) >= _FINEST))
            # What of it lies past the end of the array.
            padding += hatch_box(right, high, far, low)
            padding += hatch_box(edge, bottom, right, low)
            if size := self._label_size(cell):
                colour, halo = (ink_on(fills[0]), False) if len(fills) == 1 else ("#000000", True)
                place = (edge + right) / 2, (high + bottom) / 2
                labels.append(Words(*place, self.tiles.label(self.at, cell), size, colour=colour, halo=halo))
        yield from (*areas, *padding, *labels)
        for start, (name, _) in zip(tops, self.slices, strict=True):
            if name:
                yield Words(left, start - 7, name, anchor="start", faint=True)
        if self.slices:
            yield from self._draw_ticks(left, tops)
        else:
            yield Words(middle, below + self.slice_height / 2, "no elements")

    def _find_box(
        self, cell: Cell, x: float = 0.0, y: float = 0.0, clear: bool = False
    ) -> tuple[float, float, float, float]:
        """A cell's sides in a slice whose corner is at (x, y); if `clear`, those of the part that is not padding."""
        ends = self.tiles.shape if clear else [stop for _, stop in cell.spans]
        spans = [(cell.spans[dim][0], min(cell.spans[dim][1], ends[dim])) for dim in self.tiles.grid]
        (left, right) = spans[-1] if spans else (0, 1)
        (low, high) = spans[0] if len(spans) > 1 else (0, 1)
        wide, tall = self.width / self.spans[0], self.slice_height / self.spans[1]
        return x + left * wide, y + low * tall, x + right * wide, y + high * tall

    def _is_padding(self, cell: Cell) -> bool:
        return any(start >= size for (start, _), size in zip(cell.spans, self.tiles.shape, strict=True))

    def _label_size(self, cell: Cell) -> float:
        left, top, right, bottom = self._find_box(cell, clear=True)
        return fit_words(self.tiles.label(self.at, cell), right - left, bottom - top)

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


def _draw_arrow(left: float, top: float, step: Step, down: bool) -> Iterator[Mark]:
    """The arrow from one panel to the next, with the step's kind and the bytes that the worst device receives."""
    launches = [f"in {counted(step.launches, 'launch')}"] if step.launches > 1 else []
    words = [bytes_text(step.received_bytes), "received", *launches]
    if down:
        yield arrow_lines((left, top), (left, top + _DROP - 16))
        yield Words(left + 14, top + 12, step.kind, anchor="start", bold=True)
        yield Words(left + 14, top + 12 + LINE, " ".join(words), anchor="start")
        return
    start, end = left + 10, left + _GAP - 54
    centre = (start + end) / 2
    yield Words(centre, top - 11, step.kind, bold=True)
    yield arrow_lines((start, top), (end, top))
    for at, line in enumerate(words):
        yield Words(centre, top + 12 + LINE * at, line)


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
