"""The figures of an exchange, computed group by group, against a count device by device."""

from __future__ import annotations

import random
from math import prod

import pytest

from reshard.geometry import exchange_stats
from reshard.geometry.exchange_stats import dim_groups, fewest_received, largest_message, rounds, shortest_run
from reshard.geometry.overlap import fullest
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from tests.geometry import brute
from tests.layouts import random_pair


def pair(source: str, target: str, mesh: Mesh) -> tuple[Layout, Layout]:
    return Layout.parse(source, mesh), Layout.parse(target, mesh)


@pytest.mark.parametrize("seed", range(3))
def test_figures_of_random_pairs(seed: int):
    choose, uneven = random.Random(seed), 0
    for _ in range(150):
        source, target = random_pair(choose, most_rank=2)
        uneven += not (source.even and target.even)
        assert fewest_received(source, target) == brute.fewest_received(source, target), f"{source} -> {target}"
        assert rounds(source, target) == brute.rounds(source, target), f"{source} -> {target}"
        assert largest_message(source, target) >= brute.largest_message(source, target), f"{source} -> {target}"
    assert uneven > 30


def test_figures_of_partial_arrays_that_stay_partial():
    """A summand is not a replica: only devices with equal coordinates along the partial axes exchange."""
    choose, partial = random.Random(7), 0
    for _ in range(300):
        source, _ = random_pair(choose, "float32", partial=True, most_rank=1)
        if not source.partial or not source.dims:
            continue
        free = [a for a in source.mesh.axes if all(s.axis != a for s in source.partial)]
        target = Layout.from_spec(source.mesh, source.shape, "f32", [free])
        target = Layout(source.mesh, target.dims, "f32", source.reduction, source.partial)
        partial += 1
        assert rounds(source, target) == brute.rounds(source, target), f"{source} -> {target}"
        assert fewest_received(source, target) == brute.fewest_received(source, target), f"{source} -> {target}"
    assert partial > 50


def test_the_largest_message_of_one_group_is_exact():
    choose, seen = random.Random(11), 0
    for _ in range(200):
        source, target = random_pair(choose, most_rank=2)
        if len(dim_groups(source, target)) == 1:
            seen += 1
            assert largest_message(source, target) == brute.largest_message(source, target), f"{source} -> {target}"
    assert seen > 40


@pytest.mark.parametrize(
    ("source", "target", "mesh", "received", "messages", "largest", "run"),
    [
        # Device 3 has one element of ten and fetches three tiles of three.
        ("f32[{x}3/10]", "f32[10]", Mesh(x=4), 9, 3, 3, 1),
        # Pieces 0-2, 3-5, 6-8, 9 and 0-4, 5-9; the device x=0, y=1 needs 5-9 and holds 0-2.
        ("f32[{x}3/10]", "f32[{y}5]", Mesh(x=4, y=2), 5, 3, 3, 1),
        # Thirds against halves: the middle device needs one element of each half, and holds one of them.
        ("f32[{x}3]", "f32[{y}2]", Mesh(x=2, y=3), 2, 1, 2, 1),
        # Seven devices share 50 rows of 3: pieces of 8 and a last one of 2.
        ("f32[{x}8/50, 3]", "f32[50, 3]", Mesh(x=7), (50 - 2) * 3, 6, 24, 3),
        ("f32[10]", "f32[{x}3/10]", Mesh(x=4), 0, 0, 0, 1),
        ("f32[]", "f32[]", Mesh(x=2), 0, 0, 0, 1),
    ],
)
def test_by_hand(source: str, target: str, mesh: Mesh, received: int, messages: int, largest: int, run: int):
    layouts = pair(source, target, mesh)
    assert fewest_received(*layouts) == received
    assert rounds(*layouts) == messages
    assert largest_message(*layouts) == largest
    assert shortest_run(*layouts) == run


@pytest.mark.parametrize(
    ("source", "target", "mesh", "other"),
    [
        ("f32[{x:(1)4}3]", "f32[{x:(6)2}6]", Mesh(x=12), Mesh(x=12)),  # sub-axes that do not nest
        ("f32[{x}3]", "f32[{y}2]", Mesh(x=2, y=3), Mesh(y=3, x=2)),
        ("f32[{x}3/10]", "f32[10]", Mesh({"x": 4}, device_ids=[3, 1, 2, 0]), Mesh({"x": 4}, device_ids=[3, 1, 2, 0])),
    ],
)
def test_one_group_of_all_devices_otherwise(source: str, target: str, mesh: Mesh, other: Mesh):
    before, after = Layout.parse(source, mesh), Layout.parse(target, other)
    (group,) = dim_groups(before, after)
    assert group.factors is None
    assert group.size == mesh.size
    assert rounds(before, after) == brute.rounds(before, after)


def test_many_devices_cost_their_coordinates_only():
    """2^20 devices in two groups of 2^10. A device at the end holds padding only, and lacks its whole target tile."""
    mesh = Mesh(x=1 << 10, y=1 << 10)
    source, target = pair("f32[{x}7/7001, {y}3/3071]", "f32[7001, {y}3/3071]", mesh)
    assert sum(group.size for group in dim_groups(source, target)) == 1 << 11
    assert rounds(source, target) == 1023  # each piece goes to all others along x
    assert fewest_received(source, target) == prod((7001, 3))
    assert fullest(target.dims[1]) == 3


def test_a_dim_that_is_whole_at_one_end_has_a_closed_form():
    """The same figures as counted over the devices, and of millions of them at once."""
    choose, closed = random.Random(5), 0
    for _ in range(200):
        for group in dim_groups(*random_pair(choose, most_rank=2)):
            stats = exchange_stats._one_sided(group)
            closed += stats is not None
            assert stats is None or stats == exchange_stats._counted(group), group
    assert closed > 60
    mesh = Mesh(x=1_000_003, y=2)
    source, target = pair("f32[{x}2/2000005, 6]", "f32[2000005, {y}3]", mesh)
    assert fewest_received(source, target) == 3 * (2_000_005 - 1)  # The last device along x has one row.
    assert rounds(source, target) == 1_000_002


def test_figures_are_cached_by_layout():
    source, target = pair("f32[{x}3/11]", "f32[11]", Mesh(x=4))
    exchange_stats.rounds(source, target)
    before = exchange_stats.rounds.cache_info().hits
    exchange_stats.rounds(*pair("f32[{x}3/11]", "f32[11]", Mesh(x=4)))
    assert exchange_stats.rounds.cache_info().hits == before + 1
