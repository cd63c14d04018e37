"""Shared windows for tiles: memory that every rank of a node can read, used again once all have let go of it.

To let go is local: the last array on a window's memory dies, on each rank when it likes. To take is collective:
each rank posts at a sync which windows it has let go of, and what all have let go of is free. All ranks of a
node see the same, so they choose the same window, or make a new one together.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from reshard.errors import RankError
from reshard.runtime.on_mpi.node import huge_pages
from reshard.runtime.on_mpi.node.node_sync import WORDS
from reshard.runtime.on_mpi.strided_copy import Array

_PAGE = 4096
_ROOMY = 4  # A window is not used for less than this part of it: small arrays would hold on to large ones.
_BITS = 62


class Window:
    """One window: `capacity` bytes of every member of the node, by slot number known to all of them.

    `made` counts the windows of the node, so that the oldest is known.
    """

    def __init__(self, node: MPI.Intracomm, slot: int, capacity: int, made: int) -> None:
        self.slot = slot
        self.capacity = capacity
        self.made = made
        # A rank that is alone on its node has nobody to share with.
        self._window = MPI.Win.Allocate_shared(capacity, 1, comm=node) if node.size > 1 else None
        memory = [self._of(member, capacity) for member in range(node.size)]
        large = node.size > 1 and capacity >= huge_pages.WORTHWHILE
        self._again = {
            member: found for member, each in enumerate(memory) if large and (found := huge_pages.again(each))
        }
        self._memory = [self._again[m].memory if m in self._again else each for m, each in enumerate(memory)]
        if node.rank in self._again:
            huge_pages.fill(self._again[node.rank])
        if large:
            node.Barrier()  # Others may write to it as soon as they have it.

    def _of(self, member: int, capacity: int) -> Array:
        if self._window is None:
            return np.empty(capacity, np.uint8)
        return np.frombuffer(cast(Any, self._window.Shared_query(member)[0]), np.uint8)

    def tile(self, member: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """A member's tile, C-ordered from the start of its memory."""
        return self.root(member)[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(tuple(shape))

    def root(self, member: int) -> Array:
        """A new array of a member's memory, which every array made from it keeps alive."""
        return np.frombuffer(memoryview(cast(Any, self._memory[member])), np.uint8)

    def address(self, member: int) -> int:
        """Where a member's memory starts in this process."""
        return self._memory[member].ctypes.data

    def free(self) -> None:
        """Gives the memory back; every member must."""
        self._memory = []
        for found in self._again.values():
            found.unmap()
        self._again = {}
        if self._window is not None:
            self._window.Free()


class Windows:
    """The windows of a node, as one of its members sees them."""

    def __init__(self, node: MPI.Intracomm) -> None:
        self._node = node
        self._slots: list[Window | None] = []
        self._made = 0
        self._idle: set[int] = set()
        self._taken: set[int] = set()  # Since idle windows were posted last: those words say that they are free.

    def __getitem__(self, slot: int) -> Window:
        found = self._slots[slot]
        if found is None:
            raise RankError(f"window {slot} is no longer there: arrays of different calls were mixed up")
        return found

    def has(self, window: Window | None) -> bool:
        """Whether a window is one of these; those of a team that broke are not."""
        return window is not None and window.slot < len(self._slots) and self._slots[window.slot] is window

    def words(self) -> list[int]:
        """What this member has let go of, to be posted: one bit a slot."""
        self._taken.clear()
        words = [0] * -(-len(self._slots) // _BITS)
        for slot in self._idle:
            words[slot // _BITS] |= 1 << slot % _BITS
        return words

    def under(self, tile: Array) -> Window | None:
        """The window at whose start a C-ordered tile of this member lies."""
        if not tile.flags.c_contiguous or not tile.size:
            return None
        address, me = tile.ctypes.data, self._node.rank
        here = (window for window in self._slots if window is not None and window.address(me) == address)
        return next(here, None)

    def take(self, nbytes: int, posted: Sequence[Sequence[int]]) -> Window:
        """A window of at least so many bytes a member, by the words that all members posted at one sync."""
        known = range(min(len(self._slots), _BITS * min(map(len, posted))))
        free = [slot for slot in known if all(w[slot // _BITS] >> slot % _BITS & 1 for w in posted)]
        shared = [slot for slot in free if slot not in self._taken and self._slots[slot] is not None]
        size = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        fitting = [slot for slot in shared if size <= self[slot].capacity <= _ROOMY * size]
        best = min(fitting, key=lambda slot: (self[slot].capacity, slot), default=None)
        if best is None:
            self._drop(shared, size)
        found = self._make(size) if best is None else self[best]
        self._idle.discard(found.slot)
        self._taken.add(found.slot)
        return found

    def hold(self, window: Window, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """This member's tile in a window, which is let go of when no array on it is left."""
        root = window.root(self._node.rank)
        weakref.finalize(root, self._idle.add, window.slot).atexit = False
        return root[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(tuple(shape))

    def release(self, window: Window) -> None:
        """Lets go of a window that no array of this member is on."""
        self._idle.add(window.slot)

    def _drop(self, slots: Sequence[int], size: int) -> None:
        """Frees windows that nobody uses, oldest first, until those kept are no more than two of the largest size."""
        room = 2 * max([size, *(self[slot].capacity for slot in slots)]) - size
        for slot in sorted(slots, key=lambda slot: -self[slot].made):
            room -= self[slot].capacity
            if room < 0:
                self[slot].free()
                self._slots[slot] = None
                self._idle.discard(slot)

    def _make(self, size: int) -> Window:
        slot = next((slot for slot, window in enumerate(self._slots) if window is None), len(self._slots))
        if slot >= (WORDS - 8) * _BITS:
            raise RankError(f"{slot} arrays are alive in shared windows; let go of some")
        self._made += 1
        made = Window(self._node, slot, size, self._made)
        self._slots[slot : slot + 1] = [made]
        return made
