"""Fetches against the oracle: every target tile is filled, from the nearest holder, and loads are spread."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.lower.to_mpi import Fetch, devices_by_id, is_unreplicated, list_fetches, list_served
from reshard.types import Layout, Mesh
from tests.layouts import pairs
from tests.lower.to_mpi.elements import Tiles, assert_filled, put, taken
from tests.oracle import PADDING, tiles_of


def anywhere(one: int, other: int) -> bool:
    return True


@given(pairs(), st.integers(1, 4))
@settings(max_examples=100)
def test_fetches_fill_every_tile_from_the_nearest(pair: tuple[Layout, Layout], nodes: int):
    source, target = pair
    size, source_tiles = source.mesh.size, tiles_of(source)
    filled: Tiles = {}

    def near(one: int, other: int) -> bool:
        return one * nodes // size == other * nodes // size

    for rank, device in enumerate(devices_by_id(target.mesh)):
        tile = np.full(target.tile_shape, PADDING)
        fetched = list_fetches(source, target, rank, near)
        for fetch in fetched:
            for block in fetch.blocks:
                put(tile, (block,), taken(source_tiles[devices_by_id(source.mesh)[fetch.rank]], (block,)))
        filled[device] = tile
        assert_nearest(source, rank, fetched, near)
    assert_filled(target, filled)


def assert_nearest(source: Layout, rank: int, fetched: list[Fetch], near) -> None:
    """Nothing comes from another node, or rank, that this one's has as well."""
    tiles = tiles_of(source)
    for fetch in fetched:
        tile = tiles[devices_by_id(source.mesh)[fetch.rank]]
        same = [r for r, d in enumerate(devices_by_id(source.mesh)) if np.array_equal(tiles[d], tile)]
        assert fetch.rank == rank or rank not in same
        assert near(fetch.rank, rank) or not any(near(other, rank) for other in same)


@given(pairs(), st.integers(1, 4))
@settings(max_examples=100)
def test_what_a_rank_serves_is_what_all_fetch_from_it(pair: tuple[Layout, Layout], nodes: int):
    source, target = pair
    size = source.mesh.size

    def near(one: int, other: int) -> bool:
        return one * nodes // size == other * nodes // size

    fetched = {rank: {f.rank: f.blocks for f in list_fetches(source, target, rank, near)} for rank in range(size)}
    for rank in range(size):
        given = list_served(source, target, rank, near)
        assert {f.rank: f.blocks for f in given} == {to: by[rank] for to, by in fetched.items() if rank in by}
        assert [f.rank for f in given] == sorted((f.rank for f in given), key=lambda to: (to < rank, to))


@pytest.mark.parametrize("mesh", [Mesh(x=3, y=2), Mesh({"x": 3, "y": 2}, device_ids=[5, 4, 1, 0, 3, 2])], ids=repr)
def test_a_rank_serves_those_with_its_summand_only(mesh: Mesh):
    source, target = Layout.parse("f32[{x}3/7] + sum{y}", mesh), Layout.parse("f32[7] + sum{y}", mesh)
    for rank in range(6):
        wanted = [to for to in range(6) for f in list_fetches(source, target, to, anywhere) if f.rank == rank]
        assert sorted(f.rank for f in list_served(source, target, rank, anywhere)) == sorted(wanted)
        assert len(wanted) == 3


def test_each_rank_begins_with_itself_and_goes_on_with_the_next():
    mesh = Mesh(x=5)
    source, target = Layout.parse("f32[{x}5, 10]", mesh), Layout.parse("f32[25, {x}2]", mesh)
    for rank in range(5):
        assert [fetch.rank for fetch in list_fetches(source, target, rank, anywhere)] == [
            (rank + k) % 5 for k in range(5)
        ]


def test_holders_of_the_same_tile_share_the_load():
    """Three ranks hold each half, and three others lack it: every holder serves one of them."""
    mesh = Mesh(x=2, y=3)
    source, target = Layout.parse("f32[{x}6]", mesh), Layout.parse("f32[12]", mesh)
    served = Counter(
        fetch.rank for rank in range(6) for fetch in list_fetches(source, target, rank, anywhere) if fetch.rank != rank
    )
    assert served == dict.fromkeys(range(6), 1)


@pytest.mark.parametrize("number", range(3))
def test_tiles_of_a_mesh_of_another_size(number: int):
    """One rank that saved everything, three that load it: each of them reads its own part."""
    alone, three = Layout.parse("f32[7]", Mesh()), Layout.parse("f32[{x}3/7]", Mesh(x=3))
    (fetch,) = list_fetches(alone, three, 0, anywhere, number)
    tile = np.full(3, PADDING)
    for block in fetch.blocks:
        put(tile, (block,), taken(np.arange(7), (block,)))
    assert np.array_equal(tile, tiles_of(three)[number])


def test_replicas_on_one_axis_of_two():
    mesh = Mesh(x=2, y=3)
    texts = {"f32[{x}3, {y}2]": True, "f32[{x}3, 6]": False, "f32[6, 6]": False, "f32[{x}3, 6] + sum{y}": True}
    assert {text: is_unreplicated(Layout.parse(text, mesh)) for text in texts} == texts


def test_ranks_follow_device_ids():
    assert devices_by_id(Mesh({"x": 3}, device_ids=[7, 2, 5])) == (2, 5, 7)
    assert devices_by_id(Mesh(x=2, y=2)) == (0, 1, 2, 3)
