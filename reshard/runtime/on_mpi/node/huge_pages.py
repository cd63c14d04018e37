"""Huge pages for the memory that ranks share, on Linux 6.1 and later; elsewhere the memory stays as it is.

Numpy's own arrays get huge pages, shared memory does not: without them, reading and writing takes a tenth to a quarter
longer, and first use twice as long. The kernel makes huge pages on request (`MADV_COLLAPSE`, whatever the system's
settings for shared memory), but only for mappings whose address and file offset agree modulo the huge page size. So
files are mapped at such addresses.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from typing import Any

import numpy as np

from reshard.runtime.on_mpi.strided_copy import Array

HUGE = 2 << 20
"""Bytes of a huge page on x86 and on 64-bit Arm with pages of 4 KiB; with others the kernel refuses the request."""

WORTHWHILE = 8 << 20
"""Bytes of memory from which huge pages are worth the calls."""

_COLLAPSE = 25  # MADV_COLLAPSE
_READ_WRITE = 3  # PROT_READ | PROT_WRITE
_SHARED, _FIXED = 1, 0x10
_RESERVED = 0x4022  # MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE


class _Mapping:
    """Mapped memory, as numpy's array interface; it is unmapped when the last array on it dies."""

    def __init__(self, start: int, nbytes: int) -> None:
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (start, False), "version": 3}
        weakref.finalize(self, _call, "munmap", start, nbytes).atexit = False


def aligned(file: int, nbytes: int) -> Array | None:
    """Maps the first `nbytes` of a file, whole pages, to be shared, at a multiple of a huge page's size.

    None if this system or the kernel cannot.
    """
    if sys.platform != "linux":
        return None
    room = nbytes + HUGE
    reserved = _call("mmap", None, room, 0, _RESERVED, -1, 0)
    if reserved is None:
        return None
    start = -(-reserved // HUGE) * HUGE
    if _call("mmap", start, nbytes, _READ_WRITE, _SHARED | _FIXED, file, 0) != start:
        _call("munmap", reserved, room)
        return None
    for low, high in ((reserved, start), (start + nbytes, reserved + room)):
        if high > low:
            _call("munmap", low, high - low)
    return np.asarray(_Mapping(start, nbytes))


def wanted(nbytes: int) -> bool:
    """Whether memory of this size should have huge pages."""
    return nbytes >= WORTHWHILE and sys.platform == "linux" and os.environ.get("RESHARD_MPI_HUGE_PAGES") != "0"


def collapse(memory: Array) -> None:
    """Requests huge pages for whole ones of a mapping, of which the first page of each has been allocated as zeros.

    If the kernel refuses, nothing changes.
    """
    if memory.size:
        memory[::HUGE] = 0  # The kernel collapses only ranges that have been touched.
        _call("madvise", memory.ctypes.data, memory.size, _COLLAPSE)


_ARGUMENTS = {
    "mmap": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
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
