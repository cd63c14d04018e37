"""Arrays on a GPU, of any library: where they lie, and how to make another array of their kind.

Their memory is described by DLPack or by `__cuda_array_interface__`. How to make another one is told by the attributes
of an array, so no library is imported:

    torch         array.new_empty(shape)
    cupy          empty_like(array, shape=...) of the array's module
    jax           immutable: made from a host array by array.__array_namespace__().asarray
    any other     the caller must give `out`
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
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_mpi.copies.strided_copy import Array
from reshard.runtime.on_mpi.gpu.cuda import Strided, device_of

_CUDA, _MANAGED = 2, 13  # DLPack's kDLCUDA and kDLCUDAManaged


def on_gpu(array: object) -> bool:
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
        steps = c_strides(self.shape, self.dtype.itemsize)
        laid = zip(self.shape, self.memory.strides, steps, strict=True)
        return math.prod(self.shape) == 0 or all(n == 1 or stride == step for n, stride, step in laid)

    def overlaps(self, other: GpuArray) -> bool:
        """Whether the address ranges of two arrays overlap."""
        (low, high), (start, end) = self._span(), other._span()
        return self.device == other.device and max(low, start) < min(high, end)

    def _span(self) -> tuple[int, int]:
        if not math.prod(self.shape):
            return 0, 0
        reach = [(n - 1) * stride for n, stride in zip(self.shape, self.memory.strides, strict=True)]
        low = self.memory.address + sum(step for step in reach if step < 0)
        return low, self.memory.address + sum(step for step in reach if step > 0) + self.dtype.itemsize


def writable(array: Any) -> bool:
    """Whether arrays of this kind are mutable."""
    return _makes(array) or not hasattr(array, "__array_namespace__")


def _makes(array: Any) -> bool:
    return hasattr(array, "new_empty") or hasattr(_library(array), "empty_like")


def check_makes(array: Any) -> None:
    """Raises `TileError` for a kind of array that this module cannot make."""
    if not _makes(array) and not hasattr(array, "__array_namespace__"):
        raise TileError(f"reshard cannot make a {type(array).__name__} for the result; give one as out")


def empty(array: Any, shape: Sequence[int]) -> Any:
    """A new uninitialized C-ordered array of the same library on the same GPU."""
    if hasattr(array, "new_empty"):
        return array.new_empty(tuple(shape))
    with getattr(array, "device", None) or nullcontext():  # cupy allocates on the current device.
        return cast(Any, _library(array)).empty_like(array, shape=tuple(shape), order="C")


def of_host(array: Any, content: Array) -> Any:
    """A new array of the same library on the same GPU with the content of a host array, which may be reused then."""
    made = array.__array_namespace__().asarray(content, device=array.device)
    return made.block_until_ready() if hasattr(made, "block_until_ready") else made


def of_its_memory(array: Any, shape: Sequence[int]) -> Any:
    """The start of a C-ordered array's memory as an array of another shape; a view, if this kind has views."""
    return array.reshape(-1)[: math.prod(shape)].reshape(tuple(shape))


def _library(array: Any) -> object:
    return sys.modules.get(type(array).__module__.partition(".")[0])


def described(array: Any, what: str) -> GpuArray:
    """Describes where an array lies. Raises `TileError` if the array does not say, for example because its element
    type is unknown to numpy or because it is split over several GPUs.
    """
    try:
        if hasattr(array, "block_until_ready"):
            array.block_until_ready()  # jax computes asynchronously, on streams that it does not expose.
        return _by_dlpack(array) if hasattr(array, "__dlpack__") else _by_interface(array)
    except TileError:
        raise
    except Exception as error:
        raise TileError(
            f"the {what}, a {type(array).__name__}, does not say where it lies on the GPU ({type(error).__name__}: "
            f"{error}); give a plain array on one GPU"
        ) from error


def _by_interface(array: Any) -> GpuArray:
    interface: dict[str, Any] = array.__cuda_array_interface__
    shape, address = tuple(interface["shape"]), int(interface["data"][0])
    dtype = np.dtype(interface["typestr"])
    strides = interface.get("strides") or c_strides(shape, dtype.itemsize)
    device = device_of(address) if address else 0
    return GpuArray(array, device, Strided(address, tuple(strides)), shape, dtype)


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


def _by_dlpack(array: Any) -> GpuArray:
    """Reads the capsule without consuming it, so that its own destructor frees the memory."""
    capsule = array.__dlpack__()
    tensor = _Tensor.from_address(_pointer(capsule, b"dltensor") or 0)
    shape = tuple(tensor.shape[: tensor.ndim])
    dtype = numpy_dtype(str(array.dtype).rpartition(".")[2])  # torch's dtypes are written "torch.float32".
    if tensor.bits * tensor.lanes != dtype.itemsize * 8:
        raise TileError(
            f"the array's elements have {tensor.bits * tensor.lanes} bits, but {dtype} has {dtype.itemsize * 8}"
        )
    strides = c_strides(shape, dtype.itemsize)
    if tensor.strides:
        strides = tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim])
    memory = Strided((tensor.data or 0) + tensor.offset, strides)
    return GpuArray(array, tensor.device, memory, shape, dtype, capsule)


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides in bytes of a C-ordered array."""
    return tuple(math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape)))
