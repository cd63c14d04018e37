"""Blocks as ranks use them: between views of padded tiles, of parts of tiles, and between a tile and a message.

    tile 4 x 3, of which columns 0 and 2 are sent    Block(src=0, dst=0, axes=(Axis(2, 2, 4), Axis(4, 3, 1)))
    message                                          a d g j c f i l

A message has the elements of its blocks one after another, so what a rank copies into it, or out of it, are blocks
again: from a tile (`src`) to the message (`dst`). Collectives move padded tiles: their blocks lie in a *frame*, the
padded shape, and `clip_source` leaves out what no tile has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from reshard.errors import PlanError
from reshard.geometry.blocks import Axis, Block, Factor, block_part, list_strides, merge_blocks, multiply_blocks
from reshard.lower.exchange_rounds import Span
from reshard.plans.rules.split_steps import Cut
from reshard.plans.rules.tile_view import TileView

Blocks = tuple[Block, ...]
Shape = tuple[int, ...]

Frames = tuple[Shape, Shape]
"""The shapes of the tiles in which blocks lie, at either end."""

End = Literal["src", "dst"]
"""One end of a block."""


def block_of_tile(shape: Sequence[int]) -> Block:
    """The block of all elements of a tile, at the same place on both sides."""
    return Block(0, 0, tuple(Axis(n, step, step) for n, step in zip(shape, list_strides(shape), strict=True)))


def multiply_factors(factors: Iterable[Factor]) -> Iterator[Block]:
    """The blocks of a product of factors, with evenly spaced ones of a factor folded into one.

    >>> rows = Block(0, 0, (Axis(1, 4, 2),)), Block(8, 2, (Axis(1, 4, 2),))
    >>> list(multiply_factors([rows, (Block(1, 0, (Axis(2, 1, 1),)),)]))[0].axes
    (Axis(extent=2, src=8, dst=2), Axis(extent=1, src=4, dst=2), Axis(extent=2, src=1, dst=1))
    """
    folded = [factor if len(factor) == 1 else _fold_factor(factor) for factor in factors]
    several = [at for at, factor in enumerate(folded) if len(factor) != 1]
    if len(several) != 1:
        return map(multiply_blocks, itertools.product(*folded))
    # Only one factor has several blocks, such as the rows of a table, most of which have the axes of others.
    at, joined = several[0], dict[tuple[Axis, ...], tuple[Axis, ...]]()
    head, tail = (
        multiply_blocks([Block(0, 0, ()), *(of[0] for of in each)]) for each in (folded[:at], folded[at + 1 :])
    )
    for block in folded[at]:
        if block.axes not in joined:
            joined[block.axes] = (*head.axes, *block.axes, *tail.axes)
    src, dst = head.src + tail.src, head.dst + tail.dst
    return (Block(src + block.src, dst + block.dst, joined[block.axes]) for block in folded[at])


_TABLE = 256  # Blocks from which it is found out first whether merging them leaves many fewer.


@lru_cache(maxsize=1024)
def _fold_factor(factor: Factor) -> Factor:
    """Cached, as many messages share their factors. Runs of a table stay as they are if few go on evenly."""
    if len(factor) >= _TABLE:
        ends = np.array([block[:2] for block in factor], np.int64)
        turns = np.count_nonzero((np.diff(ends, 2, axis=0) != 0).any(axis=1))
        if 2 * turns > len(factor):
            return factor
    return tuple(merge_blocks(factor))


def block_of_spans(send: TileView, src: Sequence[Span], receive: TileView, dst: Sequence[Span]) -> Block:
    """The block between these spans of the digits of two views, which have equally many elements in the same order.

    A digit of one side that covers two of the other is split, so that each axis stays within a dim of both.
    """
    (start, before), (end, after) = _steps_of_spans(send, src), _steps_of_spans(receive, dst)
    axes: list[Axis] = []
    while before and after:
        (dim, have, step), (other, want, stride) = before.pop(), after.pop()
        extent = min(have, want)
        if dim != other or (extent and (have % extent or want % extent)):
            raise PlanError(f"a box has {have} indices of dim {dim} at one end and {want} of dim {other} at the other")
        axes.insert(0, Axis(extent, step, stride))
        if have > extent:
            before.append((dim, have // extent, step * extent))
        if want > extent:
            after.append((dim, want // extent, stride * extent))
    return Block(start, end, tuple(axes))


def _steps_of_spans(view: TileView, spans: Sequence[Span]) -> tuple[int, list[tuple[int, int, int]]]:
    """Where spans start in the padded tile, and (dim, extent, stride) of each digit that has more than one value."""
    digits = list(zip(view.dims, spans, list_strides(view.digits), strict=True))
    start = sum(low * stride for _, (low, _), stride in digits)
    return start, [(dim, extent, stride) for dim, (_, extent), stride in digits if extent != 1]


def list_starts(view: TileView) -> list[int]:
    """Where each block of a view starts in the padded tile, by the number of the block.

    >>> list_starts(TileView((4, 8), (4, 8), (4, 2, 4), (0, 1, 1), (1,)))
    [0, 4]
    """
    strides, starts = list_strides(view.digits), [0]
    for digit in view.blocks:
        starts = [start + n * strides[digit] for start in starts for n in range(view.digits[digit])]
    return starts


def block_of_part(block: Block, take: Cut, put: Cut, number: int, frames: Frames) -> Block:
    """Rewrites a block between the tiles of part `number`, of these shapes, as a block between the whole tiles.

    A part has `inner` neighbours of the cut dim together, with all that is below them: `inner * below` elements.
    Between these the whole tile has those of all other parts, so only what goes beyond them is stretched.

    >>> cut = Cut(0, 2, 3, 2)
    >>> block_of_part(Block(0, 0, (Axis(4, 1, 1),)), cut, cut, 1, ((4,), (4,)))
    Block(src=2, dst=2, axes=(Axis(extent=2, src=6, dst=6), Axis(extent=2, src=1, dst=1)))
    """
    src, dst = (cut.inner * math.prod(frame[cut.axis + 1 :]) for cut, frame in zip((take, put), frames, strict=True))

    def stretch(offset: int, unit: int) -> int:
        outer, inner = divmod(offset, unit)
        return outer * take.parts * unit + inner

    def split(axis: Axis) -> list[Axis]:
        """The axis in two where it goes beyond a unit of either end."""
        extent, step, stride = axis
        within = [extent if by >= unit else min(extent, unit // by) for by, unit in ((step, src), (stride, dst))]
        for at in sorted(within):
            if 1 < at < extent:
                return [*split(Axis(extent // at, step * at, stride * at)), axis._replace(extent=at)]
        return [axis]

    axes = [Axis(n, stretch(a, src), stretch(b, dst)) for axis in block.axes for n, a, b in split(axis)]
    return Block(stretch(block.src, src) + number * src, stretch(block.dst, dst) + number * dst, tuple(axes))


def clip_block(block: Block, frames: Frames, shapes: Frames) -> Iterator[Block]:
    """A block between padded tiles as blocks between those inside, of these shapes: what both of them have."""
    if frames == shapes:
        yield block
        return
    for held in clip_source(block, frames[0], shapes[0]):
        for part in clip_source(held.reversed, frames[1], shapes[1]):
            yield part.reversed


def clip_source(block: Block, frame: Shape, shape: Shape) -> Iterator[Block]:
    """A block whose source lies in a padded tile, as blocks of what the tile inside has, of this shape.

    Here index 9 of four, three apart, is padding:

    >>> list(clip_source(Block(0, 0, (Axis(4, 3, 1),)), (10,), (8,)))
    [Block(src=0, dst=0, axes=(Axis(extent=3, src=3, dst=1),))]
    """
    if frame == shape:
        yield block
        return
    below, steps = list_strides(frame), list_strides(shape)
    start = [block.src // step % size for step, size in zip(below, frame, strict=True)]
    # Each axis lies within one dim, that of the largest stride that is not above its own.
    dims = [next((d for d, step in enumerate(below) if step <= axis.src and frame[d] != 1), 0) for axis in block.axes]
    by_dim = [[n for n, dim in enumerate(dims) if dim == d] for d in range(len(shape))]
    along = [
        list(_spans_below(low, [(block.axes[n].extent, block.axes[n].src // below[d]) for n in by_dim[d]], shape[d]))
        for d, low in enumerate(start)
    ]
    order = [n for numbers in by_dim for n in numbers]
    for parts in itertools.product(*along):
        spans = dict(zip(order, itertools.chain(*parts), strict=True))
        _, dst, axes = block_part(block, [spans[n] for n in range(len(dims))])
        by = [axis.src // below[dim] for axis, dim in zip(axes, dims, strict=True)]
        at = sum(low * step for low, step in zip(start, steps, strict=True))
        at += sum(spans[n][0] * by[n] * steps[dim] for n, dim in enumerate(dims))
        yield Block(at, dst, tuple(axis._replace(src=by[n] * steps[dims[n]]) for n, axis in enumerate(axes)))


def _spans_below(start: int, steps: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[Span, ...]]:
    """The spans of one dim's (extent, step) axes that reach indices below its size."""
    reach = sum((extent - 1) * step for extent, step in steps)
    if start + reach < size:
        yield tuple((0, extent) for extent, _ in steps)
        return
    if not steps:
        return
    (extent, step), rest = steps[0], steps[1:]
    reach -= (extent - 1) * step
    full = max(0, -(-(size - start - reach) // step))
    if full:
        yield ((0, full), *((0, e) for e, _ in rest))
    for index in range(full, extent):
        yield from (((index, 1), *spans) for spans in _spans_below(start + index * step, rest, size))


def pack_block(block: Block, end: End, at: int) -> Block:
    """A block's elements in a message, from number `at` on: a block from the tile at that `end` to the message.

    >>> pack_block(Block(5, 0, (Axis(2, 10, 1), Axis(3, 1, 2))), "src", 100)
    Block(src=5, dst=100, axes=(Axis(extent=2, src=10, dst=3), Axis(extent=3, src=1, dst=1)))
    """
    return Block(block.src if end == "src" else block.dst, at, _pack_axes(block.axes, end))


@lru_cache(maxsize=4096)
def _pack_axes(axes: tuple[Axis, ...], end: End) -> tuple[Axis, ...]:
    """Blocks that are alike share them: a rank has thousands."""
    below = list_strides([axis.extent for axis in axes])
    return tuple(
        Axis(extent, src if end == "src" else dst, step) for (extent, src, dst), step in zip(axes, below, strict=True)
    )
