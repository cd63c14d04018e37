"""Which dims a picture of a plan's tiles shows, how much of them, and the words under it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from reshard.draw.cells import MOST_CELLS, Cell, Cut, Span, bounded, check_devices, counts, periods
from reshard.show.holders import set_text
from reshard.types.layout import Layout
from reshard.types.plan import Plan
from reshard.types.units import counted, listed

MOST_SLICES = 8
MOST_STRIPES = 8  # Colours in one cell.
_MOST_DEALT, _DEALT = 32, 16  # Runs of a dim that is dealt out in rounds: of more, so many show the pattern.


@dataclass(frozen=True)
class Scene:
    """The layouts of a plan as cells: dims of `grid` along the axes, a picture for each run of those of `slices`."""

    names: tuple[str, ...]
    cuts: tuple[Cut, ...]
    grid: tuple[int, ...]
    slices: tuple[int, ...]

    @property
    def layouts(self) -> list[Layout]:
        """Those of the source and of the result of each step."""
        return [cut.layout for cut in self.cuts]

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's."""
        return self.cuts[0].layout.shape

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """All device ids, ascending."""
        return tuple(sorted(self.cuts[0].layout.mesh.devices))

    def extent(self, at: int, dim: int) -> int:
        """Elements of a dim that a panel spans: the same in all panels, where all of it is drawn."""
        if any(self.cropped(other, dim) for other in range(len(self.cuts))):
            return self._drawn(at, dim)
        return max(self._drawn(other, dim) for other in range(len(self.cuts)))

    def cropped(self, at: int, dim: int) -> bool:
        """Whether a panel leaves runs of a dim out."""
        return self.cuts[at].drawn[dim] < self.cuts[at].counts[dim]

    def _drawn(self, at: int, dim: int) -> int:
        return self.cuts[at].drawn[dim] * self.cuts[at].runs[dim]

    def pictures(self, at: int) -> list[tuple[str, list[Cell]]]:
        """A panel's cells, slice by slice, each with its name; one without a name where no dim is sliced."""
        found: dict[tuple[Span, ...], list[Cell]] = {}
        for cell in self.cuts[at].cells:
            found.setdefault(tuple(cell.spans[dim] for dim in self.slices), []).append(cell)
        return [(self._slice_name(spans), cells) for spans, cells in found.items()]

    def _slice_name(self, spans: Sequence[Span]) -> str:
        words: list[str] = []
        for dim, (start, stop) in zip(self.slices, spans, strict=True):
            size = self.shape[dim]
            words.append(f"dim {dim}: {start}:{min(stop, size) if start < size else f'{stop} (padding)'}")
        return ", ".join(words)

    def striped(self, at: int) -> bool:
        """Whether a panel has room for all colours of a cell; else it has that of its first device."""
        cells = self.cuts[at].cells
        return len(cells) * max((len(cell.devices) for cell in cells), default=0) <= MOST_CELLS

    def notes(self) -> Iterator[str]:
        """What a reader of the picture has to be told."""
        cells = list(itertools.chain(*(cut.cells for cut in self.cuts)))
        yield f"Numbers and colours are the {counted(len(self.devices), 'device')}."
        if any(len(held) > 1 for cell in cells for held in cell.holders):
            yield "0,1 or 0-1: each of these devices holds it."
        if any(len(cell.holders) > 1 for cell in cells):
            reduction = next(layout.reduction for layout in self.layouts if layout.partial)
            yield f"0 + 1: each holds a summand, and the array is their {reduction}."
        if not all(self.striped(at) for at in range(len(self.cuts))):
            yield "Where several devices hold a tile, its colour is that of the first one."
        if any(not layout.even for layout in self.layouts):
            yield "Hatched: padding."
        rest = [dim for dim in range(len(self.shape)) if dim not in (*self.grid, *self.slices)]
        if rest:
            whole = listed([f"dim {dim} ({self.shape[dim]})" for dim in rest])
            yield f"Not drawn: {whole}, never split."
        yield from self._crops()

    def _crops(self) -> Iterator[str]:
        for at, cut in enumerate(self.cuts):
            dims = [dim for dim in (*self.grid, *self.slices) if self.cropped(at, dim)]
            some = [f"{cut.drawn[dim]} of {cut.counts[dim]} runs of dim {dim}" for dim in dims]
            if some:
                yield f"{self.names[at].capitalize()}: the first {listed(some)}."


def scene(plan: Plan) -> Scene:
    """What to draw of a plan: all dims of an array of at most two, else those that some layout splits."""
    check_devices(plan.source.mesh)
    layouts = [plan.source, *(step.result for step in plan.steps)]
    sizes = [counts(layout) for layout in layouts]
    rank = len(plan.source.shape)
    most = [max(size[dim] for size in sizes) for dim in range(rank)]
    split = [dim for dim in range(rank) if most[dim] > 1] if rank > 2 else list(range(rank))
    grid = tuple(sorted(sorted(split, key=lambda dim: (most[dim], dim))[-2:]))
    slices = tuple(dim for dim in split if dim not in grid)
    cuts = tuple(Cut(layout, _drawn(_patterns(layout), grid, slices)) for layout in layouts)
    last = len(plan.steps)
    names = ["source", *(f"after step {number}" for number in range(1, last)), "target"]
    return Scene(tuple(names) if last else ("source and target",), cuts, grid, slices)


def _patterns(layout: Layout) -> list[int]:
    """The runs of each dim, those of a dim that is dealt out many times as far as its pattern is to be seen."""
    each = zip(counts(layout), periods(layout), strict=True)
    return [count if count <= _MOST_DEALT else min(count, max(_DEALT, period)) for count, period in each]


def _drawn(sizes: Sequence[int], grid: Sequence[int], slices: Sequence[int]) -> tuple[int, ...]:
    """How many runs of each dim are drawn."""
    found = list(sizes)
    for dim, some in zip(slices, bounded([sizes[dim] for dim in slices], MOST_SLICES), strict=True):
        found[dim] = some
    pictures = max(1, math.prod(found[dim] for dim in slices))
    for dim, some in zip(grid, bounded([sizes[dim] for dim in grid], MOST_CELLS // pictures), strict=True):
        found[dim] = some
    return tuple(found)


def label(cell: Cell) -> str:
    """The devices of a cell: replicas by comma, summands by plus.

    >>> label(Cell((), ((0, 1), (4, 5)))), label(Cell((), ((3,),)))
    ('0,1 + 4,5', '3')
    """
    sets = [_set(devices) for devices in cell.holders]
    return " + ".join(sets if len(sets) <= 4 else [*sets[:2], f".. ({len(sets)})"])


def _set(devices: Sequence[int]) -> str:
    return ",".join(map(str, devices)) if len(devices) <= 2 else set_text(devices, len(devices))


def fills(cell: Cell, colour: dict[int, str], pale: str) -> list[str]:
    """The colours of a cell: one for each device, or one pale one where they are too many."""
    devices = cell.devices
    return [colour[device] for device in devices] if len(devices) <= MOST_STRIPES else [pale]
