"""Where arrays on a GPU lie, and how others of their kind are made, for fake arrays of three libraries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reshard.errors import TileError
from reshard.runtime.on_mpi.gpu.cuda_arrays import (
    check_makes,
    describe_array,
    describe_by_dlpack,
    is_on_gpu,
    is_writable,
    list_byte_strides,
    make_empty,
    make_from_host,
    reuse_memory,
)
from tests.mpi.fake_gpu import CupyLike, JaxLike, TorchLike, gpus

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


def test_strides_of_c_order():
    for shape in ((2, 3, 4), (5,), (), (3, 0, 2)):
        wanted = np.zeros(shape, "f8").strides
        assert list_byte_strides(shape, 8) == wanted or 0 in shape
