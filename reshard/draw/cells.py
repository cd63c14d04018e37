"""Which devices hold which box of an array, by `types.meaning` and nothing else, and which boxes a picture shows.

    f32[2{x}64] on <x=4>     8 runs of 64 elements, by device: | 0 | 1 | 2 | 3 | 0 | 1 | 2 | 3 |

All elements of a run, the minor local digit of a dim, lie on the same devices. So it is enough to look up the meaning
of a coarse layout, in which every run is one element: here f32[2{x}1]. An array of 2^40 elements is drawn like a small
one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from reshard.draw.colours import PALE, colour_devices
from reshard.errors import ReshardError
from reshard.plans.plan import Plan
from reshard.show.layout_pieces import set_text
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh
from reshard.types.units import counted, listed

MOST_CELLS = 4096
MOST_RUNS = 1024  # Along one dim: more than a panel has columns of pixels.
MOST_DEVICES = 4096
MOST_WORK = 1 << 22  # Runs looked up, over all devices.
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
        return tuple(_measure_run(dim) for dim in self.layout.dims)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The runs of each dim, those of padding included."""
        return count_runs(self.layout)

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
        holders = self._find_holders()
        cells: list[Cell] = []
        for box in itertools.product(*map(range, self.drawn)):
            spans = tuple((at * run, (at + 1) * run) for at, run in zip(box, self.runs, strict=True))
            # One set of devices for each summand; a single set unless the array is partial.
            sets: dict[tuple[int, ...], list[int]] = {}
            for device in sorted(holders[box]):
                mesh = self.layout.mesh
                summand = mesh.coordinates(mesh.position(device), self.layout.partial)
                sets.setdefault(summand, []).append(device)
            cells.append(Cell(spans, tuple(tuple(same) for same in sets.values())))
        return tuple(cells)

    def _find_holders(self) -> dict[tuple[int, ...], list[int]]:
        """The devices that hold each box of runs that is drawn."""
        # Each run as one element, and no more rounds than are drawn: the meaning of an array of any size is then short.
        dims = tuple(map(_coarsen_dim, self.layout.dims, self.runs, self.drawn))
        coarse = Layout(self.layout.mesh, dims, self.layout.dtype, self.layout.reduction, self.layout.partial)
        check_devices(coarse.mesh)
        devices, runs = coarse.mesh.size, sum(coarse.tile_shape)
        if devices * runs > MOST_WORK:
            raise ReshardError(
                f"{coarse} on mesh {coarse.mesh} is cut too finely to draw: {runs} runs on each of {devices} devices "
                f"(global {coarse.shape} runs); draw the same layouts of a smaller shape, or use draw('memory')"
            )
        tiles: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for device in coarse.mesh.devices:
            tiles.setdefault(meaning(coarse, device), []).append(device)
        holders: dict[tuple[int, ...], list[int]] = {}
        for index, same in tiles.items():
            drawn = [[at for at in along if at < most] for along, most in zip(index, self.drawn, strict=True)]
            for cell in itertools.product(*drawn):
                holders.setdefault(cell, []).extend(same)
        return holders


def count_runs(layout: Layout) -> tuple[int, ...]:
    """The runs of each dim, those of padding included; 0 for an empty dim.

    >>> from reshard.types import Mesh
    >>> count_runs(Layout.parse("f32[2{x}8, 16, {y}5/9]", Mesh(x=4, y=2)))
    (8, 1, 2)
    """
    return tuple(dim.padded // _measure_run(dim) if dim.padded else 0 for dim in layout.dims)


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


def _measure_run(dim: Dim) -> int:
    """The elements of a run: the minor digit if it is local."""
    return dim.digits[-1].radix if dim.digits and dim.digits[-1].axis is None else 1


def _coarsen_dim(dim: Dim, run: int, drawn: int) -> Dim:
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
        return tuple([self.colour[device] for device in (devices if self.striped(at) else devices[:1])])

    def extent(self, at: int, dim: int) -> int:
        """The elements of a dim that a panel spans: the same in all panels if none of them leaves any out."""
        drawn = [panel.drawn[dim] * panel.runs[dim] for panel in self.panels]
        return drawn[at] if any(self.cropped(other, dim) for other in range(len(self.panels))) else max(drawn)

    def cropped(self, at: int, dim: int) -> bool:
        """Whether a panel leaves out runs of a dim."""
        return self.panels[at].drawn[dim] < self.panels[at].counts[dim]

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
    def _most_holders(self) -> tuple[int, ...]:
        return tuple(max((len(cell.devices) for cell in panel.cells), default=0) for panel in self.panels)

    def striped(self, at: int) -> bool:
        """Whether a panel has room for all colours of each cell; if not, a cell has that of its first device."""
        return len(self.panels[at].cells) * self._most_holders[at] <= MOST_CELLS

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
        if not all(self.striped(at) for at in range(len(self.panels))):
            notes.append("Where several devices hold a tile, its colour is that of the first one.")
        if any(not layout.even for layout in self.layouts):
            notes.append("Hatched: padding.")
        whole = [dim for dim in range(len(self.shape)) if dim not in (*self.grid, *self.slices)]
        if whole:
            notes.append(f"Not drawn: {listed([f'dim {dim} ({self.shape[dim]})' for dim in whole])}, never split.")
        for at, panel in enumerate(self.panels):
            dims = [dim for dim in (*self.grid, *self.slices) if self.cropped(at, dim)]
            if dims:
                first = listed([f"{panel.drawn[dim]} of {panel.counts[dim]} runs of dim {dim}" for dim in dims])
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
    sets: list[str] = []
    for devices in cell.holders:
        words = ",".join(map(str, devices)) if len(devices) <= 2 else set_text(devices, len(devices))
        sets.append((_name_coordinates(devices, mesh) or words) if ".." in words else words)
    return " + ".join(sets if len(sets) <= 4 else [*sets[:2], f".. ({len(sets)})"])


def _name_coordinates(devices: Sequence[int], mesh: Mesh) -> str:
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
