"""Messages between ranks: how blocks are cut, joined, packed by MPI, reduced, and permuted in place."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

import reshard as rs
from reshard.geometry.blocks import Axis, Block
from reshard.lower.to_mpi import Reduce, StepMessages, schedule_device
from reshard.lower.to_mpi.tile_blocks import block_of_tile
from reshard.runtime.on_mpi.copies.stream_copy import copy_views
from reshard.runtime.on_mpi.copies.strided_copy import pair_views
from reshard.runtime.on_mpi.direct_moves import plan_direct
from reshard.runtime.on_mpi.run_plan import (
    RunPermutation,
    _operation_for,
    is_straight,
    permutation_of_slots,
    permute_runs,
)
from reshard.runtime.on_mpi.wire import chunks
from reshard.runtime.on_mpi.wire.chunks import (
    JointChunk,
    JointSide,
    Side,
    mean_run,
    memory_of,
    merge_messages,
    message_cap,
    messages_between,
    messages_of_step,
    pack_chunks,
)
from reshard.types import Layout, Mesh
from tests.layouts import pairs
from tests.lower.to_mpi.elements import places, put, taken
from tests.oracle import PADDING, tiles_of

# ---- Messages out of blocks, packed and unpacked, against the blocks' elements one by one


FRAME = (8, 12)

BLOCKS = [
    Block(1, 24, (Axis(3, 24, 12), Axis(4, 1, 3))),
    Block(12, 1, (Axis(5, 1, 2), Axis(2, 36, 24))),
    Block(38, 13, ()),
]
"""Between tiles of that shape, of which those of `SHAPES` have a part; each axis is within one dim."""

SHAPES = [(7, 6), (5, 11), (4, 3), (0, 5), FRAME]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cap", [1, 5, 7, 100])
def test_packed_messages_are_the_elements_of_their_blocks(shape: tuple[int, int], cap: int):
    tile = np.arange(1, 1 + shape[0] * shape[1]).reshape(shape)
    packed = []
    for chunk in pack_chunks(3, BLOCKS, cap, "src", (FRAME, shape)):
        buffer = np.full(chunk.elements, -1)
        copy_views(chunk.packing(tile, buffer))
        packed += buffer.tolist()
        assert chunk.peer == 3
        assert 0 < chunk.elements <= cap
        assert chunk.padded == (0 in buffer)
    assert packed == [max(0, element) for element in taken(tile, BLOCKS, FRAME)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cap", [1, 5, 7, 100])
def test_unpacked_messages_fill_the_places_of_their_blocks(shape: tuple[int, int], cap: int):
    tile, wanted = np.zeros(shape, int), np.zeros(shape, int)
    at = 1
    for chunk in pack_chunks(0, BLOCKS, cap, "dst", (FRAME, shape)):
        copy_views(chunk.unpacking(tile, np.arange(at, at + chunk.elements)))
        at += chunk.elements
    put(wanted, BLOCKS, list(range(1, at)), FRAME)
    assert np.array_equal(tile, wanted)


@pytest.mark.parametrize("width", [1, 8])
def test_messages_of_very_many_short_runs_go_by_index(width: int):
    """Rows at random places, in two arrays that share a message: packed and unpacked as they are one by one."""
    numbers = np.random.default_rng(7)
    rows = [np.sort(numbers.choice(500, count, replace=False)) for count in (200, 300)]
    tiles = [numbers.random((500, width)) for _ in rows]
    sides: list[Side] = []
    for end in ("src", "dst"):
        for at in rows:
            blocks = [Block(int(row) * width, int(row) * width, (Axis(width, 1, 1),)) for row in at]
            sides.append(Side(pack_chunks(1, blocks, 10**6, end)))
    joint = JointChunk(1, 500 * width, ((0, 0), (1, 0)))
    buffer, results = np.zeros(500 * width), [np.zeros_like(tile) for tile in tiles]
    for side, ends, packs in ((sides[:2], tiles, True), (sides[2:], results, False)):
        for step in JointSide((joint,), tuple(side)).list_indexed(0, ends, buffer, packs) or ():
            step()
    assert np.array_equal(buffer, np.concatenate([tile[at].ravel() for tile, at in zip(tiles, rows, strict=True)]))
    for tile, result, at in zip(tiles, results, rows, strict=True):
        assert np.array_equal(result[at], tile[at])
        assert np.count_nonzero(result) == width * len(at)
    assert Side(pack_chunks(1, BLOCKS, 100, "src")).list_indexed(0, np.zeros(FRAME), buffer, packs=True) is None


def test_as_many_blocks_as_fit_share_a_message():
    small = [Block(at, at, (Axis(2, 1, 1),)) for at in (0, 2, 4, 6, 8)]
    assert [chunk.elements for chunk in pack_chunks(0, small, 5, "src")] == [4, 4, 2]


def test_a_message_that_lies_in_one_run_is_sent_from_the_tile():
    tile = np.arange(24).reshape(6, 4)
    (rows,) = pack_chunks(0, [Block(8, 0, (Axis(3, 4, 4), Axis(4, 1, 1)))], 99, "src")
    lies = rows.direct(tile)
    assert lies is not None
    assert np.shares_memory(lies, tile)
    assert np.array_equal(lies, np.arange(8, 20))
    (column,) = pack_chunks(0, [Block(1, 0, (Axis(3, 4, 1),))], 99, "src")
    assert column.direct(tile) is None
    (padded,) = pack_chunks(0, [Block(16, 0, (Axis(3, 4, 4), Axis(4, 1, 1)))], 99, "src", ((7, 4), (6, 4)))
    assert padded.padded
    assert padded.direct(tile) is None


# ---- Messages of a step: sender and receiver cut them alike, and staging bounds their size


@given(pairs(most_rank=2), st.sampled_from([1, 8, 4096]))
@settings(max_examples=40)
def test_both_ends_cut_messages_alike(pair: tuple[Layout, Layout], scratch: int):
    source, target = pair
    plan = rs.plan(source, target)
    ranks = {device: device for device in source.mesh.devices}
    schedules = {device: schedule_device(plan, device) for device in source.mesh.devices}
    for at, step in enumerate(plan.steps):
        sent, received = defaultdict(list), defaultdict(list)
        for device, each in schedules.items():
            if not isinstance(each.steps[at], StepMessages):
                return
            shapes = (each.tile_shape, *each.tile_shapes)
            mine = replace(each.steps[at], scratch=scratch)
            cut = messages_of_step(mine, ranks, (shapes[at], shapes[at + 1]), 4, step.received_bytes)
            for chunk in cut.sends.chunks:
                sent[device, chunk.peer].append(chunk.elements)
            for chunk in cut.receives.chunks:
                received[chunk.peer, device].append(chunk.elements)
        assert sent == received


ROW = Block(0, 0, (Axis(1 << 18, 1, 1),))


@pytest.mark.parametrize(
    ("staging", "count", "largest"),
    [
        (0, 1, 1 << 18),  # unstaged: one message from tile to tile
        (1 << 18, 4, 1 << 16),  # a quarter each, so that four are under way
        (1 << 15, 16, 1 << 14),  # not below 64 KiB for that
        (100, 2622, 100),  # but never above the staging
    ],
)
def test_the_size_of_messages(staging: int, count: int, largest: int):
    cut = messages_between([(1, [ROW])], [(2, [ROW])], (), 4, staging)
    for side in (cut.sends, cut.receives):
        sizes = [chunk.elements for chunk in side.chunks]
        assert (len(sizes), max(sizes), sum(sizes)) == (count, largest, 1 << 18)


def test_unstaged_messages_stay_below_what_mpi_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "UNBUFFERED", 1 << 16)
    cut = messages_between([(1, [ROW])], [], (), 4, 0)
    assert {chunk.elements for chunk in cut.sends.chunks} == {1 << 14}


def test_all_that_is_received_is_held_if_there_is_room():
    mesh = Mesh(x=3)
    plan = rs.plan(Layout.parse("f32[{x}3, 9]", mesh), Layout.parse("f32[9, {x}3]", mesh))
    step = schedule_device(plan, 0).steps[0]
    ranks = dict.fromkeys(range(3), 0)
    for scratch, held in ((2 * 72, True), (2 * 71, False), (0, False)):
        mine = StepMessages(step.local, step.turns, scratch)
        assert messages_of_step(mine, ranks, ((3, 9), (9, 3)), 4, 72).held == held


@pytest.mark.parametrize("ends", [["src"], ["dst"], ["src", "dst"]])
def test_the_mean_run_is_that_of_the_addresses(ends: list):
    """Neighbours in the order of a block are in one run if their addresses follow one another at both ends."""
    block = Block(8, 2, (Axis(3, 8, 12), Axis(8, 1, 1)))
    after = list(zip(*(places(block, end) for end in ends), strict=True))
    breaks = sum(any(b != a + 1 for a, b in zip(*both, strict=True)) for both in itertools.pairwise(after))
    assert mean_run({block.axes: 5}, ends) == block.elements / (1 + breaks)
    assert mean_run({}, ends) == 0


# ---- Messages of several arrays as one: every element arrives, both ends agree, and no message is above the cap


MESH = Mesh(x=3)

PAIRS = [
    tuple(Layout.parse(text, MESH) for text in pair)
    for pair in (("s64[{x}2, 6]", "s64[6, {x}2]"), ("s64[{x}3/7]", "s64[7]"), ("s64[5{x}1]", "s64[{x}2/5]"))[:2]
]

NODES = (0, 1, 2)


@pytest.mark.parametrize("staging", [2, 8, 1000])
def test_every_element_arrives_in_as_few_messages_as_fit(staging: int) -> None:
    each = [[plan_direct(*pair, rank, NODES, 8, 8 * staging) for pair in PAIRS] for rank in NODES]
    together = [
        merge_messages([move.messages for move in moves], staging, 8, rank, 3) for rank, moves in enumerate(each)
    ]
    before, after = ([tiles_of(pair[end]) for pair in PAIRS] for end in (0, 1))
    results = [[np.full_like(of[rank], PADDING) for of in after] for rank in NODES]
    wire: dict[tuple[int, int], list[np.ndarray]] = {}
    for rank, mine in enumerate(together):
        for number, chunk in enumerate(mine.sends.chunks):
            buffer = np.zeros(chunk.elements, np.int64)
            copy_views(mine.sends.packing(number, [of[rank] for of in before], buffer))
            wire.setdefault((rank, chunk.peer), []).append(buffer)
    for rank, mine in enumerate(together):
        for move, result, of in zip(each[rank], results[rank], before, strict=True):
            for target, source in pair_views(move.own, result, of[rank]):
                target[...] = source
        for number, chunk in enumerate(mine.receives.chunks):
            buffer = wire[chunk.peer, rank].pop(0)
            assert buffer.size == chunk.elements <= message_cap(staging, 8)
            copy_views(mine.receives.unpacking(number, results[rank], buffer))
    assert not any(wire.values())
    for rank, at in itertools.product(NODES, range(len(PAIRS))):
        wanted = after[at][rank]
        assert np.array_equal(results[rank][at][wanted != PADDING], wanted[wanted != PADDING])
    if staging == 1000:
        assert all(len(mine.sends.chunks) == 2 for mine in together)


def test_without_room_nothing_is_joined() -> None:
    moves = [plan_direct(*PAIRS[0], 0, NODES, 8, 0).messages] * 2
    assert all(len(chunk.parts) == 1 for chunk in merge_messages(moves, 0, 8, 0, 3).sends.chunks)


# ---- Datatypes of messages: what MPI packs with them is what `Chunk.pack` packs, for tiles of any order


BLOCKS_DATATYPES = [
    Block(32, 0, (Axis(3, 60, 30), Axis(4, 1, 1))),
    Block(18, 0, (Axis(2, 3, 1), Axis(2, 6, 6), Axis(7, 30, 30))),
]

SHAPE = (7, 5, 6)


def laid(order: str, dtype: str = "i4") -> np.ndarray:
    content = np.arange(210, dtype=dtype).reshape(SHAPE)
    if order == "strided":
        return np.repeat(np.repeat(content, 2, 0), 3, 2)[::2, :, ::3]
    return np.array(content, order=order)


@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("cap", [9, 100])
def test_mpi_packs_what_a_chunk_packs(order: str, cap: int):
    tile, side = laid(order), Side(pack_chunks(0, BLOCKS_DATATYPES, cap, "src"))
    for number, chunk in enumerate(side.chunks):
        wanted = np.zeros(chunk.elements, tile.dtype)
        copy_views(chunk.packing(tile, wanted))
        packed, unpacked = np.zeros_like(wanted), np.zeros_like(tile)
        datatype = side.datatype(number, tile)
        MPI.COMM_SELF.Sendrecv([memory_of(tile), 1, datatype], 0, recvbuf=[packed, MPI.BYTE], source=0)
        assert np.array_equal(packed, wanted)
        if unpacked.strides == tile.strides:
            MPI.COMM_SELF.Sendrecv([packed, MPI.BYTE], 0, recvbuf=[memory_of(unpacked), 1, datatype], source=0)
            assert np.array_equal(unpacked[unpacked != 0], tile[unpacked != 0])
            assert np.count_nonzero(unpacked) == np.count_nonzero(wanted)


def test_types_are_made_once_for_tiles_of_the_same_strides():
    side = Side(pack_chunks(0, BLOCKS_DATATYPES[:1], 100, "src"))
    made = side.datatype(0, laid("C"))
    assert side.datatype(0, laid("C")) is made
    assert side.datatype(0, laid("F")) is not made


def test_mpi_never_sees_other_strides_than_those_of_slices_and_transpositions():
    """Tiles that are reversed, broadcast or overlap themselves are packed, even without room; single runs are sent."""
    tile, whole = laid("C"), list(pack_chunks(0, BLOCKS_DATATYPES[1:], 100, "src"))
    row = list(pack_chunks(0, [Block(32, 0, (Axis(4, 1, 1),))], 100, "src"))
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(216, dtype="i4"), 6)[: 7 * 5].reshape(7, 5, 6)[:]
    windows = np.lib.stride_tricks.as_strided(windows, SHAPE, (20, 4, 4))
    for other in (tile[::-1], tile[:, ::-1], np.broadcast_to(tile[:1], SHAPE), np.broadcast_to(tile[..., :1], SHAPE)):
        assert Side(whole).unstaged(0, other, 0) is None
    assert Side(whole).unstaged(0, windows, 0) is None
    assert Side(row).unstaged(0, tile[::-1], 0) is not None
    side = Side(whole)
    for other in (tile, laid("F"), tile[::-1], laid("strided")):  # Each is judged by its own strides.
        assert (side.unstaged(0, other, 0) is None) == (other.strides[0] < 0)


@pytest.mark.parametrize("order", ["C", "F", "strided"])
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
    rows = list(pack_chunks(0, [Block(0, 0, (Axis(3, 60, 30), Axis(5, 6, 6), Axis(6, 1, 1)))], 99, "src"))
    beyond = Block(180, 0, (Axis(2, 30, 6), Axis(6, 1, 1)))
    padded = list(pack_chunks(0, [beyond], 99, "src", ((8, 5, 6), SHAPE)))
    for takes, long, wanted in ((True, 120, True), (True, 121, False), (False, 1, False)):
        monkeypatch.setattr(chunks, "TAKES_RUNS", takes)
        monkeypatch.setattr(chunks, "LONG", long)
        assert (Side(rows).unstaged(0, tile, 99) is not None) == wanted
        assert Side(padded).unstaged(0, tile, 0) is None


# ---- Reductions on three ranks against numpy's, see `tests.mpi.modules`; and which MPI can do by itself


def test_the_dtypes_that_mpi_knows():
    assert _operation_for(np.dtype("f4"), "mean") == (MPI.FLOAT, MPI.SUM)
    assert _operation_for(np.dtype("?"), "max")[1] == MPI.LOR
    assert _operation_for(np.dtype("?"), "product")[1] == MPI.LAND
    half, combine = _operation_for(np.dtype("f2"), "sum")
    assert half.Get_size() == 2
    assert combine.Is_commutative()
    assert combine not in (MPI.SUM, MPI.MAX, MPI.MIN, MPI.PROD)


@pytest.mark.parametrize(
    ("scatter", "packed", "placed", "source", "target", "cap", "straight"),
    [
        (False, False, False, "C", "C", 12, True),
        (False, False, False, "F", "C", 12, True),  # it is first copied into the target
        (True, False, False, "F", "C", 12, False),  # but a share is smaller than the source
        (True, False, False, "C", "C", 12, True),
        (False, False, False, "C", "F", 12, False),
        (False, False, False, "C", "C", 11, False),
        (True, True, False, "C", "C", 12, False),
        (True, False, True, "C", "C", 12, False),
    ],
)
def test_when_nothing_is_packed(
    scatter: bool, packed: bool, placed: bool, source: str, target: str, cap: int, straight: bool
):
    step = Reduce((0, 1), "sum", scatter, ((block_of_tile((3, 4)),),), packed, placed)
    tiles = [np.zeros((3, 4), order=order) for order in (source, target)]
    assert is_straight(step, cap, *tiles) == straight
    odd = np.ndarray((3, 4), float, bytearray(97), 1)
    assert not is_straight(step, cap, tiles[0], odd) and not is_straight(step, cap, odd, tiles[1])


# ---- Exchanges inside a tile: on three ranks (`tests.mpi.modules`), and permutations of runs in place


@given(st.permutations(range(7)), st.integers(0, 7), st.integers(1, 3), st.integers(0, 2))
def test_runs_are_permuted_as_if_all_moved_at_once(order: list[int], count: int, run: int, rest: int):
    """Any part of a permutation: cycles, and chains whose first run nobody reads."""
    target, source = np.arange(7)[:count], np.array(order[:count], int)
    buffer = np.arange(7 * run + rest)
    wanted = buffer.copy()
    for to, at in zip(target, source, strict=True):
        wanted[to * run : (to + 1) * run] = np.arange(at * run, (at + 1) * run)
    permute_runs(buffer, RunPermutation(run, target, source))
    assert np.array_equal(buffer, wanted)


def test_the_runs_of_slots_are_as_long_as_they_can_be():
    """Two slots of the columns of a 4 x 6 tile: runs of 3."""
    blocks = [Block(3 * at, 0, (Axis(4, 6, 3), Axis(3, 1, 1))) for at in (1, 0)]
    runs = permutation_of_slots([(0, blocks[0]), (1, blocks[1])], 12)
    assert runs.run == 3
    assert runs.target.tolist() == list(range(8))
    assert runs.source.tolist() == [1, 3, 5, 7, 0, 2, 4, 6]


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4), (5,)])
def test_slots_hold_their_blocks(shape: tuple[int, ...]):
    tile = np.arange(int(np.prod(shape)))
    whole = block_of_tile(shape)
    buffer = tile.copy()
    permute_runs(buffer, permutation_of_slots([(0, whole._replace(axes=whole.axes[::-1]))], tile.size))
    assert np.array_equal(buffer, tile.reshape(shape).transpose().reshape(-1))


def test_no_slots_at_all():
    buffer = np.arange(3)
    permute_runs(buffer, permutation_of_slots([], 1))
    assert buffer.tolist() == [0, 1, 2]
