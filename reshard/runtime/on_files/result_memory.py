"""New memory for what is loaded: in pages of 4 KiB, though numpy asks for huge ones from 4 MiB on.

Whatever takes the place of a file's bytes is fresh memory: this, and not the files, is most of what a load waits for. A
huge page is zeroed whole before its first byte is copied, and the kernel may have to make room for it:

    260 MiB on 4 ranks with 2 cores, all loads' results kept      seconds of the second to sixth load
    huge pages                                                    0.08 to 0.32
    pages of 4 KiB                                                0.07 to 0.15

Tiles of less than 4 MiB lie one behind another: a thousand small ones would each fault in pages of their own.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_mpi.node.arena import call_libc
from reshard.types.layout import Layout

LARGE = 4 << 20
"""Bytes from which numpy asks for huge pages."""

SLAB = 8 << 20
"""Bytes of memory that tiles of less than `LARGE` share; it is there as long as any of them."""

_PAGE = 4096
_LINE = 64
_NO_HUGE_PAGES = 15  # MADV_NOHUGEPAGE


class ResultMemory:
    """The memory of one load: new tiles, uninitialized or, where they have padding, zero."""

    def __init__(self) -> None:
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
        if sys.platform == "linux" and size >= LARGE:
            start: int = memory.__array_interface__["data"][0]
            page = -start % _PAGE
            # The kernel's reply does not matter: without it, what is slow is right all the same.
            call_libc("madvise", start + page, (size - page) // _PAGE * _PAGE, _NO_HUGE_PAGES)
        return memory
