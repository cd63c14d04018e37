"""New memory for what is loaded: in huge pages, as long as the system gives them at once.

    150 MiB first touched on each of 4 ranks with 2 cores
    in pages of 4 KiB                                          40 ms
    in huge pages, where free memory is in one piece           15 to 25 ms
    the same in memory full of files                           up to 300 ms, as the kernel makes room for each

Whatever takes the place of a file's bytes is fresh memory: this, and not the files, is most of what a first load waits
for. So some pages are touched ahead, and where that takes too long, the rest are small ones. Not all: the page that
the kernel has just zeroed for a copy is in the core's cache.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_mpi.node.arena import HUGE, call_libc
from reshard.types.layout import Layout

LARGE = 4 << 20
"""Bytes from which numpy asks for huge pages."""

SLAB = 8 << 20
"""Bytes of memory that tiles of less than `LARGE` share; it is there as long as any of them."""

_USUAL = 0.4e-3  # Seconds for a huge page that the system has, zeroed: it takes less than half of that.
_PATIENT = 10e-3  # Seconds beyond those after which no more are asked for.
_SAMPLED = 8  # One huge page of so many is touched ahead.
_LINE = 64
_NO_HUGE_PAGES = 15  # MADV_NOHUGEPAGE


class ResultMemory:
    """The memory of one load: new tiles, uninitialized or, where they have padding, zero."""

    def __init__(self) -> None:
        self._waited = 0.0
        self._slabs: dict[int, NDArray[np.uint8]] = {}

    def new_tile(self, layout: Layout) -> NDArray[Any]:
        """A tile of a layout, C-ordered."""
        size = layout.tile_bytes
        if size < LARGE:
            # One behind another: a thousand small tiles would each fault in pages of their own. Those of a size lie
            # together, so that no memory between them is wasted.
            room = max(_LINE, -(-size // _LINE) * _LINE)
            slab = self._slabs.get(room)
            if slab is None or not slab.size:
                slab = self._new_memory(max(1, SLAB // room) * room)
            memory, self._slabs[room] = slab[:size], slab[room:]
        else:
            memory = self._new_memory(size)
        tile = memory.view(numpy_dtype(layout.dtype)).reshape(layout.tile_shape)
        if not layout.even:
            tile[...] = 0
        return tile

    def _new_memory(self, size: int) -> NDArray[np.uint8]:
        memory = np.empty(size, np.uint8)
        if sys.platform != "linux":
            return memory
        start: int = memory.__array_interface__["data"][0]
        for at in range(-start % HUGE, size, _SAMPLED * HUGE):
            if self._waited > _PATIENT:
                # Small pages need no room in one piece. The kernel's reply does not matter.
                call_libc("madvise", start + at, (size - at) // 4096 * 4096, _NO_HUGE_PAGES)
                break
            begun = time.perf_counter()
            memory[at] = 0
            self._waited += max(0.0, time.perf_counter() - begun - _USUAL)
        return memory
