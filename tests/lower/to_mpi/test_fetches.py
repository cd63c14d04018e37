"""Fetches against the oracle: every target tile is filled, from the nearest holder, and loads are spread."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.lower.to_mpi import (
    FIRST,
    SECOND,
    Fetches,
    devices_by_id,
    is_unreplicated,
    list_fetches,
    list_in_form,
    list_served,
)
from reshard.types import Layout, Mesh
from tests.layouts import SIZES, pairs, random_layout
from tests.lower.to_mpi.elements import Tiles, assert_filled, put, taken
from tests.oracle import PADDING, tiles_of
from tests.view_oracle import cut, random_case


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
        for giver, blocks in fetched.items():
            put(tile, blocks, taken(source_tiles[devices_by_id(source.mesh)[giver]], blocks))
        filled[device] = tile
        assert_nearest(source, rank, fetched, near)
    assert_filled(target, filled)


def assert_nearest(source: Layout, rank: int, fetched: Fetches, near) -> None:
    """Nothing comes from another node, or rank, that this one's has as well."""
    tiles = tiles_of(source)
    for giver in fetched:
        tile = tiles[devices_by_id(source.mesh)[giver]]
        same = [r for r, d in enumerate(devices_by_id(source.mesh)) if np.array_equal(tiles[d], tile)]
        assert giver == rank or rank not in same
        assert near(giver, rank) or not any(near(other, rank) for other in same)


@given(pairs(), st.integers(1, 4))
@settings(max_examples=100)
def test_what_a_rank_serves_is_what_all_fetch_from_it(pair: tuple[Layout, Layout], nodes: int):
    source, target = pair
    size = source.mesh.size

    def near(one: int, other: int) -> bool:
        return one * nodes // size == other * nodes // size

    fetched = {rank: list_fetches(source, target, rank, near) for rank in range(size)}
    for rank in range(size):
        given = list_served(source, target, rank, near)
        assert given == {to: by[rank] for to, by in fetched.items() if rank in by}
        assert list(given) == sorted(given, key=lambda to: (to < rank, to))


@pytest.mark.parametrize("mesh", [Mesh(x=3, y=2), Mesh({"x": 3, "y": 2}, device_ids=[5, 4, 1, 0, 3, 2])], ids=repr)
def test_a_rank_serves_those_with_its_summand_only(mesh: Mesh):
    source, target = Layout.parse("f32[{x}3/7] + sum{y}", mesh), Layout.parse("f32[7] + sum{y}", mesh)
    for rank in range(6):
        wanted = [to for to in range(6) if rank in list_fetches(source, target, to, anywhere)]
        assert sorted(list_served(source, target, rank, anywhere)) == wanted
        assert len(wanted) == 3


def test_each_rank_begins_with_itself_and_goes_on_with_the_next():
    mesh = Mesh(x=5)
    source, target = Layout.parse("f32[{x}5, 10]", mesh), Layout.parse("f32[25, {x}2]", mesh)
    for rank in range(5):
        assert list(list_fetches(source, target, rank, anywhere)) == [(rank + k) % 5 for k in range(5)]


def test_holders_of_the_same_tile_share_the_load():
    """Three ranks hold each half, and three others lack it: every holder serves one of them."""
    mesh = Mesh(x=2, y=3)
    source, target = Layout.parse("f32[{x}6]", mesh), Layout.parse("f32[12]", mesh)
    served = Counter(
        giver for rank in range(6) for giver in list_fetches(source, target, rank, anywhere) if giver != rank
    )
    assert served == dict.fromkeys(range(6), 1)


@pytest.mark.parametrize("number", range(3))
def test_tiles_of_a_mesh_of_another_size(number: int):
    """One rank that saved everything, three that load it: each of them reads its own part."""
    alone, three = Layout.parse("f32[7]", Mesh()), Layout.parse("f32[{x}3/7]", Mesh(x=3))
    (blocks,) = list_fetches(alone, three, 0, anywhere, number).values()
    tile = np.full(3, PADDING)
    put(tile, blocks, taken(np.arange(7), blocks))
    assert np.array_equal(tile, tiles_of(three)[number])


def test_replicas_on_one_axis_of_two():
    mesh = Mesh(x=2, y=3)
    texts = {"f32[{x}3, {y}2]": True, "f32[{x}3, 6]": False, "f32[6, 6]": False, "f32[{x}3, 6] + sum{y}": True}
    assert {text: is_unreplicated(Layout.parse(text, mesh)) for text in texts} == texts


@pytest.mark.parametrize("seed", range(12))
def test_both_turns_of_a_relay(seed: int) -> None:
    choose = random.Random(seed)
    shape = [choose.choice(SIZES) for _ in range(choose.randint(1, 2))]
    one, other = (Mesh({"x": n}, device_ids=choose.sample(range(8), n)) for n in (choose.randint(1, 4), 5))
    source, target = random_layout(choose, one, shape, "int64"), random_layout(choose, other, shape, "int64")
    held, filled = tiles_of(source), {device: np.full(target.tile_shape, PADDING) for device in other.devices}
    for form in (FIRST, SECOND):
        before = held if form == FIRST else {device: tile.copy() for device, tile in filled.items()}
        for device in other.devices:
            for giver, blocks in list_in_form(source, target, form, device, given=False).items():
                put(filled[device], blocks, taken(before[giver], blocks))
    assert_filled(target, filled)


@pytest.mark.parametrize("seed", range(12))
def test_fetches_through_views(seed: int) -> None:
    case = random_case(random.Random(seed), parts=False, most=60)
    source, target, view = case.move.source, case.move.target, case.move.view
    index = np.arange(int(np.prod(source.shape))).reshape(source.shape)
    held, wanted = cut(source, index), cut(target, case.reference(index))
    for device in target.mesh.devices:
        filled = np.full(target.tile_shape, PADDING)
        for giver, blocks in list_in_form(source, target, view, device, given=False).items():
            assert list_in_form(source, target, view, giver, given=True)[device] == blocks
            put(filled, blocks, taken(held[giver], blocks))
        assert np.array_equal(filled, wanted[device])
