"""Arrays on CUDA GPUs, of any library: where they lie, how to make others of their kind, and how memory is copied.

The driver is loaded by name when the first such tile comes, so importing this module needs no GPU; `libcuda.so.1` is
the driver's name whatever CUDA version the array's library uses. With unified addressing, one kind of copy serves host
to device, device to host and device to device. A lane is a CUDA stream: copies in one lane run in order, copies in two
lanes may overlap.

Where an array lies is described by DLPack or by `__cuda_array_interface__`. How to make another one is told by the
attributes of an array, so no library is imported:

    torch         array.new_empty(shape)
    cupy          empty_like(array, shape=...) of the array's module
    jax           immutable: made from a host array by array.__array_namespace__().asarray
    any other     the caller must give `out`
"""

from __future__ import annotations

import ctypes
import itertools
import math
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np

from reshard.errors import RankError, TileError
from reshard.lower.to_mpi.tile_blocks import list_strides
from reshard.runtime.numpy_tiles import numpy_dtype
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


def memory_of_array(array: Array) -> Strided:
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
        width, axes = merge_strides(to.strides, by.strides, extents, itemsize)
        rows = axes.pop() if axes and all(width <= pitch <= _LONGEST_PITCH for pitch in axes[-1][1:]) else None
        for index in itertools.product(*(range(extent) for extent, _, _ in axes)):
            into = to.address + sum(at * step for at, (_, step, _) in zip(index, axes, strict=True))
            out_of = by.address + sum(at * step for at, (_, _, step) in zip(index, axes, strict=True))
            if rows is None:
                size = ctypes.c_size_t(width)
                self._call("cuMemcpyAsync", ctypes.c_void_p(into), ctypes.c_void_p(out_of), size, self._lanes[lane])
                continue
            height, to_pitch, by_pitch = rows
            copy = _Copy2D(src_type=_UNIFIED, dst_type=_UNIFIED, width=width, height=height)
            copy.src_device, copy.src_pitch, copy.dst_device, copy.dst_pitch = out_of, by_pitch, into, to_pitch
            self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), self._lanes[lane])

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RankError(f"CUDA's {name} failed with error {status}, see CUresult in its documentation")


_Axis = tuple[int, int, int]
"""An axis's extent, and its strides in bytes in the written and in the read memory."""


def merge_strides(to: Sequence[int], by: Sequence[int], extents: Sequence[int], run: int) -> tuple[int, list[_Axis]]:
    """The bytes that are contiguous in both memories, and the remaining axes, outermost first.

    A tile of 5 x 3 x 8 floats without gaps is one run; rows of 8 floats in a wider source stay rows:

    >>> merge_strides((96, 32, 4), (96, 32, 4), (5, 3, 8), 4), merge_strides((32, 4), (64, 4), (3, 8), 4)
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
def load_driver() -> Any:
    """The driver's library; raises `TileError` if there is none."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise TileError(
            f"the tile is on a GPU, but CUDA's driver cannot be loaded ({error}); copy the tile to the host first"
        ) from None


@cache
def find_gpu(device: int) -> Cuda:
    """The GPU with this number."""
    return Cuda(load_driver(), device)


def gpu_at(address: int) -> int:
    """The number of the GPU to whose memory an address belongs; raises `TileError` if there is none."""
    ordinal = ctypes.c_int()
    load_driver().cuInit(0)
    status = load_driver().cuPointerGetAttribute(ctypes.byref(ordinal), _ORDINAL, ctypes.c_uint64(address))
    if status:
        raise TileError(
            f"the tile's address {address:#x} does not belong to any GPU (CUDA error {status}); give an array on a GPU"
        )
    return ordinal.value


_CUDA, _MANAGED = 2, 13  # DLPack's kDLCUDA and kDLCUDAManaged


def is_on_gpu(array: object) -> bool:
    """Whether an array lies in the memory of a CUDA GPU; False for objects that do not say where they lie."""
    if isinstance(array, np.ndarray):
        return False
    with suppress(Exception):
        device: Any = getattr(array, "__dlpack_device__", None)
        if device is not None:
            return int(device()[0]) in (_CUDA, _MANAGED)
        return hasattr(array, "__cuda_array_interface__")
    return False


@dataclass(frozen=True)
class GpuArray:
    """An array on a GPU: the caller's array, the GPU's number, and the memory there, which `keeps` keeps alive."""

    array: Any
    device: int
    memory: Strided
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    keeps: object = None

    @property
    def c_contiguous(self) -> bool:
        """Whether it is C-ordered, without gaps."""
        steps = list_byte_strides(self.shape, self.dtype.itemsize)
        laid = zip(self.shape, self.memory.strides, steps, strict=True)
        return math.prod(self.shape) == 0 or all(n == 1 or stride == step for n, stride, step in laid)

    def overlaps(self, other: GpuArray) -> bool:
        """Whether the address ranges of two arrays overlap."""
        spans: list[tuple[int, int]] = []
        for each in (self, other):
            reach = [(n - 1) * stride for n, stride in zip(each.shape, each.memory.strides, strict=True)]
            low = each.memory.address + sum(step for step in reach if step < 0)
            spans.append((low, each.memory.address + sum(step for step in reach if step > 0) + each.dtype.itemsize))
        (low, high), (start, end) = spans
        some = math.prod(self.shape) and math.prod(other.shape)
        return bool(some) and self.device == other.device and max(low, start) < min(high, end)


def is_writable(array: Any) -> bool:
    """Whether arrays of this kind are mutable."""
    return _can_make(array) or not hasattr(array, "__array_namespace__")


def _can_make(array: Any) -> bool:
    return hasattr(array, "new_empty") or hasattr(_library_of(array), "empty_like")


def check_makes(array: Any) -> None:
    """Raises `TileError` for a kind of array that this module cannot make."""
    if not _can_make(array) and not hasattr(array, "__array_namespace__"):
        raise TileError(f"reshard cannot make a {type(array).__name__} for the result; give one as out")


def make_empty(array: Any, shape: Sequence[int]) -> Any:
    """A new uninitialized C-ordered array of the same library on the same GPU."""
    if hasattr(array, "new_empty"):
        return array.new_empty(tuple(shape))
    with getattr(array, "device", None) or nullcontext():  # cupy allocates on the current device.
        return cast(Any, _library_of(array)).empty_like(array, shape=tuple(shape), order="C")


def make_from_host(array: Any, content: Array) -> Any:
    """A new array of the same library on the same GPU with the content of a host array, which may be reused then."""
    made = array.__array_namespace__().asarray(content, device=array.device)
    return made.block_until_ready() if hasattr(made, "block_until_ready") else made


def reuse_memory(array: Any, shape: Sequence[int]) -> Any:
    """The start of a C-ordered array's memory as an array of another shape; a view, if this kind has views."""
    return array.reshape(-1)[: math.prod(shape)].reshape(tuple(shape))


def _library_of(array: Any) -> object:
    return sys.modules.get(type(array).__module__.partition(".")[0])


def describe_array(array: Any, what: str) -> GpuArray:
    """Describes where an array lies. Raises `TileError` if the array does not say, for example because its element
    type is unknown to numpy or because it is split over several GPUs.
    """
    try:
        if hasattr(array, "block_until_ready"):
            array.block_until_ready()  # jax computes asynchronously, on streams that it does not expose.
        if hasattr(array, "__dlpack__"):
            return describe_by_dlpack(array)
        interface: dict[str, Any] = array.__cuda_array_interface__
        shape, address = tuple(interface["shape"]), int(interface["data"][0])
        dtype = np.dtype(interface["typestr"])
        strides = interface.get("strides") or list_byte_strides(shape, dtype.itemsize)
        memory = Strided(address, tuple(strides))
        return GpuArray(array, gpu_at(address) if address else 0, memory, shape, dtype)
    except TileError:
        raise
    except Exception as error:
        raise TileError(
            f"the {what}, a {type(array).__name__}, does not say where it lies on the GPU ({type(error).__name__}: "
            f"{error}); give a plain array on one GPU"
        ) from error


class _Tensor(ctypes.Structure):
    """DLPack's struct DLTensor, the first field of a DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def describe_by_dlpack(array: Any) -> GpuArray:
    """Reads the capsule without consuming it, so that its own destructor frees the memory."""
    capsule = array.__dlpack__()
    tensor = _Tensor.from_address(_pointer(capsule, b"dltensor") or 0)
    shape = tuple(tensor.shape[: tensor.ndim])
    dtype = numpy_dtype(str(array.dtype).rpartition(".")[2])  # torch's dtypes are written "torch.float32".
    if tensor.bits * tensor.lanes != dtype.itemsize * 8:
        raise TileError(
            f"the array's elements have {tensor.bits * tensor.lanes} bits, but {dtype} has {dtype.itemsize * 8}"
        )
    strides = list_byte_strides(shape, dtype.itemsize)
    if tensor.strides:
        strides = tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim])
    memory = Strided((tensor.data or 0) + tensor.offset, strides)
    return GpuArray(array, tensor.device, memory, shape, dtype, capsule)


def list_byte_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides in bytes of a C-ordered array."""
    return tuple(stride * itemsize for stride in list_strides(shape))
