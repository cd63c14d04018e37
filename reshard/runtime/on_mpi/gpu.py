"""Tiles in the memory of CUDA GPUs, of any library that speaks DLPack or `__cuda_array_interface__`.

    GpuArray      where an array lies on its GPU, how to make another of its kind, and the driver's copies, by ctypes
    move_on_gpu   a move through the host, or by messages between GPUs if MPI accepts pointers to device memory

**Not run on a GPU so far**: the tests run all of it on a fake driver, and on a real one where they find one.

Importing these needs no GPU: the driver is loaded when the first such tile comes. Without a driver the call raises
`TileError` on all ranks, and an error of the driver during a move is a `RankError`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
from mpi4py import MPI

from reshard.errors import AgreementError, RankError, TileError
from reshard.geometry.blocks import Axis, Block, fuse_axes, list_strides, split_box, split_run
from reshard.lower.to_mpi.tile_blocks import End
from reshard.runtime.account import Account, begin_account
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_mpi.collective import prepare_together
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy_view, locate_steps, view_as_words
from reshard.runtime.on_mpi.direct_moves import STAGING, Direct, plan_direct
from reshard.runtime.on_mpi.prepare import Request, TilePlan
from reshard.runtime.on_mpi.team import DEVICE, Team, Watch
from reshard.runtime.on_mpi.transports import transport_tile
from reshard.runtime.on_mpi.window_tiles import new_tile, post_tile
from reshard.runtime.on_mpi.wire.chunks import Chunk, JointSide, Side
from reshard.runtime.on_mpi.wire.message_exchange import Call
from reshard.synth import find_plan

# Arrays on CUDA GPUs, of any library: where they lie, how to make others of their kind, and how memory is copied.
#
# The driver is loaded by name when the first such tile comes, so importing this module needs no GPU; `libcuda.so.1` is
# the driver's name whatever CUDA version the array's library uses. With unified addressing, one kind of copy serves
# host to device, device to host and device to device. A lane is a CUDA stream: copies in one lane run in order, copies
# in two lanes may overlap.
#
# Where an array lies is described by DLPack or by `__cuda_array_interface__`. How to make another one is told by the
# attributes of an array, so no library is imported:
#
#     torch         array.new_empty(shape)
#     cupy          empty_like(array, shape=...) of the array's module
#     jax           immutable: made from a host array by array.__array_namespace__().asarray
#     any other     the caller must give `out`


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
        # Rows of 8 floats in a wider source stay rows; a tile without gaps is one run.
        loops = fuse_axes(Block(by.address, to.address, tuple(map(Axis, extents, by.strides, to.strides))))
        axes, width = split_run(loops.axes, itemsize)
        rows = axes[-1] if axes and all(width <= pitch <= _LONGEST_PITCH for pitch in axes[-1][1:]) else None
        axes = axes if rows is None else axes[:-1]
        for index in itertools.product(*(range(axis.extent) for axis in axes)):
            into = to.address + sum(at * axis.dst for at, axis in zip(index, axes, strict=True))
            out_of = by.address + sum(at * axis.src for at, axis in zip(index, axes, strict=True))
            if rows is None:
                size = ctypes.c_size_t(width)
                self._call("cuMemcpyAsync", ctypes.c_void_p(into), ctypes.c_void_p(out_of), size, self._lanes[lane])
                continue
            height, by_pitch, to_pitch = rows
            copy = _Copy2D(src_type=_UNIFIED, dst_type=_UNIFIED, width=width, height=height)
            copy.src_device, copy.src_pitch, copy.dst_device, copy.dst_pitch = out_of, by_pitch, into, to_pitch
            self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), self._lanes[lane])

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RankError(f"CUDA's {name} failed with error {status}, see CUresult in its documentation")


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


CHUNK = 4 << 20
"""The most bytes of a pinned buffer, of which each lane has one; together they are no larger than the smaller tile."""

CUDA_AWARE = "RESHARD_MPI_CUDA_AWARE"
"""Environment variable: 1 if MPI accepts pointers to GPU memory, 0 if not; if unset, MPI is queried."""


class DeviceTiles(NamedTuple):
    """One rank's tile on a GPU, the caller's `out` if there is one, the GPU, and the messages between GPUs; None if the
    move goes through the host.
    """

    tile: GpuArray
    out: GpuArray | None
    gpu: Cuda
    pointers: Direct | None


def prepare_device_tiles(
    tile: GpuArray, out: GpuArray | None, ready: TilePlan, request: Request, rank: int, aware: bool
) -> DeviceTiles:
    """One rank's part of a move on GPUs; `aware` says that MPI accepts pointers to GPU memory.

    Raises `TileError` if the tile must be overwritten and is not C-ordered.
    """
    if ready.transport == "overwrite" and not tile.c_contiguous:
        raise TileError("the budget is met only by overwriting the donated tile, which is not C-ordered on its GPU")
    by_pointers = aware and ready.transport != "overwrite"
    pointers = plan_between_gpus(request, rank, tile.dtype.itemsize) if by_pointers else None
    return DeviceTiles(tile, out, find_gpu(tile.device), pointers)


def plan_between_gpus(request: Request, rank: int, itemsize: int) -> Direct | None:
    """A rank's messages between GPUs; None if a sum is finished or started, or the budget leaves no room to pack."""
    source, target = request.source, request.target
    peak = find_plan(source, target, request.options._replace(donate=False)).peak_bytes
    staging = min(STAGING, (peak - source.tile_bytes - target.tile_bytes) // 2)
    if not source.partial_as(target) or staging < itemsize:
        return None
    return plan_direct(source, target, rank, tuple(range(source.mesh.size)), itemsize, staging)


def takes_pointers() -> bool:
    """Whether MPI accepts pointers to GPU memory, by the environment variable if it is set, else by MPI itself."""
    setting = os.environ.get(CUDA_AWARE)
    if setting not in (None, "", "0", "1"):
        raise AgreementError(f"{CUDA_AWARE}={setting!r}: give 1 if MPI takes pointers to a GPU's memory, 0 if not")
    return setting == "1" if setting else is_cuda_aware()


def is_cuda_aware() -> bool:
    """Whether MPI says that it takes pointers to GPU memory."""
    # Open MPI and MPICH have a function to ask; Cray's MPICH has a variable that enables GPU support.
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return bool(query and query()) or os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"


def host_like(tile: GpuArray) -> Array:
    """A host array of the same shape and dtype, for checks; it takes no memory as long as it is not written to."""
    return np.empty(tile.shape, tile.dtype)


def move_on_gpu(team: Team, watch: Watch, ready: TilePlan, tiles: DeviceTiles, memory: Account | None) -> Any:
    """The target's tile on the GPU, inside a `collective`; if there is nothing to move, the caller's tile itself."""
    request, (tile, out, gpu, pointers) = ready.request, tiles
    call = Call(team, watch, team.pool, begin_account(request.source.dtype, memory), ready.device)
    if ready.stays:
        if out is None and (tile.c_contiguous or not is_writable(tile.array)):
            return tile.array
        into = out or describe_array(make_empty(tile.array, tile.shape), "result")
        with gpu.current():
            gpu.synchronise()
            gpu.copy(into.memory, tile.memory, tile.shape, tile.dtype.itemsize, 0)
            gpu.wait(0)
        return into.array
    if pointers is not None:
        shape = request.target.tile_shape
        into = out or describe_array(make_empty(tile.array, shape), "result")
        for size in (math.prod(tile.shape), math.prod(shape)):
            call.memory.take(call.device, size)
        GpuExchange(call, gpu, pointers, tile, into).run(clear=out is None and not request.target.even)
        return into.array
    # Through the host. While tiles are copied to or from the GPU, only one of the two tiles has its host copy, so all
    # pinned buffers together may be as large as the smaller tile; a budget that overwrites the tile has no room for
    # any.
    overwritten = ready.transport == "overwrite"
    smaller = min(math.prod(request.source.tile_shape), math.prod(request.target.tile_shape))
    stage = DeviceStage(call, gpu, 0 if overwritten else min(CHUNK // tile.dtype.itemsize, smaller // LANES))
    held = new_tile(team, watch, request.source, tile.dtype)
    call.memory.take(call.device, held.tile.size)
    stage.to_host(tile, held.tile)
    call.memory.free(call.device, held.tile.size)  # From here on, `transport_tile` counts it.
    prepare_together(team, watch, lambda: None, lambda _: str(request), lambda _: post_tile(held))
    host = transport_tile(team, watch, ready, held, None, call.memory).tile
    team.settle(watch)
    if not overwritten:
        call.memory.free(call.device, held.tile.size)  # The host copy of the tile dies here.
    if out is None and not is_writable(tile.array):
        result = make_from_host(tile.array, host)
        if overwritten and hasattr(tile.array, "delete"):
            tile.array.delete()
        return result
    if out is None:
        new = reuse_memory(tile.array, host.shape) if overwritten else make_empty(tile.array, host.shape)
        out = describe_array(new, "result")
    stage.to_gpu(out, host)
    return out.array


class DeviceStage(NamedTuple):
    """Copies between a GPU and the host through pinned buffers of `chunk` elements; directly if that is 0."""

    call: Call
    gpu: Cuda
    chunk: int

    def to_host(self, source: GpuArray, target: Array) -> None:
        """Copies a tile of any strides on the GPU into a host array."""
        with self.gpu.current():
            self.gpu.synchronise()
            if not self.chunk:
                self.gpu.copy(memory_of_array(target), source.memory, target.shape, target.itemsize, 0)
                self.gpu.wait(0)
                return
            landing: deque[tuple[int, Array, Array]] = deque()

            def land() -> None:
                lane, buffer, part = landing.popleft()
                self.gpu.wait(lane)
                copy_view(view_as_words(part), view_as_words(buffer))

            for lane, buffer, part, place in self._parts(source, target):
                if len(landing) == LANES:
                    land()
                self.gpu.copy(memory_of_array(buffer), place, buffer.shape, buffer.itemsize, lane)
                landing.append((lane, buffer, part))
            while landing:
                land()
            self.call.memory.free(self.call.device, LANES * self.chunk)

    def to_gpu(self, target: GpuArray, source: Array) -> None:
        """Copies a host array into a tile of any strides on the GPU."""
        with self.gpu.current():
            self.gpu.synchronise()
            if not self.chunk:
                self.gpu.copy(target.memory, memory_of_array(source), source.shape, source.itemsize, 0)
                self.gpu.wait(0)
                return
            for lane, buffer, part, place in self._parts(target, source):
                self.gpu.wait(lane)
                copy_view(view_as_words(buffer), view_as_words(part))
                self.gpu.copy(place, memory_of_array(buffer), buffer.shape, buffer.itemsize, lane)
            for lane in range(LANES):
                self.gpu.wait(lane)
            self.call.memory.free(self.call.device, LANES * self.chunk)

    def _parts(self, memory: GpuArray, host: Array) -> Iterator[tuple[int, Array, Array, Strided]]:
        """For each part: its lane, its pinned buffer, the part of the host array, and its memory on the GPU.

        Parts come in the order of the GPU's memory. The pinned buffers are kept for the next call, and counted in this.
        """
        order = sorted(range(host.ndim), key=lambda dim: -abs(memory.memory.strides[dim]))
        ordered, strides = host.transpose(order), tuple(memory.memory.strides[dim] for dim in order)
        buffers = self.gpu.pinned(self.chunk * host.itemsize)
        self.call.memory.take(self.call.device, LANES * self.chunk)
        for number, spans in enumerate(split_box(ordered.shape, self.chunk)):
            part = ordered[(*(slice(start, start + extent) for start, extent in spans), ...)]
            lane = number % LANES
            buffer = buffers[lane][: part.nbytes].view(part.dtype).reshape(part.shape)
            yield lane, buffer, part, Strided(memory.memory.address, strides).at([start for start, _ in spans])


_abandoned: list[object] = []
"""Moves that failed, kept alive because MPI may still write to their buffers."""


class _DeviceLane:
    """The waiting messages of one direction, and a buffer of slots, each of the size of the largest one."""

    def __init__(self, call: Call, source: GpuArray, side: Side | JointSide, staging: int) -> None:
        self.waiting = deque(chunk for chunk in side.chunks if isinstance(chunk, Chunk))
        slot = max((chunk.elements for chunk in self.waiting), default=1)
        slots = min(len(self.waiting), staging // slot)
        self.memory = describe_array(make_empty(source.array, (slots * slot,)), "buffer")
        self.elements = slots * slot
        call.memory.take(call.device, self.elements)
        itemsize = source.dtype.itemsize
        self.free = [self.memory.memory.address + number * slot * itemsize for number in range(slots)]


class GpuExchange:
    """The messages of one move between tiles on this rank's GPU."""

    def __init__(self, call: Call, gpu: Cuda, move: Direct, source: GpuArray, target: GpuArray) -> None:
        self._call, self._gpu, self._source, self._target = call, gpu, source, target
        self._own = move.own
        self._itemsize = source.dtype.itemsize
        staging = move.messages.staging
        self._sends = _DeviceLane(call, source, move.messages.sends, staging)
        self._receives = _DeviceLane(call, source, move.messages.receives, staging)
        self._requests: list[MPI.Request] = []
        self._flights: list[tuple[_DeviceLane, Chunk, int]] = []  # Each with the address of its slot.

    def run(self, clear: bool) -> None:
        """Sends and receives everything; with `clear`, the target is filled with zeros first, for its padding."""
        try:
            with self._gpu.current():
                self._gpu.synchronise()
                if clear:
                    self._gpu.clear(self._target.memory.address, math.prod(self._target.shape) * self._itemsize)
                for block in self._own:
                    self._copy(_place(self._target, block, "dst"), _place(self._source, block, "src"), block)
                self._post()
                while self._requests:
                    self._progress()
                self._gpu.wait(0)
        except BaseException:
            _abandoned.append(self)
            raise
        for lane in (self._sends, self._receives):
            self._call.memory.free(self._call.device, lane.elements)

    def _post(self) -> None:
        """Posts as many messages as there is room for, receives first."""
        comm = self._call.team.comm
        for lane, post in ((self._receives, comm.Irecv), (self._sends, comm.Isend)):
            while lane.waiting and lane.free:
                chunk, slot = lane.waiting.popleft(), lane.free.pop()
                if lane is self._sends:
                    for block in chunk.blocks:
                        self._copy(self._in_slot(slot, block), _place(self._source, block, "src"), block)
                    self._gpu.wait(0)
                spec = [memory_at(slot, chunk.elements * self._itemsize), MPI.BYTE]
                self._requests.append(post(spec, chunk.peer, DEVICE))
                self._flights.append((lane, chunk, slot))

    def _progress(self) -> None:
        """Unpacks messages that have arrived and posts others in their room."""
        done = MPI.Request.Testsome(self._requests)
        for at in sorted(done or (), reverse=True):
            self._requests.pop(at)
            lane, chunk, slot = self._flights.pop(at)
            if lane is self._receives:
                self._call.memory.receive(self._call.device, chunk.elements)
                for block in chunk.blocks:
                    self._copy(_place(self._target, block, "src"), self._in_slot(slot, block), block)
                self._gpu.wait(0)  # The slot is free only when the copies out of it are done.
            lane.free.append(slot)
        if done:
            self._post()
        else:
            self._call.watch.pause()

    def _in_slot(self, slot: int, block: Block) -> Strided:
        """A block of a message, in the memory of its slot."""
        return Strided(slot + block.dst * self._itemsize, tuple(axis.dst * self._itemsize for axis in block.axes))

    def _copy(self, to: Strided, by: Strided, block: Block) -> None:
        self._gpu.copy(to, by, block.extents, self._itemsize, 0)


def memory_at(address: int, nbytes: int) -> MPI.memory:
    """GPU memory in the form that mpi4py accepts; the host must not read it."""
    return MPI.memory.fromaddress(address, nbytes)


def _place(array: GpuArray, block: Block, end: End) -> Strided:
    """One end of a block as strided memory."""
    start, steps = (block.src, [axis.src for axis in block.axes])
    if end == "dst":
        start, steps = (block.dst, [axis.dst for axis in block.axes])
    offset, strides = locate_steps(array.shape, array.memory.strides, start, steps)
    return Strided(array.memory.address + offset, tuple(strides))
