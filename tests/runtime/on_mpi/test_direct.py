"""Direct moves without MPI: the tiles of all ranks in one process, pulled, pushed, packed, or sent in messages."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.lower.to_mpi import ranks, unreplicated
from reshard.runtime.on_mpi.copies.strided_copy import raw
from reshard.runtime.on_mpi.direct import direct, node_packing, pack, pulling, pushes, pushing, run_bytes, unpacking
from reshard.types import Layout, Mesh
from tests.layouts import pairs
from tests.oracle import PADDING, tiles_of

NO_CALL = cast(Any, None)


def nodes_of(size: int, nodes: int) -> tuple[int, ...]:
    return tuple(rank * nodes // size for rank in range(size))


def by_rank(layout: Layout) -> list[np.ndarray]:
    tiles = tiles_of(layout)
    return [tiles[device].copy() for device in ranks(layout.mesh)]


def assert_filled(layout: Layout, tiles: list[np.ndarray]) -> None:
    for rank, wanted in enumerate(by_rank(layout)):
        real = wanted != PADDING
        assert np.array_equal(tiles[rank][real], wanted[real]), f"rank {rank} of {layout}"


def moves(source: Layout, target: Layout, nodes: tuple[int, ...]) -> list:
    return [direct(source, target, rank, nodes, 8, 1 << 20) for rank in range(len(nodes))]


def exchange(all_moves: list, before: list[np.ndarray], after: list[np.ndarray]) -> None:
    """All messages between nodes, by way of a buffer."""
    wire: dict[tuple[int, int], list[np.ndarray]] = {}
    for rank, move in enumerate(all_moves):
        for chunk in move.messages.sends.chunks:
            buffer = np.zeros(chunk.elements, np.int64)
            chunk.pack(before[rank], buffer)
            wire.setdefault((rank, chunk.peer), []).append(buffer)
    for rank, move in enumerate(all_moves):
        for chunk in move.messages.receives.chunks:
            chunk.unpack(after[rank], wire[chunk.peer, rank].pop(0))
    assert not any(wire.values()), "messages that nobody receives"


@given(pairs(), st.integers(1, 4), st.sampled_from(["pull", "push", "pack"]))
@settings(max_examples=90)
def test_every_target_is_filled(pair: tuple[Layout, Layout], count: int, way: str):
    source, target = pair
    nodes = nodes_of(source.mesh.size, count)
    if way == "pack" and not unreplicated(target):
        way = "pull"
    before = by_rank(source)
    after = [np.full(target.tile_shape, PADDING) for _ in nodes]
    every = moves(source, target, nodes)
    packed = {rank: packed_of(source, target, rank, nodes, before[rank]) for rank in range(len(nodes)) if way == "pack"}
    for rank, move in enumerate(every):
        if way == "push":
            fill = pushing(pushes(source, target, rank, nodes, 8), dict(enumerate(after)))
        elif way == "pack":
            fill = unpacking({giver: packed[giver][rank] for giver, _ in move.pulls})
        else:
            fill = pulling(dict(enumerate(before)))
        for step in fill(NO_CALL, move, raw(before[rank]), raw(after[rank])):
            step()
    exchange(every, before, after)
    assert_filled(target, after)


def packed_of(source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], tile: np.ndarray) -> dict:
    """What a rank packed, from the start of each receiver's part on; the whole is no larger than its tile."""
    packing = node_packing(source, target, rank, nodes, 8)
    packed = np.full(tile.size, PADDING)
    pack(packing, raw(tile), raw(packed))
    return {to: packed[start:] for to, start in packing.starts.items()}


def test_ranks_of_other_nodes_are_never_pulled_from():
    mesh = Mesh(x=6)
    source, target = Layout.parse("f32[{x}2, 12]", mesh), Layout.parse("f32[12, {x}2]", mesh)
    nodes = nodes_of(6, 2)
    for rank, move in enumerate(moves(source, target, nodes)):
        assert {nodes[giver] for giver, _ in move.pulls} == {nodes[rank]}
        assert {nodes[chunk.peer] for chunk in move.messages.receives.chunks} == {1 - nodes[rank]}
        assert move.pulled == 2 * 4
        assert sum(chunk.elements for chunk in move.messages.receives.chunks) == 3 * 4


def test_pushing_is_preferred_if_the_runs_are_shorter_in_the_source():
    """Columns to everything: runs are long in the source and short in the result, and the other way round."""
    mesh = Mesh(x=4)
    columns, everything = Layout.parse("f32[64, {x}16]", mesh), Layout.parse("f32[64, 64]", mesh)
    gather = run_bytes(columns, everything, 0, 4, 4)
    assert (gather.reach, gather.landing, gather.run) == (64 * 16 * 4, 64, 64)
    assert not gather.prefers_push
    halves = run_bytes(Layout.parse("f32[64, {x}16]", mesh), Layout.parse("f32[{x}16, 64]", mesh), 0, 4, 4)
    assert (halves.reach, halves.landing) == (16 * 16 * 4, 64)
    back = run_bytes(Layout.parse("f32[{x}16, 64]", mesh), Layout.parse("f32[64, {x}16]", mesh), 0, 4, 4)
    assert (back.reach, back.landing) == (64, 16 * 16 * 4)
    assert back.prefers_push
