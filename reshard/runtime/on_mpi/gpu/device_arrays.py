"""Arrays on a GPU, of whatever library: where they lie, and how another of their kind is made.

They say where they lie by DLPack or `__cuda_array_interface__`. A library is known by what its arrays can do:

    torch         array.new_empty(shape)
    cupy          its module's empty_like(array, shape=...)
    jax           arrays that cannot be written to: made of one of the host, array.__array_namespace__().asarray
    any other     it must be given `out`
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from reshard.errors import TileError
from reshard.runtime.numpy_dtypes import numpy_dtype
from reshard.runtime.on_mpi.gpu.cuda import Strided, device_of
from reshard.runtime.on_mpi.strided_copy import Array

_CUDA, _MANAGED = 2, 13  # DLPack's kDLCUDA and kDLCUDAManaged


def on_gpu(array: object) -> bool:
    """Whether an array lies in the memory of a GPU that speaks CUDA; what cannot say where it lies does not."""
    if isinstance(array, np.ndarray):
        return False
    with suppress(Exception):
        found: Any = getattr(array, "__dlpack_device__", None)
        if found is not None:
            return int(found()[0]) in (_CUDA, _MANAGED)
        return hasattr(array, "__cuda_array_interface__")
    return False


@dataclass(frozen=True)
class GpuArray:
    """An array on a GPU: the caller's, its GPU's number, and how it lies there. `keeps` keeps its memory alive."""

    array: Any
    device: int
    memory: Strided
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    keeps: object = None

    @property
    def c_contiguous(self) -> bool:
        """Whether it lies in C order, without gaps."""
        steps = c_strides(self.shape, self.dtype.itemsize)
        laid = zip(self.shape, self.memory.strides, steps, strict=True)
        return math.prod(self.shape) == 0 or all(n == 1 or stride == step for n, stride, step in laid)

    def overlaps(self, other: GpuArray) -> bool:
        """Whether the spans of two arrays' addresses meet."""
        (low, high), (start, end) = self._span(), other._span()
        return self.device == other.device and max(low, start) < min(high, end)

    def _span(self) -> tuple[int, int]:
        if not math.prod(self.shape):
            return 0, 0
        reach = [(n - 1) * stride for n, stride in zip(self.shape, self.memory.strides, strict=True)]
        low = self.memory.address + sum(step for step in reach if step < 0)
        return low, self.memory.address + sum(step for step in reach if step > 0) + self.dtype.itemsize


def writable(array: Any) -> bool:
    """Whether an array of this kind can be written to once it is made."""
    return _makes(array) or not hasattr(array, "__array_namespace__")


def _makes(array: Any) -> bool:
    return hasattr(array, "new_empty") or hasattr(_library(array), "empty_like")


def check_makes(array: Any) -> None:
    """Raises `TileError` if it is not known how to make another array of this kind."""
    if not _makes(array) and not hasattr(array, "__array_namespace__"):
        raise TileError(f"no way is known to make a {type(array).__name__} for the result; give one as out")


def empty(array: Any, shape: Sequence[int]) -> Any:
    """A new array of anything, of the same library on the same GPU, C-ordered."""
    if hasattr(array, "new_empty"):
        return array.new_empty(tuple(shape))
    with getattr(array, "device", None) or nullcontext():  # cupy allocates on the current device.
        return cast(Any, _library(array)).empty_like(array, shape=tuple(shape), order="C")


def of_host(array: Any, content: Array) -> Any:
    """A new array of the same library on the same GPU, of the content of one of the host, which may then change."""
    made = array.__array_namespace__().asarray(content, device=array.device)
    return made.block_until_ready() if hasattr(made, "block_until_ready") else made


def of_its_memory(array: Any, shape: Sequence[int]) -> Any:
    """A C-ordered array's memory, from its start, as an array of another shape, if its kind has views."""
    return array.reshape(-1)[: math.prod(shape)].reshape(tuple(shape))


def _library(array: Any) -> object:
    return sys.modules.get(type(array).__module__.partition(".")[0])


def described(array: Any, what: str) -> GpuArray:
    """Where an array lies; `TileError` if it cannot say, for an element type unknown to numpy or an array split over
    GPUs, say.
    """
    try:
        if hasattr(array, "block_until_ready"):
            array.block_until_ready()  # jax's may not be there yet, and no stream says when.
        return _by_dlpack(array) if hasattr(array, "__dlpack__") else _by_interface(array)
    except TileError:
        raise
    except Exception as error:
        raise TileError(
            f"the {what}, a {type(array).__name__}, does not say where it lies on the GPU ({type(error).__name__}: "
            f"{error}); give a plain array on one GPU"
        ) from error


def _by_interface(array: Any) -> GpuArray:
    found: dict[str, Any] = array.__cuda_array_interface__
    shape, address = tuple(found["shape"]), int(found["data"][0])
    dtype = np.dtype(found["typestr"])
    strides = found.get("strides") or c_strides(shape, dtype.itemsize)
    device = device_of(address) if address else 0
    return GpuArray(array, device, Strided(address, tuple(strides)), shape, dtype)


class _Tensor(ctypes.Structure):
    """DLTensor, which a DLManagedTensor begins with."""

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


def _by_dlpack(array: Any) -> GpuArray:
    """The capsule is only looked at, so that its own destructor frees it."""
    capsule = array.__dlpack__()
    tensor = _Tensor.from_address(_pointer(capsule, b"dltensor") or 0)
    shape = tuple(tensor.shape[: tensor.ndim])
    dtype = numpy_dtype(str(array.dtype).rpartition(".")[2])  # torch writes its own name before it.
    if tensor.bits * tensor.lanes != dtype.itemsize * 8:
        raise TileError(f"the array's elements have {tensor.bits * tensor.lanes} bits, but {dtype} has not")
    strides = c_strides(shape, dtype.itemsize)
    if tensor.strides:
        strides = tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim])
    memory = Strided((tensor.data or 0) + tensor.offset, strides)
    return GpuArray(array, tensor.device, memory, shape, dtype, capsule)


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides in bytes of a C-ordered array."""
    return tuple(math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape)))
