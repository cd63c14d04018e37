"""Huge pages for the memory of shared windows, on Linux from 6.1 on; elsewhere it stays as it is.

Numpy's own arrays have them, and shared memory does not: reading and writing it takes a tenth to a quarter longer, and
its first use twice as long. The kernel makes them on request (`MADV_COLLAPSE`, whatever its settings for shared memory
are), for mappings that lie in memory as in their file, modulo their size. MPI's need not, so that the same memory is
mapped once more where it does (`mremap` of no bytes).
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard.runtime.on_mpi.strided_copy import Array

WORTHWHILE = 8 << 20
"""Bytes of memory from which on this is done."""

_HUGE = 2 << 20  # Of x86 and of 64-bit Arm with pages of 4 KiB; of others the kernel refuses.
_PAGE = 4096
_COLLAPSE = 25  # MADV_COLLAPSE
_MAYMOVE, _FIXED = 1, 2
_ANONYMOUS, _NORESERVE = 0x22, 0x4000  # MAP_PRIVATE | MAP_ANONYMOUS


class Again(NamedTuple):
    """Memory that is mapped a second time: the array there, and the mapping."""

    memory: Array
    start: int
    nbytes: int

    def unmap(self) -> None:
        """Takes the second mapping away; no array on it may be left."""
        _call("munmap", self.start, self.nbytes)


def again(memory: Array) -> Again | None:
    """The same shared memory where it can have huge pages; None where that cannot be."""
    if memory.size < WORTHWHILE or sys.platform != "linux" or os.environ.get("RESHARD_MPI_HUGE_PAGES") == "0":
        return None
    address = memory.ctypes.data
    offset = _offset(address)
    if offset is None or address % _PAGE:
        return None
    room = memory.size + 2 * _HUGE
    reserved = _call("mmap", None, room, 0, _ANONYMOUS | _NORESERVE, -1, 0)
    if reserved is None:
        return None
    start = reserved + (offset - reserved) % _HUGE
    if _call("mremap", address, 0, memory.size, _MAYMOVE | _FIXED, start) != start:
        _call("munmap", reserved, room)
        return None
    end = start + -(-memory.size // _PAGE) * _PAGE
    _call("munmap", end, reserved + room - end)
    if start > reserved:
        _call("munmap", reserved, start - reserved)
    there: Any = (ctypes.c_char * memory.size).from_address(start)
    return Again(np.frombuffer(there, np.uint8), start, end - start)


def fill(found: Again) -> None:
    """Has the kernel make new memory, of zeros, of huge pages; nothing else changes if it cannot."""
    first = -(-found.start // _HUGE) * _HUGE
    last = (found.start + found.memory.size) // _HUGE * _HUGE
    # It does not for what was never touched.
    found.memory[first - found.start : max(first, last) - found.start : _HUGE] = 0
    if last > first:
        _call("madvise", first, last - first, _COLLAPSE)


def _offset(address: int) -> int | None:
    """Where in its file the memory at an address lies; that it is shared, the kernel sees to."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        where, _, offset = line.split()[:3]
        low, high = (int(end, 16) for end in where.split("-"))
        if low <= address < high:
            return int(offset, 16) + address - low
    return None


_ARGUMENTS = {
    "mmap": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    "mremap": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
    "munmap": (ctypes.c_void_p, ctypes.c_size_t),
    "madvise": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
}


def _call(name: str, *arguments: int | None) -> int | None:
    """What a function of the C library returns, None for its error."""
    found: Any = getattr(ctypes.CDLL(None), name, None)
    if found is None:
        return None
    found.argtypes, found.restype = _ARGUMENTS[name], ctypes.c_size_t
    result: int = found(*arguments)
    return None if result in (2**64 - 1, 2**32 - 1) else result
