"""Which devices hold which box of an array, for drawing, by `types.meaning` and nothing else.

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

from reshard.errors import ReshardError
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh

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
            for box in itertools.product(*kept):
                held.setdefault(box, []).extend(devices)
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
