"""Shared windows for tiles: memory that every rank of a node can read and write, reused once all have released it.

Releasing is local: a rank releases a window when the last array on its own memory dies, at any time. Acquiring is
collective: at each sync every rank posts which windows it has released, and a window that all have released is free.
All ranks of a node see the same posts, so they choose the same free window, or allocate a new one together.

    sync n       rank 0 posts {slot 0}       rank 1 posts {}             slot 0 is still in use on rank 1
    sync n + 1   rank 0 posts {slot 0}       rank 1 posts {slot 0}       slot 0 is free: the next `take` may return it
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
_ROOMY = 4  # A window is used only for arrays of at least a quarter of it, lest small arrays keep large ones alive.
_BITS = 62


class Window:
    """One window: `capacity` bytes of every member of the node, under a slot number that is the same on all of them.

    `made` is the window's serial number on the node, by which the oldest one is known.
    """

    def __init__(self, node: MPI.Intracomm, slot: int, capacity: int, made: int) -> None:
        self.slot = slot
        self.capacity = capacity
        self.made = made
        # A rank that is alone on its node needs no shared memory.
        self._window = MPI.Win.Allocate_shared(capacity, 1, comm=node) if node.size > 1 else None
        memory = [self._of(member, capacity) for member in range(node.size)]
        large = node.size > 1 and capacity >= huge_pages.WORTHWHILE
        mappings = {member: huge_pages.map_again(each) if large else None for member, each in enumerate(memory)}
        self._huge = {member: mapping for member, mapping in mappings.items() if mapping is not None}
        self._memory = [self._huge[m].memory if m in self._huge else each for m, each in enumerate(memory)]
        if node.rank in self._huge:
            huge_pages.populate(self._huge[node.rank])
        if large:
            node.Barrier()  # Peers may write to this memory as soon as their constructor returns.

    def _of(self, member: int, capacity: int) -> Array:
        if self._window is None:
            return np.empty(capacity, np.uint8)
        return np.frombuffer(cast(Any, self._window.Shared_query(member)[0]), np.uint8)

    def tile(self, member: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """A member's tile, C-ordered from the start of its memory."""
        return self.root(member)[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(tuple(shape))

    def root(self, member: int) -> Array:
        """A new array on a member's memory; every view of it keeps this array alive."""
        return np.frombuffer(memoryview(cast(Any, self._memory[member])), np.uint8)

    def address(self, member: int) -> int:
        """The address of a member's memory in this process."""
        return self._memory[member].ctypes.data

    def free(self) -> None:
        """Frees the memory; collective among the members."""
        self._memory = []
        for mapping in self._huge.values():
            mapping.unmap()
        self._huge = {}
        if self._window is not None:
            self._window.Free()


class Windows:
    """The windows of a node, as one of its members sees them."""

    def __init__(self, node: MPI.Intracomm) -> None:
        self._node = node
        self._slots: list[Window | None] = []
        self._made = 0
        self._idle: set[int] = set()
        self._taken: set[int] = set()  # Slots taken since the last post, whose words still call them free.

    def __getitem__(self, slot: int) -> Window:
        window = self._slots[slot]
        if window is None:
            raise RankError(f"window {slot} has been freed: arrays of different calls were mixed up")
        return window

    def has(self, window: Window | None) -> bool:
        """Whether a window is one of these: an array may outlive its team, if a call has failed."""
        return window is not None and window.slot < len(self._slots) and self._slots[window.slot] is window

    def words(self) -> list[int]:
        """The slots that this member has released, one bit each, as words to post."""
        self._taken.clear()
        words = [0] * -(-len(self._slots) // _BITS)
        for slot in self._idle:
            words[slot // _BITS] |= 1 << slot % _BITS
        return words

    def under(self, tile: Array) -> Window | None:
        """The window at whose start a tile of this member lies; None unless the tile is C-ordered and not empty."""
        if not tile.flags.c_contiguous or not tile.size:
            return None
        address, me = tile.ctypes.data, self._node.rank
        here = (window for window in self._slots if window is not None and window.address(me) == address)
        return next(here, None)

    def take(self, nbytes: int, posted: Sequence[Sequence[int]]) -> Window:
        """A window of at least `nbytes` per member, reused or new, given the words that all members posted at one sync.

        Collective: every member calls it with the same arguments.
        """
        known = range(min(len(self._slots), _BITS * min(map(len, posted))))
        free = [slot for slot in known if all(w[slot // _BITS] >> slot % _BITS & 1 for w in posted)]
        shared = [slot for slot in free if slot not in self._taken and self._slots[slot] is not None]
        size = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        fitting = [slot for slot in shared if size <= self[slot].capacity <= _ROOMY * size]
        best = min(fitting, key=lambda slot: (self[slot].capacity, slot), default=None)
        if best is None:
            self._drop(shared, size)
        window = self._make(size) if best is None else self[best]
        self._idle.discard(window.slot)
        self._taken.add(window.slot)
        return window

    def hold(self, window: Window, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """This member's tile in a window, which is released when the last array on it dies."""
        root = window.root(self._node.rank)
        weakref.finalize(root, self._idle.add, window.slot).atexit = False
        return root[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(tuple(shape))

    def release(self, window: Window) -> None:
        """Releases a window on which this member has no array."""
        self._idle.add(window.slot)

    def _drop(self, slots: Sequence[int], size: int) -> None:
        """Frees unused windows, oldest first, until the rest take no more than two of the largest size."""
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
            raise RankError(f"{slot} arrays are alive in shared windows; delete some")
        self._made += 1
        made = Window(self._node, slot, size, self._made)
        self._slots[slot : slot + 1] = [made]
        return made
