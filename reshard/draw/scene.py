"""Which dims a picture of a plan's tiles shows, how many runs of each, and the caption.

f32[{y}8, 16, {x}4] -> f32[16, {x}{y}2, 16] on <x=4, y=2>, one all_to_all

dim      0   1   2      all three are split by one of the layouts, so all three are drawn:
source   2   1   4      (runs of each dim)
target   1   8   1      dims 1 and 2, the ones with most runs, along the axes of a panel,
most     2   8   4      and one slice of the panel for each run of dim 0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from reshard.draw.cells import MOST_CELLS, Cell, LayoutCells, Span, bounded, check_devices, counts, periods
from reshard.draw.shapes import colours
from reshard.errors import ReshardError
from reshard.show.holders import set_text
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.plan import Plan
from reshard.types.units import counted, listed

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
