"""The order of several strided copies into one tile: copies that fill each other's gaps take turns.

    tile     a a b b a a b b a a b b a a b b        copy a writes the a's, copy b the b's
    before   a a . . a a . . a a . . a a . .   then b: every cache line is fetched twice
    now      a a b b a a b b | a a b b a a b b      a, b for the first part of the tile, then a, b for the second

Caches and prefetchers fetch the gaps of a strided copy too. If all copies of one part of the tile are done while that
part is in the core's cache, each line is fetched once: 512^3 floats in pencils take 1.2 times a plain copy instead of
1.6, on eight ranks 1.3 instead of 2.1; blocks of 64 x 64 doubles 1.2 instead of 1.6.

This is how numpy makes copies; large ones mostly go past the caches instead, see `stream_copy`.

Copies that read short runs of one tile leave the prefetchers little to see. So the part is first read in order, one
byte of each cache line: in shared memory, runs of 512 bytes then take 1.6 times a plain copy instead of 2.3, runs of 64
bytes 1.4 instead of 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import EllipsisType
from typing import NamedTuple

import numpy as np

from reshard.geometry.blocks import split_box
from reshard.runtime.on_mpi.copies.stream_copy import list_stream_steps
from reshard.runtime.on_mpi.copies.strided_copy import LINE, Array, copy_view, needs_blocks, widen_views
from reshard.runtime.on_mpi.wire.chunks import Region

_PART = 512 << 10  # Bytes of a part: with its gaps, about a core's cache; half of that takes 2% longer.
NEAR = 16 << 10  # Bytes of a run from which its gaps cost little.
_AHEAD = 1 << 20  # Bytes of a tile that are read ahead: with half of that, or four times, copies take a tenth longer.
_LEAST = 64 << 10  # Bytes of a part at least: numpy's call takes a twentieth of its copy.
_WORTH_READING = 2 << 10  # Bytes of a run below which its part is read in order before.

Index = tuple[slice | EllipsisType, ...]


class CopyPart(NamedTuple):
    """Part of a copy: the number of the copy, where the part is in it, and the bytes of the tile to read before it,
    in order: those from which this and the next copies are made.
    """

    number: int
    where: Index
    ahead: tuple[int, int] | None = None


Order = tuple[CopyPart, ...]
"""Which part of which copy comes next."""


class _Placed(NamedTuple):
    """A part of a copy by the element of the tile where it starts."""

    offset: int
    number: int
    where: Index
    elements: int


def order_copies(regions: Sequence[Region], shape: Sequence[int], itemsize: int, reads: bool = False) -> Order:
    """The order of copies to or from these regions of a C-ordered tile: by memory address, short runs in parts.

    If the copies read the tile (`reads`), they take short runs from caches: what several of them need is read before.

    Two halves of rows of 64 doubles, in runs of 256 bytes, take turns:

    >>> halves = [Region((0, at), ((0, 1), (1, 1)), (4096, 32)) for at in (0, 32)]
    >>> [part.number for part in order_copies(halves, (4096, 64), 8)]
    [0, 1, 0, 1]
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    runs: list[int] = []  # Bytes that are contiguous in the tile.
    for region in regions:
        run = 1
        for extent, (dim, step) in reversed(list(zip(region.extents, region.steps, strict=True))):
            if extent != 1 and step * strides[dim] != run:
                break
            run *= extent
        runs.append(run * itemsize)
    # Reading ahead pays if all parts of a turn fit into a cache together, and if none is so small that numpy's call
    # takes longer than what it saves.
    few = 1 < len(regions) <= _AHEAD // _LEAST
    short = reads and few and max(runs) < _WORTH_READING and math.prod(shape) * itemsize > _AHEAD
    most = max(1, (_AHEAD // len(regions) if short else _PART) // itemsize)
    parts: list[_Placed] = []
    for number, (region, run) in enumerate(zip(regions, runs, strict=True)):
        whole = tuple((0, extent) for extent in region.extents)
        for spans in split_box(region.extents, most) if len(regions) > 1 and run < NEAR else [whole]:
            part = region.part(spans)
            offset = sum(at * stride for at, stride in zip(part.start, strides, strict=True))
            # An ellipsis stands for the whole axes at the end: numpy makes a view of fewer slices in less time.
            cut = next((at + 1 for at in range(len(spans) - 1, -1, -1) if spans[at] != whole[at]), 0)
            where: Index = (*(slice(low, low + extent) for low, extent in spans[:cut]), ...)
            parts.append(_Placed(offset, number, where, math.prod(part.extents)))
    parts.sort(key=lambda part: part[:2])
    if not short:
        return tuple(CopyPart(part.number, part.where) for part in parts)
    return tuple(_read_ahead(parts, math.prod(shape), itemsize))


def _read_ahead(parts: Sequence[_Placed], elements: int, itemsize: int) -> Iterator[CopyPart]:
    """The parts; the first one of each turn comes with what the turn reads, if it reads most of that.

    A turn ends where a copy comes again.
    """
    turns: list[dict[int, _Placed]] = [{}]
    for part in parts:
        if part.number in turns[-1]:
            turns.append({})
        turns[-1][part.number] = part
    ends = [*(next(iter(turn.values())).offset for turn in turns[1:]), elements]
    for turn, high in zip(turns, ends, strict=True):
        low = next(iter(turn.values())).offset
        used = sum(part.elements for part in turn.values())
        worth = len(turn) > 1 and 4 * used >= 3 * (high - low) and (high - low) * itemsize <= 2 * _AHEAD
        ahead = (low * itemsize, high * itemsize) if worth else None
        for at, part in enumerate(turn.values()):
            yield CopyPart(part.number, part.where, None if at else ahead)


def list_copy_steps(
    views: Sequence[tuple[Array, Array]], order: Order, tile: Array | None = None
) -> list[Callable[[], object]]:
    """The copies of raw (target, source) views as functions, in this order; one by one if some copy transposes.

    `tile` is the one that they read, if the order is that of its memory.
    """
    if any(needs_blocks(*pair) for pair in views):
        return [partial(copy_view, *pair) for pair in views]
    streamed = list_stream_steps(views)
    if streamed is not None:
        return streamed
    wide = [widen_views(*pair) for pair in views]
    memory = None if tile is None or not tile.flags.c_contiguous else tile.reshape(-1).view(np.uint8)
    steps: list[Callable[[], object]] = []
    for number, where, ahead in order:
        if ahead is not None and memory is not None:
            steps.append(partial(np.bitwise_or.reduce, memory[ahead[0] : ahead[1] : LINE]))
        target, source = wide[number]
        steps.append(partial(np.copyto, target[where], source[where]))
    return steps
