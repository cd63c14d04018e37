"""Strided blocks: the same elements in a sender's tile and in a receiver's.

    sender's tile           receiver's tile
    dim 0: a . b . c        dim 0: . a b c          Block((0,), (1,), (Axis(dim=0, extent=3, src=2, dst=1),))

Starts and steps count local indices of a dim, not bytes, so a block is valid for tiles of any memory order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import lt
from typing import NamedTuple

from reshard.errors import PlanError
from reshard.geometry.blocks import Block as FlatBlock
from reshard.geometry.blocks import split_box
from reshard.geometry.messages import Product
from reshard.lower.exchange_rounds import Span
from reshard.plans.rules.split_steps import Cut
from reshard.plans.rules.tile_view import TileView


class Axis(NamedTuple):
    """`extent` local indices of a dim, `src` apart in the sender's tile and `dst` apart in the receiver's."""

    dim: int
    extent: int
    src: int
    dst: int


class Block(NamedTuple):
    """Elements in row-major order of `axes`, starting at local index `src` in one tile and `dst` in the other."""

    src: tuple[int, ...]
    dst: tuple[int, ...]
    axes: tuple[Axis, ...]

    @property
    def extents(self) -> tuple[int, ...]:
        """The extent of every axis."""
        return tuple(axis.extent for axis in self.axes)

    @property
    def elements(self) -> int:
        """Elements in the block."""
        return math.prod(self.extents)

    def part(self, spans: Sequence[Span]) -> Block:
        """The block of these (start, extent) spans of the axes.

        >>> Block((0,), (4,), (Axis(0, 6, 2, 1),)).part([(1, 3)])
        Block(src=(2,), dst=(5,), axes=(Axis(dim=0, extent=3, src=2, dst=1),))
        """
        src, dst = list(self.src), list(self.dst)
        for axis, (start, _) in zip(self.axes, spans, strict=True):
            src[axis.dim] += start * axis.src
            dst[axis.dim] += start * axis.dst
        axes = tuple(axis._replace(extent=extent) for axis, (_, extent) in zip(self.axes, spans, strict=True))
        return Block(tuple(src), tuple(dst), axes)


def whole_tile(shape: Sequence[int]) -> Block:
    """The block of all elements of a tile of this shape, at the same indices on both sides."""
    zeros = (0,) * len(shape)
    return Block(zeros, zeros, tuple(Axis(dim, extent, 1, 1) for dim, extent in enumerate(shape)))


def cut_tile_block(block: Block, cap: int) -> Iterator[Block]:
    """Splits a block into blocks of at most `cap` elements, in the order of its elements."""
    if block.elements <= cap:
        yield block
        return
    yield from (block.part(spans) for spans in split_box(block.extents, cap))


def block_of_spans(send: TileView, src: Sequence[Span], receive: TileView, dst: Sequence[Span]) -> Block:
    """The block between these spans of the digits of two views, which have equally many elements in the same order."""
    start, before = _unravel_spans(send, src)
    end, after = _unravel_spans(receive, dst)
    return Block(start, end, _pair_steps(before, after))


def list_starts(view: TileView) -> list[tuple[int, ...]]:
    """The local index at which each block of a view starts, by the number of the block.

    >>> list_starts(TileView((4, 8), (4, 8), (4, 2, 4), (0, 1, 1), (1,)))
    [(0, 0), (0, 4)]
    """
    below = [
        math.prod(r for r, dim in zip(view.digits[at + 1 :], view.dims[at + 1 :], strict=True) if dim == view.dims[at])
        for at in range(len(view.digits))
    ]
    first = [(0,) * len(view.tile)]
    for axis in view.blocks:
        dim, step = view.dims[axis], below[axis]
        moved = range(0, step * view.digits[axis], step)
        first = [(*at[:dim], at[dim] + by, *at[dim + 1 :]) for at in first for by in moved]
    return first


_Steps = list[tuple[int, int, int]]
"""(dim, extent, step) of each digit of which a span has more than one value."""


def _unravel_spans(view: TileView, spans: Sequence[Span]) -> tuple[tuple[int, ...], _Steps]:
    start = [0] * len(view.tile)
    steps: _Steps = []
    below = [1] * len(view.tile)
    for digit in range(len(view.digits) - 1, -1, -1):
        dim, (low, extent) = view.dims[digit], spans[digit]
        start[dim] += low * below[dim]
        if extent != 1:
            steps.insert(0, (dim, extent, below[dim]))
        below[dim] *= view.digits[digit]
    return tuple(start), steps


def _pair_steps(before: _Steps, after: _Steps) -> tuple[Axis, ...]:
    """Axes common to both sides: a digit of one side that covers two of the other is split."""
    before, after = list(before), list(after)
    axes: list[Axis] = []
    while before and after:
        (dim, have, src), (other, want, dst) = before.pop(), after.pop()
        extent = min(have, want)
        if dim != other or (extent and (have % extent or want % extent)):
            raise PlanError(f"a box has {have} indices of dim {dim} at one end and {want} of dim {other} at the other")
        axes.insert(0, Axis(dim, extent, src, dst))
        if have > extent:
            before.append((dim, have // extent, src * extent))
        if want > extent:
            after.append((dim, want // extent, dst * extent))
    return tuple(axes)


def blocks_of_products(products: Iterable[Product], send: Sequence[int], receive: Sequence[int]) -> Iterator[Block]:
    """The blocks of a message between tiles of these shapes, from what it says of flat ones, dim by dim."""
    steps = [(math.prod(send[at + 1 :]), math.prod(receive[at + 1 :])) for at in range(len(send))]
    for product in products:
        yield from blocks_of_runs(
            [[_of_dim(block, *step) for block in factor] for factor, step in zip(product, steps, strict=True)]
        )


def _of_dim(block: FlatBlock, src: int, dst: int) -> FlatBlock:
    """A block of flat tiles in local indices of its dim, of which neighbours are `src` and `dst` apart in the tiles."""
    axes = tuple([axis._replace(src=axis.src // src, dst=axis.dst // dst) for axis in block.axes])
    return FlatBlock(block.src // src, block.dst // dst, axes)


def unravel_block(block: FlatBlock, send: Sequence[int], receive: Sequence[int]) -> Block:
    """A block of flat tiles as one of tiles of these shapes; each of its axes lies within one dim of both.

    >>> from reshard.geometry.blocks import Axis as FlatAxis
    >>> unravel_block(FlatBlock(7, 2, (FlatAxis(2, 6, 3),)), (4, 6), (3, 3))
    Block(src=(1, 1), dst=(0, 2), axes=(Axis(dim=0, extent=2, src=1, dst=1),))
    """
    steps = [math.prod(send[at + 1 :]) for at in range(len(send))]
    strides = [math.prod(receive[at + 1 :]) for at in range(len(receive))]
    axes: list[Axis] = []
    for extent, src, dst in block.axes:
        dim = next((at for at, step in enumerate(steps) if step <= src and send[at] != 1), 0)
        axes.append(Axis(dim, extent, src // steps[dim], dst // strides[dim]))
    return Block(
        tuple(block.src // step % size for step, size in zip(steps, send, strict=True)),
        tuple(block.dst // step % size for step, size in zip(strides, receive, strict=True)),
        tuple(axes),
    )


def blocks_of_runs(runs: Sequence[Sequence[FlatBlock]]) -> list[Block]:
    """The blocks of a message: the product of those of all dims, with evenly spaced ones folded into one block.

    >>> from reshard.geometry.blocks import Axis as FlatAxis
    >>> blocks_of_runs([[FlatBlock(at, to, (FlatAxis(2, 1, 1),)) for at, to in ((0, 4), (6, 6), (12, 8))]])
    [Block(src=(0,), dst=(4,), axes=(Axis(dim=0, extent=3, src=6, dst=2), Axis(dim=0, extent=2, src=1, dst=1)))]
    """
    return multiply_dims([blocks_of_dim(dim, tuple(along)) for dim, along in enumerate(runs)])


class DimBlock(NamedTuple):
    """What a block has along one dim."""

    src: int
    dst: int
    axes: tuple[Axis, ...]


def blocks_of_dim(dim: int, runs: tuple[FlatBlock, ...]) -> tuple[DimBlock, ...]:
    """The runs along one dim, with evenly spaced ones folded into one.

    >>> from reshard.geometry.blocks import Axis as FlatAxis
    >>> blocks_of_dim(1, (FlatBlock(0, 4, (FlatAxis(2, 1, 1),)), FlatBlock(6, 6, (FlatAxis(2, 1, 1),))))
    (DimBlock(src=0, dst=4, axes=(Axis(dim=1, extent=2, src=6, dst=2), Axis(dim=1, extent=2, src=1, dst=1))),)
    """
    if len(runs) == len(runs[0].axes) == 1:
        return (DimBlock(runs[0].src, runs[0].dst, _axis_of_run(dim, runs[0].axes[0].extent)),)
    return fold_dim(dim, runs)


@lru_cache(maxsize=1024)
def fold_dim(dim: int, runs: tuple[FlatBlock, ...]) -> tuple[DimBlock, ...]:
    """The same for runs that repeat, or of which there are several; cached, as many messages share them."""
    # Blocks of one dim, which is dim 0 of one-dimensional tiles.
    along = fold_blocks(map(_block_of_run, runs))
    return tuple(DimBlock(b.src[0], b.dst[0], tuple(axis._replace(dim=dim) for axis in b.axes)) for b in along)


@lru_cache(maxsize=1024)
def _axis_of_run(dim: int, length: int) -> tuple[Axis, ...]:
    """The axes of neighbouring elements; blocks that are alike share them."""
    return (Axis(dim, length, 1, 1),)


def multiply_dims(along: Sequence[Sequence[DimBlock]]) -> list[Block]:
    """The blocks that are products of parts, one of every dim."""
    if all(len(of) == 1 for of in along):
        return [_multiply_one([of[0] for of in along])]
    return [_multiply_one(each) for each in itertools.product(*along)]


def _multiply_one(each: Sequence[DimBlock]) -> Block:
    axes = tuple([axis for part in each for axis in part.axes])
    return Block(tuple([part.src for part in each]), tuple([part.dst for part in each]), axes)


def _block_of_run(run: FlatBlock) -> Block:
    return Block((run.src,), (run.dst,), tuple([Axis(0, *axis) for axis in run.axes]))


def fold_blocks(blocks: Iterable[Block]) -> list[Block]:
    """The same elements in the same order, with evenly spaced equal blocks merged into one with one more axis.

    >>> rows = [Block((at,), (at + 1,), (Axis(0, 2, 1, 1),)) for at in (0, 4, 8)]
    >>> fold_blocks(rows)
    [Block(src=(0,), dst=(1,), axes=(Axis(dim=0, extent=3, src=4, dst=4), Axis(dim=0, extent=2, src=1, dst=1)))]

    Passes repeat as long as they reduce the number of blocks.
    """
    folded = list(blocks)
    while len(rows := list(_fold_once(folded))) < len(folded):
        folded = rows
    return folded


def _fold_once(blocks: list[Block]) -> Iterator[Block]:
    at = 0
    while at < len(blocks):
        first, axis, count = blocks[at], None, 1
        while at + count < len(blocks):
            step = _axis_between(blocks[at + count - 1], blocks[at + count])
            if step is None or (axis is not None and step != axis):
                break
            axis, count = step, count + 1
        at += count
        yield first if axis is None else first._replace(axes=(axis._replace(extent=count), *first.axes))


def _axis_between(one: Block, other: Block) -> Axis | None:
    """The axis that leads from one block to an equal one further on; None unless they differ along one dim only."""
    if one.axes != other.axes:
        return None
    moved = [dim for dim in range(len(one.src)) if (one.src[dim], one.dst[dim]) != (other.src[dim], other.dst[dim])]
    if len(moved) != 1:
        return None
    dim = moved[0]
    src, dst = other.src[dim] - one.src[dim], other.dst[dim] - one.dst[dim]
    return Axis(dim, 2, src, dst) if src > 0 and dst > 0 else None


def block_of_part(block: Block, take: Cut, put: Cut, number: int) -> Block:
    """Rewrites a block between the tiles of part `number` as a block between the whole tiles."""
    axes: list[Axis] = []
    for axis in block.axes:
        if axis.dim != take.axis:
            axes.append(axis)
            continue
        axes += _split_at(axis, take.inner, put.inner)
    stretched = [
        axis
        if axis.dim != take.axis
        else axis._replace(src=_stretch_index(axis.src, take), dst=_stretch_index(axis.dst, put))
        for axis in axes
    ]
    src, dst = list(block.src), list(block.dst)
    src[take.axis] = _stretch_index(src[take.axis], take) + number * take.inner
    dst[put.axis] = _stretch_index(dst[put.axis], put) + number * put.inner
    return Block(tuple(src), tuple(dst), tuple(stretched))


def _stretch_index(index: int, into: Cut) -> int:
    """A local index (or a step of whole rounds) of part 0, as one of the whole tile."""
    outer, inner = divmod(index, into.inner)
    return outer * into.parts * into.inner + inner


def _split_at(axis: Axis, src: int, dst: int) -> list[Axis]:
    """Splits an axis that runs beyond the inner indices of either cut: one axis stays within them, one goes beyond."""
    for at in sorted({_count_within(axis.src, axis.extent, src), _count_within(axis.dst, axis.extent, dst)}):
        if 1 < at < axis.extent:
            outer = Axis(axis.dim, axis.extent // at, axis.src * at, axis.dst * at)
            return [*_split_at(outer, src, dst), axis._replace(extent=at)]
    return [axis]


def _count_within(step: int, extent: int, inner: int) -> int:
    """How many indices of an axis fall into the first `inner` ones."""
    return extent if step >= inner else min(extent, inner // step)


def fits_tile(block: Block, at: str, shape: Sequence[int]) -> bool:
    """Whether a block that has elements lies in a tile of this shape as a whole, at its end `at`: "src" or "dst".

    >>> [fits_tile(Block((0,), (0,), (Axis(0, 4, 3, 1),)), "src", (size,)) for size in (9, 10)]
    [False, True]
    """
    last = list(block.src if at == "src" else block.dst)
    for dim, reach in _reach_of_axes(block.axes, at):
        last[dim] += reach
    return all(map(lt, last, shape))


@lru_cache(maxsize=1024)
def _reach_of_axes(axes: tuple[Axis, ...], at: str) -> tuple[tuple[int, int], ...]:
    """How far each axis goes in its dim."""
    return tuple((axis.dim, (axis.extent - 1) * (axis.src if at == "src" else axis.dst)) for axis in axes)


def spans_inside(block: Block, at: str, shape: Sequence[int]) -> Iterator[tuple[Span, ...]]:
    """The spans of a block's axes that lie inside a tile of this shape, that is, all but padding.

    `at` says which end of the block is that tile: "src" or "dst". Here index 9 is padding:

    >>> list(spans_inside(Block((0,), (0,), (Axis(0, 4, 3, 1),)), "src", (8,)))
    [((0, 3),)]
    """
    start = block.src if at == "src" else block.dst
    steps = [(axis.dim, axis.extent, axis.src if at == "src" else axis.dst) for axis in block.axes]
    order = [n for dim in range(len(shape)) for n, step in enumerate(steps) if step[0] == dim]
    along = [
        list(_spans_along(low, [(extent, step) for d, extent, step in steps if d == dim], size))
        for dim, (low, size) in enumerate(zip(start, shape, strict=True))
    ]
    for parts in itertools.product(*along):
        spans = dict(zip(order, itertools.chain(*parts), strict=True))
        yield tuple(spans[n] for n in range(len(steps)))


def _spans_along(start: int, steps: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[Span, ...]]:
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
        yield from (((index, 1), *spans) for spans in _spans_along(start + index * step, rest, size))
