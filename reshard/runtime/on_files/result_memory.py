"""New memory for what is loaded, in huge pages as long as the kernel has them at hand.

Whatever takes the place of a file's bytes is fresh memory: this, and not the files, is most of what a load waits for.

    256 MiB, touched by one core      pages of 4 KiB                  97 ms
                                      huge pages                      25 ms
                                      huge ones for which the kernel, or the machine's host, makes room first   340 ms

So huge pages are asked for one by one, and no more of them once they take longer than small ones. Tiles of less than
`SLAB` lie one behind another in memory of about that size: a thousand small ones would each fault in pages of their
own.

Memory whose tiles have died is the kernel's to take back whenever it needs some (`MADV_FREE`); what it has not taken
is used by the next load of the same sizes, without a fault. Any other load gives it back first.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_mpi.node.arena import HUGE
from reshard.types.layout import Layout

SLAB = 16 << 20
"""Bytes of memory that small tiles share; it is there as long as any of them."""

_LINE = 64
_WORTH = 0.8e-3  # Seconds of a core for as much in small pages, zeroed and mapped, as a huge one has.
_PATIENT = 1e-3  # Seconds beyond these after which no more huge ones are asked for.


class ResultMemory:
    """The memory of one load: tiles, uninitialized or, where they have padding, zero.

    `layouts` are those of all tiles that there will be, under any keys, about in the order in which they are filled.
    """

    def __init__(self, layouts: Mapping[Any, Layout]) -> None:
        self._layouts = layouts
        self._places: dict[Hashable, tuple[int, int]] = {}
        self._lengths: list[int] = []
        self._slabs: dict[int, NDArray[np.uint8]] = {}
        self._spent, self._worth = 0.0, _PATIENT
        # Known before: a slab is as long as its tiles, and no page of it is there for nothing.
        for key, layout in layouts.items():
            size = -(-layout.tile_bytes // _LINE) * _LINE
            if not self._lengths or self._lengths[-1] + size > SLAB:
                self._lengths.append(0)
            self._places[key] = len(self._lengths) - 1, self._lengths[-1]
            self._lengths[-1] += size
        wanted = Counter(self._lengths)
        for size, idle in list(IDLE.items()):
            del idle[wanted[size] :]

    def make_tile(self, key: Hashable) -> NDArray[Any]:
        """The tile of a key, C-ordered, which is asked for once."""
        layout, (number, start) = self._layouts[key], self._places[key]
        if number not in self._slabs:
            self._slabs[number] = self._map_memory(self._lengths[number])
        memory = self._slabs[number][start : start + layout.tile_bytes]
        tile = memory.view(numpy_dtype(layout.dtype)).reshape(layout.tile_shape)
        if not layout.even:
            tile[...] = 0
        return tile

    def _map_memory(self, size: int) -> NDArray[np.uint8]:
        """Memory that lives as long as any array on it."""
        if size < HUGE or not hasattr(mmap, "MADV_FREE"):
            return np.empty(size, np.uint8)
        with suppress(IndexError):
            return np.asarray(_ResultMapping(*IDLE[size].pop(), size))
        # What is not touched takes no memory.
        mapped = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        first, length = -np.frombuffer(mapped, np.uint8).ctypes.data % HUGE, size // HUGE * HUGE
        memory = np.asarray(_ResultMapping(mapped, first, size))
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return memory
        if self._spent < self._worth:
            mapped.madvise(mmap.MADV_HUGEPAGE, first, length)
        for at in range(0, length, HUGE):
            if self._spent > self._worth:
                mapped.madvise(mmap.MADV_NOHUGEPAGE, first + at, length - at)
                break
            # In seconds of this core: other processes may have it meanwhile.
            begun = time.thread_time()
            memory[at] = 0
            self._spent += time.thread_time() - begun
            self._worth += _WORTH
        return memory


class _ResultMapping:
    """Mapped memory from a byte on, as numpy's array interface; it is idle when the last array on it dies."""

    def __init__(self, mapped: mmap.mmap, first: int, size: int) -> None:
        start: int = np.frombuffer(mapped, np.uint8).ctypes.data + first
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (start, False), "version": 3}
        # The last one is called first: the kernel may have it, then it is idle.
        weakref.finalize(self, IDLE[size].append, (mapped, first)).atexit = False
        weakref.finalize(self, mapped.madvise, mmap.MADV_FREE).atexit = False


IDLE: defaultdict[int, list[tuple[mmap.mmap, int]]] = defaultdict(list)
"""Memory whose tiles have died, by its size, and the byte of it at which they began."""
