"""Copies between strided views: from tile to tile, and into and out of messages.

A transposing copy is done block by block, so that both sides stay in the cache, and runs of a few elements are copied
as one wider element. Both choices are measured figures, given below.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from reshard.geometry.blocks import Axis, Block, list_strides, split_run
from reshard.lower.to_mpi.tile_blocks import End

Array = NDArray[Any]

_RAW = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8"), 16: np.dtype("c16")}


def view_as_words(array: Array) -> Array:
    """The same elements as plain words of their size, so that every dtype is copied at the speed of integers.

    >>> view_as_words(np.ones(2, "float32")).dtype
    dtype('uint32')
    """
    return array.view(find_word_dtype(array.dtype.itemsize))


def find_word_dtype(nbytes: int) -> np.dtype[Any]:
    """The raw dtype of elements of a size.

    >>> find_word_dtype(4), find_word_dtype(3)
    (dtype('uint32'), dtype('V3'))
    """
    return _RAW.get(nbytes) or np.dtype((np.void, nbytes))


def overlaps_itself(array: Array) -> bool:
    """Whether elements may share memory: some stride is shorter than what lies below it.

    >>> tile = np.zeros((3, 4))
    >>> [overlaps_itself(each) for each in (tile.T, tile[::-1, ::2], np.broadcast_to(tile[0], (3, 4)))]
    [False, False, True]
    """
    if array.flags.c_contiguous or not array.size:
        return False
    reach = array.itemsize
    for stride, extent in sorted((abs(each[0]), each[1]) for each in zip(array.strides, array.shape, strict=True)):
        if extent > 1:
            if stride < reach:
                return True
            reach += stride * (extent - 1)
    return False


def locate_block(tile: Array, block: Block, end: End) -> tuple[int, list[int]]:
    """Where one end of a block lies in a tile of any memory order: the byte at which it starts, counted from the tile's
    first element, and the bytes between the indices of each axis.

    >>> from reshard.geometry.blocks import Axis
    >>> tile = np.arange(12, dtype="u1").reshape(3, 4)
    >>> columns = Block(4, 0, (Axis(2, 1, 1), Axis(2, 4, 2)))
    >>> locate_block(tile, columns, "src"), locate_block(np.asfortranarray(tile), columns, "src")
    ((4, [1, 4]), (1, [3, 1]))
    """
    start, steps = _side_of_block(block, end)
    if tile.flags.c_contiguous:
        size = tile.itemsize
        return start * size, [step * size for step in steps]
    return locate_steps(tile.shape, tile.strides, start, steps)


def _side_of_block(block: Block, end: End) -> tuple[int, list[int]]:
    if end == "src":
        return block.src, [axis.src for axis in block.axes]
    return block.dst, [axis.dst for axis in block.axes]


def locate_steps(
    shape: Sequence[int], strides: Sequence[int], start: int, steps: Sequence[int]
) -> tuple[int, list[int]]:
    """An offset and steps of a flat tile as bytes in memory of these strides."""
    below = list_strides(shape)
    offset = sum(start // step % size * by for step, size, by in zip(below, shape, strides, strict=True))
    # An axis lies within one dim, that of the largest stride that is not above its own.
    dims = [next((dim for dim, step in enumerate(below) if step <= by and shape[dim] != 1), 0) for by in steps]
    return offset, [by // below[dim] * strides[dim] for dim, by in zip(dims, steps, strict=True)]


def view_block(tile: Array, block: Block, end: End) -> Array:
    """The elements at one end of a block as a view of a tile.

    >>> from reshard.geometry.blocks import Axis
    >>> view_block(np.arange(12).reshape(3, 4), Block(4, 0, (Axis(2, 2, 1), Axis(2, 4, 2))), "src")
    array([[ 4,  8],
           [ 6, 10]])
    """
    offset, strides = locate_block(tile, block, end)
    if tile.flags.c_contiguous:
        return np.ndarray(block.extents, tile.dtype, tile, offset, strides)
    start, _ = _side_of_block(block, end)
    each = zip(list_strides(tile.shape), tile.shape, strict=True)
    return as_strided(tile[tuple(slice(start // step % size, None) for step, size in each)], block.extents, strides)


class TileCopies(NamedTuple):
    """The copies that blocks make from one tile to another."""

    blocks: Sequence[Block]
    target: Array
    source: Array


def pair_views(blocks: Iterable[Block], target: Array, source: Array) -> list[tuple[Array, Array]]:
    """The copies that blocks make from one tile to another, as (target, source) views."""
    return [(view_block(target, block, "dst"), view_block(source, block, "src")) for block in blocks]


_SMALL = 16 << 10  # Bytes below which looking for a faster way takes longer than the copy itself.
LINE = 64
"""Bytes of a cache line: elements of this size or more waste none of it, in any order."""

NEAR = 16 << 10
"""Bytes of a run from which its gaps, and a step of its own, cost little."""

LONG_RUN = 512
"""Bytes from which a run does not gain from being one element: at 512 it loses a sixth."""

_LARGE = 256 << 10  # Bytes that fit into a core's cache, where the order of a copy makes no difference.
_TRIED = 1 << 20  # Elements copied to measure one blocking.
_BLOCK = 1 << 15  # Least elements of a block: with fewer, numpy's call takes longer than the copy.

_BLOCKINGS = ((128, 16, 16), (16, 16, 16), (128, 32, 1), (64, 64, 16), (1 << 62, 1 << 62, 1 << 62))
"""Extents of a block along the source's fastest axis, the target's fastest axis, and the others.

The last is numpy's own copy. Which blocking is best depends on how strides map to cache sets: for 512^3 elements of
4 bytes, each of the first four is the fastest for some order of the axes."""


_THICK = 16  # Indices of a measured part along the axis that it is cut along: those of a block.
_LONGEST = 2 * _THICK * len(_BLOCKINGS)


def copy_view(target: Array, source: Array) -> None:
    """Copies one view into another of the same shape and raw dtype.

    Numpy writes in the target's order and jumps through the source's memory if its order differs. Block by block,
    the transpositions of 512^3 floats take 5 to 12 times a plain copy, instead of 8 to 110.

    >>> target, source = np.zeros((2, 3), "u4"), np.arange(6, dtype="u4").reshape(3, 2).T
    >>> copy_view(target, source)
    >>> np.array_equal(target, source)
    True
    """
    target, source = widen_views(target, source)
    if not needs_blocks(target, source):
        np.copyto(target, source)
        return
    ends = _find_fastest(target), _find_fastest(source)
    key = target.strides, source.strides, target.shape
    large = target.size >= 2 * len(_BLOCKINGS) * _TRIED and target.shape[_choose_axis(target, ends)] >= _LONGEST
    if key not in _best and not large:
        _copy_blocks(target, source, _choose_extents(target, ends, _BLOCKINGS[0]))
        return
    if key not in _best:
        target, source, _best[key] = _measure_blockings(target, source, ends)
    _copy_blocks(target, source, _choose_extents(target, ends, _best[key]))


def needs_blocks(target: Array, source: Array) -> bool:
    """Whether a copy must go block by block, because the memory orders of the views differ."""
    if target.nbytes <= _LARGE or target.itemsize >= LINE:
        return False
    return _find_fastest(target) != _find_fastest(source)


def widen_views(target: Array, source: Array) -> tuple[Array, Array]:
    """The same views with each run of elements that is contiguous in both as one wider element.

    Numpy copies short rows element by element. Widened, runs of 8 bytes take 1.4 times a plain copy instead of 17,
    runs of 64 bytes 1.3 instead of 2.2.
    """
    if target.nbytes < _SMALL:
        return target, source
    axis, run = target.ndim, target.itemsize
    while axis and target.strides[axis - 1] == source.strides[axis - 1] == run:
        axis -= 1
        run *= target.shape[axis]
    if run == target.itemsize or run >= LONG_RUN or not axis:
        return target, source
    wide = _RAW.get(run) or np.dtype((np.void, run))
    shape = (*target.shape[:axis], -1)
    return target.reshape(shape).view(wide)[..., 0], source.reshape(shape).view(wide)[..., 0]


_Key = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
_Blocking = tuple[int, int, int]
_best: dict[_Key, _Blocking] = {}


def _find_fastest(array: Array) -> int:
    """The axis with the smallest stride among those with more than one index."""
    axes = [axis for axis in range(array.ndim) if array.shape[axis] > 1]
    return min(axes, key=lambda axis: abs(array.strides[axis]), default=0)


def _measure_blockings(target: Array, source: Array, ends: tuple[int, int]) -> tuple[Array, Array, _Blocking]:
    """Copies one part of the array with each blocking; returns what is left to copy, and the fastest blocking."""
    along = _choose_axis(target, ends)
    step = max(_THICK, -(-_TRIED * target.shape[along] // target.size))
    times: list[tuple[float, _Blocking]] = []
    for blocking in _BLOCKINGS:
        head, tail = ((*(slice(None),) * along, cut) for cut in (slice(step), slice(step, None)))
        start = time.perf_counter()
        _copy_blocks(target[head], source[head], _choose_extents(target, ends, blocking))
        times.append((time.perf_counter() - start, blocking))
        target, source = target[tail], source[tail]
    return target, source, min(times)[1]


def _choose_axis(target: Array, ends: tuple[int, int]) -> int:
    """The axis along which the measured parts are cut: if possible, a long one that is neither view's fastest."""
    most = target.shape
    return max(range(target.ndim), key=lambda axis: (axis not in ends and most[axis] >= _LONGEST, most[axis]))


def _choose_extents(target: Array, ends: tuple[int, int], blocking: _Blocking) -> tuple[int, ...]:
    """A block's extents: those of the blocking, enlarged if other axes are too short for `_BLOCK` elements."""
    to, by = ends
    wanted = {by: blocking[0], to: blocking[1]}
    extents = [max(1, min(wanted.get(axis, blocking[2]), extent)) for axis, extent in enumerate(target.shape)]
    for axis in (to, by, *range(target.ndim)):
        missing = -(-_BLOCK // max(1, math.prod(extents)))
        extents[axis] = max(1, min(target.shape[axis], extents[axis] * missing))
    return tuple(extents)


def _copy_blocks(target: Array, source: Array, extents: Sequence[int]) -> None:
    starts = (range(0, size, extent) for size, extent in zip(target.shape, extents, strict=True))
    for corner in itertools.product(*starts):
        block = tuple(slice(at, at + extent) for at, extent in zip(corner, extents, strict=True))
        np.copyto(target[block], source[block])


# Very many short runs from one tile to another, such as the rows of a table of owners: taken and put by index.
#
#     runs of 8 elements, from 0, 24, 32 to 0, 8, 16      units of 8 elements: target[[0, 1, 2]] = source[[0, 3, 4]]
#
# A Python step for each of a thousand runs takes longer than their bytes: 5,000 rows of 64 bytes take numpy 30
# microseconds by index, and 20 milliseconds as copies of their own.


MANY_BLOCKS = 64
"""Blocks from which a step for each of them is too many."""

_FEW_RUNS = 4  # Runs of a block, on average, up to which their places take less memory than the blocks themselves.
_PART = 256 << 10  # Bytes that are copied at once, and that a copy may hold beside the tiles.
_MOST_UNITS = 1 << 15  # The same for the indices of units.


def are_short_runs(blocks: Sequence[Block], itemsize: int, least: int = MANY_BLOCKS) -> bool:
    """Whether blocks are so many, so short, and of so few runs each that they are copied by index."""
    if len(blocks) < least or itemsize * sum([block.elements for block in blocks]) >= NEAR * len(blocks):
        return False
    # Thousands of blocks have the axes of a few.
    runs = 0
    for axes, times in Counter([block.axes for block in blocks]).items():
        outer, _ = split_run(axes)
        runs += times * math.prod([axis.extent for axis in outer])
    return runs <= _FEW_RUNS * len(blocks)


class RunTable:
    """The runs of some blocks, as multiples of the largest unit that divides all of them, in the order of one tile."""

    def __init__(self, blocks: Sequence[Block], itemsize: int, by_source: bool) -> None:
        alike: dict[tuple[Axis, ...], list[Block]] = {}
        for block in blocks:
            alike.setdefault(block.axes, []).append(block)
        parts: list[Array] = []
        for axes, each in alike.items():
            outer, run = split_run(axes)
            starts = np.array([[block.src, block.dst] for block in each], np.int64)
            for extent, src, dst in outer:
                steps = np.arange(extent)[:, None] * np.array([src, dst])
                starts = (starts[:, None] + steps).reshape(-1, 2)
            parts.append(np.column_stack([starts, np.full(len(starts), run)]))
        runs = np.concatenate(parts or [np.empty((0, 3), np.int64)])
        runs = runs[np.argsort(runs[:, 0 if by_source else 1], kind="stable")]
        unit = max(1, int(np.gcd.reduce(runs, axis=None))) if len(runs) else 1
        self.source, self.target, self.lengths = (runs // unit).T.copy()
        self.unit = np.dtype((np.void, unit * itemsize))
        self.elements = unit
        # Parts of about so many units, in whole runs.
        ends = np.cumsum(self.lengths)
        most = max(1, min(_MOST_UNITS, _PART // self.unit.itemsize))
        cuts = np.searchsorted(ends, np.arange(most, ends[-1] if len(ends) else 0, most)).tolist()
        self.cuts: list[int] = sorted({0, *cuts, len(ends)})
        self._where: dict[int, tuple[Any, Any]] = {}

    def list_steps(self, target: Array, source: Array) -> list[Callable[[], object]]:
        """The copies between two C-ordered tiles as functions."""
        ends = [self._in_units(end) for end in (target, source)]
        return [partial(self._copy_part, *ends, slice(*pair)) for pair in itertools.pairwise(self.cuts)]

    def copy(self, target: Array, source: Array) -> None:
        """Makes them."""
        to, by = self._in_units(target), self._in_units(source)
        for pair in itertools.pairwise(self.cuts):
            self._copy_part(to, by, slice(*pair))

    def _in_units(self, tile: Array) -> Array:
        flat, odd = tile.reshape(-1), tile.size % self.elements
        return (flat[:-odd] if odd else flat).view(self.unit)

    def _copy_part(self, target: Array, source: Array, part: slice) -> None:
        where = self._where.get(part.start) or self._list_units(part)
        if len(self.cuts) == 2:  # Of few units, which a handle copies again and again.
            self._where[part.start] = where
        to, by = where
        if isinstance(to, slice) and not isinstance(by, slice):
            np.take(source, by, out=target[to], mode="clip")  # Without a copy in between, as another mode makes one.
        else:
            target[to] = source[by]

    def _list_units(self, part: slice) -> tuple[Any, Any]:
        """Where the units of some runs go, and where they are: as slices where they are neighbours."""
        lengths = self.lengths[part]
        total = int(lengths.sum())
        # For each run its units: those before it in this part are counted off from where it starts.
        single = total == len(lengths)
        before = 0 if single else np.cumsum(lengths) - lengths
        where: list[Any] = []
        for starts in (self.target[part], self.source[part]):
            first, last = int(starts[0]), int(starts[-1] + lengths[-1])
            if last - first == total and bool(np.all(starts[1:] == starts[:-1] + lengths[:-1])):
                where.append(slice(first, last))
            else:
                where.append(starts if single else np.repeat(starts - before, lengths) + np.arange(total))
        return where[0], where[1]
