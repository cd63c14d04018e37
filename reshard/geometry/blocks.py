"""Blocks: which elements of a sender's tile are which of a receiver's, as nested loops over both.

    sender's tile, 4 x 6      receiver's tile, 2 x 3

    . . . . . .               a b c
    . a . b . c               d e f        Block(src=7, dst=0, axes=(Axis(2, 6, 3), Axis(3, 2, 1)))
    . d . e . f
    . . . . . .

Tiles are flat here: row-major, padding included, and offsets and strides count elements. As they are made, an axis
stays within one dim of either tile, so that an offset and a stride can be unravelled over the shape of a tile; only
those who read blocks fuse axes across dims. A message is a list of blocks, and the planner, the prover and every
runtime read the same ones.

Whatever must fit a budget is cut along its major axes first, so that each piece is one run of a row-major copy: 4 x 6
in pieces of at most 13 elements are two of 2 x 6, of at most 4 eight of 1 x 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple


def list_strides(shape: Sequence[int]) -> list[int]:
    """How far apart neighbours along each dim are in a flat tile.

    >>> list_strides((2, 3, 4))
    [12, 4, 1]
    """
    return [math.prod(shape[at + 1 :]) for at in range(len(shape))]


class Axis(NamedTuple):
    """`extent` elements that are `src` apart in the sender's tile and `dst` apart in the receiver's."""

    extent: int
    src: int
    dst: int


class Block(NamedTuple):
    """The elements of nested loops over `axes`, outermost first, from `src` in the sender's tile to `dst` in the other.

    >>> block = Block(7, 0, (Axis(2, 6, 3), Axis(3, 2, 1)))
    >>> block.elements, block.extents, block.is_run
    (6, (2, 3), False)
    >>> block.reversed
    Block(src=0, dst=7, axes=(Axis(extent=2, src=3, dst=6), Axis(extent=3, src=1, dst=2)))
    """

    src: int
    dst: int
    axes: tuple[Axis, ...]

    @property
    def elements(self) -> int:
        """Elements in the block."""
        return math.prod([axis[0] for axis in self.axes])

    @property
    def extents(self) -> tuple[int, ...]:
        """The extent of every axis."""
        return tuple([axis[0] for axis in self.axes])

    @property
    def is_run(self) -> bool:
        """Whether the elements are neighbours in both tiles, in the order of the loops."""
        below = 1
        for extent, src, dst in reversed(self.axes):
            if extent != 1 and (src, dst) != (below, below):
                return False
            below *= extent
        return True

    @property
    def reversed(self) -> Block:
        """The same elements on their way back."""
        return Block(self.dst, self.src, tuple([Axis(extent, dst, src) for extent, src, dst in self.axes]))


Factor = tuple[Block, ...]
"""What two pieces of some dims share: blocks without common elements."""

Product = tuple[Factor, ...]
"""A block of each factor, in every combination."""


def count_product(product: Product) -> int:
    """The elements of a product of factors."""
    # Written out: messages of thousands of blocks are counted often.
    counts = [sum([math.prod([axis[0] for axis in block[2]]) for block in factor]) for factor in product]
    return math.prod(counts)


def block_part(block: Block, spans: Sequence[tuple[int, int]]) -> Block:
    """The part of a block that has these (start, extent) spans of its axes.

    >>> block_part(Block(0, 4, (Axis(6, 2, 1),)), [(1, 3)])
    Block(src=2, dst=5, axes=(Axis(extent=3, src=2, dst=1),))
    """
    at, to = block.src, block.dst
    axes: list[Axis] = []
    for (_, src, dst), (start, extent) in zip(block.axes, spans, strict=True):
        at, to = at + start * src, to + start * dst
        axes.append(Axis(extent, src, dst))
    return Block(at, to, tuple(axes))


def cut_block(block: Block, cap: int) -> Iterator[Block]:
    """The block in blocks of at most `cap` elements, in the order of its elements; major axes are cut first.

    >>> [(part.src, part.extents) for part in cut_block(Block(0, 0, (Axis(2, 3, 1), Axis(3, 1, 2))), 3)]
    [(0, (1, 3)), (3, (1, 3))]
    """
    if block.elements <= cap:
        yield block
    else:
        yield from (block_part(block, spans) for spans in split_box(block.extents, cap))


def split_box(extents: Sequence[int], cap: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Cuts a box into pieces of at most `cap` elements, each as (start, extent) per axis.

    >>> list(split_box((3, 2), 4))
    [((0, 2), (0, 2)), ((2, 1), (0, 2))]
    """
    if math.prod(extents) <= cap:
        yield tuple((0, extent) for extent in extents)
        return
    row = extents[1:]
    rows = cap // max(1, math.prod(row))
    if not rows:
        for start in range(extents[0]):
            yield from (((start, 1), *rest) for rest in split_box(row, cap))
        return
    # No more pieces than needed, and these as equal as they can be.
    step = -(-extents[0] // -(-extents[0] // rows))
    for start in range(0, extents[0], step):
        yield ((start, min(step, extents[0] - start)), *((0, extent) for extent in row))


def measure_pieces(extents: Sequence[int], cap: int) -> tuple[int, int]:
    """How many pieces `split_box` makes, and the elements of the largest, without listing them.

    >>> measure_pieces((4, 6), 13), measure_pieces((4, 6), 4), measure_pieces((4, 6), 100)
    ((2, 12), (8, 3), (1, 24))
    """
    number, size = 1, math.prod(extents)
    for extent in extents:
        if size <= cap:
            break
        row = size // extent
        if rows := cap // row:
            pieces = -(-extent // rows)
            return number * pieces, -(-extent // pieces) * row
        number, size = number * extent, row
    return number, size


def cut_range(block: Block, low: int, high: int) -> Iterator[Block]:
    """The elements number `low` to `high` of a block, in the order of its loops: whole rows stay one block.

    >>> [(part.src, part.extents) for part in cut_range(Block(0, 0, (Axis(3, 10, 10), Axis(4, 1, 1))), 2, 10)]
    [(2, (2,)), (10, (1, 4)), (20, (2,))]
    """
    if low >= high:
        return
    if (low, high) == (0, block.elements):
        yield block
        return
    (_, src, dst), rest = block.axes[0], block.axes[1:]
    row = math.prod([axis.extent for axis in rest])
    for first, last, start, end in split_rows(low, high, row):
        at, to = block.src + first * src, block.dst + first * dst
        if (start, end) == (0, row):
            yield Block(at, to, (Axis(last - first, src, dst), *rest))
        else:
            yield from cut_range(Block(at, to, rest), start, end)


def split_rows(low: int, high: int, row: int) -> Iterator[tuple[int, int, int, int]]:
    """Numbers `low` to `high` in rows: the first row and the one after the last, and the part that each of these has.

    Part of the first row, whole rows, part of the last; only one part if both ends cut the same row.

    >>> list(split_rows(95, 205, 100)), list(split_rows(2, 4, 10))
    ([(0, 1, 95, 100), (1, 2, 0, 100), (2, 3, 0, 5)], [(0, 1, 2, 4)])
    """
    first, last = -(-low // row), high // row
    if first > last:
        yield last, first, low - last * row, high - last * row
        return
    if low < first * row:
        yield first - 1, first, low - (first - 1) * row, row
    if first < last:
        yield first, last, 0, row
    if last * row < high:
        yield last, last + 1, 0, high - last * row


def scale_blocks(blocks: Factor, src: int, dst: int) -> Factor:
    """Blocks of local indices of a dim, as those of tiles in which these are `src` and `dst` apart.

    >>> scale_blocks((Block(1, 0, (Axis(3, 1, 1),)),), 10, 4)
    (Block(src=10, dst=0, axes=(Axis(extent=3, src=10, dst=4),)),)
    """
    if src == dst == 1:
        return blocks
    return tuple([Block(block.src * src, block.dst * dst, _scale_axes(block.axes, src, dst)) for block in blocks])


@lru_cache(maxsize=4096)
def _scale_axes(axes: tuple[Axis, ...], src: int, dst: int) -> tuple[Axis, ...]:
    # Blocks that are alike share their axes, which are most of what a message takes.
    return tuple([Axis(extent, step * src, stride * dst) for extent, step, stride in axes])


def multiply_blocks(factors: Sequence[Block]) -> Block:
    """The block of all combinations of the elements of some: offsets add up, and axes follow each other.

    >>> multiply_blocks([Block(4, 0, (Axis(2, 4, 3),)), Block(1, 2, (Axis(3, 1, 1),))])
    Block(src=5, dst=2, axes=(Axis(extent=2, src=4, dst=3), Axis(extent=3, src=1, dst=1)))
    """
    if len(factors) == 1:
        return factors[0]
    axes = tuple([axis for factor in factors for axis in factor.axes])
    return Block(sum([factor.src for factor in factors]), sum([factor.dst for factor in factors]), axes)


def fuse_axes(block: Block) -> Block:
    """The same elements in the same order, in as few axes as possible: neighbours that go on evenly are one.

    >>> fuse_axes(Block(0, 2, (Axis(2, 6, 3), Axis(1, 9, 9), Axis(3, 2, 1)))).axes
    (Axis(extent=6, src=2, dst=1),)
    """
    fused: list[Axis] = []
    for axis in block.axes:
        extent, src, dst = axis
        if extent == 1:
            continue
        if fused and fused[-1][1:] == (extent * src, extent * dst):
            fused[-1] = Axis(fused[-1].extent * extent, src, dst)
        else:
            fused.append(axis)
    return Block(block.src, block.dst, tuple(fused))


def split_run(axes: Sequence[Axis], run: int = 1, below: float = math.inf) -> tuple[tuple[Axis, ...], int]:
    """The axes of a block without the last ones that are one run at both ends, and how long that is: an element is
    `run` long, and the run shorter than `below`.

    >>> split_run((Axis(3, 40, 20), Axis(2, 4, 4), Axis(4, 1, 1)))
    ((Axis(extent=3, src=40, dst=20),), 8)
    """
    left = len(axes)
    while left and axes[left - 1][1] == axes[left - 1][2] == run and axes[left - 1][0] * run < below:
        left -= 1
        run *= axes[left][0]
    return tuple(axes[:left]), run


def merge_blocks(blocks: Iterable[Block], rising: bool = True) -> list[Block]:
    """The same elements in the same order, evenly spaced equal blocks made one of one more axis.

    Passes repeat as long as they leave fewer blocks: rows become planes, and planes volumes. Unless `rising`, distances
    may fall or be 0.

    >>> merge_blocks([Block(at, at + 1, (Axis(2, 1, 1),)) for at in (0, 4, 8)])
    [Block(src=0, dst=1, axes=(Axis(extent=3, src=4, dst=4), Axis(extent=2, src=1, dst=1)))]
    """
    merged = list(blocks)
    while True:
        rows: list[Block] = []
        at = 0
        while at < len(merged):
            first, count = merged[at], 1
            step: tuple[int, int] | None = None
            while at + count < len(merged):
                last, following = merged[at + count - 1], merged[at + count]
                apart = following.src - last.src, following.dst - last.dst
                # Steps ascend at both ends: readers take the first offset for the lowest.
                if following.axes != first.axes or (rising and min(apart) <= 0) or step not in (None, apart):
                    break
                step, count = apart, count + 1
            rows.append(first if step is None else Block(first.src, first.dst, (Axis(count, *step), *first.axes)))
            at += count
        if len(rows) == len(merged):
            return rows
        merged = rows
