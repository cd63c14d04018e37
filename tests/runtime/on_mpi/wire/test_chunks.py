"""Messages out of blocks, packed and unpacked, against the blocks' elements one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.lower.to_mpi import Axis, Block
from reshard.runtime.on_mpi.wire.chunks import Region, chunks, copies, region
from tests.lower.to_mpi.elements import places

BLOCKS = [
    Block((0, 1), (2, 0), (Axis(0, 3, 2, 1), Axis(1, 4, 1, 3))),
    Block((1, 0), (0, 1), (Axis(1, 5, 1, 2), Axis(0, 2, 3, 2))),
    Block((3, 2), (1, 1), ()),
]
SHAPES = [(7, 6), (5, 11), (4, 3), (0, 5)]


def message(tile: np.ndarray, blocks: Sequence[Block]) -> list[int]:
    within = [at for block in blocks for at in places(block, "src")]
    return [int(tile[at]) if all(map(int.__lt__, at, tile.shape)) else 0 for at in within]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cap", [1, 5, 7, 100])
def test_packed_messages_are_the_elements_of_their_blocks(shape: tuple[int, int], cap: int):
    tile = np.arange(1, 1 + shape[0] * shape[1]).reshape(shape)
    packed = []
    for chunk in chunks(3, BLOCKS, cap, "src", shape):
        buffer = np.full(chunk.elements, -1)
        chunk.pack(tile, buffer)
        packed += buffer.tolist()
        assert chunk.peer == 3
        assert 0 < chunk.elements <= cap
        assert chunk.padded == (0 in buffer)
    assert packed == message(tile, BLOCKS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cap", [1, 5, 7, 100])
def test_unpacked_messages_fill_the_places_of_their_blocks(shape: tuple[int, int], cap: int):
    tile, wanted = np.zeros(shape, int), np.zeros(shape, int)
    for value, index in enumerate((index for block in BLOCKS for index in places(block, "dst")), 1):
        if all(map(int.__lt__, index, shape)):
            wanted[index] = value
    at = 1
    for chunk in chunks(0, BLOCKS, cap, "dst", shape):
        chunk.unpack(tile, np.arange(at, at + chunk.elements))
        at += chunk.elements
    assert np.array_equal(tile, wanted)


def test_as_many_blocks_as_fit_share_a_message():
    small = [Block((at,), (at,), (Axis(0, 2, 1, 1),)) for at in (0, 2, 4, 6, 8)]
    assert [chunk.elements for chunk in chunks(0, small, 5, "src", (10,))] == [4, 4, 2]


def test_a_message_that_lies_in_one_run_is_sent_from_the_tile():
    tile = np.arange(24).reshape(6, 4)
    (rows,) = chunks(0, [Block((2, 0), (0, 0), (Axis(0, 3, 1, 1), Axis(1, 4, 1, 1)))], 99, "src", tile.shape)
    lies = rows.direct(tile)
    assert lies is not None
    assert np.shares_memory(lies, tile)
    assert np.array_equal(lies, np.arange(8, 20))
    (column,) = chunks(0, [Block((0, 1), (0, 0), (Axis(0, 3, 1, 1),))], 99, "src", tile.shape)
    assert column.direct(tile) is None
    (padded,) = chunks(0, [Block((4, 0), (0, 0), (Axis(0, 3, 1, 1), Axis(1, 4, 1, 1)))], 99, "src", tile.shape)
    assert padded.padded
    assert padded.direct(tile) is None


@given(st.sampled_from(BLOCKS), st.sampled_from(SHAPES), st.sampled_from(SHAPES))
def test_copies_from_tile_to_tile_leave_padding_alone(block: Block, before: tuple[int, int], after: tuple[int, int]):
    source, target = np.arange(1, 1 + before[0] * before[1]).reshape(before), np.zeros(after, int)
    wanted = target.copy()
    for src, dst in zip(places(block, "src"), places(block, "dst"), strict=True):
        if all(map(int.__lt__, src, before)) and all(map(int.__lt__, dst, after)):
            wanted[dst] = source[src]
    for one, other in copies(block, before, after):
        other.of(target)[...] = one.of(source)
    assert np.array_equal(target, wanted)


def test_a_part_of_a_region():
    tile = np.arange(60).reshape(6, 10)
    whole = Region((1, 2), ((0, 2), (1, 3)), (2, 3))
    assert np.array_equal(whole.part([(1, 1), (1, 2)]).of(tile), whole.of(tile)[1:2, 1:3])
    assert np.array_equal(region(BLOCKS[0], "src").of(tile).reshape(-1), [tile[at] for at in places(BLOCKS[0], "src")])
