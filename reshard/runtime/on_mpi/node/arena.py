"""The arena of a node: memory for tiles that every rank of the node can read and write, in a few large segments.

A block lies at the same place on every rank, each in its own part of the segment. Releasing is local: a rank releases
its block when the last array on it dies, at any time. Acquiring is collective: each rank logs its releases, and posts
at each sync how long its log is; a block that all ranks have released by then is free. All ranks of a node see the same
lengths, so they choose the same free block, or allocate another segment together.

    sync n       rank 0 has logged {block 0}     rank 1 has logged {}          block 0 is still in use on rank 1
    sync n + 1   rank 0 has logged {block 0}     rank 1 has logged {block 0}   block 0 is free for the next `take`

Arrays on some ranks only have blocks in segments of their own, in which the other ranks have no memory: they take part
in `take`, so that all ranks agree on what is where, and nothing else.

If the node has no more room, `take` says so on all ranks, and their tiles stay in private memory.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from reshard.errors import RankError
from reshard.runtime.on_mpi.node import huge_pages
from reshard.runtime.on_mpi.node.heap import SHARED, Heap, rounded
from reshard.runtime.on_mpi.node.segment import PAGE, Gather, segment
from reshard.runtime.on_mpi.strided_copy import Array

LOG = 512
"""Entries of a rank's log. It is a ring: at each sync a rank adds at most half of it, while others read the rest."""

_FIRST = 64 << 10  # Bytes that each rank has in the first segment; the next ones are as large as all before them.
_PATIENCE = 64  # After a refusal, this many blocks that need more room are refused without another try.
_BITS = 40  # A place is 1 plus the number of the segment, then this many bits for the byte at which the block starts.


Members = tuple[int, ...]
"""The ranks of the node, by their numbers there, that have memory in a segment."""


class Arena:
    """The memory that ranks of a node share, as one of them (`me` of `size`) sees it.

    A place is a positive number that says where in its own memory a rank has something; 0 stands for private memory.
    `logs` is shared memory for the logs, `LOG` entries for each rank.
    """

    def __init__(self, size: int, me: int, logs: Array) -> None:
        self._size, self._me, self._logs = size, me, logs
        self._everyone = tuple(range(size))
        self._heaps: dict[Members, Heap] = {}
        self._homes: dict[int, Members] = {}
        self._memory: dict[int, Array] = {}
        self._made = 0
        self._refused = (0, 0)  # The bytes of the last refusal, and how many blocks of that size are yet to be refused.
        self._own: list[tuple[int, int, int]] = []  # (address, segment, bytes) of this rank's parts, sorted
        self._released: deque[int] = deque()
        self._live: dict[int, tuple[weakref.ref[Array], int]] = {}
        self._dies = partial(_died, self._live, self._released)
        self._logged = 0
        self._read = [0] * size
        self._counts: dict[int, int] = {}

    def log(self) -> int:
        """Logs what this rank has released; returns how long the log is since the beginning, to be posted."""
        for _ in range(min(len(self._released), LOG // 2)):
            self._logs[self._me, self._logged % LOG] = self._released.popleft()
            self._logged += 1
        return self._logged

    @property
    def logged(self) -> int:
        """How long this rank's log is."""
        return self._logged

    def update(self, logged: Sequence[int]) -> None:
        """Frees what all ranks have released, given the lengths that they posted at one sync."""
        if logged == self._read:
            return
        for member, (start, end) in enumerate(zip(self._read, logged, strict=True)):
            for number in range(start, end):
                place = int(self._logs[member, number % LOG])
                count = self._counts.get(place, 0) + 1
                self._counts[place] = count
                block = _block(place)
                if count == len(self._homes[block[0]]):
                    del self._counts[place]
                    self._heap_of(block[0]).free(block)
        self._read = list(logged)

    def take(self, nbytes: int, gather: Gather, members: Members | None = None) -> int:
        """The place of a block of at least `nbytes` on these members, by default all; 0 if the node has no room for it.

        Collective: every rank of the node calls it with the same arguments, after the same syncs.
        """
        home = self._everyone if members is None else members
        heap = self._heaps.setdefault(home, Heap())
        block = heap.take(nbytes)
        if block is None and self._grow(nbytes, gather, home):
            block = heap.take(nbytes)
        return 0 if block is None else _place(*block)

    def has_room(self, nbytes: int, members: Members | None = None) -> bool:
        """Whether `take` has room for a block, without another segment: the same on every rank of the node."""
        heap = self._heaps.get(self._everyone if members is None else members)
        return heap is not None and heap.has_room(nbytes)

    def _heap_of(self, number: int) -> Heap:
        return self._heaps[self._homes[number]]

    def hold(self, place: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """This rank's tile in a block, which is released when the last array on it dies."""
        number, start = _block(place)
        start += self._me * self._heap_of(number).capacities[number]
        nbytes = rounded(math.prod(shape) * dtype.itemsize)
        root = np.frombuffer(self._memory[number].data, np.uint8, nbytes, start)  # Views keep this very array alive.
        ref = weakref.ref(root, self._dies)
        self._live[id(ref)] = ref, place
        return np.ndarray(shape, dtype, root)

    def release(self, place: int) -> None:
        """Releases a block on which this rank holds no array."""
        self._released.append(place)

    def tile(self, member: int, place: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """The C-ordered tile that a member has at a place."""
        number, start = _block(place)
        if number not in self._memory:
            raise RankError(f"memory {number} of the node has been freed: arrays of different calls were mixed up")
        start += member * self._heap_of(number).capacities[number]
        return self._memory[number][start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(tuple(shape))

    def around(self, place: int) -> tuple[Array, int, int]:
        """The segment of a place: its memory, the byte at which member 0 has the place, and the bytes of each part."""
        number, start = _block(place)
        return self._memory[number], start, self._heap_of(number).capacities[number]

    def place_of(self, tile: Array) -> int:
        """The place of a tile of this rank; 0 unless it is C-ordered and lies in the arena."""
        if not self._own or not tile.flags.c_contiguous:
            return 0
        address: int = tile.__array_interface__["data"][0]
        at = bisect_right(self._own, (address, self._made, 0)) - 1
        if at < 0:
            return 0
        start, number, nbytes = self._own[at]
        return _place(number, address - start) if address < start + nbytes else 0

    def _grow(self, nbytes: int, gather: Gather, home: Members) -> bool:
        """Adds a segment with room for `nbytes` on some members; all ranks have it, or none."""
        size, (refused, left) = rounded(nbytes), self._refused
        if left and size >= refused:
            self._refused = (refused, left - 1)
            return False
        self._shrink(size)
        if self._add(self._wished(size, home), gather, home):
            return True
        for number in self._unused():
            self._drop(number)
        if self._add(_capacity(size), gather, home):
            return True
        self._refused = (size, _PATIENCE)
        return False

    def _wished(self, size: int, home: Members) -> int:
        """The capacity of a new segment: small blocks share one that is as large as all such segments before it."""
        if size >= huge_pages.WORTHWHILE:
            return _capacity(size)
        shared = sum(capacity for capacity in self._heaps[home].capacities.values() if capacity <= SHARED)
        return _capacity(max(size, _FIRST, min(SHARED, shared)))

    def _add(self, capacity: int, gather: Gather, home: Members) -> bool:
        # A rank that is alone on its node needs no shared memory.
        alone = self._size == 1
        memory = np.empty(capacity, np.uint8) if alone else segment(self._size, self._me, capacity, gather, home)
        if memory is None:
            return False
        number, self._made = self._made, self._made + 1
        self._memory[number], self._homes[number] = memory, home
        self._heaps[home].add(number, capacity)
        if self._me in home:
            start: int = memory.__array_interface__["data"][0] + self._me * capacity
            self._own = sorted([*self._own, (start, number, capacity)])
        return True

    def _unused(self) -> dict[int, int]:
        """The capacities of the segments without blocks, by number, oldest first."""
        unused = {number: heap.capacities[number] for heap in self._heaps.values() for number in heap.unused()}
        return dict(sorted(unused.items()))

    def _shrink(self, size: int) -> None:
        """Drops unused segments, oldest first, until the rest take no more than two of the largest size."""
        unused = self._unused()
        room = 2 * max([size, *unused.values()]) - size
        for number in sorted(unused, reverse=True):
            room -= unused[number]
            if room < 0:
                self._drop(number)

    def _drop(self, number: int) -> None:
        """Forgets an unused segment; its memory is unmapped when the last array on it dies."""
        self._heap_of(number).remove(number)
        del self._memory[number], self._homes[number]
        self._own = [part for part in self._own if part[1] != number]


def _died(live: dict[int, tuple[weakref.ref[Array], int]], released: deque[int], ref: weakref.ref[Array]) -> None:
    """Called when the last array on a block has died. It keeps no arena alive."""
    released.append(live.pop(id(ref))[1])


def _place(number: int, start: int) -> int:
    return (number + 1 << _BITS) + start


def _block(place: int) -> tuple[int, int]:
    """The number of a segment, and the byte at which a place starts in each rank's part."""
    return (place >> _BITS) - 1, place & (1 << _BITS) - 1


def _capacity(nbytes: int) -> int:
    """Bytes of each rank's part of a segment: whole pages, or huge ones."""
    unit = huge_pages.HUGE if huge_pages.wanted(nbytes) else PAGE
    return -(-nbytes // unit) * unit
