"""Who holds a tile, and how holders share the requests for it: against all positions, and requests one by one."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings

from reshard.geometry import dealing
from reshard.geometry.dealing import Queue, assign_requests, tile_queues
from reshard.geometry.holders import TileHolders, home_tile
from reshard.geometry.messages import list_requests
from reshard.geometry.overlap import shared_dims
from reshard.types import Layout, Mesh
from reshard.types.layout import Digit, Dim
from reshard.types.mesh import SubAxis
from tests.layouts import pairs, random_crossing
from tests.sampling import for_each


def test_requests_stay_whole_where_that_loads_nobody_more():
    assert [tuple(s) for s in assign_requests([6, 6, 6], 4, limit=6)] == [(0, 0, 0, 6), (1, 1, 0, 6), (2, 2, 0, 6)]
    shares = list(assign_requests([6, 6, 6], 4, limit=5))
    assert [sum(s.high - s.low for s in shares if s.holder == h) for h in range(4)] == [5, 5, 5, 3]
    assert list(assign_requests([], 3, limit=0)) == []


def random_requests(choose: random.Random) -> list[tuple[int, int]]:
    """Up to seven requests, half of the time all alike."""
    size = choose.randint(1, 6)
    alike = choose.random() < 0.5
    return [(at, size if alike else choose.randint(1, 7)) for at in choose.sample(range(20), choose.randint(0, 7))]


@pytest.mark.parametrize("seed", range(4))
def test_a_queue_knows_what_its_shares_are(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dealing, "_FEW", 2)
    choose = random.Random(seed)
    for _ in range(500):
        asked, gone = random_requests(choose), choose.sample(range(20), choose.randint(0, 6))
        holders, limit = choose.randint(1, 6), choose.randint(0, 20)
        rest = sorted((at, size) for at, size in asked if at not in gone)
        queue = Queue.of(asked).without(gone)
        assert [*zip(queue.listed().positions, queue.sizes(), strict=True)] == rest
        assert [queue.first(number) for number in range(queue.requests + 1)] == list(queue.listed().ends)
        shares = list(assign_requests([size for _, size in rest], holders, limit))
        sends, parts, sent = Counter(s.holder for s in shares), Counter(s.request for s in shares), Counter()
        for share in shares:
            sent[share.holder] += share.high - share.low
        figures = queue.figures(holders, limit)
        assert figures.sends == tuple(sends[holder] for holder in range(holders))
        assert figures.sent == tuple(sent[holder] for holder in range(holders))
        assert figures.message == max((share.high - share.low for share in shares), default=0)
        assert figures.extra == {rest[at][0]: number - 1 for at, number in parts.items() if number > 1}
        for at, (position, _) in enumerate(rest):
            assert list(queue.shares(position, holders, limit)) == [share for share in shares if share.request == at]


def test_the_requests_of_some_positions_only():
    queue = Queue.of([(2, 6), (5, 3), (7, 6)])
    assert queue.only([7, 2, 4]) == Queue([2, 7], range(0, 18, 6))
    assert not list(queue.shares(4, 2, 9)) and not list(queue.without([5]).shares(5, 2, 9))


@for_each(range(60))
def test_a_queue_has_the_requests_for_a_tile(seed: int):
    source, target = random_crossing(random.Random(seed))
    listed = list_requests(source, target, target.mesh.devices, shared_dims(source, target))
    queues = tile_queues(source, target)
    for tile, wanted in listed.items():
        queue = queues.of(tile)
        assert [target.mesh.devices[at] for at in queue.positions] == [device for device, _ in wanted]
        assert sum(queue.sizes()) == queue.ends[-1]


def assert_listed(layout: Layout) -> None:
    rank, found = len(layout.dims), TileHolders(layout)
    homes = [home_tile(layout, at) for at in range(layout.mesh.size)]
    for tile in dict.fromkeys(homes):
        assert found.of(tile) == tuple(at for at, other in enumerate(homes) if other == tile)
        alike = tuple(at for at, other in enumerate(homes) if other[:rank] == tile[:rank])
        assert TileHolders(layout, any_summand=True).of(tile[:rank]) == alike
    assert found.copies == max(homes.count(tile) for tile in homes)


@given(pairs())
@settings(max_examples=100)
def test_each_tile_is_where_the_coordinates_say(pair: tuple[Layout, Layout]):
    assert_listed(pair[0])


@pytest.mark.parametrize("mesh", [Mesh(x=2, y=3, z=2), Mesh({"x": 6}, device_ids=[5, 0, 3, 1, 4, 2])], ids=repr)
def test_summands_are_tiles_of_their_own(mesh: Mesh):
    assert_listed(Layout.parse("f32[7] + sum{x}", mesh))


def test_sub_axes_whose_strides_do_not_divide_each_other():
    """On x=6, the first of two values and the second of two: positions 3 apart, and 2 times 3 of 1 apart."""
    mesh = Mesh(x=12)
    one, other = SubAxis("x", 1, 2), SubAxis("x", 4, 3)
    assert_listed(Layout(mesh, (Dim((Digit(2, one), Digit(2, None)), 4), Dim((Digit(3, other),), 3)), "float32"))
