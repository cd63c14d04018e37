"""Messages between ranks: how blocks are cut, joined, packed by MPI, reduced, and permuted in place."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

import reshard as rs
from reshard.lower.to_mpi import Axis, Block, Reduce, StepMessages, schedule_device
from reshard.lower.to_mpi.blocks import whole_tile
from reshard.runtime.on_mpi.copies.stream_copy import copy_views
from reshard.runtime.on_mpi.direct import plan_direct
from reshard.runtime.on_mpi.wire import datatypes
from reshard.runtime.on_mpi.wire import messages as messages_module
from reshard.runtime.on_mpi.wire.by_node import table_bytes
from reshard.runtime.on_mpi.wire.chunks import Region, pack_chunks, pairs_of_block, region_of_block
from reshard.runtime.on_mpi.wire.datatypes import Datatypes, memory_of
from reshard.runtime.on_mpi.wire.messages import (
    join_messages,
    mean_run,
    message_cap,
    messages_between,
    messages_of_step,
)
from reshard.runtime.on_mpi.wire.overwrite import _permutation_of_slots, _permute_runs, _RunPermutation
from reshard.runtime.on_mpi.wire.reduction import _operation_for, is_straight
from reshard.types import Layout, Mesh
from tests.layouts import pairs
from tests.lower.to_mpi.elements import places
from tests.oracle import PADDING, tiles_of

# ---- Messages out of blocks, packed and unpacked, against the blocks' elements one by one


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
    for chunk in pack_chunks(3, BLOCKS, cap, "src", shape):
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
    for chunk in pack_chunks(0, BLOCKS, cap, "dst", shape):
        chunk.unpack(tile, np.arange(at, at + chunk.elements))
        at += chunk.elements
    assert np.array_equal(tile, wanted)


def test_as_many_blocks_as_fit_share_a_message():
    small = [Block((at,), (at,), (Axis(0, 2, 1, 1),)) for at in (0, 2, 4, 6, 8)]
    assert [chunk.elements for chunk in pack_chunks(0, small, 5, "src", (10,))] == [4, 4, 2]


def test_a_message_that_lies_in_one_run_is_sent_from_the_tile():
    tile = np.arange(24).reshape(6, 4)
    (rows,) = pack_chunks(0, [Block((2, 0), (0, 0), (Axis(0, 3, 1, 1), Axis(1, 4, 1, 1)))], 99, "src", tile.shape)
    lies = rows.direct(tile)
    assert lies is not None
    assert np.shares_memory(lies, tile)
    assert np.array_equal(lies, np.arange(8, 20))
    (column,) = pack_chunks(0, [Block((0, 1), (0, 0), (Axis(0, 3, 1, 1),))], 99, "src", tile.shape)
    assert column.direct(tile) is None
    (padded,) = pack_chunks(0, [Block((4, 0), (0, 0), (Axis(0, 3, 1, 1), Axis(1, 4, 1, 1)))], 99, "src", tile.shape)
    assert padded.padded
    assert padded.direct(tile) is None


@given(st.sampled_from(BLOCKS), st.sampled_from(SHAPES), st.sampled_from(SHAPES))
def test_copies_from_tile_to_tile_leave_padding_alone(block: Block, before: tuple[int, int], after: tuple[int, int]):
    source, target = np.arange(1, 1 + before[0] * before[1]).reshape(before), np.zeros(after, int)
    wanted = target.copy()
    for src, dst in zip(places(block, "src"), places(block, "dst"), strict=True):
        if all(map(int.__lt__, src, before)) and all(map(int.__lt__, dst, after)):
            wanted[dst] = source[src]
    for one, other in pairs_of_block(block, before, after):
        other.of(target)[...] = one.of(source)
    assert np.array_equal(target, wanted)


def test_a_part_of_a_region():
    tile = np.arange(60).reshape(6, 10)
    whole = Region((1, 2), ((0, 2), (1, 3)), (2, 3))
    assert np.array_equal(whole.part([(1, 1), (1, 2)]).of(tile), whole.of(tile)[1:2, 1:3])
    assert np.array_equal(
        region_of_block(BLOCKS[0], "src").of(tile).reshape(-1), [tile[at] for at in places(BLOCKS[0], "src")]
    )


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
            mine = each.steps[at].__class__(each.steps[at].local, each.steps[at].turns, scratch)
            cut = messages_of_step(mine, ranks, shapes[at], shapes[at + 1], 4, step.received_bytes)
            for chunk in cut.sends.chunks:
                sent[device, chunk.peer].append(chunk.elements)
            for chunk in cut.receives.chunks:
                received[chunk.peer, device].append(chunk.elements)
        assert sent == received


ROW = Block((0,), (0,), (Axis(0, 1 << 18, 1, 1),))


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
    cut = messages_between([(1, [ROW])], [(2, [ROW])], (), (1 << 18,), (1 << 18,), 4, staging)
    for side in (cut.sends, cut.receives):
        sizes = [chunk.elements for chunk in side.chunks]
        assert (len(sizes), max(sizes), sum(sizes)) == (count, largest, 1 << 18)


def test_unstaged_messages_stay_below_what_mpi_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(messages_module, "DIRECT", 1 << 16)
    cut = messages_between([(1, [ROW])], [], (), (1 << 18,), (1 << 18,), 4, 0)
    assert {chunk.elements for chunk in cut.sends.chunks} == {1 << 14}


def test_all_that_is_received_is_held_if_there_is_room():
    mesh = Mesh(x=3)
    plan = rs.plan(Layout.parse("f32[{x}3, 9]", mesh), Layout.parse("f32[9, {x}3]", mesh))
    step = schedule_device(plan, 0).steps[0]
    ranks = dict.fromkeys(range(3), 0)
    for scratch, held in ((2 * 72, True), (2 * 71, False), (0, False)):
        mine = StepMessages(step.local, step.turns, scratch)
        assert messages_of_step(mine, ranks, (3, 9), (9, 3), 4, 72).held == held


@pytest.mark.parametrize("shapes", [((6, 8), None), (None, (5, 12)), ((6, 8), (5, 12))])
def test_the_mean_run_is_that_of_the_addresses(shapes):
    """Neighbours in the order of a block are in one run if their addresses follow one another at both ends."""
    block = Block((1, 0), (0, 2), (Axis(0, 3, 1, 1), Axis(1, 8, 1, 1)))
    ends = [
        [at[0] * shape[1] + at[1] for at in places(block, end)]
        for end, shape in zip(("src", "dst"), shapes, strict=True)
        if shape
    ]
    breaks = sum(
        any(after[k] != before[k] + 1 for k in range(len(ends)))
        for before, after in itertools.pairwise(zip(*ends, strict=True))
    )
    assert mean_run([block], *shapes) == block.elements / (1 + breaks)
    assert mean_run([], *shapes) == 0


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
        join_messages([move.messages for move in moves], staging, 8, rank, 3) for rank, moves in enumerate(each)
    ]
    before, after = ([tiles_of(pair[end]) for pair in PAIRS] for end in (0, 1))
    results = [[np.full_like(of[rank], PADDING) for of in after] for rank in NODES]
    wire: dict[tuple[int, int], list[np.ndarray]] = {}
    for rank, mine in enumerate(together):
        for number, chunk in enumerate(mine.sends.chunks):
            buffer = np.zeros(chunk.elements, np.int64)
            copy_views(list(mine.sends.packing(number, [of[rank] for of in before], buffer)))
            wire.setdefault((rank, chunk.peer), []).append(buffer)
    for rank, mine in enumerate(together):
        for move, result, of in zip(each[rank], results[rank], before, strict=True):
            for source, into in move.own:
                into.of(result)[...] = source.of(of[rank])
        for number, chunk in enumerate(mine.receives.chunks):
            buffer = wire[chunk.peer, rank].pop(0)
            assert buffer.size == chunk.elements <= message_cap(staging, 8)
            copy_views(list(mine.receives.unpacking(number, results[rank], buffer)))
    assert not any(wire.values())
    for rank, at in itertools.product(NODES, range(len(PAIRS))):
        wanted = after[at][rank]
        assert np.array_equal(results[rank][at][wanted != PADDING], wanted[wanted != PADDING])
    if staging == 1000:
        assert all(len(mine.sends.chunks) == 2 for mine in together)


def test_without_room_nothing_is_joined() -> None:
    moves = [plan_direct(*PAIRS[0], 0, NODES, 8, 0).messages] * 2
    assert all(len(chunk.parts) == 1 for chunk in join_messages(moves, 0, 8, 0, 3).sends.chunks)


# ---- Datatypes of messages: what MPI packs with them is what `Chunk.pack` packs, for tiles of any order


BLOCKS_DATATYPES = [
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
    for number, chunk in enumerate(pack_chunks(0, BLOCKS_DATATYPES, cap, "src", SHAPE)):
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
    (chunk,) = pack_chunks(0, BLOCKS_DATATYPES[:1], 100, "src", SHAPE)
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
    (rows,) = pack_chunks(
        0, [Block((0, 0, 0), (0, 0, 0), (Axis(0, 3, 2, 1), Axis(1, 5, 1, 1), Axis(2, 6, 1, 1)))], 99, "src", SHAPE
    )
    (padded,) = pack_chunks(0, [Block((6, 0, 0), (0, 0, 0), (Axis(0, 2, 1, 1), Axis(2, 6, 1, 1)))], 99, "src", SHAPE)
    for takes, long, wanted in ((True, 120, True), (True, 121, False), (False, 1, False)):
        monkeypatch.setattr(datatypes, "TAKES_RUNS", takes)
        monkeypatch.setattr(datatypes, "LONG", long)
        assert Datatypes().long(0, rows, tile) == wanted
        assert not Datatypes().long(0, padded, tile)


# ---- Messages joined by node, on pretended nodes, against the oracle (see `tests.mpi.by_node`)


def test_a_rank_tells_its_node_what_goes_to_each_rank_and_comes_from_each_node():
    assert table_bytes((0, 0, 1, 1)) == 6 * 8


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
    step = Reduce((0, 1), "sum", scatter, ((whole_tile((3, 4)),),), packed, placed)
    tiles = [np.zeros((3, 4), order=order) for order in (source, target)]
    assert is_straight(step, cap, *tiles) == straight


# ---- Exchanges inside a tile: on three ranks (`tests.mpi.modules`), and permutations of runs in place


@given(st.permutations(range(7)), st.integers(0, 7), st.integers(1, 3), st.integers(0, 2))
def test_runs_are_permuted_as_if_all_moved_at_once(order: list[int], count: int, run: int, rest: int):
    """Any part of a permutation: cycles, and chains whose first run nobody reads."""
    target, source = np.arange(7)[:count], np.array(order[:count], int)
    buffer = np.arange(7 * run + rest)
    wanted = buffer.copy()
    for to, at in zip(target, source, strict=True):
        wanted[to * run : (to + 1) * run] = np.arange(at * run, (at + 1) * run)
    _permute_runs(buffer, _RunPermutation(run, target, source))
    assert np.array_equal(buffer, wanted)


def test_the_runs_of_slots_are_as_long_as_they_can_be():
    """Two slots of the columns of a 4 x 6 tile: runs of 3."""
    blocks = [Block((0, 3 * at), (0, 3 * at), (Axis(0, 4, 1, 1), Axis(1, 3, 1, 1))) for at in (1, 0)]
    runs = _permutation_of_slots([(0, blocks[0]), (1, blocks[1])], 12, (4, 6))
    assert runs.run == 3
    assert runs.target.tolist() == list(range(8))
    assert runs.source.tolist() == [1, 3, 5, 7, 0, 2, 4, 6]


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4), (5,)])
def test_slots_hold_their_blocks(shape: tuple[int, ...]):
    tile = np.arange(int(np.prod(shape)))
    whole = Block((0,) * len(shape), (0,) * len(shape), tuple(Axis(d, n, 1, 1) for d, n in enumerate(shape))[::-1])
    buffer = tile.copy()
    _permute_runs(buffer, _permutation_of_slots([(0, whole)], tile.size, shape))
    assert np.array_equal(buffer, tile.reshape(shape).transpose().reshape(-1))


def test_no_slots_at_all():
    buffer = np.arange(3)
    _permute_runs(buffer, _permutation_of_slots([], 1, (3,)))
    assert buffer.tolist() == [0, 1, 2]
