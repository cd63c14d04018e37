"""Datatypes of messages: what MPI packs with them is what `Chunk.pack` packs, for tiles of any order."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.lower.to_mpi import Axis, Block
from reshard.runtime.on_mpi.wire import datatypes
from reshard.runtime.on_mpi.wire.chunks import chunks
from reshard.runtime.on_mpi.wire.datatypes import Datatypes, memory_of

BLOCKS = [
    Block((1, 0, 2), (0, 0, 0), (Axis(0, 3, 2, 1), Axis(2, 4, 1, 1))),
    Block((0, 3, 0), (0, 0, 0), (Axis(2, 2, 3, 1), Axis(1, 2, 1, 1), Axis(0, 7, 1, 1))),
]
SHAPE = (7, 5, 6)


def laid(order: str, dtype: str = "i4") -> np.ndarray:
    content = np.arange(210, dtype=dtype).reshape(SHAPE)
    if order == "reversed":
        return content[::-1, :, ::-1]
    if order == "strided":
        return np.repeat(np.repeat(content, 2, 0), 3, 2)[::2, :, ::3]
    return np.array(content, order=order)


@pytest.mark.parametrize("order", ["C", "F", "reversed", "strided"])
@pytest.mark.parametrize("cap", [9, 100])
def test_mpi_packs_what_a_chunk_packs(order: str, cap: int):
    tile, types = laid(order), Datatypes()
    for number, chunk in enumerate(chunks(0, BLOCKS, cap, "src", SHAPE)):
        wanted = np.zeros(chunk.elements, tile.dtype)
        chunk.pack(tile, wanted)
        packed, unpacked = np.zeros_like(wanted), np.zeros_like(tile)
        datatype = types.of(number, chunk, tile)
        MPI.COMM_SELF.Sendrecv([memory_of(tile), 1, datatype], 0, recvbuf=[packed, MPI.BYTE], source=0)
        assert np.array_equal(packed, wanted)
        if unpacked.strides == tile.strides:
            MPI.COMM_SELF.Sendrecv([packed, MPI.BYTE], 0, recvbuf=[memory_of(unpacked), 1, datatype], source=0)
            assert np.array_equal(unpacked[unpacked != 0], tile[unpacked != 0])
            assert np.count_nonzero(unpacked) == np.count_nonzero(wanted)
    types.free()


def test_types_are_made_once_for_tiles_of_the_same_strides():
    tile, types = laid("C"), Datatypes()
    (chunk,) = chunks(0, BLOCKS[:1], 100, "src", SHAPE)
    made = types.of(0, chunk, tile)
    assert types.of(0, chunk, laid("C")) is made
    assert types.of(0, chunk, laid("F")) is not made


@pytest.mark.parametrize("order", ["C", "F", "reversed", "strided"])
def test_the_memory_of_a_tile_holds_all_of_its_elements(order: str):
    tile = laid(order)
    memory = memory_of(tile)
    addresses = [tile[at : at + 1, ...].ctypes.data for at in range(SHAPE[0])]
    assert memory.address <= min(addresses)
    assert memory.address + memory.nbytes >= max(addresses) + tile.itemsize
    last = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * memory.nbytes).from_address(memory.address))
    assert last[:4].view("i4")[0] in tile
    assert last[-4:].view("i4")[0] in tile


def test_only_long_runs_without_padding_are_given_to_mpi_as_they_lie(monkeypatch: pytest.MonkeyPatch):
    tile = laid("C")
    (rows,) = chunks(
        0, [Block((0, 0, 0), (0, 0, 0), (Axis(0, 3, 2, 1), Axis(1, 5, 1, 1), Axis(2, 6, 1, 1)))], 99, "src", SHAPE
    )
    (padded,) = chunks(0, [Block((6, 0, 0), (0, 0, 0), (Axis(0, 2, 1, 1), Axis(2, 6, 1, 1)))], 99, "src", SHAPE)
    for takes, long, wanted in ((True, 120, True), (True, 121, False), (False, 1, False)):
        monkeypatch.setattr(datatypes, "TAKES_RUNS", takes)
        monkeypatch.setattr(datatypes, "LONG", long)
        assert Datatypes().long(0, rows, tile) == wanted
        assert not Datatypes().long(0, padded, tile)
