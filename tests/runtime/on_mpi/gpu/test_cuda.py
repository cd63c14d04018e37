"""The driver's calls: the structs that it reads, and strided copies on a fake one, in as few calls as possible."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from reshard.errors import RankError, TileError
from reshard.runtime.on_mpi.gpu import cuda_arrays as module
from reshard.runtime.on_mpi.gpu.cuda_arrays import (
    LANES,
    Cuda,
    Strided,
    _Copy2D,
    device_at,
    memory_of_array,
    merge_strides,
)
from tests.mpi.fake_gpu import Driver, TorchLike, gpus


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


def test_an_index_moves_the_address():
    assert Strided(1000, (40, -8)).at((2, 3)) == Strided(1056, (40, -8))


def test_axes_that_follow_one_another_aremerge_strides():
    assert merge_strides((96, 32, 4), (96, 32, 4), (5, 3, 8), 4) == (480, [])
    assert merge_strides((32, 4), (64, 4), (3, 8), 4) == (32, [(3, 32, 64)])
    assert merge_strides((96, 32, 4), (192, 64, 4), (5, 3, 8), 4) == (32, [(15, 32, 64)])
    assert merge_strides((4, 12), (8, 4), (3, 2), 4) == (4, [(3, 4, 8), (2, 12, 4)])
    assert merge_strides((7, 999, 4), (7, 123, 4), (2, 1, 8), 4) == (32, [(2, 7, 7)])


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
        assert device_at(TorchLike.of(driver, np.zeros(4), 1).address) == 1
        with pytest.raises(TileError, match="0x1000 does not belong to any GPU"):
            device_at(0x1000)


def test_without_a_driver_the_advice_is_to_copy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_LIBRARY", "libnothing-of-this-name.so")
    module.load_driver.cache_clear()
    with pytest.raises(TileError, match="copy the tile to the host first"):
        module.load_driver()
    module.load_driver.cache_clear()
