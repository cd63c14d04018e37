"""The part of CUDA's driver that tiles on a GPU need: pinned host memory, and strided copies.

The driver is loaded by name when the first such tile comes, so importing this module needs no GPU; `libcuda.so.1` is
the driver's name whatever CUDA version the array's library uses. With unified addressing, one kind of copy serves host
to device, device to host and device to device. A lane is a CUDA stream: copies in one lane run in order, copies in two
lanes may overlap.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import RankError, TileError
from reshard.runtime.on_mpi.copies.strided_copy import Array

LANES = 2
"""Streams per GPU: while one lane's chunk is copied on the host, the other lane's crosses the bus."""

_LIBRARY = "libcuda.so.1"
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for every context
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_LONGEST_PITCH = (1 << 31) - 1


class Strided(NamedTuple):
    """Memory by its address and the stride of each axis in bytes; whoever creates this keeps the memory alive."""

    address: int
    strides: tuple[int, ...]

    def at(self, start: Sequence[int]) -> Strided:
        """The memory from an index onwards."""
        skipped = sum(at * stride for at, stride in zip(start, self.strides, strict=True))
        return Strided(self.address + skipped, self.strides)


def strided(array: Array) -> Strided:
    """The memory of a host array."""
    return Strided(array.__array_interface__["data"][0], array.strides)


class _Copy2D(ctypes.Structure):
    """The struct CUDA_MEMCPY2D_v2 of cuda.h."""

    _fields_ = [
        *((f"src_{name}", kind) for name, kind in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t))),
        ("src_type", ctypes.c_int),
        *((f"src_{name}", ctypes.c_void_p) for name in ("host", "device", "array")),
        ("src_pitch", ctypes.c_size_t),
        *((f"dst_{name}", kind) for name, kind in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t))),
        ("dst_type", ctypes.c_int),
        *((f"dst_{name}", ctypes.c_void_p) for name in ("host", "device", "array")),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class Cuda:
    """One GPU: its lanes, and its pinned host buffers, which are kept from call to call."""

    def __init__(self, library: Any, device: int) -> None:
        self._library = library
        self._context = ctypes.c_void_p()
        self._pinned: list[ctypes.c_void_p] = []
        self._size = 0
        handle = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        self._lanes = [ctypes.c_void_p() for _ in range(LANES)]
        with self.current():
            for lane in self._lanes:
                self._call("cuStreamCreate", ctypes.byref(lane), _NON_BLOCKING)

    @contextmanager
    def current(self) -> Generator[None]:
        """Makes this GPU's context current inside the `with`, and restores the previous one afterwards."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def synchronise(self) -> None:
        """Waits for all work that any library has begun on the GPU."""
        self._call("cuCtxSynchronize")

    def wait(self, lane: int) -> None:
        """Waits for the copies of one lane."""
        self._call("cuStreamSynchronize", self._lanes[lane])

    def pinned(self, nbytes: int) -> list[Array]:
        """A pinned host buffer of `nbytes` for each lane; the last call's buffers if they have that size."""
        if nbytes != self._size:
            while self._pinned:
                self._call("cuMemFreeHost", self._pinned.pop())
            self._size = 0
            for _ in range(LANES if nbytes else 0):
                pointer = ctypes.c_void_p()
                self._call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes), _PORTABLE)
                self._pinned.append(pointer)
            self._size = nbytes
        kind = ctypes.c_uint8 * nbytes
        return [np.ctypeslib.as_array(kind.from_address(pointer.value or 0)) for pointer in self._pinned]

    def clear(self, address: int, nbytes: int) -> None:
        """Starts writing zeros to memory of the GPU, in the first lane."""
        if nbytes:
            self._call("cuMemsetD8Async", ctypes.c_void_p(address), 0, ctypes.c_size_t(nbytes), self._lanes[0])

    def copy(self, to: Strided, by: Strided, extents: Sequence[int], itemsize: int, lane: int) -> None:
        """Starts copying elements between two strided memories, in as few contiguous or 2D copies as possible."""
        if not math.prod(extents):
            return
        width, axes = _merged(to.strides, by.strides, extents, itemsize)
        rows = axes.pop() if axes and all(width <= pitch <= _LONGEST_PITCH for pitch in axes[-1][1:]) else None
        for index in itertools.product(*(range(extent) for extent, _, _ in axes)):
            into = to.address + sum(at * step for at, (_, step, _) in zip(index, axes, strict=True))
            out_of = by.address + sum(at * step for at, (_, _, step) in zip(index, axes, strict=True))
            if rows is None:
                size = ctypes.c_size_t(width)
                self._call("cuMemcpyAsync", ctypes.c_void_p(into), ctypes.c_void_p(out_of), size, self._lanes[lane])
            else:
                self._rows(into, out_of, width, rows, lane)

    def _rows(self, to: int, by: int, width: int, rows: _Axis, lane: int) -> None:
        height, to_pitch, by_pitch = rows
        copy = _Copy2D(src_type=_UNIFIED, dst_type=_UNIFIED, width=width, height=height)
        copy.src_device, copy.src_pitch, copy.dst_device, copy.dst_pitch = by, by_pitch, to, to_pitch
        self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), self._lanes[lane])

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RankError(f"CUDA's {name} failed with error {status}, see CUresult in its documentation")


_Axis = tuple[int, int, int]
"""An axis's extent, and its strides in bytes in the written and in the read memory."""


def _merged(to: Sequence[int], by: Sequence[int], extents: Sequence[int], run: int) -> tuple[int, list[_Axis]]:
    """The bytes that are contiguous in both memories, and the remaining axes, outermost first.

    A tile of 5 x 3 x 8 floats without gaps is one run; rows of 8 floats in a wider source stay rows:

    >>> _merged((96, 32, 4), (96, 32, 4), (5, 3, 8), 4), _merged((32, 4), (64, 4), (3, 8), 4)
    ((480, []), (32, [(3, 32, 64)]))
    """
    axes: list[_Axis] = []
    for axis in reversed([axis for axis in zip(extents, to, by, strict=True) if axis[0] != 1]):
        extent, step, other = axis
        if not axes and step == other == run:
            run *= extent
        elif axes and (step, other) == (axes[-1][0] * axes[-1][1], axes[-1][0] * axes[-1][2]):
            axes[-1] = (extent * axes[-1][0], *axes[-1][1:])
        else:
            axes.append(axis)
    return run, axes[::-1]


@cache
def library() -> Any:
    """The driver's library; raises `TileError` if there is none."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise TileError(
            f"the tile is on a GPU, but CUDA's driver cannot be loaded ({error}); copy the tile to the host first"
        ) from None


@cache
def cuda(device: int) -> Cuda:
    """The GPU with this number."""
    return Cuda(library(), device)


def device_of(address: int) -> int:
    """The number of the GPU to whose memory an address belongs; raises `TileError` if there is none."""
    ordinal = ctypes.c_int()
    library().cuInit(0)
    status = library().cuPointerGetAttribute(ctypes.byref(ordinal), _ORDINAL, ctypes.c_uint64(address))
    if status:
        raise TileError(
            f"the tile's address {address:#x} does not belong to any GPU (CUDA error {status}); give an array on a GPU"
        )
    return ordinal.value
