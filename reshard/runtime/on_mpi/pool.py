"""Buffers that are used again: a fresh page costs as much as the copy into it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Pool:
    """Buffers, those given back kept for the next who asks, as long as all together stay within `room` bytes."""

    def __init__(self) -> None:
        self._room = 0
        self._used = 0
        self._idle: list[Bytes] = []

    def limit(self, nbytes: int) -> None:
        """From now on, keeps no more than so many bytes, those in use included."""
        self._room = nbytes
        self._shrink(nbytes)

    def take(self, nbytes: int) -> Bytes:
        """A buffer of so many bytes; what is in it is anything."""
        most = min(2 * nbytes, max(nbytes, self._room - self._used))
        best = min((buffer for buffer in self._idle if nbytes <= buffer.size <= most), key=len, default=None)
        if best is None:
            self._shrink(self._room - self._used - nbytes)
            best = np.empty(nbytes, np.uint8)
        self._idle = [buffer for buffer in self._idle if buffer is not best]
        self._used += best.size
        return best[:nbytes]

    def give(self, buffer: NDArray[Any]) -> None:
        """Takes a buffer back: what `take` gave, or a view of it."""
        whole: Any = buffer
        while whole.base is not None:
            whole = whole.base
        self._used -= whole.size
        self._idle.append(whole)

    def _shrink(self, nbytes: int) -> None:
        """Keeps idle buffers of at most so many bytes, the largest ones first."""
        kept: list[Bytes] = []
        for buffer in sorted(self._idle, key=len, reverse=True):
            if buffer.size <= nbytes:
                kept.append(buffer)
                nbytes -= buffer.size
        self._idle = kept
