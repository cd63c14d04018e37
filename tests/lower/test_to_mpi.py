"""Schedules and fetches without MPI: all ranks in one process, element by element, against the oracle."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.errors import PlanError
from reshard.lower.to_mpi import Axis, Block, Fetch, StepMessages, PeerBlocks, fetches, ranks, schedule
from reshard.lower.to_mpi.blocks import cut, fold, inside, whole_tile
from reshard.types import Layout, Mesh
from tests.layouts import pairs
from tests.oracle import PADDING, tiles_of

Tiles = dict[int, np.ndarray]


def places(block: Block, end: str) -> list[tuple[int, ...]]:
    """The local indices of a block's elements, in order."""
    start = block.src if end == "src" else block.dst
    found = []
    for index in itertools.product(*(range(axis.extent) for axis in block.axes)):
        at = list(start)
        for axis, i in zip(block.axes, index, strict=True):
            at[axis.dim] += i * (axis.src if end == "src" else axis.dst)
        found.append(tuple(at))
    return found


def taken(tile: np.ndarray, blocks: tuple[Block, ...]) -> list[int]:
    """A message: padding beyond the tile is sent along as anything."""
    within = [at for block in blocks for at in places(block, "src")]
    return [int(tile[at]) if all(map(int.__lt__, at, tile.shape)) else PADDING for at in within]


def put(tile: np.ndarray, blocks: tuple[Block, ...], message: list[int]) -> None:
    within = [at for block in blocks for at in places(block, "dst")]
    for at, value in zip(within, message, strict=True):
        if all(map(int.__lt__, at, tile.shape)):
            tile[at] = value


def step_of(tiles: Tiles, moves: dict[int, StepMessages], shape: tuple[int, ...]) -> Tiles:
    """One step on all devices: turn by turn, what is sent in order is what is received in order."""
    found = {device: np.full(shape, PADDING) for device in tiles}
    wire: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for device, move in moves.items():
        for block in move.local:
            put(found[device], (block,), taken(tiles[device], (block,)))
        for turn in move.turns:
            if turn.send:
                wire[device, turn.send.peer].append(taken(tiles[device], turn.send.blocks))
    for device, move in moves.items():
        for received in (turn.receive for turn in move.turns if turn.receive):
            put(found[device], received.blocks, wire[received.peer, device].pop(0))
    assert not any(wire.values()), "messages that nobody receives"
    return found


def assert_filled(layout: Layout, tiles: Tiles) -> None:
    for device, wanted in tiles_of(layout).items():
        real = wanted != PADDING
        assert np.array_equal(tiles[device][real], wanted[real]), f"device {device} of {layout}"


@given(pairs(most_rank=2), st.booleans())
@settings(max_examples=60)
def test_a_schedule_moves_every_element(pair: tuple[Layout, Layout], tight: bool):
    source, target = pair
    plan = rs.plan(source, target, budget=source.tile_bytes + target.tile_bytes if tight and source.even else None)
    schedules = {device: schedule(plan, device) for device in source.mesh.devices}
    tiles = tiles_of(source)
    for at, _ in enumerate(plan.steps):
        moves = {device: found.steps[at] for device, found in schedules.items()}
        tiles = step_of(tiles, moves, plan.steps[at].result.tile_shape)
    assert_filled(target, tiles)


@given(pairs(), st.integers(1, 4))
@settings(max_examples=100)
def test_fetches_fill_every_tile_from_the_nearest(pair: tuple[Layout, Layout], nodes: int):
    source, target = pair
    size, given_tiles = source.mesh.size, tiles_of(source)
    found: Tiles = {}

    def near(one: int, other: int) -> bool:
        return one * nodes // size == other * nodes // size

    for rank, device in enumerate(ranks(target.mesh)):
        tile = np.full(target.tile_shape, PADDING)
        asked = fetches(source, target, rank, near)
        for fetch in asked:
            for block in fetch.blocks:
                put(tile, (block,), taken(given_tiles[ranks(source.mesh)[fetch.rank]], (block,)))
        found[device] = tile
        assert_nearest(source, rank, asked, near)
    assert_filled(target, found)


def assert_nearest(source: Layout, rank: int, asked: list[Fetch], near) -> None:
    """Nothing comes from another node, or rank, that this one's has as well."""
    tiles = tiles_of(source)
    for fetch in asked:
        tile = tiles[ranks(source.mesh)[fetch.rank]]
        same = [r for r, d in enumerate(ranks(source.mesh)) if np.array_equal(tiles[d], tile)]
        assert fetch.rank == rank or rank not in same
        assert near(fetch.rank, rank) or not any(near(other, rank) for other in same)


def test_no_turn_waits_for_a_later_one():
    """In the k-th turn of a group everybody sends to one and receives from one, who do the same then."""
    mesh = Mesh(x=4)
    plan = rs.plan(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh))
    turns = {device: schedule(plan, device).steps[0].turns for device in mesh.devices}
    for k in range(3):
        for device in mesh.devices:
            send = turns[device][k].send
            assert isinstance(send, PeerBlocks)
            assert turns[send.peer][k].receive.peer == device


def test_blocks_are_cut_and_folded_in_order():
    block = Block((0, 1), (2, 0), (Axis(0, 3, 2, 1), Axis(1, 4, 1, 3)))
    for cap in (1, 3, 4, 5, 12, 20):
        parts = list(cut(block, cap))
        assert all(part.elements <= cap for part in parts)
        for end in ("src", "dst"):
            assert [at for part in parts for at in places(part, end)] == places(block, end)
            assert [at for part in fold(parts) for at in places(part, end)] == places(block, end)
    assert len(fold(cut(block, 4))) == 1


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 20))
def test_what_lies_inside_is_all_but_padding(outer: int, inner: int, step: int, size: int):
    block = Block((1,), (0,), (Axis(0, outer, step * inner, 1), Axis(0, inner, 1, 1)))
    found = [at for spans in inside(block, "src", (size,)) for at in places(block.part(spans), "src")]
    assert found == [at for at in places(block, "src") if at[0] < size]


def test_a_whole_tile():
    assert places(whole_tile((2, 3)), "src") == list(np.ndindex(2, 3))


def test_only_checked_plans_are_lowered():
    with pytest.raises(PlanError, match="checked Plan"):
        schedule("f32[4]", 0)
