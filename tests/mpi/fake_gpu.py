"""A fake GPU: CUDA's driver and the arrays of three libraries, at addresses that no process has.

Reading such an address on the host crashes the process. Copies happen as late as the driver allows, when their stream
is waited for, so a buffer that is reused or read too early gives wrong elements.
"""

from __future__ import annotations

import ctypes
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from numpy.lib.stride_tricks import as_strided

from reshard.runtime.on_mpi import gpu

_BASE, _SPACE = 1 << 60, 1 << 40  # Start of the first GPU's memory, size of each: beyond any process's addresses.


class Driver:
    """The functions of libcuda that `gpu.Cuda` calls, and the memory of its GPUs."""

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.most_pinned = 0
        self.current: list[int] = []
        self.crossings = 0
        self.broken = False
        self._queues: dict[int | None, list[Callable[[], None]]] = defaultdict(list)
        self._next = 0x1000
        self._tops: dict[int, int] = defaultdict(int)

    def alloc(self, device: int, nbytes: int) -> int:
        address = _BASE + device * _SPACE + self._tops[device]
        self._tops[device] += (nbytes // 256 + 2) * 256
        self.memory[address] = np.full(nbytes, 0xA5, np.uint8)
        return address

    def bytes_at(self, address: int, nbytes: int) -> np.ndarray:
        """Memory of a GPU, pinned memory, or any other memory of the process."""
        for base, memory in self.memory.items():
            if base <= address and address + nbytes <= base + memory.size:
                return memory[address - base : address - base + nbytes]
        assert address < _BASE, f"{address:#x} is no memory of a GPU"
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, into: Any, device: int) -> int:
        into._obj.value = device
        return 0

    def cuDevicePrimaryCtxRetain(self, into: Any, handle: Any) -> int:
        into._obj.value = 0xC0 + handle.value
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.current.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, into: Any) -> int:
        into._obj.value = self.current.pop()
        return 0

    def cuStreamCreate(self, into: Any, flags: int) -> int:
        assert self.current
        self._next += 1
        into._obj.value = self._next
        return 0

    def cuStreamSynchronize(self, stream: Any) -> int:
        for copy in self._queues.pop(stream.value, []):
            copy()
        return 0

    def cuCtxSynchronize(self) -> int:
        assert self.current
        for stream in list(self._queues):
            self.cuStreamSynchronize(SimpleNamespace(value=stream))
        return 0

    def cuMemHostAlloc(self, into: Any, nbytes: Any, flags: int) -> int:
        buffer = np.full(nbytes.value, 0xEE, np.uint8)
        self.pinned[buffer.ctypes.data] = buffer
        self.most_pinned = max(self.most_pinned, sum(each.size for each in self.pinned.values()))
        into._obj.value = buffer.ctypes.data
        return 0

    def cuMemFreeHost(self, pointer: Any) -> int:
        del self.pinned[pointer.value]
        return 0

    def cuMemsetD8Async(self, address: Any, value: int, nbytes: Any, stream: Any) -> int:
        self._queues[stream.value].append(lambda: self.bytes_at(address.value, nbytes.value).fill(value))
        return 0

    def cuMemcpyAsync(self, to: Any, by: Any, nbytes: Any, stream: Any) -> int:
        return self._copy([(to.value, by.value)], nbytes.value, stream)

    def cuMemcpy2DAsync_v2(self, reference: Any, stream: Any) -> int:
        copy2d = reference._obj
        assert copy2d.src_type == copy2d.dst_type == 4
        assert copy2d.width <= min(copy2d.src_pitch, copy2d.dst_pitch)
        pairs = [
            (copy2d.dst_device + row * copy2d.dst_pitch, copy2d.src_device + row * copy2d.src_pitch)
            for row in range(copy2d.height)
        ]
        return self._copy(pairs, copy2d.width, stream)

    def cuPointerGetAttribute(self, into: Any, attribute: int, address: Any) -> int:
        if address.value < _BASE:
            return 1
        into._obj.value = (address.value - _BASE) // _SPACE
        return 0

    def _copy(self, pairs: list[tuple[int, int]], nbytes: int, stream: Any) -> int:
        if self.broken:
            return 700

        def run() -> None:
            for to, by in pairs:
                self.bytes_at(to, nbytes)[...] = self.bytes_at(by, nbytes)

        self.crossings += len({(to < _BASE, by < _BASE) for to, by in pairs} & {(True, False), (False, True)})
        self._queues[stream.value].append(run)
        return 0


class _Array:
    """Memory of a GPU with a shape, a dtype and strides; only tests read its elements (`shadow`)."""

    def __init__(
        self, driver: Driver, device: int, address: int, shape: Sequence[int], dtype: Any, strides: Sequence[int]
    ) -> None:
        self.driver, self.number, self.address = driver, device, address
        self.shape, self.kind, self.strides = tuple(shape), np.dtype(dtype), tuple(strides)

    @classmethod
    def of(cls, driver: Driver, content: np.ndarray, device: int = 0) -> Any:
        """An array with this content and the same memory order and gaps as on the host."""
        span = [(extent - 1) * stride for extent, stride in zip(content.shape, content.strides, strict=True)]
        below = -sum(step for step in span if step < 0) if content.size else 0
        above = sum(step for step in span if step > 0) + content.itemsize if content.size else 0
        address = driver.alloc(device, below + above) + below
        made = cls(driver, device, address, content.shape, content.dtype, content.strides)
        made.shadow[...] = content
        return made

    @property
    def shadow(self) -> np.ndarray:
        if 0 in self.shape:
            return np.empty(self.shape, self.kind)
        low = sum(min(0, (n - 1) * stride) for n, stride in zip(self.shape, self.strides, strict=True))
        high = sum(max(0, (n - 1) * stride) for n, stride in zip(self.shape, self.strides, strict=True))
        memory = self.driver.bytes_at(self.address + low, high - low + self.kind.itemsize)
        first = memory[-low : -low + self.kind.itemsize].view(self.kind)
        return as_strided(first, self.shape, self.strides)

    def __array__(self, *given: Any, **options: Any) -> Any:
        raise TypeError("implicit conversion of an array on a GPU")

    def reshape(self, *shape: Any) -> Any:
        steps = np.empty(shape[0] if isinstance(shape[0], tuple) else self._flat(), np.uint8).shape
        return type(self)(self.driver, self.number, self.address, steps, self.kind, _steps(steps, self.kind))

    def _flat(self) -> tuple[int]:
        return (int(np.prod(self.shape)),)

    def __getitem__(self, key: slice) -> Any:
        shape = (min(key.stop, self.shape[0]),)
        return type(self)(self.driver, self.number, self.address, shape, self.kind, _steps(shape, self.kind))


def _steps(shape: Sequence[int], dtype: np.dtype) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[dim + 1 :], dtype=int)) * dtype.itemsize for dim in range(len(shape)))


class _Packed(_Array):
    """Describes its memory by DLPack."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.number

    def __dlpack__(self) -> Any:
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        elements = [stride // self.kind.itemsize for stride in self.strides]
        strides = (ctypes.c_int64 * len(elements))(*elements)
        bits = self.kind.itemsize * 8
        self.described = tensor = _Tensor(
            self.address - 8, 2, self.number, len(self.shape), 0, bits, 1, shape, strides, 8
        )
        self.kept = shape, strides
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(tensor), b"dltensor", None)


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class TorchLike(_Packed):
    """Mutable, makes others of its kind; its dtypes are written "torch.float32"."""

    @property
    def dtype(self) -> str:
        return f"torch.{self.kind.name}"

    def new_empty(self, shape: tuple[int, ...]) -> TorchLike:
        return TorchLike.of(self.driver, np.full(shape, 99).astype(self.kind), self.number)


class CupyLike(_Array):
    """Has only `__cuda_array_interface__`; its module makes other arrays, on the current GPU."""

    @property
    def dtype(self) -> np.dtype:
        return self.kind

    @property
    def device(self) -> Any:
        return mock.patch.object(CupyLike, "on", self.number)

    on = -1

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        plain = self.strides == _steps(self.shape, self.kind)
        return {
            "shape": self.shape,
            "typestr": self.kind.str,
            "data": (self.address if np.prod(self.shape) else 0, False),
            "strides": None if plain else self.strides,
            "version": 3,
        }


def _empty_like(array: CupyLike, shape: tuple[int, ...], order: str) -> CupyLike:
    assert order == "C"
    return CupyLike.of(array.driver, np.full(shape, 99).astype(array.kind), CupyLike.on)


CupyLike.__module__ = "cupy_like.core"
sys.modules["cupy_like"] = SimpleNamespace(empty_like=_empty_like)  # type: ignore[assignment]


class JaxLike(_Packed):
    """Immutable, made from a host array, and computed asynchronously: it has no memory before it was waited for."""

    ready = deleted = False

    @property
    def dtype(self) -> np.dtype:
        return self.kind

    @property
    def device(self) -> int:
        return self.number

    def __dlpack__(self) -> Any:
        assert self.ready
        return super().__dlpack__()

    def __array_namespace__(self) -> Any:
        def asarray(content: np.ndarray, device: int) -> JaxLike:
            return JaxLike.of(self.driver, np.array(content, order="C"), device)

        return SimpleNamespace(asarray=asarray)

    def block_until_ready(self) -> JaxLike:
        self.ready = True
        return self

    def delete(self) -> None:
        self.deleted = True


@contextmanager
def gpus() -> Iterator[Driver]:
    """Gives this process fake GPUs inside the `with`."""
    driver = Driver()
    libraries = mock.patch.object(gpu, "load_driver", lambda: driver)
    # An MPI that accepts these pointers is given the memory behind them.
    pointers = mock.patch.object(gpu, "memory_at", driver.bytes_at)
    with libraries, pointers:
        gpu.find_gpu.cache_clear()
        yield driver
    gpu.find_gpu.cache_clear()
