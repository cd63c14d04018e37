"""Huge pages for the memory of shared windows, on Linux 6.1 and later; elsewhere the memory stays as it is.

Numpy's own arrays get huge pages, shared memory does not: without them, reading and writing takes a tenth to a quarter
longer, and first use twice as long. The kernel makes huge pages on request (`MADV_COLLAPSE`, whatever the system's
settings for shared memory), but only for mappings whose address and file offset agree modulo the huge page size. MPI's
mappings may not, so the memory is mapped a second time at an address that does (`mremap` with an old size of 0).
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
"""Bytes of memory from which huge pages are worth the calls."""

_HUGE = 2 << 20  # The size on x86 and on 64-bit Arm with pages of 4 KiB; with others the kernel refuses.
_PAGE = 4096
_COLLAPSE = 25  # MADV_COLLAPSE
_MAYMOVE, _FIXED = 1, 2
_ANONYMOUS, _NORESERVE = 0x22, 0x4000  # MAP_PRIVATE | MAP_ANONYMOUS


class HugeMapping(NamedTuple):
    """A second mapping of shared memory: the array there, and the mapping's start and length."""

    memory: Array
    start: int
    nbytes: int

    def unmap(self) -> None:
        """Removes the mapping; no array on it may be alive."""
        _call("munmap", self.start, self.nbytes)


def map_again(memory: Array) -> HugeMapping | None:
    """Maps shared memory a second time, at an address where it can have huge pages; None if that is impossible."""
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
    return HugeMapping(np.frombuffer(there, np.uint8), start, end - start)


def populate(mapping: HugeMapping) -> None:
    """Requests huge pages for new memory, which holds zeros; if the kernel refuses, nothing changes."""
    first = -(-mapping.start // _HUGE) * _HUGE
    last = (mapping.start + mapping.memory.size) // _HUGE * _HUGE
    # The kernel collapses only ranges that have been touched.
    mapping.memory[first - mapping.start : max(first, last) - mapping.start : _HUGE] = 0
    if last > first:
        _call("madvise", first, last - first, _COLLAPSE)


def _offset(address: int) -> int | None:
    """The offset in its file of the memory at an address; for private memory, the later `mremap` fails."""
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
    """Calls a function of the C library; None if it fails or does not exist."""
    function: Any = getattr(ctypes.CDLL(None), name, None)
    if function is None:
        return None
    function.argtypes, function.restype = _ARGUMENTS[name], ctypes.c_size_t
    result: int = function(*arguments)
    return None if result in (2**64 - 1, 2**32 - 1) else result
