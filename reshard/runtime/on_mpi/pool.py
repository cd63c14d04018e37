"""A pool of buffers to reuse: the first touch of a new page costs as much as copying into it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Pool:
    """Buffers to take and give back; idle ones are kept as long as all buffers together stay within the limit.

    >>> pool = Pool()
    >>> pool.limit(100)
    >>> first = pool.take(60)
    >>> pool.give(first)
    >>> pool.take(50).base is first.base
    True
    """

    def __init__(self) -> None:
        self._room = 0
        self._used = 0
        self._idle: list[Bytes] = []

    def limit(self, nbytes: int) -> None:
        """Sets how many bytes the pool may keep, buffers in use included."""
        self._room = nbytes
        self._shrink(nbytes)

    def take(self, nbytes: int) -> Bytes:
        """An uninitialized buffer of `nbytes`, of an idle one that is not much larger if there is one."""
        most = min(2 * nbytes, max(nbytes, self._room - self._used))
        best = min((buffer for buffer in self._idle if nbytes <= buffer.size <= most), key=len, default=None)
        if best is None:
            self._shrink(self._room - self._used - nbytes)
            best = np.empty(nbytes, np.uint8)
        self._idle = [buffer for buffer in self._idle if buffer is not best]
        self._used += best.size
        return best[:nbytes]

    def give(self, buffer: NDArray[Any]) -> None:
        """Takes back a buffer from `take`, or any view of it."""
        whole: Any = buffer
        while whole.base is not None:
            whole = whole.base
        self._used -= whole.size
        self._idle.append(whole)

    def _shrink(self, nbytes: int) -> None:
        """Drops idle buffers until they have at most `nbytes` in total; the largest are kept first."""
        kept: list[Bytes] = []
        for buffer in sorted(self._idle, key=len, reverse=True):
            if buffer.size <= nbytes:
                kept.append(buffer)
                nbytes -= buffer.size
        self._idle = kept
