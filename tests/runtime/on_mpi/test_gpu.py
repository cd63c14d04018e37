"""Tiles on GPUs: on a fake driver everywhere, on a real one where there is one. See `tests.mpi.on_gpus`."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import reshard as rs
from reshard.errors import AgreementError, RankError, TileError
from reshard.runtime import Account
from reshard.runtime.on_mpi import gpu
from reshard.runtime.on_mpi.gpu import (
    LANES,
    Cuda,
    DeviceStage,
    Strided,
    _Copy2D,
    check_makes,
    describe_array,
    describe_by_dlpack,
    gpu_at,
    is_on_gpu,
    is_writable,
    make_empty,
    make_from_host,
    memory_of_array,
    plan_between_gpus,
    reuse_memory,
)
from reshard.runtime.on_mpi.prepare import Request, read_options
from reshard.types import Layout, Mesh
from tests.mpi.fake_gpu import CupyLike, Driver, JaxLike, TorchLike, gpus
from tests.mpi.moving import laid

# ---- The driver's calls: the structs that it reads, and strided copies, in as few calls as possible


def test_the_driver_reads_the_description_of_a_copy_as_its_header_has_it():
    """Offsets of CUDA_MEMCPY2D_v2 in cuda.h, on machines of 64 bits."""
    fields = ("src_type", "src_device", "src_pitch", "dst_type", "dst_device", "dst_pitch", "width", "height")
    assert [getattr(_Copy2D, name).offset for name in fields] == [16, 32, 48, 72, 88, 104, 112, 120]
    assert ctypes.sizeof(_Copy2D) == 128


class Counting(Driver):
    calls = 0

    def _copy(self, *arguments) -> int:
        self.calls += 1
        return super()._copy(*arguments)


@pytest.mark.parametrize(
    ("part", "calls"),
    [
        (np.s_[:], 1),  # one run
        (np.s_[1:3], 1),
        (np.s_[:, :2], 1),  # rows
        (np.s_[:, :, 1:4], 1),  # rows of rows, in one pitch
        (np.s_[:, 1:3, 1:4], 5),
        (np.s_[::2, :, ::2], 3),  # single elements, in a pitch each
        (np.s_[0:0], 0),
    ],
)
def test_strided_copies_between_host_and_gpu(part, calls: int):
    driver = Counting()
    gpu = Cuda(driver, 0)
    content = np.arange(5 * 4 * 6, dtype="u4").reshape(5, 4, 6)
    there = TorchLike.of(driver, content)
    source = content[part]
    host = np.zeros_like(source, order="C")
    start = tuple(s.start or 0 for s in (part if isinstance(part, tuple) else (part,)))
    start += (0,) * (3 - len(start))
    memory = Strided(Strided(there.address, there.strides).at(start).address, source.strides)
    with gpu.current():
        gpu.copy(memory_of_array(host), memory, source.shape, 4, 1)
        assert not host.any() or not host.size, "begun, not done"
        gpu.wait(1)
    assert np.array_equal(host, source)
    assert driver.calls == calls


def test_zeros_are_written_where_they_are_wanted():
    driver = Driver()
    gpu, there = Cuda(driver, 0), TorchLike.of(driver, np.ones(12, "u4"))
    with gpu.current():
        gpu.clear(there.address + 8, 16)
        gpu.clear(there.address, 0)
        gpu.synchronise()
    assert there.shadow.tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]


def test_pinned_buffers_are_kept_until_another_size_is_wanted():
    driver = Driver()
    gpu = Cuda(driver, 0)
    buffers = gpu.pinned(64)
    assert len(buffers) == LANES
    assert [each.size for each in buffers] == [64] * LANES
    assert [each.ctypes.data for each in gpu.pinned(64)] == [each.ctypes.data for each in buffers]
    gpu.pinned(128)
    assert sum(each.size for each in driver.pinned.values()) == 128 * LANES
    assert gpu.pinned(0) == []
    assert not driver.pinned


def test_the_context_is_current_only_inside():
    driver = Driver()
    gpu = Cuda(driver, 3)
    with pytest.raises(ValueError, match="inside"), gpu.current():
        assert driver.current == [0xC3]
        raise ValueError("inside")
    assert driver.current == []


def test_a_failed_call_names_the_function_and_the_status():
    driver = Driver()
    gpu, there = Cuda(driver, 0), TorchLike.of(driver, np.zeros(4))
    driver.broken = True
    memory = Strided(there.address, there.strides)
    with pytest.raises(RankError, match="cuMemcpyAsync failed with error 700"):
        gpu.copy(memory, memory, (4,), 8, 0)


def test_an_address_belongs_to_a_gpu_or_to_none():
    with gpus() as driver:
        assert gpu_at(TorchLike.of(driver, np.zeros(4), 1).address) == 1
        with pytest.raises(TileError, match="0x1000 does not belong to any GPU"):
            gpu_at(0x1000)


def test_without_a_driver_the_advice_is_to_copy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "_LIBRARY", "libnothing-of-this-name.so")
    gpu.load_driver.cache_clear()
    with pytest.raises(TileError, match="copy the tile to the host first"):
        gpu.load_driver()
    gpu.load_driver.cache_clear()


# ---- Where arrays on a GPU lie, and how others of their kind are made, for fake arrays of three libraries


KINDS = [TorchLike, CupyLike, JaxLike]
CONTENT = np.arange(24.0).reshape(2, 3, 4)


def test_where_a_dlpack_array_lies():
    """Numpy's arrays say so too: they are the real producer that every machine has."""
    for array in (CONTENT[:, ::2, 1:], np.array(np.float32(3)), np.zeros((0, 2), "i2")):
        memory = describe_by_dlpack(array)
        assert memory.memory.address == array.ctypes.data or not array.size
        assert (memory.shape, memory.dtype) == (array.shape, array.dtype)
        assert memory.memory.strides == array.strides or not array.size
        assert memory.c_contiguous == array.flags.c_contiguous
        assert not is_on_gpu(array)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [np.s_[:], np.s_[:, ::2, 1:], np.s_[0:0], np.s_[::-1]])
def test_where_an_array_of_each_library_lies(kind: Any, part: Any):
    content = CONTENT[part]
    with gpus() as driver:
        array = kind.of(driver, content, 1)
        assert kind is JaxLike or is_on_gpu(array)
        memory = describe_array(array, "tile")
        assert memory.memory.address == array.address or not content.size
        assert (memory.shape, memory.dtype) == (content.shape, content.dtype)
        assert memory.device == 1 or not content.size
        assert memory.c_contiguous == content.flags.c_contiguous
        assert memory.overlaps(memory) == bool(content.size)


def test_arrays_overlap_if_their_addresses_meet():
    with gpus() as driver:
        array = TorchLike.of(driver, np.zeros(10, "i4"))
        low, high, middle = (array[slice(0, 10)] for _ in range(3))
        low.shape, high.shape, middle.shape = (5,), (5,), (4,)
        high.address += 20
        middle.address += 12
        low, high, middle = (describe_array(each, "tile") for each in (low, high, middle))
        assert not low.overlaps(high)
        assert not high.overlaps(low)
        assert middle.overlaps(low)
        assert high.overlaps(middle)
        elsewhere = describe_array(TorchLike.of(driver, np.zeros(10, "i4"), 1), "tile")
        assert not elsewhere.overlaps(low)


def test_which_kinds_can_be_written_to_and_made():
    with gpus() as driver:
        arrays = [kind.of(driver, CONTENT) for kind in KINDS]
        assert [is_writable(array) for array in arrays] == [True, True, False]
        for array in arrays:
            check_makes(array)
        with pytest.raises(TileError, match="cannot make a SimpleNamespace for the result; give one as out"):
            check_makes(SimpleNamespace())


@pytest.mark.parametrize("kind", [TorchLike, CupyLike])
def test_a_new_array_is_of_the_same_kind_on_the_same_gpu(kind: Any):
    with gpus() as driver:
        made = make_empty(kind.of(driver, CONTENT, 1), (5, 2))
        memory = describe_array(made, "result")
        assert type(made) is kind
        assert (memory.device, memory.shape, memory.dtype, memory.c_contiguous) == (1, (5, 2), CONTENT.dtype, True)


def test_an_immutable_array_is_made_of_one_of_the_host():
    with gpus() as driver:
        content = np.arange(6).reshape(2, 3)
        made = make_from_host(JaxLike.of(driver, CONTENT, 1), content)
        content[...] = 0
        assert made.ready
        assert made.number == 1
        assert np.array_equal(made.shadow, np.arange(6).reshape(2, 3))


def test_a_donated_array_has_room_for_a_smaller_one():
    with gpus() as driver:
        array = TorchLike.of(driver, np.arange(12))
        assert np.array_equal(reuse_memory(array, (2, 5)).shadow, np.arange(10).reshape(2, 5))


@pytest.mark.parametrize("array", [3, "text", np.zeros(2), SimpleNamespace(__dlpack_device__=lambda: (1, 0)), None])
def test_what_does_not_lie_on_a_gpu(array: Any):
    assert not is_on_gpu(array)


def test_an_array_that_does_not_say_where_it_lies():
    with gpus(), pytest.raises(TileError, match="the tile, a SimpleNamespace, does not say where it lies"):
        describe_array(SimpleNamespace(), "tile")


# ---- Messages between GPUs: whether MPI takes their pointers, and which requests can go that way


def test_whether_mpi_takes_pointers_can_be_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "is_cuda_aware", lambda: False)
    monkeypatch.delenv(gpu.CUDA_AWARE, raising=False)
    assert not gpu.takes_pointers()
    for setting, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(gpu.CUDA_AWARE, setting)
        assert gpu.takes_pointers() == expected
    monkeypatch.setenv(gpu.CUDA_AWARE, "maybe")
    with pytest.raises(AgreementError, match="give 1 if MPI takes pointers"):
        gpu.takes_pointers()


def test_the_setting_of_crays_mpich(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MPICH_GPU_SUPPORT_ENABLED", raising=False)
    before = gpu.is_cuda_aware()
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")
    assert gpu.is_cuda_aware()
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "0")
    assert gpu.is_cuda_aware() == before


def test_every_rank_is_sent_what_it_lacks():
    mesh = Mesh(x=3)
    source, target = Layout.parse("f32[{x}5, 9]", mesh), Layout.parse("f32[15, {x}3]", mesh)
    for rank in range(3):
        move = plan_between_gpus(Request.of_tile(source, target), rank, 4)
        assert move is not None
        assert not move.pulls
        assert sum(chunk.elements for chunk in move.messages.receives.chunks) == 2 * 5 * 3
        spare = rs.plan(source, target).peak_bytes - source.tile_bytes - target.tile_bytes
        assert 0 < move.messages.staging * 4 <= spare // 2


@pytest.mark.parametrize(
    ("before", "after", "tight"),
    [("[6, 6] + sum{x}", "[{x}3, 6]", False), ("[{x}3, 6]", "[6, {x}3]", True), ("[{x}3, 6]", "[6, 6]", False)],
)
def test_sums_and_budgets_without_room_to_pack_go_through_the_host(before: str, after: str, tight: bool):
    mesh = Mesh(x=2)
    source, target = (Layout.parse(f"f32{text}", mesh) for text in (before, after))
    budget = source.tile_bytes + target.tile_bytes if tight else None
    assert plan_between_gpus(Request.of_tile(source, target, read_options(budget)), 0, 4) is None


# ---- Through the host, in pinned chunks


@pytest.mark.parametrize("order", ["C", "F", "strided", "reversed"])
@pytest.mark.parametrize("chunk", [0, 1, 7, 1000])
def test_a_tile_goes_to_the_host_and_back(order: str, chunk: int):
    """In pinned chunks of any size, or in none; the account has both lanes' buffers meanwhile."""
    content = laid(np.arange(5 * 7 * 3, dtype="i4").reshape(5, 7, 3), order)
    with gpus() as driver:
        account = Account("int32")
        call = cast(Any, SimpleNamespace(memory=account, device=0))
        stage = DeviceStage(call, Cuda(driver, 0), chunk)
        host = np.zeros(content.shape, "i4")
        stage.to_host(describe_array(TorchLike.of(driver, content), "tile"), host)
        assert np.array_equal(host, content)
        back = TorchLike.of(driver, laid(np.zeros_like(content), order))
        stage.to_gpu(describe_array(back, "result"), host)
        assert np.array_equal(back.shadow, content)
        assert account.peak_bytes == 2 * chunk * 4
        assert account.live[0] == 0
        assert driver.most_pinned == 2 * chunk * 4
        assert not driver.current


def _driver() -> bool:
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


@pytest.mark.skipif(not _driver(), reason="no GPU at hand")
def test_a_real_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Torch, cupy and jax, those of them that are installed, two ranks on one GPU."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    running.check("on_gpus.hardware", 2, tmp_path)
