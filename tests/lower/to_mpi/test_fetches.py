"""Fetches against the oracle: every tile is filled, from the nearest holder, and loads are spread."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.geometry.blocks import Block
from reshard.geometry.figures import count_sent_across
from reshard.geometry.holders import count_lacked
from reshard.lower.to_mpi import (
    FIRST,
    SECOND,
    Fetches,
    MoveForm,
    devices_by_id,
    is_seated,
    is_unreplicated,
    list_across,
    list_fetches,
    list_in_form,
    list_served,
    rank_of_devices,
    ranks_of_seats,
    seat_of,
)
from reshard.types import Layout, Mesh
from tests.layouts import SIZES, pairs, random_layout
from tests.lower.to_mpi.elements import Tiles, assert_filled, put, taken
from tests.oracle import PADDING, tiles_of
from tests.sampling import for_each
from tests.view_oracle import cut, random_case


def split(size: int, nodes: int) -> list[int]:
    """The node of each rank."""
    return [rank * nodes // size for rank in range(size)]


@given(pairs(), st.integers(1, 4))
@settings(max_examples=100)
def test_fetches_fill_every_tile_from_the_nearest(pair: tuple[Layout, Layout], nodes: int):
    source, target = pair
    size, source_tiles = source.mesh.size, tiles_of(source)
    filled: Tiles = {}
    where = split(size, nodes)

    for rank, device in enumerate(devices_by_id(target.mesh)):
        tile = np.full(target.tile_shape, PADDING)
        fetched = list_fetches(source, target, rank, where)
        for giver, blocks in fetched.items():
            put(tile, blocks, taken(source_tiles[devices_by_id(source.mesh)[giver]], blocks))
        filled[device] = tile
        assert_nearest(source, rank, fetched, where)
    assert_filled(target, filled)


def assert_nearest(source: Layout, rank: int, fetched: Fetches, nodes: Sequence[int]) -> None:
    """Nothing comes from another node, or rank, that this one's has as well."""
    tiles = tiles_of(source)
    for giver in fetched:
        tile = tiles[devices_by_id(source.mesh)[giver]]
        same = [r for r, d in enumerate(devices_by_id(source.mesh)) if np.array_equal(tiles[d], tile)]
        assert giver == rank or rank not in same
        assert nodes[giver] == nodes[rank] or not any(nodes[other] == nodes[rank] for other in same)


@given(pairs(), st.integers(1, 4))
@settings(max_examples=100)
def test_what_a_rank_serves_is_what_all_fetch_from_it(pair: tuple[Layout, Layout], nodes: int):
    source, target = pair
    size = source.mesh.size
    where = split(size, nodes)

    fetched = {rank: list_fetches(source, target, rank, where) for rank in range(size)}
    for rank in range(size):
        given = list_served(source, target, rank, where)
        assert given == {to: by[rank] for to, by in fetched.items() if rank in by}
        assert list(given) == sorted(given, key=lambda to: (to < rank, to))


@pytest.mark.parametrize("mesh", [Mesh(x=3, y=2), Mesh({"x": 3, "y": 2}, device_ids=[5, 4, 1, 0, 3, 2])], ids=repr)
def test_a_rank_serves_those_with_its_summand_only(mesh: Mesh):
    source, target = Layout.parse("f32[{x}3/7] + sum{y}", mesh), Layout.parse("f32[7] + sum{y}", mesh)
    for rank in range(6):
        wanted = [to for to in range(6) if rank in list_fetches(source, target, to)]
        assert sorted(list_served(source, target, rank)) == wanted
        assert len(wanted) == 3


def test_holders_of_the_same_tile_share_the_load():
    """Three ranks hold each half, and three others lack it: every holder serves one of them."""
    mesh = Mesh(x=2, y=3)
    source, target = Layout.parse("f32[{x}6]", mesh), Layout.parse("f32[12]", mesh)
    served = Counter(giver for rank in range(6) for giver in list_fetches(source, target, rank) if giver != rank)
    assert served == dict.fromkeys(range(6), 1)


def test_replicas_on_one_axis_of_two():
    mesh = Mesh(x=2, y=3)
    texts = {"f32[{x}3, {y}2]": True, "f32[{x}3, 6]": False, "f32[6, 6]": False, "f32[{x}3, 6] + sum{y}": True}
    assert {text: is_unreplicated(Layout.parse(text, mesh)) for text in texts} == texts


@for_each(range(12))
def test_both_turns_of_a_relay(seed: int) -> None:
    choose = random.Random(seed)
    shape = [choose.choice(SIZES) for _ in range(choose.randint(1, 2))]
    one, other = (Mesh({"x": n}, device_ids=choose.sample(range(8), n)) for n in (choose.randint(1, 4), 5))
    source, target = random_layout(choose, one, shape, "int64"), random_layout(choose, other, shape, "int64")
    held, filled = tiles_of(source), {device: np.full(target.tile_shape, PADDING) for device in other.devices}
    for turn in (FIRST, SECOND):
        before = held if turn == FIRST else {device: tile.copy() for device, tile in filled.items()}
        for device in other.devices:
            for giver, blocks in list_in_form(source, target, MoveForm(turn), device, given=False).items():
                put(filled[device], blocks, taken(before[giver], blocks))
    assert_filled(target, filled)


@for_each(range(12))
def test_fetches_through_views(seed: int) -> None:
    case = random_case(random.Random(seed), parts=False, most=60)
    source, target, view = case.move.source, case.move.target, case.move.view
    index = np.arange(int(np.prod(source.shape))).reshape(source.shape)
    held, wanted = cut(source, index), cut(target, case.reference(index))
    for turns in ((0,), (FIRST, SECOND)):
        filled = {device: np.full(target.tile_shape, PADDING) for device in target.mesh.devices}
        for form in (MoveForm(turn, view) for turn in turns):
            before = {device: tile.copy() for device, tile in filled.items()} if form.turn == SECOND else held
            for device in target.mesh.devices:
                for giver, blocks in list_in_form(source, target, form, device, given=False).items():
                    assert list_in_form(source, target, form, giver, given=True)[device] == blocks
                    put(filled[device], blocks, taken(before[giver], blocks))
        assert all(np.array_equal(filled[device], wanted[device]) for device in filled)


# ---- Fetches between two sets of devices: every element arrives, and holders share what is asked of them as planned


ONE_NODE, HALVES = [0] * 8, [device // 4 for device in range(8)]


def random_ends(choose: random.Random) -> tuple[Layout, Layout]:
    shape = [choose.choice(SIZES) for _ in range(choose.choice([1, 2, 2, 3]))]
    ends: list[Layout] = []
    for _ in range(2):
        count = choose.randint(1, 6)
        axes = {"x": 2, "y": count // 2} if count % 2 == 0 else {"x": count}
        mesh = Mesh(axes, device_ids=choose.sample(range(8), count))
        ends.append(random_layout(choose, mesh, shape, "int32"))
    return ends[0], ends[1]


def elements(blocks: tuple[Block, ...]) -> int:
    return sum(block.elements for block in blocks)


@pytest.mark.fast(20)
@pytest.mark.parametrize("nodes", [ONE_NODE, HALVES], ids=["one node", "two nodes"])
@pytest.mark.parametrize("seed", range(40))
def test_every_element_arrives_once(seed: int, nodes: Sequence[int]):
    source, target = random_ends(random.Random(seed))
    held, wanted = tiles_of(source), tiles_of(target)
    sent: Counter[int] = Counter()
    for device in target.mesh.devices:
        tile = np.full(target.tile_shape, PADDING)
        fetched = list_across(source, target, device, nodes, given=False)
        for giver, blocks in fetched.items():
            put(tile, blocks, taken(held[giver], blocks))
            sent[giver] += elements(blocks) if giver != device else 0
        real = wanted[device] != PADDING
        assert np.array_equal(tile[real], wanted[device][real])
        lacking = sum(elements(blocks) for giver, blocks in fetched.items() if giver != device)
        assert lacking == count_lacked(source, target).on(target.mesh.devices)[device]
    if nodes is ONE_NODE:
        assert +sent == +Counter(count_sent_across(source, target)), "the shares are those of the plan"


@pytest.mark.fast(20)
@pytest.mark.parametrize("nodes", [ONE_NODE, HALVES], ids=["one node", "two nodes"])
@pytest.mark.parametrize("seed", range(40))
def test_givers_and_takers_agree(seed: int, nodes: Sequence[int]):
    source, target = random_ends(random.Random(seed))
    taken_from = {
        (giver, device): blocks
        for device in range(8)
        for giver, blocks in list_across(source, target, device, nodes, given=False).items()
    }
    given_to = {
        (device, taker): blocks
        for device in range(8)
        for taker, blocks in list_across(source, target, device, nodes, given=True).items()
    }
    assert taken_from == given_to


@for_each(range(12))
def test_copies_on_several_nodes_answer_their_own_node_and_share_the_rest(seed: int):
    """Four to eight copies on two nodes of five devices, asked by devices of these nodes and of a third one."""
    choose = random.Random(seed)
    nodes = [device // 5 for device in range(15)]
    source = Layout.parse("s32[{x}7/13, 5]", Mesh({"x": 2, "r": 4}, device_ids=choose.sample(range(10), 8)))
    if seed % 3 == 0:
        source = Layout.parse("s32[13, 5]", source.mesh)
    target = Layout.parse("s32[{y}3/13, {z}3/5]", Mesh({"y": 5, "z": 2}, device_ids=choose.sample(range(15), 10)))
    held, wanted = tiles_of(source), tiles_of(target)
    for device in target.mesh.devices:
        tile = np.full(target.tile_shape, PADDING)
        for giver, blocks in list_across(source, target, device, nodes, given=False).items():
            put(tile, blocks, taken(held[giver], blocks))
            assert list_across(source, target, giver, nodes, given=True)[device] == blocks
        real = wanted[device] != PADDING
        assert np.array_equal(tile[real], wanted[device][real])


NODES = {"one node": lambda _: 0, "nodes of 64": lambda rank: rank // 64, "a node a rank": lambda rank: rank}


@pytest.mark.fast(2)
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize(
    ("before", "after"),
    [("f32[{x}8, 4096]", "f32[4096, {y}2]"), ("f32[{x}8/4091, 4093]", "f32[4091, {y}2/4093]")],
)
def test_givers_and_takers_agree_among_thousands(before: str, after: str, nodes: str):
    """Eight copies on 4,096 ranks to columns on 2,048 of these: every tile has thousands of requests."""
    source, target = Layout.parse(before, Mesh(r=8, x=512)), Layout.parse(after, Mesh(y=2048))
    node_of, device = [NODES[nodes](rank) for rank in range(4096)], 1234
    fetched = list_across(source, target, device, node_of, given=False)
    assert sum(map(elements, fetched.values())) == math.prod(target.shape[:1]) * 2
    for giver in list(fetched)[:: len(fetched) // 3]:
        assert list_across(source, target, giver, node_of, given=True)[device] == fetched[giver]


def test_each_rank_begins_with_itself_and_goes_on_with_the_next():
    mesh = Mesh(x=5)
    source, target = Layout.parse("f32[{x}5, 10]", mesh), Layout.parse("f32[25, {x}2]", mesh)
    for rank in range(5):
        assert list(list_fetches(source, target, rank)) == [(rank + k) % 5 for k in range(5)]


def test_a_holder_on_the_same_node_is_asked():
    source, target = Layout.parse("s32[6]", Mesh(x=4)), Layout.parse("s32[6]", Mesh({"d": 2}, device_ids=[5, 7]))
    nodes = [0, 1, 2, 3, 4, 1, 4, 3]
    asked = {d: list(list_across(source, target, d, nodes, given=False)) for d in (5, 7)}
    assert asked == {5: [1], 7: [3]}


# ---- Which rank has which tile: by device id, or by its order where every rank has one


FAR = Mesh({"x": 3}, device_ids=[7, 2, 5])


def test_ranks_number_the_device_ids() -> None:
    assert devices_by_id(FAR) == (2, 5, 7)
    assert devices_by_id(Mesh(x=2, y=2)) == (0, 1, 2, 3)


@pytest.mark.parametrize("mesh", [FAR, Mesh(x=3), Mesh(x=1), Mesh({"x": 2}, device_ids=[7, 0])])
@pytest.mark.parametrize("size", [8, 11])
def test_ids_are_ranks_where_some_ranks_have_no_tile(mesh: Mesh, size: int) -> None:
    assert ranks_of_seats(mesh, size) == tuple(sorted(mesh.devices))
    assert rank_of_devices((mesh,), size) == {device: device for device in mesh.devices}
    for rank in range(size):
        seat = seat_of(mesh, rank, size)
        assert (seat is None) == (rank not in mesh.devices)
        assert seat is None or devices_by_id(mesh)[seat] == rank


def test_any_ids_where_every_rank_has_a_tile() -> None:
    assert ranks_of_seats(FAR, 3) == range(3)
    assert [seat_of(FAR, rank, 3) for rank in range(3)] == [0, 1, 2]
    assert rank_of_devices((FAR,), 3) == {2: 0, 5: 1, 7: 2}


@pytest.mark.parametrize(
    ("one", "other", "size", "seated"),
    [
        (FAR, FAR, 3, True),
        (FAR, FAR, 8, True),
        (FAR, FAR, 7, False),
        (FAR, Mesh(x=3), 3, False),
        (FAR, Mesh(x=3), 8, True),
        (Mesh(x=4), Mesh(x=2), 3, False),
        (Mesh(x=1 << 40), Mesh(x=2), 3, False),
    ],
)
def test_devices_without_a_rank(one: Mesh, other: Mesh, size: int, seated: bool) -> None:
    assert is_seated(one, other, size) == is_seated(other, one, size) == seated
