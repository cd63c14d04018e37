"""Copies between equally spaced memory fused into one strided copy: what a small move costs is its number of copies.

Rows to columns on 4 ranks is one copy on each: the parts of the ranks lie at one distance in the segment that they
share, and what each gives lies at one distance in the result.

    from rank 0    start 0       to 0     extents (8, 32)
    from rank 1    start 4096    to 2048  extents (8, 32)      ->    start 0 to 0, extents (4, 8, 32)
    ...

The blocks here count bytes, from the start of the shared memory and from that of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from reshard.geometry.blocks import Axis, Block, merge_blocks
from reshard.runtime.on_mpi.direct import Direct
from reshard.types import Layout

_LONG = 512  # Bytes from which a run does not gain from being one element, see `strided_copy`.


def fuse_copies(copies: Iterable[Block]) -> list[Block]:
    """The same copies as few ones, of more axes, in any order.

    >>> one = Block(0, 0, (Axis(8, 8, 16),))
    >>> fuse_copies([one, one._replace(src=512, dst=8)])
    [Block(src=0, dst=0, axes=(Axis(extent=2, src=512, dst=8), Axis(extent=8, src=8, dst=16)))]
    """
    before = list(copies)
    while True:
        # Distances may fall, unlike those of messages: a rank may take its parts from the last rank to the first.
        before.sort(key=lambda each: (each.axes, each.dst, each.src))
        after = merge_blocks(before, rising=False)
        if len(after) == len(before):
            return after
        before = after


def list_tile_copies(
    move: Direct, source: Layout, target: Layout, rank: int, itemsize: int, starts: Sequence[int]
) -> list[Block]:
    """What a rank copies in a move inside one node to its tile, out of memory in which the tiles of all ranks lie, its
    own too, at `starts`.
    """
    before, after = (_list_strides(end.tile_shape, itemsize) for end in (source, target))
    copies: list[Block] = []
    for other, pairs in ((rank, move.own), *move.pulls):
        for region, into in pairs:
            src = sum(at * stride for at, stride in zip(region.start, before, strict=True))
            dst = sum(at * stride for at, stride in zip(into.start, after, strict=True))
            steps = zip(into.extents, region.steps, into.steps, strict=True)
            axes = tuple([Axis(extent, before[a] * step, after[b] * by) for extent, (a, step), (b, by) in steps])
            copies.append(Block(starts[other] + src, dst, axes))
    return fuse_copies(copies)


def widen_block(block: Block, itemsize: int) -> tuple[Block, int]:
    """The same copy of fewer elements, those that are together on both sides as one, and the bytes of each.

    >>> widen_block(Block(0, 0, (Axis(3, 64, 128), Axis(8, 8, 8))), 8)
    (Block(src=0, dst=0, axes=(Axis(extent=3, src=64, dst=128),)), 64)
    """
    axes = block.axes
    while axes and axes[-1].src == axes[-1].dst == itemsize and axes[-1].extent * itemsize < _LONG:
        itemsize *= axes[-1].extent
        axes = axes[:-1]
    return block._replace(axes=axes), itemsize


def find_strides(block: Block, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """The byte strides at which what a copy reads lies like a C-ordered result of this shape, which it fills; None if
    no strides say that.

    >>> find_strides(Block(0, 0, (Axis(2, 96, 8), Axis(3, 8, 16))), (3, 2), 8)
    (8, 96)
    >>> find_strides(Block(0, 0, (Axis(2, 8, 24), Axis(3, 16, 8))), (6,), 8) is None
    True
    """
    axes = sorted([(axis.dst, axis.extent, axis.src) for axis in block.axes if axis.extent != 1])
    strides: list[int] = []
    for extent, step in reversed(list(zip(shape, _list_strides(shape, itemsize), strict=True))):
        length = 1
        stride = axes[0][2] if axes else itemsize
        while length < extent:
            if not axes or axes[0][0] != step * length or axes[0][2] != stride * length:
                return None
            length *= axes.pop(0)[1]
        if length != extent:
            return None
        strides.append(stride)
    return None if axes else tuple(reversed(strides))


def _list_strides(shape: Sequence[int], itemsize: int) -> list[int]:
    """The byte strides of a C-ordered tile."""
    return [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
