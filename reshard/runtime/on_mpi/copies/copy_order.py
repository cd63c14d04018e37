"""Several strided copies into one tile: in which order they go, and those at equal distances as one.

    tile     a a b b a a b b a a b b a a b b        copy a writes the a's, copy b the b's
    before   a a . . a a . . a a . . a a . .   then b: every cache line is fetched twice
    now      a a b b a a b b | a a b b a a b b      a, b for the first part of the tile, then a, b for the second

Caches and prefetchers fetch the gaps of a strided copy too. If all copies of one part of the tile are done while that
part is in the core's cache, each line is fetched once: 512^3 floats in pencils take 1.2 times a plain copy instead of
1.6, on eight ranks 1.3 instead of 2.1; blocks of 64 x 64 doubles 1.2 instead of 1.6.

This is how numpy makes copies; large ones mostly go past the caches instead, see `stream_copy`.

Copies that read runs of one cache line leave the prefetchers nothing to see. So the part is first read in order, one
byte of each line: out of a tile of 16 to 48 MiB they then take 1.2 times a plain copy instead of 2.4 to 3.4. Out of one
of 2 to 4 MiB, which the caches hold, this would take 1.3 times as long, whatever the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from reshard.geometry.blocks import Block, block_part, merge_blocks, scale_blocks, split_box, split_run
from reshard.runtime.on_mpi.copies import stream_copy
from reshard.runtime.on_mpi.copies.stream_copy import CopyTable
from reshard.runtime.on_mpi.copies.strided_copy import (
    LINE,
    LONG_RUN,
    MANY_BLOCKS,
    NEAR,
    Array,
    RunTable,
    TileCopies,
    are_short_runs,
    copy_view,
    needs_blocks,
    pair_views,
    widen_views,
)

_PART = 512 << 10  # Bytes of a part: with its gaps, about a core's cache; half of that takes 2% longer.
_AHEAD = 1 << 20  # Bytes of a tile that are read ahead: with half of that, or four times, copies take a tenth longer.
_LEAST = 64 << 10  # Bytes of a part at least: numpy's call takes a twentieth of its copy.
_RUNS = "runs"  # Where `made` has the tables of very many short ones.
_UNCACHED = 12 << 20  # Bytes of a tile from which parts in runs of one line are read in order before.

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


def order_copies(blocks: Sequence[Block], elements: int, itemsize: int, reads: bool = False) -> Order:
    """The order of copies to a C-ordered tile of so many elements, or from it: by address, short runs in parts.

    If the copies read the tile (`reads`), it is at the `src` end of the blocks, and they take runs of one line from
    caches: what several of them need is read before.

    Two halves of rows of 64 doubles, in runs of 256 bytes, take turns:

    >>> from reshard.geometry.blocks import Axis
    >>> halves = [Block(0, at, (Axis(4096, 32, 64), Axis(32, 1, 1))) for at in (0, 32)]
    >>> [part.number for part in order_copies(halves, 4096 * 64, 8)]
    [0, 1, 0, 1]
    """
    if are_short_runs(blocks, itemsize):  # They go by index, unless a tile lies in another order.
        whole = sorted(range(len(blocks)), key=lambda number: blocks[number][0 if reads else 1])
        return tuple([CopyPart(number, (...,)) for number in whole])
    runs: list[int] = []  # Bytes that are contiguous in the tile.
    for block in blocks:
        run = 1
        for extent, src, dst in reversed(block.axes):
            if extent != 1 and (src if reads else dst) != run:
                break
            run *= extent
        runs.append(run * itemsize)
    # Reading ahead pays if all parts of a turn fit into a cache together, and if none is so small that numpy's call
    # takes longer than what it saves.
    few = 1 < len(blocks) <= _AHEAD // _LEAST
    short = reads and few and LINE <= max(runs) < 2 * LINE and elements * itemsize >= _UNCACHED
    most = max(1, (_AHEAD // len(blocks) if short else _PART) // itemsize)
    parts: list[_Placed] = []
    for number, (block, run) in enumerate(zip(blocks, runs, strict=True)):
        whole = tuple((0, extent) for extent in block.extents)
        for spans in split_box(block.extents, most) if len(blocks) > 1 and run < NEAR else [whole]:
            part = block_part(block, spans)
            # An ellipsis stands for the whole axes at the end: numpy makes a view of fewer slices in less time.
            cut = next((at + 1 for at in range(len(spans) - 1, -1, -1) if spans[at] != whole[at]), 0)
            where: Index = (*(slice(low, low + extent) for low, extent in spans[:cut]), ...)
            parts.append(_Placed(part.src if reads else part.dst, number, where, part.elements))
    parts.sort(key=lambda part: part[:2])
    if not short:
        return tuple(CopyPart(part.number, part.where) for part in parts)
    return tuple(_read_ahead(parts, elements, itemsize))


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
    copies: Sequence[TileCopies],
    order: Order,
    made: dict[Hashable, Any],
    tile: Array | None = None,
    whole: bool = False,
) -> list[Callable[[], object]]:
    """The copies as functions, in this order; one by one if some copy transposes.

    `tile` is the one that they read, if the order is that of its memory. `made` has what an earlier call with the same
    blocks has worked out. `whole`: nothing is done between two steps, so that one is enough. Each asks for Python's
    interpreter again, for which a move that a thread makes may have to wait.
    """
    apart = not any(np.may_share_memory(each.target, each.source) for each in copies)
    if _RUNS not in made and sum([len(each.blocks) for each in copies]) >= MANY_BLOCKS:
        itemsize = copies[0].target.itemsize
        by_index = are_short_runs([block for each in copies for block in each.blocks], itemsize)
        made[_RUNS] = [RunTable(each.blocks, itemsize, tile is not None) for each in copies] if by_index else []
    if made.get(_RUNS) and apart and all(end.flags.c_contiguous for each in copies for end in each[1:]):
        pairs = zip(made[_RUNS], copies, strict=True)
        return [step for table, each in pairs for step in table.list_steps(each.target, each.source)]
    ends = [(each.source.ctypes.data, each.target.ctypes.data) for each in copies]
    key = tile is not None, *((each.target.strides, each.source.strides) for each in copies)
    table = made.get(key)
    views: list[tuple[Array, Array]] = []
    if table is None:
        views = [pair for each in copies for pair in pair_views(*each)]
        if any(needs_blocks(*pair) for pair in views):
            return [partial(copy_view, *pair) for pair in views]
        if apart and sum(target.nbytes for target, _ in views) >= stream_copy.LARGE and stream_copy.find_kernel():
            groups = [len(each.blocks) for each in copies]
            table = made[key] = CopyTable(views, tile is not None, groups, ends)
    streamed = table.list_steps(ends, copies, whole) if table is not None and apart else None
    if streamed is not None:
        return streamed
    views = views or [pair for each in copies for pair in pair_views(*each)]
    wide = [widen_views(*pair) for pair in views]
    memory = None if tile is None or not tile.flags.c_contiguous else tile.reshape(-1).view(np.uint8)
    steps: list[Callable[[], object]] = []
    for number, where, ahead in order:
        if ahead is not None and memory is not None:
            steps.append(partial(np.bitwise_or.reduce, memory[ahead[0] : ahead[1] : LINE]))
        target, source = wide[number]
        steps.append(partial(np.copyto, target[where], source[where]))
    return steps


# What a small move costs is its number of copies: those between equally spaced memory are one. Rows to columns on 4
# ranks is one copy on each: the parts of the ranks lie at one distance in the segment that they share, and what each
# gives lies at one distance in the result.
#
#     from rank 0    start 0       to 0     extents (8, 32)
#     from rank 1    start 4096    to 2048  extents (8, 32)      ->    start 0 to 0, extents (4, 8, 32)
#     ...
#
# The blocks here count bytes, from the start of the shared memory and from that of the result.


def fuse_copies(copies: Iterable[Block]) -> list[Block]:
    """The same copies as few ones, of more axes, in any order.

    >>> from reshard.geometry.blocks import Axis
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


def list_tile_copies(given: Iterable[tuple[int, Sequence[Block]]], itemsize: int, starts: Sequence[int]) -> list[Block]:
    """What a rank copies to its tile from those of ranks of its node, its own too, out of the memory in which the tiles
    of all lie, at `starts`.
    """
    scaled = [(starts[other], block) for other, of in given for block in scale_blocks(tuple(of), itemsize, itemsize)]
    return fuse_copies(block._replace(src=start + block.src) for start, block in scaled)


def widen_block(block: Block, itemsize: int) -> tuple[Block, int]:
    """The same copy of fewer elements, those that are together on both sides as one, and the bytes of each.

    >>> from reshard.geometry.blocks import Axis
    >>> widen_block(Block(0, 0, (Axis(3, 64, 128), Axis(8, 8, 8))), 8)
    (Block(src=0, dst=0, axes=(Axis(extent=3, src=64, dst=128),)), 64)
    """
    axes, itemsize = split_run(block.axes, itemsize, LONG_RUN)
    return block._replace(axes=axes), itemsize
