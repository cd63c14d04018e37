"""The tiles of a plan as SVG, without matplotlib: a panel for each layout, with the steps between them.

    source              all_to_all            target
    ┌───┬───┬───┬───┐    1792 B     ┌───────────────┐      Each cell is coloured and labelled by its devices; a pointer
    │ 0 │ 2 │ 4 │ 6 │   ───────>    │       0       │      that rests on it shows which indices they hold.
    └───┴───┴───┴───┘   received    └───────────────┘

The same cells as in `plan.draw("tiles")`, for pages that a browser makes by itself and for files beside a text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import NamedTuple

from reshard.draw.shapes import PALE, Point, box, colours, on, stripes
from reshard.errors import ReshardError
from reshard.plans.plan import Plan, Step
from reshard.show.holders import set_text
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh
from reshard.types.units import bytes_text, counted, listed

_WIDTH, _SHORTEST, _TALLEST = 200.0, 60.0, 280.0
_GAP, _EDGE, _HEAD, _FOOT = 118.0, 46.0, 44.0, 40.0  # Between panels; left of the first, above and below each.
_TOP, _DROP = 14.0, 62.0  # Above the first panel; between panels that are stacked.
_HATCH = 8.0  # Between the lines over padding.
_LETTER = 0.61  # The width of a character over its size.
_SMALLEST, _NORMAL = 7.0, 12.0
_STYLE = "font-family:system-ui,sans-serif;font-size:12px"

STANDALONE = """
svg{color:#1c1e21;background:#fff}
@media (prefers-color-scheme:dark){svg{color:#e6e8ea;background:#15171a}}
"""
"""A style for a picture in a file of its own, legible in light and dark."""


@dataclass(frozen=True)
class _Panel:
    """One layout: its cells, and where they lie, in pixels."""

    scene: Scene
    at: int
    colour: dict[int, str]

    @cached_property
    def slices(self) -> list[tuple[str, list[Cell]]]:
        return self.scene.slices_of(self.at)

    @cached_property
    def _spans(self) -> tuple[int, int]:
        """The elements across and down."""
        grid = self.scene.grid
        across = self.scene.extent(self.at, grid[-1]) if grid else 1
        return max(1, across), max(1, self.scene.extent(self.at, grid[0])) if len(grid) > 1 else 1

    @cached_property
    def slice_height(self) -> float:
        across, down = self._spans
        tall = _SHORTEST if len(self.scene.grid) < 2 else min(max(_WIDTH * down / across, _SHORTEST), _TALLEST)
        return tall if len(self.slices) <= 1 else max(tall / len(self.slices), 46.0)

    @property
    def pitch(self) -> float:
        return self.slice_height + (20 if self.scene.slices else 0)

    @property
    def height(self) -> float:
        return _HEAD + self.pitch * max(1, len(self.slices)) + _FOOT

    def elements(self) -> Iterator[str]:
        """The panel's texts and cells."""
        layout = str(self.scene.layouts[self.at])
        size = min(12.5, (_WIDTH + _GAP - 24) / (_LETTER * len(layout)))
        middle = _WIDTH / 2
        yield _text(middle, 12, self.scene.names[self.at], "middle", "font-weight:600")
        mono = f"font-family:ui-monospace,Menlo,Consolas,monospace;font-size:{max(size, 6.5):.4g}px"
        yield _text(middle, 31, layout, "middle", mono)
        for number, (name, cells) in enumerate(self.slices):
            top = _HEAD + number * self.pitch
            if self.scene.slices:
                yield _text(0, top + 13, name, "start", "font-size:10.5px;opacity:.75")
                top += 20
            for cell in cells:
                yield self._cell(cell, top)
            yield from self._padding(cells, top)
        if not self.slices:
            yield _text(middle, _HEAD + self.slice_height / 2, "no elements", "middle")
        yield from self._ticks()

    def _corners(self, cell: Cell, top: float, clear: bool = False) -> tuple[float, float, float, float]:
        """A cell's sides in pixels; if `clear`, those of the part that is not padding."""
        ends = self.scene.shape if clear else [stop for _, stop in cell.spans]
        spans = [(cell.spans[dim][0], min(cell.spans[dim][1], ends[dim])) for dim in self.scene.grid]
        (left, right) = spans[-1] if spans else (0, 1)
        (low, high) = spans[0] if len(spans) > 1 else (0, 1)
        wide, tall = _WIDTH / self._spans[0], self.slice_height / self._spans[1]
        return left * wide, top + low * tall, right * wide, top + high * tall

    def _cell(self, cell: Cell, top: float) -> str:
        """The part of a cell that is not padding, with its label and what a pointer on it shows."""
        if self._is_padding(cell):
            return ""
        corners = self._corners(cell, top, clear=True)
        own = fills(cell, self.colour, PALE)
        own = own if self.scene.striped(self.at) else own[:1]
        outline = box(*corners)
        parts = stripes(outline, len(own)) if len(own) > 1 else [outline]
        shapes = "".join(_polygon(part, fill) for part, fill in zip(parts, own, strict=True))
        title = escape(self._hover(cell))
        return f"<g><title>{title}</title>{shapes}{_rim(corners)}{self._words(cell, corners, own)}</g>"

    def _is_padding(self, cell: Cell) -> bool:
        return any(start >= size for (start, _), size in zip(cell.spans, self.scene.shape, strict=True))

    def _padding(self, cells: Sequence[Cell], top: float) -> Iterator[str]:
        """The part of each cell that lies past the end of the array."""
        for cell in cells:
            left, low, right, bottom = self._corners(cell, top)
            if self._is_padding(cell):
                yield _hatched(left, low, right, bottom)
                continue
            _, _, end, floor = self._corners(cell, top, clear=True)
            yield _hatched(end, low, right, bottom) if end < right else ""
            yield _hatched(left, floor, end, bottom) if floor < bottom else ""

    def _words(self, cell: Cell, corners: Sequence[float], own: Sequence[str]) -> str:
        left, top, right, bottom = corners
        words = self.scene.label(self.at, cell)
        size = min(_NORMAL, (right - left) * 0.9 / (_LETTER * len(words)), (bottom - top) * 0.8)
        if size < _SMALLEST:
            return ""
        ink = on(own[0]) if len(own) == 1 else "#000"
        halo = ";paint-order:stroke;stroke:#fff;stroke-width:2.5px" if len(own) > 1 else ""
        x, y = (left + right) / 2, (top + bottom) / 2 + size * 0.35
        return _text(x, y, words, "middle", f"font-size:{size:.4g}px;fill:{ink}{halo}")

    def _hover(self, cell: Cell) -> str:
        """Which devices hold which indices."""
        sizes = self.scene.shape
        each = (f"{start}:{min(stop, max(start, n))}" for (start, stop), n in zip(cell.spans, sizes, strict=True))
        devices = ", ".join(map(str, cell.devices[:32])) + (", ..." if len(cell.devices) > 32 else "")
        return f"{'device' if len(cell.devices) == 1 else 'devices'} {devices}: [{', '.join(each)}]"

    def _ticks(self) -> Iterator[str]:
        grid, style = self.scene.grid, "font-size:10.5px;opacity:.75"
        if not grid or not self.slices:
            return
        bottom = _HEAD + self.pitch * len(self.slices)
        yield _text(_WIDTH / 2, bottom + 17, f"dim {grid[-1]} ({self.scene.shape[grid[-1]]})", "middle", style)
        if len(grid) > 1:
            name = escape(f"dim {grid[0]} ({self.scene.shape[grid[0]]})")
            at = f'transform="translate(-8 {(_HEAD + bottom) / 2:.4g}) rotate(-90)"'
            yield f'<text {at} text-anchor="middle" style="fill:currentColor;{style}">{name}</text>'


def tiles_svg(plan: Plan, style: str = "", columns: int = 3) -> str:
    """The tiles of a plan before, between and after its steps as one `svg` element; `style` is CSS to put into it.

    The panels are in rows of `columns`: with 1, one is below the other, for a narrow screen.

    Raises `ReshardError` for more devices than a picture has room for, and for steps that change the array's dims.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> svg = tiles_svg(plan(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh)))
    >>> "<title>device 3: [12:16, 0:16]</title>" in svg, "all_to_all" in svg
    (True, True)
    """
    panels = _panels(plan)
    width, height, parts = _in_rows(plan, panels, columns)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.4g} {height:.5g}" role="img"'
    sizes = f'width="{width:.4g}" height="{height:.5g}" style="{_STYLE}" aria-label="{escape(_spoken(plan))}"'
    return f"{head} {sizes}>{f'<style>{style}</style>' if style else ''}{''.join(parts)}</svg>"


def tiles_notes(plan: Plan) -> str:
    """How to read the picture, and what it leaves out."""
    return " ".join(scene(plan).notes())


def _in_rows(plan: Plan, panels: Sequence[_Panel], columns: int) -> tuple[float, float, list[str]]:
    """Width, height and elements of the panels; an arrow leads to each from the left, to a row's first from above."""
    top, parts = _TOP, list[str]()
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        tall = max(panel.height for panel in row)
        if first:
            parts.append(_arrow_down(top, plan.steps[first - 1]))
            top += _DROP
        for column, panel in enumerate(row):
            left = _EDGE + column * (_WIDTH + _GAP)
            middle = top + _HEAD + (tall - _HEAD - _FOOT) / 2
            parts += [_arrow(left - _GAP, middle, plan.steps[panel.at - 1])] if column else []
            parts.append(_placed(panel, left, top))
        top += tall
    return _EDGE + min(columns, len(panels)) * (_WIDTH + _GAP) - _GAP + 52, top, parts


def _placed(panel: _Panel, left: float, top: float) -> str:
    return f'<g transform="translate({left:.4g} {top:.5g})">{"".join(panel.elements())}</g>'


def _panels(plan: Plan) -> list[_Panel]:
    shown = scene(plan)
    return [_Panel(shown, at, shown.colour) for at in range(len(shown.panels))]


def _spoken(plan: Plan) -> str:
    """The picture in words."""
    steps = ", ".join(step.kind for step in plan.steps) or "no step"
    return f"which device holds what, from {plan.source} to {plan.target}, by {steps}"


def _arrow(left: float, middle: float, step: Step) -> str:
    start, end, centre = left + 12, left + _GAP - 28, left + (_GAP - 16) / 2
    words = _received(step)
    line = (
        f'<path d="M{start:.4g} {middle:.4g}H{end:.4g}m-6 -4l6 4l-6 4" fill="none" stroke="currentColor" '
        'stroke-width="1.3"/>'
    )
    below = (_text(centre, middle + 16 + 13 * at, text, "middle", "font-size:10.5px") for at, text in enumerate(words))
    return f"{_text(centre, middle - 8, step.kind, 'middle', 'font-size:10.5px;font-weight:600')}{line}{''.join(below)}"


def _arrow_down(top: float, step: Step) -> str:
    x = _EDGE + _WIDTH / 2 - 60
    line = (
        f'<path d="M{x:.4g} {top:.5g}v{_DROP - 22:.4g}m-4 -6l4 6l4 -6" fill="none" stroke="currentColor" '
        'stroke-width="1.3"/>'
    )
    kind = _text(x + 14, top + 16, step.kind, "start", "font-size:10.5px;font-weight:600")
    return f"{line}{kind}{_text(x + 14, top + 31, ' '.join(_received(step)), 'start', 'font-size:10.5px')}"


def _received(step: Step) -> list[str]:
    launches = [f"in {counted(step.launches, 'launch')}"] if step.launches > 1 else []
    return [bytes_text(step.received_bytes), "received", *launches]


def _text(x: float, y: float, words: str, anchor: str, style: str = "") -> str:
    ink = "" if "fill:" in style else "fill:currentColor;"
    return f'<text x="{x:.4g}" y="{y:.5g}" text-anchor="{anchor}" style="{ink}{style}">{escape(words)}</text>'


def _polygon(corners: Sequence[Point], fill: str) -> str:
    return f'<polygon points="{" ".join(f"{x:.4g},{y:.4g}" for x, y in corners)}" fill="{fill}"/>'


def _hatched(left: float, top: float, right: float, bottom: float) -> str:
    """Lines at half a right angle across a box of padding."""
    lines: list[str] = []
    total = left + top + _HATCH  # x + y of the points of a line.
    while total < right + bottom:
        start, end = max(left, total - bottom), min(right, total - top)
        lines.append(f"M{start:.4g} {total - start:.4g}L{end:.4g} {total - end:.4g}")
        total += _HATCH
    place = f'x="{left:.4g}" y="{top:.4g}" width="{right - left:.4g}" height="{bottom - top:.4g}"'
    return (
        f'<g stroke="currentColor" stroke-opacity=".35"><title>padding</title><rect {place} fill="#888" '
        f'fill-opacity=".1"/><path d="{"".join(lines)}"/></g>'
    )


def _rim(corners: Sequence[float]) -> str:
    """A border where the cell is large enough for one."""
    left, top, right, bottom = corners
    if min(right - left, bottom - top) < 5:
        return ""
    place = f'x="{left:.4g}" y="{top:.4g}" width="{right - left:.4g}" height="{bottom - top:.4g}"'
    return f'<rect {place} fill="none" stroke="#fff" stroke-opacity=".75"/>'


# Which devices hold which box of an array, for drawing, by `types.meaning` and nothing else.
#
#     f32[2{x}64] on <x=4>     8 runs of 64 elements, by device: | 0 | 1 | 2 | 3 | 0 | 1 | 2 | 3 |
#
# All elements of a run, the minor local digit of a dim, lie on the same devices. So it is enough to look up the meaning
# of a coarse layout, in which every run is one element: here f32[2{x}1]. An array of 2^40 elements is drawn like a
# small one.


MOST_CELLS = 4096
MOST_RUNS = 1024  # Along one dim: more than a panel has columns of pixels.
MOST_DEVICES = 4096
MOST_WORK = 1 << 22  # Runs looked up, over all devices.

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
        return tuple(_run(dim) for dim in self.layout.dims)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The runs of each dim, those of padding included."""
        return counts(self.layout)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """A cell for each box of runs that is drawn, row-major; none for an empty array.

        >>> from reshard.types import Mesh
        >>> for cell in LayoutCells(Layout.parse("f32[{x}2/3, 2]", Mesh(x=2, y=2)), (2, 1)).cells:
        ...     print(cell)
        Cell(spans=((0, 2), (0, 2)), holders=((0, 1),))
        Cell(spans=((2, 4), (0, 2)), holders=((2, 3),))
        """
        if 0 in self.layout.shape:
            return ()
        held = self._held()
        boxes = itertools.product(*(range(drawn) for drawn in self.drawn))
        return tuple(Cell(self._spans(box), _by_summand(self.layout, held[box])) for box in boxes)

    def _spans(self, box: Sequence[int]) -> tuple[Span, ...]:
        return tuple((at * run, (at + 1) * run) for at, run in zip(box, self.runs, strict=True))

    def _held(self) -> dict[tuple[int, ...], list[int]]:
        """The devices that hold each box of runs that is drawn."""
        coarse = self._coarse()
        _check_work(coarse)
        tiles: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for device in coarse.mesh.devices:
            tiles.setdefault(meaning(coarse, device), []).append(device)
        held: dict[tuple[int, ...], list[int]] = {}
        for index, devices in tiles.items():
            kept = [[at for at in along if at < most] for along, most in zip(index, self.drawn, strict=True)]
            for cell in itertools.product(*kept):
                held.setdefault(cell, []).extend(devices)
        return held

    def _coarse(self) -> Layout:
        """The layout with each run as one element, and no more rounds than are drawn."""
        dims = tuple(map(_coarse, self.layout.dims, self.runs, self.drawn))
        return Layout(self.layout.mesh, dims, self.layout.dtype, self.layout.reduction, self.layout.partial)


def counts(layout: Layout) -> tuple[int, ...]:
    """The runs of each dim, those of padding included; 0 for an empty dim.

    >>> from reshard.types import Mesh
    >>> counts(Layout.parse("f32[2{x}8, 16, {y}5/9]", Mesh(x=4, y=2)))
    (8, 1, 2)
    """
    return tuple(dim.padded // _run(dim) if dim.padded else 0 for dim in layout.dims)


def periods(layout: Layout) -> tuple[int, ...]:
    """The runs of each dim after which a block-cyclic layout starts over; all runs if it deals the dim out once.

    >>> from reshard.types import Mesh
    >>> periods(Layout.parse("f32[8{x}64, {y}5]", Mesh(x=4, y=2)))
    (4, 2)
    """
    cyclic = [len(dim.digits) > 1 and dim.digits[0].axis is None for dim in layout.dims]
    each = zip(layout.dims, counts(layout), cyclic, strict=True)
    return tuple(count // dim.digits[0].radix if deals else count for dim, count, deals in each)


def bounded(sizes: Sequence[int], most: int = MOST_CELLS) -> tuple[int, ...]:
    """How many runs of each dim to draw for at most `most` cells; small dims are drawn whole.

    >>> bounded([2, 8]), bounded([128, 128]), bounded([2, 4000])
    ((2, 8), (64, 64), (2, 1024))
    """
    drawn = [0] * len(sizes)
    smallest_first = sorted(range(len(sizes)), key=lambda at: sizes[at])
    for left, at in zip(range(len(sizes), 0, -1), smallest_first, strict=True):
        share = math.floor(most ** (1 / left) + 1e-9)
        drawn[at] = max(min(sizes[at], share, MOST_RUNS), min(1, sizes[at]))
        most //= max(1, drawn[at])
    return tuple(drawn)


def _run(dim: Dim) -> int:
    """The elements of a run: the minor digit if it is local."""
    return dim.digits[-1].radix if dim.digits and dim.digits[-1].axis is None else 1


def _coarse(dim: Dim, run: int, drawn: int) -> Dim:
    """A dim with each run as one element, and of a block-cyclic one only the rounds that are drawn."""
    digits = dim.digits[:-1] if run > 1 else dim.digits
    size = -(-dim.size // run)
    if digits and digits[0].axis is None:
        unit = math.prod(d.radix for d in digits[1:])
        rounds = min(digits[0].radix, -(-drawn // unit))
        digits, size = (Digit(rounds, None), *digits[1:]), min(size, rounds * unit)
    return Dim(digits, size)


def check_devices(mesh: Mesh) -> None:
    """Raises `ReshardError` if a mesh has too many devices for a picture of their tiles."""
    if mesh.size > MOST_DEVICES:
        raise ReshardError(
            f"{mesh.size} devices on mesh {mesh} are too many to draw tiles of (at most {MOST_DEVICES}); draw the same "
            f"layouts on smaller axes, or use draw('memory')"
        )


def _check_work(coarse: Layout) -> None:
    check_devices(coarse.mesh)
    devices, runs = coarse.mesh.size, sum(coarse.tile_shape)
    if devices * runs > MOST_WORK:
        raise ReshardError(
            f"{coarse} on mesh {coarse.mesh} is cut too finely to draw: {runs} runs on each of {devices} devices "
            f"(global {coarse.shape} runs); draw the same layouts of a smaller shape, or use draw('memory')"
        )


def _by_summand(layout: Layout, devices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The devices in sets that hold the same summand; a single set unless the array is partial."""
    sets: dict[tuple[int, ...], list[int]] = {}
    for device in sorted(devices):
        position = layout.mesh.position(device)
        summand = layout.mesh.coordinates(position, layout.partial)
        sets.setdefault(summand, []).append(device)
    return tuple(tuple(same) for same in sets.values())


# Which dims a picture of a plan's tiles shows, how many runs of each, and the caption.
#
# f32[{y}8, 16, {x}4] -> f32[16, {x}{y}2, 16] on <x=4, y=2>, one all_to_all
#
# dim      0   1   2      all three are split by one of the layouts, so all three are drawn:
# source   2   1   4      (runs of each dim)
# target   1   8   1      dims 1 and 2, the ones with most runs, along the axes of a panel,
# most     2   8   4      and one slice of the panel for each run of dim 0


MOST_SLICES = 8
MOST_STRIPES = 8  # Colours in one cell.
_MOST_DEALT, _DEALT = 32, 16  # Of a block-cyclic dim with more than 32 runs, 16 (or one round) show the pattern.


@dataclass(frozen=True)
class Scene:
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
        return colours([layout.mesh for layout in self.layouts])

    def label(self, at: int, cell: Cell) -> str:
        """The devices of a cell of panel number `at`; see `label`."""
        return label(cell, self.layouts[at].mesh)

    def extent(self, at: int, dim: int) -> int:
        """The elements of a dim that a panel spans: the same in all panels if none of them leaves any out."""
        if any(self.cropped(other, dim) for other in range(len(self.panels))):
            return self._drawn(at, dim)
        return max(self._drawn(other, dim) for other in range(len(self.panels)))

    def cropped(self, at: int, dim: int) -> bool:
        """Whether a panel leaves out runs of a dim."""
        return self.panels[at].drawn[dim] < self.panels[at].counts[dim]

    def _drawn(self, at: int, dim: int) -> int:
        return self.panels[at].drawn[dim] * self.panels[at].runs[dim]

    def slices_of(self, at: int) -> list[tuple[str, list[Cell]]]:
        """A panel's cells, slice by slice, each with its name; a single one without a name if no dim is sliced."""
        by_spans: dict[tuple[Span, ...], list[Cell]] = {}
        for cell in self.panels[at].cells:
            by_spans.setdefault(tuple(cell.spans[dim] for dim in self.slices), []).append(cell)
        return [(self._slice_name(spans), cells) for spans, cells in by_spans.items()]

    def _slice_name(self, spans: Sequence[Span]) -> str:
        words: list[str] = []
        for dim, (start, stop) in zip(self.slices, spans, strict=True):
            size = self.shape[dim]
            words.append(f"dim {dim}: {start}:{min(stop, size) if start < size else f'{stop} (padding)'}")
        return ", ".join(words)

    def striped(self, at: int) -> bool:
        """Whether a panel has room for all colours of each cell; if not, a cell has that of its first device."""
        cells = self.panels[at].cells
        return len(cells) * max((len(cell.devices) for cell in cells), default=0) <= MOST_CELLS

    def notes(self) -> list[str]:
        """The sentences of the caption: how to read the cells, and what is not drawn."""
        return [
            f"Numbers and colours are the {counted(len(self.devices), 'device')}.",
            *self._notes_on_holders(),
            *(["Hatched: padding."] if any(not layout.even for layout in self.layouts) else []),
            *self._notes_on_dims(),
            *self._notes_on_crops(),
        ]

    def _notes_on_holders(self) -> Iterator[str]:
        cells = [cell for panel in self.panels for cell in panel.cells]
        if any(len(replicas) > 1 for cell in cells for replicas in cell.holders):
            yield "0,1 or 0-1: each of these devices holds it."
            yield from self._notes_on_coordinates()
        if any(len(cell.holders) > 1 for cell in cells):
            reduction = next(layout.reduction for layout in self.layouts if layout.partial)
            yield f"0 + 1: each holds a summand, and the array is their {reduction}."
        if not all(self.striped(at) for at in range(len(self.panels))):
            yield "Where several devices hold a tile, its colour is that of the first one."

    def _notes_on_coordinates(self) -> Iterator[str]:
        labels = (label(cell, panel.layout.mesh) for panel in self.panels for cell in panel.cells)
        if name := next((words for words in labels if "=" in words), None):
            yield f"{name.split(' + ')[0]}: the devices at this place of the mesh."

    def _notes_on_dims(self) -> Iterator[str]:
        whole = [dim for dim in range(len(self.shape)) if dim not in (*self.grid, *self.slices)]
        if whole:
            yield f"Not drawn: {listed([f'dim {dim} ({self.shape[dim]})' for dim in whole])}, never split."

    def _notes_on_crops(self) -> Iterator[str]:
        for at, panel in enumerate(self.panels):
            dims = [dim for dim in (*self.grid, *self.slices) if self.cropped(at, dim)]
            if dims:
                first = listed([f"{panel.drawn[dim]} of {panel.counts[dim]} runs of dim {dim}" for dim in dims])
                yield f"{self.names[at].capitalize()}: the first {first}."


def scene(plan: Plan) -> Scene:
    """The scene of a plan: all dims of an array of at most two, else those that one of the layouts splits.

    >>> from reshard.synth import plan
    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> drawn = scene(plan(Layout.parse("f32[{y}8, 16, {x}4]", mesh), Layout.parse("f32[16, {x}{y}2, 16]", mesh)))
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
    grid, slices = _drawn_dims(layouts)
    panels = tuple(LayoutCells(layout, _drawn_runs(_pattern(layout), grid, slices)) for layout in layouts)
    return Scene(_names(len(plan.steps)), panels, grid, slices)


def _names(steps: int) -> tuple[str, ...]:
    if not steps:
        return ("source and target",)
    return ("source", *(f"after step {number}" for number in range(1, steps)), "target")


def _drawn_dims(layouts: Sequence[Layout]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims along the axes of a panel, the two with most runs, and the other drawn dims, which are sliced."""
    runs = [max(of_dim) for of_dim in zip(*map(counts, layouts), strict=True)]
    drawn = [dim for dim, most in enumerate(runs) if most > 1 or len(runs) <= 2]
    grid = sorted(sorted(drawn, key=lambda dim: (runs[dim], dim))[-2:])
    return tuple(grid), tuple(dim for dim in drawn if dim not in grid)


def _pattern(layout: Layout) -> list[int]:
    """The runs of each dim that show its pattern: all, or the first of a block-cyclic dim with many rounds."""
    each = zip(counts(layout), periods(layout), strict=True)
    return [count if count <= _MOST_DEALT else min(count, max(_DEALT, period)) for count, period in each]


def _drawn_runs(pattern: Sequence[int], grid: Sequence[int], slices: Sequence[int]) -> tuple[int, ...]:
    """How many runs of each dim are drawn: at most `MOST_SLICES` slices, and `MOST_CELLS` cells in all of them."""
    drawn = list(pattern)
    for dim, some in zip(slices, bounded([pattern[dim] for dim in slices], MOST_SLICES), strict=True):
        drawn[dim] = some
    number = max(1, math.prod(drawn[dim] for dim in slices))
    for dim, some in zip(grid, bounded([pattern[dim] for dim in grid], MOST_CELLS // number), strict=True):
        drawn[dim] = some
    return tuple(drawn)


def label(cell: Cell, mesh: Mesh) -> str:
    """The devices of a cell: replicas by comma, or by their coordinate if they are many; summands by plus.

    >>> mesh = Mesh(x=4, y=2)
    >>> label(Cell((), ((0, 1), (4, 5))), mesh), label(Cell((), ((3,),)), mesh), label(Cell((), ((0, 2, 4, 6),)), mesh)
    ('0,1 + 4,5', '3', 'y=0')
    """
    sets = [_set(devices, mesh) for devices in cell.holders]
    return " + ".join(sets if len(sets) <= 4 else [*sets[:2], f".. ({len(sets)})"])


def _set(devices: Sequence[int], mesh: Mesh) -> str:
    words = ",".join(map(str, devices)) if len(devices) <= 2 else set_text(devices, len(devices))
    return (_coordinates(devices, mesh) or words) if ".." in words else words


def _coordinates(devices: Sequence[int], mesh: Mesh) -> str:
    """What the coordinates of these devices have in common, if no other device has it too; else nothing."""
    axes = [(name, mesh.sub_axis(name)) for name, size in mesh.axes.items() if size > 1]
    first, *others = (mesh.position(device) for device in devices)
    same = [
        (name, axis)
        for name, axis in axes
        if all(mesh.coordinate(other, axis) == mesh.coordinate(first, axis) for other in others)
    ]
    if mesh.size != len(devices) * math.prod(axis.size for _, axis in same):
        return ""
    return ",".join(f"{name}={mesh.coordinate(first, axis)}" for name, axis in same)


def fills(cell: Cell, colour: dict[int, str], pale: str) -> list[str]:
    """The colours of a cell: one for each device, or `pale` alone if there are more than `MOST_STRIPES`."""
    devices = cell.devices
    return [colour[device] for device in devices] if len(devices) <= MOST_STRIPES else [pale]
