"""Blocks of memory in a few large chunks: which parts are free, and where the next block goes.

This is bookkeeping only. Ranks that take and free the same blocks in the same order get the same answers, so they
allocate shared memory without a word about it:

    chunk 0, 64 KiB    | a, 4 KiB | b, 8 KiB | free |     take 6 KiB: after b
                       | a, 4 KiB | free     | free |     b is freed: one hole of 60 KiB
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort

SHARED = 16 << 20
"""Bytes of the largest chunk that any block may share; a larger chunk takes only blocks of a quarter of it or more, so
that small arrays do not keep much memory alive.
"""

ROOMY = 4

_LINE, _PAGE = 64, 4096

Block = tuple[int, int]
"""The number of a chunk, and the byte at which a block starts there."""

_Hole = tuple[int, int, int]
"""Bytes, chunk and start."""


def rounded(nbytes: int) -> int:
    """Bytes of the block for `nbytes`: whole cache lines, or pages.

    >>> [rounded(nbytes) for nbytes in (0, 65, 5000)]
    [64, 128, 8192]
    """
    unit = _LINE if nbytes < _PAGE else _PAGE
    return max(unit, -(-nbytes // unit) * unit)


class Heap:
    """Chunks, the blocks taken from them, and the holes between.

    >>> heap = Heap()
    >>> heap.add(7, 4096)
    >>> heap.take(100), heap.take(64), heap.take(4096)
    ((7, 0), (7, 128), None)
    """

    def __init__(self) -> None:
        self.capacities: dict[int, int] = {}
        self._blocks: dict[Block, int] = {}
        self._holes: list[_Hole] = []  # Sorted.
        self._starts: dict[Block, int] = {}  # The bytes of the hole that starts there.
        self._ends: dict[Block, int] = {}  # The bytes of the hole that ends there.

    def add(self, chunk: int, capacity: int) -> None:
        """Adds a chunk, all of it free, under a number that has not been used."""
        self.capacities[chunk] = capacity
        self._open(chunk, 0, capacity)

    def remove(self, chunk: int) -> None:
        """Removes a chunk without blocks."""
        self._close(chunk, 0, self.capacities.pop(chunk))

    def unused(self) -> list[int]:
        """The chunks without blocks, oldest first."""
        return [chunk for chunk, capacity in self.capacities.items() if self._starts.get((chunk, 0)) == capacity]

    def take(self, nbytes: int) -> Block | None:
        """A block of `nbytes` in the smallest hole that it may use; None if there is none."""
        size = rounded(nbytes)
        smallest = self._hole(size)
        if smallest is None:
            return None
        hole, chunk, start = smallest
        self._close(chunk, start, hole)
        if hole > size:
            self._open(chunk, start + size, hole - size)
        self._blocks[chunk, start] = size
        return chunk, start

    def has_room(self, nbytes: int) -> bool:
        """Whether `take` has a block of `nbytes`.

        >>> Heap().has_room(64)
        False
        """
        return self._hole(rounded(nbytes)) is not None

    def _hole(self, size: int) -> _Hole | None:
        most = max(SHARED, ROOMY * size)
        fitting = itertools.islice(self._holes, bisect_left(self._holes, (size, 0, 0)), None)
        return next((hole for hole in fitting if self.capacities[hole[1]] <= most), None)

    def free(self, block: Block) -> None:
        """Frees a block, and joins it with the holes beside it."""
        chunk, start = block
        size = self._blocks.pop(block)
        if (before := self._ends.get(block)) is not None:
            start -= before
            self._close(chunk, start, before)
            size += before
        if (after := self._starts.get((chunk, start + size))) is not None:
            self._close(chunk, start + size, after)
            size += after
        self._open(chunk, start, size)

    def _open(self, chunk: int, start: int, size: int) -> None:
        insort(self._holes, (size, chunk, start))
        self._starts[chunk, start] = self._ends[chunk, start + size] = size

    def _close(self, chunk: int, start: int, size: int) -> None:
        del self._holes[bisect_left(self._holes, (size, chunk, start))]
        del self._starts[chunk, start], self._ends[chunk, start + size]
